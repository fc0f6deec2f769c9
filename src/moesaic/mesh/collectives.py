"""Collectives on plain tensors: each a call with a group, counted in the traffic meter, named when it fails.

On gloo everything is plain messages, each rank's receives posted before its sends (`mesh.messages`): its own all-gather
and reduce-scatter are several times slower, its all-to-all uses one direction of a link at a time, and sums taken here,
in rank order, are the same on all ranks and in all runs. Splits are Python numbers. Tensors may have any device and,
except for sums, any type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.mesh import messages
from moesaic.mesh.device import device
from moesaic.mesh.dry import expected
from moesaic.mesh.group import Group, byte_count
from moesaic.mesh.lanes import before_wait
from moesaic.mesh.traffic import count

# Newer releases of torch have other names for these two.
_native_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


BULK = frozenset({"dispatch", "combine", "dispatch gradient", "combine gradient"})
"""Messages whose wait another lane may use (`lanes`). Small ones are waited for at once."""


@dataclass
class Pending:
    """A collective under way. `wait` returns its result; the input must not change before that."""

    what: str
    group: Group
    result: Tensor
    work: Any = None
    keep: Any = None
    after: Callable[[Tensor], Tensor] | None = None
    """What makes the result of what arrived."""

    def wait(self) -> Tensor:
        """Block until the result is there (on an accelerator: until its stream may read it)."""
        if self.work is not None:
            if self.what in BULK:
                before_wait(self.work, self.result)
            with self.group.naming(self.what):
                self.work.wait()
            self.work = self.keep = None
        if self.after is not None:
            self.result, self.after = self.after(self.result), None
        return self.result

    def wait_beside(self) -> Tensor:
        """`wait`, for a bulk message of any name."""
        if self.work is not None and self.what not in BULK:
            before_wait(self.work, self.result)
        return self.wait()


def start_all_to_all(x_RD: Tensor, group: Group, send: list[int], receive: list[int], name: str = "") -> Pending:
    """Begin to send `send[i]` rows of x to rank i of the group, in order, and to receive `receive[i]` from it."""
    name = name or "all-to-all"
    if group.handle is None:
        return Pending(name, group, x_RD)
    x_RD = x_RD.contiguous()
    out = x_RD.new_empty(sum(receive), *x_RD.shape[1:])
    width = byte_count(x_RD) // max(1, x_RD.shape[0])
    count(name, group.name, (sum(send) - send[group.rank]) * width)
    with group.naming(name):
        return Pending(name, group, out, _start_exchange(x_RD, out, group, send, receive), x_RD)


def _start_exchange(x_RD: Tensor, out_RD: Tensor, group: Group, send: list[int], receive: list[int]) -> Any:
    if group.needs_device:
        return dist.all_to_all_single(out_RD, x_RD, receive, send, group=group.handle, async_op=True)
    return messages.exchange(x_RD.split(send), out_RD.split(receive), group)


def all_to_all(x_RD: Tensor, group: Group, send: list[int], receive: list[int], name: str = "") -> Tensor:
    """Rows from all ranks, in rank order."""
    return start_all_to_all(x_RD, group, send, receive, name).wait()


def all_gather(x: Tensor, group: Group) -> Tensor:
    """x of every rank, [n, *x.shape]; shapes must be equal."""
    return all_gather_rows(x[None], group, [1] * group.size)


def send_to_all(x: Tensor, places: list[Tensor], group: Group) -> messages.Exchange:
    """Begin to send x to every rank and to receive rank i's into `places[i]`, without copies."""
    return messages.exchange([x] * group.size, places, group)


def start_all_gather_rows(x_RD: Tensor, group: Group, counts: list[int], name: str = "all-gather") -> Pending:
    """Begin to bring rows of every rank together, in rank order; rank i has `counts[i]` of them."""
    if group.handle is None:
        return Pending(name, group, x_RD)
    x_RD = x_RD.contiguous()
    n = group.size
    count(name, group.name, byte_count(x_RD) * (n - 1))
    out = x_RD.new_empty(sum(counts), *x_RD.shape[1:])
    with group.naming(name):
        if not group.needs_device:
            return Pending(name, group, out, send_to_all(x_RD, list(out.split(counts)), group), x_RD)
        if len(set(counts)) == 1:
            return Pending(name, group, out, _native_gather(out, x_RD, group=group.handle, async_op=True), x_RD)
        copies = x_RD.repeat(n, *(1 for _ in x_RD.shape[1:]))
        sent = [x_RD.shape[0]] * n
        work = dist.all_to_all_single(out, copies, counts, sent, group=group.handle, async_op=True)
        return Pending(name, group, out, work, copies)


