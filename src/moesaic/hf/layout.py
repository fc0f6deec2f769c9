"""How one of our tensors lies on disk: rules made of pieces, each piece a chain of views.

A converter (take one expert, take some rows, transpose, interleave, add an axis) is a *view* of our tensor in the
order of the disk tensor. Reading copies the disk tensor into the view, writing copies the view out, so every
conversion has an exact inverse by construction, no temporary of our own is needed, and gradients go the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Converter(Protocol):
    """One step from our order to the order on disk."""

    def view(self, tensor: Tensor) -> Tensor:
        """A view of `tensor`, never a copy."""
        ...


@dataclass(frozen=True)
class Select:
    """Entry `index` of the first axis: one expert of a stack. Its inverse merges the list of experts."""

    index: int

    def view(self, tensor: Tensor) -> Tensor:
        return tensor[self.index]


@dataclass(frozen=True)
class Rows:
    """`count` entries of axis `axis` from `start`: gate or up of a concatenated gate|up."""

    start: int
    count: int
    axis: int = 0

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.start, self.count)


@dataclass(frozen=True)
class Transposed:
    """The last two axes exchanged."""

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2)


@dataclass(frozen=True)
class Interleaved:
    """gate|up halves of axis 1, [E, 2F] or [E, 2F, D], as alternating gate, up on the last axis: [E, F, 2] or
    [E, D, F, 2] (gpt-oss, whose weights are also transposed)."""

    def view(self, tensor: Tensor) -> Tensor:
        halves = tensor.unflatten(1, (2, tensor.shape[1] // 2))
        return halves.movedim(1, -1).transpose(1, 2) if tensor.dim() == 3 else halves.movedim(1, -1)


@dataclass(frozen=True)
class Alternating:
    """gate|up halves of axis 1 of [E, 2F, D] as alternating rows: [E, F, 2, D] (gpt-oss's MXFP4 blocks)."""

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (2, tensor.shape[1] // 2)).transpose(1, 2)


@dataclass(frozen=True)
class Leading:
    """A leading axis of length one: [E] as [1, E] (ERNIE). Its inverse squeezes."""

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)


@dataclass(frozen=True)
class Piece:
    """One tensor on disk and the part of ours that it fills."""

    key: str
    shape: tuple[int, ...]
    steps: tuple[Converter, ...] = ()
    mxfp4: bool = False
    """Stored as blocks of packed four-bit numbers, `shape` in bytes; read only."""

    def view(self, tensor: Tensor) -> Tensor:
        """Our tensor seen in the disk's order; reshaping the result to `shape` gives the disk tensor."""
        for step in self.steps:
            tensor = step.view(tensor)
        return tensor

    def to_disk(self, tensor: Tensor) -> Tensor:
        """The disk tensor of shape `shape`, contiguous."""
        return self.view(tensor).reshape(self.shape).contiguous()

    def from_disk(self, tensor: Tensor, disk: Tensor) -> None:
        """Copies `disk` into its part of our `tensor`, converting the dtype."""
        view = self.view(tensor)
        view.copy_(disk.view(view.shape))


Layout = tuple[Piece, ...]


@dataclass(frozen=True)
class Rule:
    """One of our tensors, and the layouts in which it may lie on disk. Export writes the first."""

    name: str
    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    copies: tuple[str, ...] = ()
    """Further keys that hold the same tensor: written on export, not read on import."""
    mtp: bool = False
    """Part of a multi-token prediction block, which a checkpoint may lack."""
    fp32: bool = False
    """Kept in fp32 whatever the dtype of the model (selection biases)."""

    @property
    def layout(self) -> Layout:
        """The published layout."""
        return self.layouts[0]

    def keys(self) -> Iterator[str]:
        """Every disk key that some layout of this rule reads."""
        for layout in self.layouts:
            for piece in layout:
                yield piece.key


def single(name: str, shape: tuple[int, ...], key: str, *, also: tuple[str, ...] = (), fp32: bool = False) -> Rule:
    """A rule for a tensor that lies on disk as it is, under `key` or one of the spellings in `also`."""
    return Rule(name, shape, tuple((Piece(spelling, shape),) for spelling in (key, *also)), fp32=fp32)


def check_layout(rule: Rule, layout: Layout) -> None:
    """Asserts that the pieces cover every element of our tensor exactly once.

    Raises:
        ValueError: an element is covered twice or never, or a piece's shape disagrees with its view.
    """
    covered = torch.zeros(rule.shape, dtype=torch.int32)
    for piece in layout:
        view = piece.view(covered)
        if view.numel() != prod(piece.shape) * (2 if piece.mxfp4 else 1):
            raise ValueError(f"{piece.key} has shape {piece.shape} on disk and {tuple(view.shape)} in {rule.name}.")
        view += 1
    if covered.numel() and (covered.min() != 1 or covered.max() != 1):
        raise ValueError(f"the pieces of {rule.name} do not cover it exactly once.")
