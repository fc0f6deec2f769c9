"""Rows of other ranks travel while own work is done: it is done although nothing has come from them yet."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.by_rank import gather_under, sum_under
from moesaic.mesh.group import Group
from tests.ranks import ranks


def groups(world: int) -> tuple[Group, Group]:
    """The group, and connections beside it."""
    partition = [tuple(range(world))]
    return Group.create("tp", partition, 60.0), Group.create("beside", partition, 60.0, channel="beside")


def hold(rank: int, beside: Group) -> None:
    """Rank 1 goes on when rank 0 says so."""
    if rank == 1:
        dist.recv(torch.empty(1), 0, group=beside.handle)


def let_go(rank: int, beside: Group) -> None:
    if rank == 0:
        dist.send(torch.ones(1), 1, group=beside.handle)


def gathered(rank: int) -> tuple[list[int], list[float]]:
    group, beside = groups(2)
    seen: list[int] = []

    def use(source: int, rows_RD: Tensor) -> None:
        if source == rank:
            let_go(rank, beside)
        seen.append(source)
        assert bool((rows_RD == source + 1).all())

    hold(rank, beside)
    return seen, gather_under(torch.full((2, 3), rank + 1.0), group, use)[:, 0, 0].tolist()


def test_own_rows_are_used_before_others_have_sent_theirs() -> None:
    assert ranks(2).run(gathered) == [([0, 1], [1.0, 2.0]), ([1, 0], [1.0, 2.0])]


def summed(rank: int, own: bool) -> tuple[list[int], list[float]]:
    group, beside = groups(2)
    made: list[int] = []

    def make(to: int) -> Tensor:
        if own and to == rank:
            let_go(rank, beside)
        made.append(to)
        return torch.full((3,), 10.0 * (rank + 1) + to)

    def meanwhile() -> None:
        if not own:
            let_go(rank, beside)

    hold(rank, beside)
    return made, sum_under(make, torch.empty(2, 3), group, meanwhile).tolist()


def test_own_rows_are_made_last_and_before_others_have_sent_theirs() -> None:
    wanted = [([1, 0], [30.0] * 3), ([0, 1], [32.0] * 3)]
    assert ranks(2).run(summed, True) == wanted
    assert ranks(2).run(summed, False) == wanted
