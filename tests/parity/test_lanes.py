"""Micro-batches beside each other, and weight gradients in waits, train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.mesh import collectives, lanes
from moesaic.train.stages import StageWork
from tests.parity import runs
from tests.parity.runs import Plan
from tests.ranks import ranks

TOLERANCE = 1e-5
PLAN = Plan(steps=2)
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "deepseek_v3", {"ep": 2, "overlap": ["experts"]}),
    (2, "deepseek_v3", {"ep": 2, "overlap": ["experts", "weight_gradients"], "dispatcher": "allgather"}),
    (2, "deepseek_v3", {"tp": 2, "ep": 2, "overlap": ["between"]}),
    (2, "qwen3_moe", {"cp": 2, "ep": 2, "overlap": ["experts", "between"]}),
    (2, "mixtral", {"tp": 2, "etp": 2, "overlap": ["experts", "weight_gradients"]}),
    (2, "mixtral", {"ep": 2, "overlap": ["experts"], "sharding": "optimizer"}),
    (2, "deepseek_v3", {"overlap": ["experts"], "sharding": "gradients"}),
    (2, "deepseek_v3", {"pp": 2, "overlap": ["experts"]}),
    (4, "deepseek_v3", {"pp": 2, "ep": 2, "overlap": ["experts", "weight_gradients"]}),
    (4, "qwen3_moe", {"pp": 2, "ep": 2, "virtual_stages": 2, "overlap": ["experts"]}),
    (4, "deepseek_v3", {"tp": 2, "ep": 4, "overlap": ["experts", "weight_gradients", "between"]}),
    (4, "mixtral", {"pp": 4, "overlap": ["experts"]}),
]


@pytest.mark.parametrize(("world", "name", "keys"), CASES, ids=str)
def test_lanes_train_as_one_process(world: int, name: str, keys: dict[str, Any]) -> None:
    found = ranks(world).run(runs.errors, name, keys, PLAN)
    worst = {what: max(each[what] for each in found) for what in found[0]}
    exact = ("counts", "bias", "missing")
    assert {w: x for w, x in worst.items() if not x <= (0 if w in exact else TOLERANCE)} == {}
