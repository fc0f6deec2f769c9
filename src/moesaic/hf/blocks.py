"""The part of a disk tensor that belongs in a rank's piece of ours.

A rule's pieces are views of our *whole* tensor. A rank that holds a piece has no whole tensor to view, so the view is
taken of one that has a shape only, and read back as arithmetic: each axis of the disk tensor walks along one of our
dimensions with some step. A box of ours is then a box, or one for each half of an interleaved axis, of the disk tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from moesaic.hf.layout import Piece
from moesaic.mesh.cut import Box

Range = tuple[int, int]
"""start, stop."""


@dataclass(frozen=True)
class Block:
    """A box of a disk tensor, as one range per axis of a piece's view, and the part of ours that it fills."""

    ranges: tuple[Range, ...]
    target: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the disk tensor in the view's shape."""
        return tuple(slice(start, stop) for start, stop in self.ranges)

    def inside(self, start: int, stop: int) -> Block | None:
        """What lies in entries start … stop − 1 of the first axis, or None if nothing does."""
        first, last = max(self.ranges[0][0], start), min(self.ranges[0][1], stop)
        if last <= first:
            return None
        target = self.target.narrow(0, first - self.ranges[0][0], last - first)
        return Block(((first, last), *self.ranges[1:]), target)

    def entry(self, index: int) -> Block:
        """The block in entry `index` of the first axis, which is one of the block's."""
        return Block(self.ranges[1:], self.target[index - self.ranges[0][0]])


@dataclass(frozen=True)
class _Axis:
    """An axis of the view: `size` entries, `step` apart along our dimension `dim` (None for an axis of one entry)."""

    dim: int | None
    step: int
    size: int


@dataclass(frozen=True)
class _Stretch:
    """What a box's range along one of our dimensions is on disk: a range on each of that dimension's axes, and where
    in the box it starts."""

    ranges: dict[int, Range]
    start: int
    size: int


def whole_block(view: Tensor) -> Block:
    """The block of a piece that is wanted whole, given the view of our tensor."""
    return Block(tuple((0, size) for size in view.shape), view)


def blocks_of(
    piece: Piece, shape: tuple[int, ...], local: Tensor, boxes: Sequence[Box]
) -> tuple[tuple[int, ...], list[Block]]:
    """The shape of the piece's view of our tensor, and the blocks of it that `boxes` want.

    Args:
        piece: how the disk tensor lies in our tensor of `shape`.
        local: holds the boxes at their places.
        boxes: parts of our tensor that do not overlap.
    """
    view = piece.view(torch.empty(shape, device="meta"))
    axes, origin = _axes(shape, view)
    found = []
    for box in boxes:
        along = [list(_stretches(dim, axes, origin[dim], box)) for dim in range(len(shape))]
        for stretches in product(*along):
            found.append(_block(axes, stretches, box.of(local)))
    return tuple(view.shape), found


def _axes(shape: tuple[int, ...], view: Tensor) -> tuple[list[_Axis], list[int]]:
    """The axes of a view of a contiguous tensor of `shape`, and the index of ours at which it starts."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    origin, rest = [], view.storage_offset()
    for stride in strides:
        origin.append(rest // stride)
        rest %= stride
    axes = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            axes.append(_Axis(None, 1, 1))
            continue
        dim = next(d for d, own in enumerate(strides) if own <= stride and shape[d] > 1)
        axes.append(_Axis(dim, stride // strides[dim], size))
    return axes, origin


def _stretches(dim: int, axes: list[_Axis], origin: int, box: Box) -> Iterator[_Stretch]:
    mine = sorted((i for i, axis in enumerate(axes) if axis.dim == dim), key=lambda i: axes[i].step)
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    if not mine:
        if low <= origin < high:
            yield _Stretch({}, origin - low, 1)
        return
    inner, outer = mine[0], mine[1:]
    for index in product(*(range(axes[i].size) for i in outer)):
        at = origin + sum(axes[i].step * n for i, n in zip(outer, index, strict=True))
        first, last = max(low, at), min(high, at + axes[inner].size)
        if last > first:
            ranges = {i: (n, n + 1) for i, n in zip(outer, index, strict=True)}
            yield _Stretch({**ranges, inner: (first - at, last - at)}, first - low, last - first)


def _block(axes: list[_Axis], stretches: Sequence[_Stretch], box: Tensor) -> Block:
    ranges: dict[int, Range] = {}
    for d, stretch in enumerate(stretches):
        ranges |= stretch.ranges
        box = box.narrow(d, stretch.start, stretch.size)
    # The innermost axis of each dimension carries it; the others have one entry here, as have dimensions without axis.
    by_step = sorted(range(len(axes)), key=lambda i: -axes[i].step)
    carrying: dict[int, int] = {}
    for i in by_step:
        dim = axes[i].dim
        if dim is not None:
            carrying[dim] = i
    order = sorted(carrying, key=lambda dim: carrying[dim])
    rest = [dim for dim in range(len(stretches)) if dim not in carrying]
    target = box.permute(*order, *rest)
    for _ in rest:
        target = target.squeeze(-1)
    for i in range(len(axes)):
        if i not in carrying.values():
            target = target.unsqueeze(i)
    return Block(tuple(ranges.get(i, (0, 1)) for i in range(len(axes))), target)
