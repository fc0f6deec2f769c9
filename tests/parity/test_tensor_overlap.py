"""Layers whose tensor-parallel messages travel under products train as one process does, and send the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import runs, test_traffic
from tests.parity.test_traffic import LATENT, grouped
from tests.ranks import ranks

pytestmark = pytest.mark.long
WORDS = {"overlap": ["tensor"]}

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 2, {"tp": 2, "ep": 2, "dispatcher": "allgather", "micro_batch": 2}),
    (
        "deepseek_v3",
        2,
        {"tp": 2, "micro_batch": 2, "recompute": ["mla_up_proj", "mlp", "shared_experts", "layernorm", "core_attn"]},
    ),
    ("qwen3_moe", 2, {"tp": 2, "recompute": ["mlp", "moe"], "overlap": ["tensor", "weight_gradients", "gradients"]}),
    (
        "deepseek_v3",
        4,
        {"tp": 2, "ep": 4, "dispatcher": "alltoall", "overlap": ["tensor", "experts", "between", "inside"]},
    ),
    ("deepseek_v3", 4, {"tp": 2, "pp": 2, "schedule": "zero_bubble", "recompute": ["mla_up_proj"], "micro_batch": 2}),
    ("mixtral", 4, {"tp": 4, "micro_batch": 2, "recompute": ["full"]}),
    ("deepseek_v3", 4, {"tp": 4, "ep": 2, "etp": 2, "dispatcher": "allgather", "recompute": ["moe", "mla_up_proj"]}),
    ("deepseek_v3", 4, {"tp": 2, "cp": 2, "sharding": "parameters"}),
]


@pytest.mark.parametrize(("name", "world", "keys"), CASES, ids=str)
def test_layers_by_rank_train_as_one_process(name: str, world: int, keys: dict[str, Any]) -> None:
    for each in ranks(world).run(runs.errors, name, WORDS | keys):
        assert all(each[what] == 0 for what in ("counts", "bias", "missing")), each
        assert max(each.values()) <= 1e-5, each


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("spec", [grouped(8, 4, qk_norm="head"), LATENT], ids=["grouped", "latent"])
def test_attention_by_rank_sends_the_same_bytes(spec: Any, n: int) -> None:
    plain, mine = (ranks(n).run(test_traffic.attention_traffic, spec, {"tp": n} | words) for words in ({}, WORDS))
    assert mine == plain


@pytest.mark.parametrize("n", [2, 4])
def test_the_dense_block_by_rank_sends_the_same_bytes(n: int) -> None:
    plain, mine = (ranks(n).run(test_traffic.mlp_traffic, {"tp": n} | words) for words in ({}, WORDS))
    assert mine == plain
