"""What a rank of the ring computes against each other rank's keys: rectangles and triangles, hardly ever a mask.

The tokens that a query at place p sees are one interval of places, [first(p), p], where first(p) is the start of its
segment or the far end of its window. Places ascend within a rank, so the keys seen among another rank's are an interval
too, [low, high) in that rank's own numbering. Runs of queries with equal intervals are full rectangles; intervals that
grow by one key per query are a causal triangle; only the edge of a window or an unusual placement is left for a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

_SHORTEST, _LONGEST = 128, 512
_MASK_ELEMENTS = 1 << 24

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Block:
    """Queries of some rows against keys of the same rows; both ranges count within the rank's part of a row.

    With neither `causal` nor `seen` every query sees every key. `causal`: as many queries as keys, query i sees keys
    0 … i. `seen` = (low, high): query i sees keys low[i] … high[i] − 1 of the block, at least one.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    seen: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class RingPlan:
    """The work of one rank of a ring of `size`: `own` against its own keys, and, by shift, against other ranks'.

    `shifts` are the distances s, ascending and the same on all ranks, at which some rank has work against the keys of
    the rank s places before it. `others[i]` is this rank's work at `shifts[i]`, possibly none.
    """

    batch: int
    length: int
    size: int
    own: tuple[Block, ...]
    shifts: tuple[int, ...]
    others: tuple[tuple[Block, ...], ...]

    @property
    def hops(self) -> tuple[int, ...]:
        """How far keys and values move before each shift, and, last, how far they are then from home."""
        return tuple(after - before for before, after in pairwise((0, *self.shifts, self.size)))


def ring_plan(
    batch: int,
    segment_ids: Tensor | None,
    places: Tensor,
    rank: int,
    *,
    window: int | None = None,
) -> RingPlan:
    """The plan of rank `rank` of a group whose rank r holds the places `places[r]` of every row.

    places [c, S/c], each row ascending, all of 0 … S − 1 together. `segment_ids` [B, S] covers the full rows and is the
    same on all ranks; a segment is a run of equal numbers; None means that a row is one segment. `window` is the number
    of tokens a token sees, itself included. Reads `segment_ids` on the CPU: make a plan once for all layers that share
    segments and window. Raises ValueError for shapes that do not fit.
    """
    places_CN = places.cpu().numpy()
    size, length = places_CN.shape
    whole = size * length
    owners = np.full(whole, -1)
    if places_CN.min(initial=0) >= 0 and places_CN.max(initial=0) < whole:
        owners[places_CN] = np.arange(size)[:, None]
    if (owners < 0).any() or (np.diff(places_CN) <= 0).any():
        raise ValueError(f"places must hold 0 … {whole - 1}, each once, ascending in each of {size} rows.")
    if segment_ids is None:
        starts_BS, rows_of = np.zeros((1, whole), dtype=np.int64), [0] * batch
    else:
        if segment_ids.shape != (batch, whole):
            raise ValueError(f"segment_ids is {list(segment_ids.shape)}, but {batch} rows have {whole} places each.")
        starts_BS, rows_of = _distinct(_segment_starts(segment_ids.cpu().numpy()))
    reach = whole if window is None else window
    needed = _needed(starts_BS, owners, places_CN, reach)

    mine_N = places_CN[rank]
    first_BN = np.maximum(starts_BS[:, mine_N], mine_N - (reach - 1))
    blocks: dict[int, tuple[Block, ...]] = {}
    for shift in (0, *needed):
        keys_N = places_CN[(rank - shift) % size]
        high_N = np.searchsorted(keys_N, mine_N, side="right")
        cut = [_cut(np.searchsorted(keys_N, first_N), high_N, window) for first_N in first_BN]
        blocks[shift] = _over_rows([cut[row] for row in rows_of])
    return RingPlan(batch, length, size, blocks[0], needed, tuple(blocks[shift] for shift in needed))


