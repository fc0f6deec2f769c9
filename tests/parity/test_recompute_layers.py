"""Recomputing a number of layers, several together, or other modules on other stages changes no gradient's last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import runs
from tests.parity.runs import Plan
from tests.parity.test_recompute import same
from tests.ranks import ranks

pytestmark = pytest.mark.long

BLOCK = {"recompute": ["full", "layernorm"], "recompute_method": "block", "recompute_layers": 1}
TOGETHER = {"recompute": ["full"], "recompute_layers": 2}
STAGES = {"recompute_stages": [["full"], ["layernorm", "mla_up_proj"]]}

CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, BLOCK, {"tp": 2, "ep": 2, "overlap": ["between"]}),
    (2, TOGETHER, {"tp": 2, "ep": 2, "dispatcher": "allgather", "overlap": ["gradients"]}),
    (2, TOGETHER, {"ep": 2, "overlap": ["experts", "weight_gradients"]}),
    (2, STAGES, {"pp": 2, "schedule": "zero_bubble"}),
    (2, STAGES | {"recompute_layers": 2}, {"pp": 2}),
    (2, BLOCK, {"sharding": "parameters", "overlap": ["parameters", "gradients"]}),
    (2, TOGETHER, {"sharding": "parameters"}),
    (2, TOGETHER, {"sharding": "parameters", "overlap": ["parameters", "gradients"]}),
    (4, STAGES, {"pp": 2, "ep": 2, "sharding": "gradients"}),
    (4, TOGETHER, {"pp": 2, "ep": 2, "sharding": "optimizer"}),
]


@pytest.mark.parametrize(("world", "how", "keys"), CASES, ids=str)
def test_results_are_those_without(world: int, how: dict[str, Any], keys: dict[str, Any]) -> None:
    plan = Plan(steps=2 if "sharding" in keys else 1)  # sharding marks modules from step to step
    plain, mine = (ranks(world).run(runs.outcome, "deepseek_v3", keys | each, plan)[0] for each in ({}, how))
    assert plain is not None and mine is not None
    same(mine, plain)
