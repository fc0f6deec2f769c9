"""Layers computed in parts train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import runs
from tests.ranks import ranks

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral", 2, {"ep": 2, "dispatcher": "alltoall"}),
    ("mixtral", 2, {"ep": 2, "dispatcher": "alltoall", "inside_chunks": 1}),
    ("qwen3_moe", 2, {"ep": 2, "tp": 2, "dispatcher": "allgather", "micro_batch": 2}),
    ("mixtral", 4, {"ep": 4, "dispatcher": "allgather", "inside_chunks": 3, "micro_batch": 2}),
    ("deepseek_v3", 4, {"ep": 2, "etp": 2, "dispatcher": "allgather", "inside_chunks": 2, "recompute": ["moe"]}),
    ("deepseek_v3", 4, {"ep": 2, "etp": 2, "dispatcher": "alltoall", "micro_batch": 2}),
    ("deepseek_v3", 4, {"ep": 4, "dispatcher": "alltoall", "micro_batch": 1, "sharding": "gradients"}),
    ("mixtral", 4, {"ep": 2, "pp": 2, "dispatcher": "alltoall", "schedule": "zero_bubble", "micro_batch": 2}),
]

HEADS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 2, {"cp": 2, "ep": 2, "dispatcher": "alltoall", "inside_chunks": 4, "micro_batch": 2}),
    ("mixtral", 2, {"cp": 2, "inside_chunks": 2, "recompute": ["core_attn", "layernorm"]}),
    ("deepseek_v3", 2, {"cp": 2, "inside_chunks": 3, "recompute": ["mla_up_proj"], "sharding": "parameters"}),
    ("deepseek_v3", 4, {"cp": 2, "tp": 2, "inside_chunks": 2, "micro_batch": 2}),
    ("qwen3_moe", 4, {"cp": 2, "pp": 2, "inside_chunks": 2, "schedule": "zero_bubble", "recompute": ["full"]}),
]
"""Heads in groups: 4 (of 8 on 2 ranks), 2, 2 (of at most 3), 2 of a tensor-parallel rank's 4, 2."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "world", "keys"), HEADS)
def test_heads_in_groups_train_as_one_process(name: str, world: int, keys: dict[str, Any]) -> None:
    for each in ranks(world).run(runs.errors, name, keys | {"overlap": ["inside"]}):
        assert all(each[what] == 0 for what in ("counts", "bias", "missing")), each
        assert max(each.values()) <= 1e-5, each


@pytest.mark.long
@pytest.mark.parametrize(("name", "world", "keys"), CASES)
def test_layers_in_parts_train_as_one_process(name: str, world: int, keys: dict[str, Any]) -> None:
    for each in ranks(world).run(runs.errors, name, keys | {"overlap": ["inside"]}):
        assert all(each[what] == 0 for what in ("counts", "bias", "missing")), each
        assert max(each.values()) <= 1e-5, each
