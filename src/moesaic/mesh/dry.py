"""What a dry run answers where a real one reads numbers out of tensors.

A dry run makes tensors without memory (torch's `meta` device), so nobody knows what a router chose. The few places that
need to, to know how many rows there are, ask `expected`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Expected(Protocol):
    """Counts of the mixture layer that a rank is in, under the routing that a dry run supposes."""

    def sent(self, tokens: int, top_k: int, places: int) -> list[int]:
        """Of own tokens, how many go to each of the places that share an expert layer."""

    def received(self, tokens: int, top_k: int, places: int) -> list[int]:
        """How many come here from each place, where every rank has as many tokens."""

    def rows(self, tokens: int) -> int:
        """How many choices of `tokens` tokens that came here are experts of this rank."""


_state: list[Expected] = []


def expected() -> Expected | None:
    """The counts of the dry run that is going on; None in a real run."""
    return _state[-1] if _state else None


@contextlib.contextmanager
def expecting(counts: Expected) -> Iterator[None]:
    """Inside is a dry run."""
    _state.append(counts)
    try:
        yield
    finally:
        _state.pop()