def all_gather_rows(x_RD: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Rows of every rank in rank order; rank i has `counts[i]` of them."""
    return start_all_gather_rows(x_RD, group, counts).wait()


def start_reduce_scatter_rows(x_RD: Tensor, group: Group, counts: list[int], name: str = "reduce-scatter") -> Pending:
    """Begin to sum over ranks their rows for me: x holds rows for all ranks in rank order, `counts[i]` for rank i."""
    if group.handle is None:
        return Pending(name, group, x_RD)
    x_RD = x_RD.contiguous()
    n, mine = group.size, counts[group.rank]
    width = byte_count(x_RD) // max(1, x_RD.shape[0])
    count(name, group.name, (sum(counts) - mine) * width)
    with group.naming(name):
        if group.needs_device and len(set(counts)) == 1:
            out = x_RD.new_empty(mine, *x_RD.shape[1:])
            return Pending(name, group, out, _native_reduce_scatter(out, x_RD, group=group.handle, async_op=True), x_RD)
        parts = x_RD.new_empty(n * mine, *x_RD.shape[1:])
        work = _start_exchange(x_RD, parts, group, counts, [mine] * n)
    return Pending(name, group, parts, work, x_RD, lambda parts: sum_of_ranks(parts.unflatten(0, (n, mine))))


def reduce_scatter_rows(x_RD: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Sum over ranks of their rows for me: x holds rows for all ranks in rank order, `counts[i]` for rank i."""
    return start_reduce_scatter_rows(x_RD, group, counts).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks of their x[my rank]; x [n, …] to […]."""
    return reduce_scatter_rows(x, group, [1] * group.size)[0]


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum or elementwise maximum over ranks, in place, the same bits on every rank. Returns x."""
    if group.handle is None or x.numel() == 0:
        return x
    n = group.size
    count("all-reduce", group.name, 2 * byte_count(x) * (n - 1) // n)
    with group.naming("all-reduce"):
        if group.needs_device:
            dist.all_reduce(x, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group.handle)
            return x
        flat = x.reshape(-1)
        if op == "max" or flat.numel() <= _SMALL:
            parts = flat.new_empty(n, flat.numel())
            send_to_all(flat, list(parts), group).wait()
            return x.copy_((parts.amax(0) if op == "max" else sum_of_ranks(parts)).view_as(x))
        share = -(-flat.numel() // n)
        padded = flat if flat.numel() == share * n else torch.nn.functional.pad(flat, (0, share * n - flat.numel()))
        parts = padded.new_empty(n, share)
        messages.exchange(list(padded.view(n, share)), list(parts), group).wait()
        total = sum_of_ranks(parts)
        whole = padded.new_empty(n, share)
        send_to_all(total, list(whole), group).wait()
        return x.copy_(whole.view(-1)[: flat.numel()].view_as(x))


_SMALL = 4096
"""Up to so many elements a sum sends everything to everybody: one message's time instead of two."""


def sum_of_ranks(parts: Tensor) -> Tensor:
    """Sum over the first dimension in order, in fp32 for narrower floats."""
    if parts.dtype in (torch.bfloat16, torch.float16):
        return parts.sum(0, dtype=torch.float32).to(parts.dtype)
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]  # not in place: what keeps the sum should not hold all parts
    for part in parts[2:]:
        total += part
    return total


def exchange_counts(counts: list[int], group: Group) -> list[int]:
    """counts[i] goes to rank i; returns what each rank sent here."""
    if group.handle is None or expected() is not None:  # in a dry run all ranks do as this one does
        return list(counts)
    where = device().torch_device if group.needs_device else torch.device("cpu")
    sent = torch.tensor(counts, dtype=torch.int64, device=where)
    return all_to_all(sent, group.small or group, [1] * group.size, [1] * group.size, "counts").tolist()


def exchange_count_lists(lists: list[list[int]], group: Group) -> list[list[int]]:
    """Several `exchange_counts` as one message."""
    n = group.size
    if group.handle is None or not lists or expected() is not None:
        return [list(counts) for counts in lists]
    where = device().torch_device if group.needs_device else torch.device("cpu")
    sent_nL = torch.tensor(lists, dtype=torch.int64, device=where).t().contiguous()
    return all_to_all(sent_nL, group.small or group, [1] * n, [1] * n, "counts").t().tolist()  # type: ignore[no-any-return]


def gather_counts(count_here: int, group: Group) -> list[int]:
    """The number that each rank gives, in rank order."""
    return exchange_counts([count_here] * group.size, group)


def isend(x: Tensor, group: Group, to: int, tag: int = 0) -> Pending:
    """Begin to send x to place `to` of the group."""
    x = x.contiguous()
    count("send", group.name, byte_count(x))
    with group.naming("send"):
        work = dist.isend(x, group.ranks[to], group=group.handle, tag=tag)
    return Pending("send", group, x, work, x)


def irecv(x: Tensor, group: Group, source: int, tag: int = 0) -> Pending:
    """Begin to receive x from place `source` of the group."""
    with group.naming("receive"):
        work = dist.irecv(x, group.ranks[source], group=group.handle, tag=tag)
    return Pending("receive", group, x, work)


def start_shift(x: Tensor, group: Group) -> Pending:
    """Begin to send x to the next rank of the ring and to receive the previous rank's, of the same shape.

    Both directions are one batch, so it cannot block on NCCL.
    """
    if group.handle is None:
        return Pending("shift", group, x)
    x = x.contiguous()
    out = torch.empty_like(x)
    count("shift", group.name, byte_count(x))
    after, before = group.ranks[(group.rank + 1) % group.size], group.ranks[(group.rank - 1) % group.size]
    with group.naming("shift"):
        if x.is_meta:  # torch knows no back-end for batches of these
            both = [dist.isend(x, after, group=group.handle), dist.irecv(out, before, group=group.handle)]
            return Pending("shift", group, out, messages.Exchange(both), x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, after, group=group.handle),
                dist.P2POp(dist.irecv, out, before, group=group.handle),
            ]
        )
    return Pending("shift", group, out, messages.Exchange(works), x)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """The Python object that each rank gives, in rank order."""
    if group.handle is None or expected() is not None:
        return [value] * group.size
    out: list[Any] = [None] * group.size
    with group.naming("gathering of objects"):
        dist.all_gather_object(out, value, group=group.handle)
    return out


def barrier(group: Group) -> None:
    """Return when every rank of the group is here."""
    gather_counts(0, group)