def _distinct(rows_BS: Array) -> tuple[Array, list[int]]:
    """The rows without repetition, and which of them each row is."""
    numbers: dict[bytes, int] = {}
    rows_of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in rows_BS]
    return rows_BS[[rows_of.index(number) for number in range(len(numbers))]], rows_of


def _needed(starts_BS: Array, owners: Array, places_CN: Array, reach: int) -> tuple[int, ...]:
    """Shifts above 0, ascending, at which some rank sees a key of another."""
    size, whole = len(places_CN), len(owners)
    # Neighbouring places with one owner and one segment see together one interval.
    new = np.ones(starts_BS.shape, dtype=bool)
    new[:, 1:] = (owners[1:] != owners[:-1]) | (starts_BS[:, 1:] != starts_BS[:, :-1])
    rows, begins = np.nonzero(new)
    ends = np.append(begins[1:], 0)
    ends[ends == 0] = whole
    first = np.maximum(starts_BS[rows, begins], begins - (reach - 1))
    found = np.zeros(size, dtype=bool)
    for source, keys_N in enumerate(places_CN):
        sees = np.searchsorted(keys_N, ends) > np.searchsorted(keys_N, first)
        found[(owners[begins[sees]] - source) % size] = True
    return tuple(shift for shift in range(1, size) if found[shift])


def _segment_starts(ids_BS: Array) -> Array:
    """First place [B, S] of the run of equal numbers that each place is in."""
    starts = np.zeros(ids_BS.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ids_BS[:, 1:] != ids_BS[:, :-1], np.arange(1, ids_BS.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)


@dataclass(frozen=True)
class _Piece:
    """A block before its rows are known: ranges of queries and keys, and the intervals where a mask is needed."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def _cut(low: Array, high: Array, window: int | None) -> list[_Piece]:
    """Pieces that cover what the queries of one row see among the keys of one rank."""
    sees = high > low
    if not sees.any():
        return []
    # Where neighbours have no key in common, as at the start of a segment, a run ends.
    breaks = (sees[1:] != sees[:-1]) | (low[1:] >= high[:-1])
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(low)]
    pieces: list[_Piece] = []
    for start, stop in pairwise(edges):
        if sees[start]:
            pieces += _pieces(low, high, start, stop, window)
    return pieces


def _pieces(low: Array, high: Array, start: int, stop: int, window: int | None) -> list[_Piece]:
    """A run of queries that all see something, as one piece if it needs no mask, else as short ones."""
    a, b = low[start:stop], high[start:stop]
    keys = (int(a[0]), int(b[-1]))
    if a[0] == a[-1] and b[0] == b[-1]:
        return [_Piece((start, stop), keys)]
    if a[0] == a[-1] and b[0] == a[0] + 1 and b[-1] - b[0] == stop - start - 1 and (np.diff(b) == 1).all():
        return [_Piece((start, stop), keys, causal=True)]
    reach = stop - start if window is None else window
    size = min(max(reach, _SHORTEST), _LONGEST, max(1, _MASK_ELEMENTS // (reach + _LONGEST)))
    if stop - start > size:
        return [
            piece
            for begin in range(start, stop, size)
            for piece in _pieces(low, high, begin, min(begin + size, stop), window)
        ]
    return [_Piece((start, stop), keys, seen=(tuple((a - a[0]).tolist()), tuple((b - a[0]).tolist())))]


def _over_rows(rows: list[list[_Piece]]) -> tuple[Block, ...]:
    """Equal pieces of neighbouring rows as one block."""
    found: dict[_Piece, list[list[int]]] = {}
    for row, pieces in enumerate(rows):
        for piece in pieces:
            runs = found.setdefault(piece, [])
            if runs and runs[-1][1] == row:
                runs[-1][1] = row + 1
            else:
                runs.append([row, row + 1])
    return tuple(
        Block(
            slice(*run),
            slice(*piece.queries),
            slice(*piece.keys),
            piece.causal,
            None if piece.seen is None else (np.array(piece.seen[0]), np.array(piece.seen[1])),
        )
        for piece, runs in found.items()
        for run in runs
    )
