"""Sums over ranks that run while this rank computes, and sums that travel in bf16.

The same bits as `collectives.all_reduce`: shares travel all-to-all, each rank adds its share of all ranks in rank
order, and the sums are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.collectives import _native_gather, send_to_all, sum_of_ranks
from moesaic.mesh.group import Group, byte_count
from moesaic.mesh.traffic import count


class PendingSum:
    """A sum over ranks under way. `wait` returns x, summed in place; x must not change before that.

    With `compress`, fp32 shares travel in bf16 (every rank's own one is rounded too), are added in fp32, and the sums
    are gathered in fp32. That replaces a reduce-scatter in fp32 by half its bytes and rounds every addend once, where a
    ring that adds in bf16 rounds at each hop (MegaScale-MoE, arXiv 2505.11432).
    """

    def __init__(self, x: Tensor, group: Group, *, compress: bool = False) -> None:
        self._x, self._group, self._n = x, group, group.size
        self._first: Any = None
        self._second: Any = None
        self._whole: Tensor | None = None
        self._is_native = group.needs_device and not compress
        if group.handle is None or x.numel() == 0:
            return
        n, flat = self._n, x.reshape(-1)
        if self._is_native:
            count("all-reduce", group.name, 2 * byte_count(x) * (n - 1) // n)
            with group.naming("all-reduce"):
                self._first = dist.all_reduce(x, group=group.handle, async_op=True)
            return
        share = -(-flat.numel() // n)
        if flat.numel() != share * n:
            flat = torch.nn.functional.pad(flat, (0, share * n - flat.numel()))
        self._type = x.dtype
        self._sent = flat.to(torch.bfloat16) if compress else flat
        self._parts = torch.empty(n, share, dtype=self._sent.dtype, device=x.device)
        if compress:
            count("all-to-all of gradients", group.name, share * (n - 1) * self._parts.element_size())
            count("all-gather of gradients", group.name, share * (n - 1) * x.element_size())
        else:
            count("all-reduce", group.name, 2 * byte_count(x) * (n - 1) // n)
        with group.naming("all-reduce"):
            self._first = dist.all_to_all_single(
                self._parts, self._sent.view(n, share), group=group.handle, async_op=True
            )

    def advance(self) -> bool:
        """Begin the second half if the first has arrived, without waiting. Whether it has begun (or there is none).

        Only over plain messages: NCCL wants its collectives in one order on all ranks, and ranks look at other times.
        """
        if self._first is None or self._is_native or self._second is not None:
            return True
        if self._group.needs_device or not self._first.is_completed():
            return False
        self._gather()
        return True

    def wait(self) -> Tensor:
        """Block until the sum is there."""
        if self._first is None:
            return self._x
        with self._group.naming("all-reduce"):
            if self._is_native:
                self._first.wait()
            else:
                if self._second is None:
                    self._gather()
                assert self._whole is not None
                self._second.wait()
                self._x.copy_(self._whole.view(-1)[: self._x.numel()].view_as(self._x))
        self._first = self._second = self._whole = None
        return self._x

    def _gather(self) -> None:
        group = self._group
        with group.naming("all-reduce"):
            self._first.wait()
            total = sum_parts(self._parts, self._type)
            self._whole = total.new_empty(self._n, total.numel())
            if group.needs_device:
                self._second = _native_gather(self._whole.view(-1), total, group=group.handle, async_op=True)
            else:
                self._second = send_to_all(total, list(self._whole), group)
        self._sent, self._parts, self._total = total, total, total  # what is sent has to live as long as the message


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension in order; bf16 parts of an fp32 sum are added in fp32."""
    if parts.dtype == dtype:
        return sum_of_ranks(parts)
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total += part
    return total


class PendingScatter:
    """A sum over ranks of their x[my rank], x [n, …], under way; `wait` writes it to `into`, not to be read before.

    x must not change before that. With `compress` it is sent in bf16 and added in the type of `into`.
    """

    def __init__(self, x: Tensor, into: Tensor, group: Group, *, compress: bool = False) -> None:
        self._into, self._group = into, group
        self._sent = x.to(torch.bfloat16).contiguous() if compress else x.contiguous()
        self._name = "all-to-all of gradients" if compress else "reduce-scatter"
        count(self._name, group.name, byte_count(self._sent) * (group.size - 1) // group.size)
        self._parts = torch.empty_like(self._sent)
        with group.naming(self._name):
            self._work = dist.all_to_all_single(self._parts, self._sent, group=group.handle, async_op=True)

    def wait(self) -> None:
        """Block until the sum is there."""
        with self._group.naming(self._name):
            self._work.wait()
        self._into.view(-1).copy_(sum_parts(self._parts, self._into.dtype).view(-1))


def reduce_scatter_compressed(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks of their x[my rank], x [n, …] to […]: sent in bf16, added in x's type."""
    if group.handle is None:
        return x[0]
    into = torch.empty_like(x[0])
    PendingScatter(x, into, group, compress=True).wait()
    return into
