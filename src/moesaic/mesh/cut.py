"""How a rank's piece of a parameter lies in the whole.

Most pieces are a range along one dimension. Two are not, and are why this is a record of its own: a joined gate-and-up
matrix is cut in both halves, and an expert stack is cut along experts and along their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Piece `index` of `parts` along `dim`. With `segments` the dimension is that many equal stretches (gate rows, then
    up rows), and each is cut by itself. Pieces are of equal size but for the last, which may be smaller or empty."""

    dim: int
    parts: int
    index: int
    segments: int = 1


@dataclass(frozen=True)
class Box:
    """A block of the whole tensor and where it stands in the piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The block as a view of the piece."""
        return local[tuple(slice(a, a + n) for a, n in zip(self.place, self.sizes, strict=True))]


@dataclass(frozen=True)
class Cut:
    """A tensor of `shape` and which pieces of it are here. `expert`: whether it lives on the expert mesh."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    expert: bool = False

    def _ranges(self, dim: int) -> list[tuple[int, int]]:
        """Global (start, stop) ranges along `dim`, in the order in which they stand in the piece."""
        size = self.shape[dim]
        piece = next((p for p in self.pieces if p.dim == dim), None)
        if piece is None:
            return [(0, size)]
        stretch = size // piece.segments
        share = -(-stretch // piece.parts)
        start, stop = min(share * piece.index, stretch), min(share * (piece.index + 1), stretch)
        return [(stretch * s + start, stretch * s + stop) for s in range(piece.segments)]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(sum(b - a for a, b in self._ranges(dim)) for dim in range(len(self.shape)))

    @property
    def is_whole(self) -> bool:
        """Whether the piece is everything."""
        return all(piece.parts == 1 for piece in self.pieces)

    def start(self, dim: int) -> int:
        """The first global index along `dim` that is here."""
        return self._ranges(dim)[0][0]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor; a view where that is possible."""
        for dim in range(len(self.shape)):
            ranges = self._ranges(dim)
            parts = [whole.narrow(dim, a, b - a) for a, b in ranges]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return whole

    def boxes(self, start: int = 0, stop: int | None = None) -> list[Box]:
        """The blocks of rows start … stop − 1 of the piece (all by default), where a row is along dimension 0.

        `Box.place` counts from row `start`, so that it indexes a tensor that holds those rows only.
        """
        if not self.shape:
            return [Box((), (), ())]
        along = [self._placed(dim) for dim in range(len(self.shape))]
        rows = self.local_shape[0] if stop is None else stop
        kept = []
        for offset, size, place in along[0]:
            a, b = max(place, start), min(place + size, rows)
            if b > a:
                kept.append((offset + a - place, b - a, a - start))
        along[0] = kept
        boxes = [Box(*(tuple(part) for part in zip(*combination, strict=True))) for combination in product(*along)]
        return [box for box in boxes if 0 not in box.sizes]

    def _placed(self, dim: int) -> list[tuple[int, int, int]]:
        """(global offset, size, place in the piece) of each range along `dim`."""
        place, out = 0, []
        for a, b in self._ranges(dim):
            out.append((a, b - a, place))
            place += b - a
        return out


def cut_of(parameter: Tensor) -> Cut:
    """The Cut of a parameter; whole where none is recorded."""
    found = getattr(parameter, "cut", None)
    return found if isinstance(found, Cut) else Cut(tuple(parameter.shape))


def new_parameter(
    cut: Cut, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.nn.Parameter:
    """An uninitialised parameter that holds this rank's piece, with the record attached as `.cut`."""
    parameter = torch.nn.Parameter(torch.empty(cut.local_shape, dtype=dtype, device=device))
    parameter.cut = cut  # type: ignore[attr-defined]
    return parameter
