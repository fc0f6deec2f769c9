"""Weight gradients of experts that compute one layer's tokens in parts: one tensor for all parts, not one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Gradients = list[Tensor | None]


class PartGradients:
    """Where `count` parts add the gradients of the same weights. The part whose backward runs last hands them on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._new()

    def _new(self) -> None:
        self._left = self._count
        self._into: tuple[Gradients, bool] | None = None
        self.filled: set[int] = set()
        """Experts whose gradient a part has written; later ones add to it."""

    def into(self, take: Callable[[], tuple[Gradients, bool]]) -> tuple[Gradients, bool]:
        """What `take` gave the first part: where gradients go, and whether that is the parameters' `.grad`."""
        if self._into is None:
            self._into = take()
        return self._into

    def done(self) -> bool:
        """A part has added its share. Returns whether it was the last; then the next backward begins anew."""
        self._left -= 1
        if self._left:
            return False
        self._new()
        return True

    def add(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Take a part's whole gradients; returns the sums if it is the last part, else None for each."""
        sums, _ = self.into(lambda: (list(gradients), False))
        if self._left < self._count:
            for total, part in zip(sums, gradients, strict=True):
                if total is not None and part is not None:
                    total.add_(part)
        return sums if self.done() else [None] * len(sums)
