"""What backward computes again in waits for messages changes no bit, however late messages are."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.mesh.messages import Exchange
from moesaic.train import stages
from tests.parity import runs
from tests.parity.runs import Plan, Record
from tests.parity.test_recompute import CHEAP, MOE, same
from tests.ranks import ranks

pytestmark = pytest.mark.long

PLAN = Plan(steps=1)
CASES: list[tuple[int, str, list[str], dict[str, Any]]] = [
    (2, "deepseek_v3", CHEAP, {"ep": 2, "dispatcher": "alltoall", "overlap": ["between"]}),
    (2, "deepseek_v3", CHEAP, {"tp": 2, "ep": 2, "dispatcher": "allgather", "overlap": ["between", "gradients"]}),
    (2, "deepseek_v3", CHEAP, {"ep": 2, "overlap": ["between", "inside", "experts"]}),
    (2, "deepseek_v3", CHEAP, {"tp": 2, "ep": 2, "overlap": ["between", "tensor"]}),
    (2, "deepseek_v3", ["layernorm", "mla_up_proj"], {"cp": 2, "cp_kind": "ring", "ep": 2, "overlap": ["between"]}),
    (2, "qwen3_moe", CHEAP, {"cp": 2, "ep": 2, "overlap": ["between", "weight_gradients"]}),
    (2, "deepseek_v3", MOE, {"ep": 2, "overlap": ["between"]}),
    (2, "deepseek_v3", CHEAP, {"ep": 2, "overlap": ["between"], "offload": ["activations"]}),
    (4, "deepseek_v3", CHEAP, {"pp": 2, "ep": 2, "overlap": ["between", "experts"]}),
]


def late(rank: int, name: str, keys: dict[str, Any], asks: int) -> tuple[Record | None, int]:
    """Train where no message is there until it has been asked for `asks` times; how often waits computed again."""
    asked: dict[int, int] = {}
    seen: list[Exchange] = []
    made = 0
    arrived, ahead = Exchange.is_completed, stages.make_ahead

    def watched_arrived(message: Exchange) -> bool:
        if id(message) not in asked:
            seen.append(message)
        asked[id(message)] = asked.get(id(message), 0) + 1
        return asked[id(message)] > asks

    def watched_ahead() -> bool:
        nonlocal made
        done = ahead()
        made += done
        return done

    Exchange.is_completed, stages.make_ahead = watched_arrived, watched_ahead  # type: ignore[method-assign]
    try:
        return runs.outcome(rank, name, keys, PLAN), made
    finally:
        Exchange.is_completed, stages.make_ahead = arrived, ahead  # type: ignore[method-assign]


@pytest.mark.parametrize(("world", "name", "words", "keys"), CASES, ids=str)
def test_it_trains_to_the_last_bit_as_without(world: int, name: str, words: list[str], keys: dict[str, Any]) -> None:
    plain = ranks(world).run(runs.outcome, name, keys | {"recompute": "none"}, PLAN)[0]
    for asks in (1, 99) if keys == CASES[0][3] else (99,):
        record, made = ranks(world).run(late, name, keys | {"recompute": words}, asks)[0]
        assert made and plain is not None and record is not None
        same(record, plain)
