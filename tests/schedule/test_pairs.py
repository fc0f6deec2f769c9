"""Orders of pairs are complete, never block, keep as many micro-batches as they say, and keep the last rank busy."""

from __future__ import annotations

import pytest

from moesaic.schedule.orders import Action, Pair, paired, received, sent, single_actions
from moesaic.schedule.pipeline import UNREAD
from moesaic.spec.errors import SpecError

Work = Action | Pair
PIPELINES = [(pp, v, micros) for pp in range(1, 7) for v in range(1, 4) for micros in range(1, 15)]


def whole(pp: int, virtual: int, micros: int) -> list[list[Work]]:
    return [paired(rank, pp, virtual, micros) for rank in range(pp)]


def legal() -> list[tuple[int, int, int]]:
    return [case for case in PIPELINES if case[1] == 1 or case[2] % case[0] == 0]


def ends(orders: list[list[Work]], stages: int) -> list[float]:
    """When each rank is done if a forward takes 1 and a backward 2, a pair takes all that it receives before it
    computes, and a rank goes on only when `UNREAD` messages of a link at most have not been read, where a receive is
    posted when the one before it was taken, and a gradient's not before its forward."""
    pp = len(orders)
    if pp == 1:
        return [float(sum(1 if a.kind == "F" else 2 for a in single_actions(orders[0])))]
    order_in = {(r, k): received(single_actions(orders[r]), k, stages) for r in range(pp) for k in ("F", "B")}
    order_out = {(r, k): sent(single_actions(orders[r]), k, stages) for r in range(pp) for k in ("F", "B")}
    sent_at: dict[tuple[int, str], list[float]] = {key: [] for key in order_in}
    taken: dict[tuple[int, str], int] = dict.fromkeys(order_in, 0)
    done: set[Action] = set()
    at, now, blocked = [0] * pp, [0.0] * pp, [False] * pp

    def reader(rank: int, kind: str) -> int:
        return (rank + (1 if kind == "F" else -1)) % pp

    def read(rank: int, kind: str) -> int:
        there = reader(rank, kind)
        count = taken[there, kind]
        if count < len(order_in[there, kind]):
            micro, stage = order_in[there, kind][count]
            count += kind == "F" or Action("F", micro, stage - 1) in done
        return min(count, len(sent_at[rank, kind]))

    moved = True
    while moved:
        moved = False
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                if blocked[rank]:
                    if any(len(sent_at[rank, k]) - read(rank, k) > UNREAD for k in ("F", "B")):
                        break
                    blocked[rank], moved = False, True
                    at[rank] += 1
                    continue
                actions = single_actions([orders[rank][at[rank]]])
                start = now[rank]
                arrived = True
                for kind, micro, stage in actions:
                    source = (micro, stage + (-1 if kind == "F" else 1))
                    if 0 <= source[1] < stages:
                        assert order_in[rank, kind][taken[rank, kind]] == source
                        sender = (rank + (-1 if kind == "F" else 1)) % pp
                        if len(sent_at[sender, kind]) <= taken[rank, kind]:
                            arrived = False
                            break
                        start = max(start, sent_at[sender, kind][taken[rank, kind]])
                    if kind == "B":
                        assert Action("F", micro, stage) in done
                if not arrived:
                    break
                now[rank] = start + sum(1 if a.kind == "F" else 2 for a in actions)
                for action in actions:
                    kind, micro, stage = action
                    if 0 <= stage + (-1 if kind == "F" else 1) < stages:
                        taken[rank, kind] += 1
                    if stage != (stages - 1 if kind == "F" else 0):
                        assert order_out[rank, kind][len(sent_at[rank, kind])] == (micro, stage)
                        sent_at[rank, kind].append(now[rank])
                    done.add(action)
                blocked[rank] = moved = True
    stuck = [f"rank {r} at {orders[r][place]}" for r, place in enumerate(at) if place < len(orders[r])]
    assert not stuck, stuck
    return now


@pytest.mark.parametrize("pipeline", legal(), ids=str)
def test_pairs_are_complete_and_never_block(pipeline: tuple[int, int, int]) -> None:
    pp, virtual, micros = pipeline
    orders = whole(*pipeline)
    for rank, order in enumerate(orders):
        expected = [
            Action(kind, micro, stage)
            for kind in ("B", "F")
            for micro in range(micros)
            for stage in range(rank, pp * virtual, pp)
        ]
        assert sorted(single_actions(order)) == sorted(expected)
        now = most = 0
        for each in order:
            if isinstance(each, Pair):
                most = max(most, now + 1)
            else:
                now += 1 if each.kind == "F" else -1
                most = max(most, now)
        warm_up = 2 * (pp - rank - 1) + (virtual - 1) * pp + 1
        assert most == min(virtual * micros, warm_up + 1)
    ends(orders, pp * virtual)


@pytest.mark.parametrize(("pp", "micros"), [(2, 8), (3, 9), (4, 12), (6, 14)])
def test_the_last_rank_never_waits_after_its_first_input(pp: int, micros: int) -> None:
    assert ends(whole(pp, 1, micros), pp)[-1] == (pp - 1) + 3 * micros


def test_rounds_must_be_full() -> None:
    with pytest.raises(SpecError, match="multiple of 2"):
        paired(0, 2, 2, 3)
