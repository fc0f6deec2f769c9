"""Exchanges of plain messages: several under way, asked or not whether they have ended, and what fails in one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moesaic.mesh import messages
from moesaic.mesh.group import Group
from tests.ranks import ranks


def _several(rank: int, asked: bool) -> list[list[list[int]]]:
    """Two exchanges begun before either is waited for; rank r sends rank i of exchange e r·i numbers 100·e + r."""
    size = dist.get_world_size()
    group = Group.create("messages", [tuple(range(size))], 60.0, small=True)
    assert group.small is not None and group.small.handle is not group.handle and group.small.ranks == group.ranks
    began, found = [], []
    for number in range(2):
        pieces = [torch.full((rank * i,), 100 * number + rank) for i in range(size)]
        places = [torch.empty(rank * i, dtype=torch.int64) for i in range(size)]
        began.append(messages.exchange(pieces, places, group))
        found.append(places)
    for each in began:
        if asked:
            assert each.is_completed() in (False, True)
        each.wait()
        if asked:
            assert each.is_completed()
    return [[place.tolist() for place in places] for places in found]


@pytest.mark.parametrize("asked", [False, True])
def test_exchanges_under_way_keep_apart_and_empty_pieces_do_not_travel(asked: bool) -> None:
    for rank, found in enumerate(ranks(4).run(_several, asked)):
        assert found == [[[100 * number + i] * (rank * i) for i in range(4)] for number in range(2)]


class _Broken:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_what_fails_on_the_thread_that_waits_is_raised_where_it_is_waited_for() -> None:
    exchange = messages.Exchange([_Broken()], "broken")
    ended: list[bool] = []
    assert exchange.watched(lambda: ended.append(True)).wait(60.0)
    with pytest.raises(RuntimeError, match="Connection closed"):
        exchange.wait()
    assert ended == [True]
