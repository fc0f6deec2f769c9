"""A linear layer whose product goes through `kernels.linear`, whole or one tensor-parallel rank's piece of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moesaic.dispatch.parts import sum_of
from moesaic.mesh.autograd import scatter_tokens
from moesaic.mesh.cut import Cut, Piece, new_parameter
from moesaic.mesh.group import Group
from moesaic.model.by_rank import products_to_tokens
from moesaic.model.kernels import linear

ALONE = Group.single("tp")
"""Tensor parallelism of one."""


class Linear(nn.Module):
    """y = x Wᵀ + b for x [..., I], weight [O, I], bias [O] or none. Weights are left uninitialised.

    With `split`, a group of n tensor-parallel ranks, this rank holds O / n rows of the weight and gives that many
    columns of y. `segments` 2: the rows are gate rows, then up rows, and both are split.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        split: Group = ALONE,
        segments: int = 1,
    ) -> None:
        super().__init__()
        rows = (Piece(0, split.size, split.rank, segments),)
        self.weight = new_parameter(Cut((outputs, inputs), rows), dtype=dtype, device=device)
        self.bias = new_parameter(Cut((outputs,), rows), dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] to y [..., O]."""
        return linear(x, self.weight, self.bias)

    def pieces(self, count: int) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of `count` equal ranges of y's columns."""
        biases = [None] * count if self.bias is None else self.bias.chunk(count)
        return list(zip(self.weight.chunk(count), biases, strict=True))

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}"


class LinearToTokens(nn.Module):
    """y = x Wᵀ + b where a group's ranks hold pieces of x's columns for many tokens, and each wants y of its own.

    This rank holds I / n columns of the weight [O, I]. The bias is whole, because it meets own tokens only. `by_rank`:
    some ranks' results travel while others' are computed (see `by_rank`).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        split: Group = ALONE,
        by_rank: bool = False,
    ) -> None:
        super().__init__()
        self.split, self.by_rank = split, by_rank
        columns = (Piece(1, split.size, split.rank),)
        self.weight = new_parameter(Cut((outputs, inputs), columns), dtype=dtype, device=device)
        self.bias = new_parameter(Cut((outputs,)), dtype=dtype, device=device) if bias else None

    def forward(self, x_TI: Tensor, batch: int = 1) -> Tensor:
        """x [n · T, I / n] of the group's tokens, `batch` rows, to y [T, O] of this rank's tokens."""
        if self.split.size == 1:
            return linear(x_TI, self.weight, self.bias)
        if self.by_rank:
            y_TO = products_to_tokens(x_TI, self.weight, self.split, batch)
        else:
            y_TO = scatter_tokens(linear(x_TI, self.weight), self.split, batch)
        return y_TO if self.bias is None else y_TO + self.bias

    def of_parts(self, parts: Sequence[Callable[[], Tensor]], batch: int = 1) -> Tensor:
        """`forward` of columns of x that come one part after another, all of one width."""
        columns = self.weight.chunk(len(parts), 1)
        y_TO = scatter_tokens(
            sum_of([linear(part(), weight) for part, weight in zip(parts, columns, strict=True)]), self.split, batch
        )
        return y_TO if self.bias is None else y_TO + self.bias

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}"
