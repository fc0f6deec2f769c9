"""Layouts whose tokens travel by a library train as one process does. The library is a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dispatch.test_flex import fake
from tests.parity import runs
from tests.ranks import ranks

pytestmark = pytest.mark.long

TOLERANCE = 1e-5
DEEPEP = {"dispatcher": "flex", "dispatcher_backend": "deepep"}
HYBRIDEP = {"dispatcher": "flex", "dispatcher_backend": "hybridep"}


def errors(rank: int, name: str, keys: dict[str, Any], steps: int) -> dict[str, float]:
    with fake(torch.float32):
        return runs.errors(rank, name, keys, runs.Plan(steps=steps))


@pytest.mark.parametrize(
    ("world", "name", "keys"),
    [
        (2, "mixtral", {"ep": 2, **DEEPEP, "overlap": ["experts"]}),
        (2, "deepseek_v3", {"ep": 2, **HYBRIDEP, "overlap": ["experts", "weight_gradients"]}),
        (4, "qwen3_moe", {"pp": 2, "ep": 2, **HYBRIDEP, "recompute": ["moe"]}),
        (4, "deepseek_v3", {"ep": 4, **DEEPEP, "sharding": "optimizer", "recompute": ["full"]}),
    ],
    ids=str,
)
def test_layouts_by_a_library_equal_one_process(world: int, name: str, keys: dict[str, Any]) -> None:
    found = ranks(world).run(errors, name, keys, 2)
    worst = {what: max(each[what] for each in found) for what in found[0]}
    assert not any(worst[what] for what in ("counts", "bias", "missing"))
    assert max(worst.values()) <= TOLERANCE, worst
