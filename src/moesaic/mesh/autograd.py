"""Collectives with gradients. The backward of each is its transpose: a gather's is a sum-scatter and the reverse.

That is right under rule "sum everywhere": each rank's loss is its own share, and the gradient of a rank's tensor is the
sum of what all ranks' shares say about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moesaic.mesh import collectives
from moesaic.mesh.group import Group


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, group: Group, counts: list[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return collectives.start_all_gather_rows(x_RD, group, counts).wait_beside()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return collectives.start_reduce_scatter_rows(grads[0], ctx.group, ctx.counts).wait_beside(), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, group: Group, counts: list[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return collectives.start_reduce_scatter_rows(x_RD, group, counts).wait_beside()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return collectives.start_all_gather_rows(grads[0], ctx.group, ctx.counts).wait_beside(), None, None


class Leg(ABC):
    """One direction of travel, and the opposite one for its gradients."""

    wants: tuple[bool, ...]
    """Which of what was sent needs a gradient."""

    @abstractmethod
    def start(self, *tensors: Tensor) -> None:
        """Send off what forward sends."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, ...]:
        """Wait for what arrives."""

    @abstractmethod
    def start_backward(self, *grads: Tensor) -> None:
        """Send off the gradients of what arrived."""

    @abstractmethod
    def finish_backward(self) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of what was sent."""


class Start(Function):
    """Sends tensors off. The empty tensor that it returns ties it to its `Finish`, in both directions."""

    @staticmethod
    def forward(ctx: Any, leg: Leg, *tensors: Tensor) -> Tensor:
        ctx.leg = leg
        leg.wants = tuple(ctx.needs_input_grad[1:])
        leg.start(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.leg.finish_backward()


class Finish(Function):
    """Waits for what `Start` sent; its backward sends the gradients off, for which backward of `Start` waits."""

    @staticmethod
    def forward(ctx: Any, leg: Leg, token: Tensor) -> tuple[Tensor, ...]:
        ctx.leg = leg
        return leg.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        ctx.leg.start_backward(*grads)
        return None, grads[0].new_empty(0)


class _Exchange(Leg):
    """An all-to-all, and that of its gradient."""

    def __init__(self, group: Group, send: list[int], receive: list[int], name: str) -> None:
        self.group, self.send, self.receive, self.name = group, send, receive, name
        self.pending: collectives.Pending | None = None

    def start(self, *tensors: Tensor) -> None:
        self.pending = collectives.start_all_to_all(tensors[0], self.group, self.send, self.receive, self.name)

    def finish(self) -> tuple[Tensor, ...]:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return (pending.wait_beside(),)

    def start_backward(self, *grads: Tensor) -> None:
        self.pending = collectives.start_all_to_all(grads[0], self.group, self.receive, self.send, self.name)

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        return self.finish()


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x.clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return collectives.all_reduce(grads[0].clone(), ctx.group), None


def all_gather_rows(x_RD: Tensor, group: Group, counts: list[int] | None = None) -> Tensor:
    """Rows of all ranks in rank order; `counts` per rank where they differ."""
    if group.size == 1:
        return x_RD
    return _Gather.apply(x_RD, group, counts or [x_RD.shape[0]] * group.size)  # type: ignore[no-any-return]


def reduce_scatter_rows(x_RD: Tensor, group: Group, counts: list[int] | None = None) -> Tensor:
    """Sum over ranks of the rows meant for this one; `counts` per rank where they differ."""
    if group.size == 1:
        return x_RD
    counts = counts or [x_RD.shape[0] // group.size] * group.size
    return _ReduceScatter.apply(x_RD, group, counts)  # type: ignore[no-any-return]


def start_all_to_all(
    x_RD: Tensor, group: Group, send: list[int], receive: list[int], name: str = ""
) -> Callable[[], Tensor]:
    """Begin to send send[i] rows to rank i and to receive receive[i] rows from it, in rank order; what is returned
    waits for them. x may not change before that.

    In backward the gradient's exchange begins where that wait was, and is waited for where this call was.
    """
    if group.size == 1:
        return lambda: x_RD
    exchange = _Exchange(group, send, receive, name)
    token = Start.apply(exchange, x_RD)
    return lambda: Finish.apply(exchange, token)[0]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks, whose gradient is the sum of the ranks' gradients."""
    return x if group.size == 1 else _AllReduce.apply(x, group)  # type: ignore[no-any-return]


def gather_tokens(x_TD: Tensor, group: Group, batch: int) -> Tensor:
    """Join the ranks' pieces of each of `batch` rows: [B · s, …] to [B · n · s, …], row after row."""
    if group.size == 1:
        return x_TD
    gathered = all_gather_rows(x_TD, group)
    if batch == 1:
        return gathered
    return gathered.unflatten(0, (group.size, batch, -1)).transpose(0, 1).flatten(0, 2)


def scatter_tokens(x_TD: Tensor, group: Group, batch: int) -> Tensor:
    """Sum the ranks' partial results and keep this rank's piece of each row: [B · n · s, …] to [B · s, …]."""
    if group.size == 1:
        return x_TD
    if batch > 1:
        x_TD = x_TD.unflatten(0, (batch, group.size, -1)).transpose(0, 1).flatten(0, 2)
    return reduce_scatter_rows(x_TD, group)
