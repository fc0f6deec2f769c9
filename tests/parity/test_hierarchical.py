"""Layouts whose tokens travel by node train as one process does. A node is two of the ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from moesaic.dispatch.alltoall import AllToAllDispatcher
from moesaic.dispatch.hierarchical import HierarchicalDispatcher
from moesaic.model.moe import Moe
from tests.parity import runs
from tests.ranks import RankError, ranks

TOLERANCE = 1e-5


def errors(rank: int, name: str, keys: dict[str, Any], ranks_per_node: int, steps: int) -> dict[str, float]:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node)):
        return runs.errors(rank, name, keys, runs.Plan(steps=steps))


def dispatchers(rank: int, keys: dict[str, Any], ranks_per_node: int) -> set[str]:
    """Those of the layers of a rank."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node)):
        decoder = runs.start("mixtral", runs.mesh_for("mixtral", keys), keys, runs.Plan()).decoder
    return {type(m.dispatcher).__name__ for m in decoder.modules() if isinstance(m, Moe)}


HIERARCHICAL = {"dispatcher": "hierarchical"}
FLEX = {"dispatcher": "flex", "dispatcher_backend": "portable"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "keys", "steps"),
    [
        ("deepseek_v3", {"ep": 4, **HIERARCHICAL, "micro_batch": 2}, 1),
        ("mixtral", {"ep": 4, **FLEX, "sharding": "optimizer", "micro_batch": 2}, 3),
        ("qwen3_moe", {"ep": 2, "etp": 2, "tp": 2, **HIERARCHICAL, "micro_batch": 2}, 2),
        ("mixtral", {"ep": 2, "pp": 2, **HIERARCHICAL, "micro_batch": 2}, 2),  # each stage is a node
    ],
)
def test_layouts_by_node_equal_one_process(name: str, keys: dict[str, Any], steps: int) -> None:
    found = ranks(4).run(errors, name, keys, 2, steps)
    worst = {what: max(each[what] for each in found) for what in found[0]}
    assert not any(worst[what] for what in ("counts", "bias", "missing"))
    assert max(worst.values()) <= TOLERANCE, worst


def test_the_dispatcher_is_what_the_nodes_make_it() -> None:
    keys = {"ep": 4, **HIERARCHICAL}
    assert ranks(4).run(dispatchers, keys, 2) == [{HierarchicalDispatcher.__name__}] * 4
    assert ranks(4).run(dispatchers, keys, 4) == [{AllToAllDispatcher.__name__}] * 4


def test_uneven_nodes_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match="lie unevenly on nodes of 3 ranks, 3 on node 0 and 1 on node 1"):
        ranks(4).run(dispatchers, {"ep": 4, **HIERARCHICAL}, 3)
