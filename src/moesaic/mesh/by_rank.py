"""All-gather and reduce-scatter under the work on their rows: what a rank sends to each other is a message of its own.

Of what is gathered, own rows are worked on while the others' travel, then theirs as they come. Of what is summed, the
rows for other ranks are made first and leave one rank after the other, and own rows last. Bytes are those of the plain
collectives; sums are taken in rank order, in fp32 for narrower floats, so they are the same in all runs.

At step k of n − 1 a rank sends to the k-th rank after it and receives from the k-th before it: no two send to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.collectives import Pending, sum_of_ranks
from moesaic.mesh.group import Group, byte_count
from moesaic.mesh.messages import Exchange
from moesaic.mesh.traffic import count


def gather_under(x_RD: Tensor, group: Group, use: Callable[[int, Tensor], None]) -> Tensor:
    """The rows x [R, D] of every rank, [n, R, D]. `use(rank, rows)` is called for each rank's as soon as they are here,
    for own ones first, always in the same order."""
    n, me, what = group.size, group.rank, "all-gather"
    parts_nRD = x_RD.new_empty(n, *x_RD.shape)
    own_RD = parts_nRD[me].copy_(x_RD)
    count(what, group.name, byte_count(x_RD) * (n - 1))
    with group.naming(what):
        messages = _Messages(parts_nRD, group)
        arriving = [(source, messages.step(k, own_RD)) for k, source in messages.sources()]
    use(me, own_RD)
    for place, (source, works) in enumerate(arriving):
        arrival = Pending(what, group, parts_nRD[source], _as_one(works, group))
        # Another lane has its turn once: the other ranks' rows come close behind.
        rows_RD = arrival.wait_beside() if place == 0 else arrival.wait()
        use(source, rows_RD)
    with group.naming(what):
        _as_one(messages.sends, group).wait()
    return parts_nRD


def sum_under(
    make: Callable[[int], Tensor], places_nRD: Tensor, group: Group, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """The sum over ranks of the rows that each makes for this one, [R, D]. `make(rank)` gives the rows [R, D] for a
    rank, and `meanwhile` runs when all are made. `places_nRD` is memory for what is summed."""
    n, me, what = group.size, group.rank, "reduce-scatter"
    count(what, group.name, byte_count(places_nRD) // n * (n - 1))
    # Until all are on their way no other lane has its turn: it would send before what its partners receive before.
    with group.naming(what):
        messages = _Messages(places_nRD, group)
    works = []
    for k, _ in messages.sources():
        rows_RD = make((me + k) % n).contiguous()
        with group.naming(what):
            works += messages.step(k, rows_RD)
    places_nRD[me] = make(me)
    if meanwhile is not None:
        meanwhile()
    work = _as_one(works + messages.sends, group)
    return Pending(what, group, places_nRD, work, messages, sum_of_ranks).wait_beside()


class _Messages:
    """Messages to and from every other rank, whose rows arrive at `places_nRD`."""

    def __init__(self, places_nRD: Tensor, group: Group) -> None:
        self.places_nRD, self.group = places_nRD, group
        self.kept: list[Tensor] = []
        """What is being sent."""
        self.sends: list[Any] = []
        # Plain messages travel best if all receives are posted before the first send (see `mesh.messages`).
        self._receives = {} if group.needs_device else {k: self._receive(source) for k, source in self.sources()}

    def sources(self) -> list[tuple[int, int]]:
        """Steps 1 … n − 1 and the rank that each receives from."""
        n, me = self.group.size, self.group.rank
        return [(k, (me - k) % n) for k in range(1, n)]

    def _receive(self, source: int) -> Any:
        return dist.irecv(self.places_nRD[source], self.group.ranks[source], group=self.group.handle)

    def step(self, k: int, rows_RD: Tensor) -> list[Any]:
        """Begin to send `rows_RD` to the k-th rank after this one; what ends when those of the k-th before are here."""
        group, n, me = self.group, self.group.size, self.group.rank
        to, source = group.ranks[(me + k) % n], (me - k) % n
        self.kept.append(rows_RD)
        if not group.needs_device:
            self.sends.append(dist.isend(rows_RD, to, group=group.handle))
            return [self._receives[k]]
        if rows_RD.is_meta:  # torch knows no back-end for batches of these
            return [dist.isend(rows_RD, to, group=group.handle), self._receive(source)]
        # Both directions at once, so that neither waits for the other to begin.
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, rows_RD, to, group=group.handle),
                dist.P2POp(dist.irecv, self.places_nRD[source], group.ranks[source], group=group.handle),
            ]
        )


def _as_one(works: list[Any], group: Group) -> Any:
    return _OnDevice(works) if group.needs_device else Exchange(works, group.name)


class _OnDevice:
    """Several messages of an accelerator's back-end, as one: it, unlike that of plain messages, can tell the end."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Let this thread's stream go on when all have arrived and left."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all have."""
        return all(work.is_completed() for work in self._works)
