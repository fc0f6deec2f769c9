"""What is recomputed changes nothing: gradients to the last bit, counts, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moesaic.mesh.traffic import meter
from tests.parity import models, runs
from tests.parity.runs import Plan, Record
from tests.ranks import ranks

pytestmark = pytest.mark.long

PLAN = Plan(steps=1)
CHEAP = ["layernorm", "core_attn", "mlp", "shared_experts", "mla_up_proj"]
MOE = ["moe", "layernorm", "core_attn", "mla_up_proj", "mlp"]

CASES: list[tuple[int, str, list[str], dict[str, Any]]] = [
    (2, "deepseek_v3", CHEAP, {"tp": 2, "ep": 2, "dispatcher": "allgather"}),
    (2, "deepseek_v3", MOE, {"ep": 2, "overlap": ["experts", "weight_gradients"]}),
    (2, "deepseek_v3", ["full"], {"tp": 2, "ep": 2, "overlap": ["between"]}),
    (2, "qwen3_moe", CHEAP, {"cp": 2, "ep": 2, "overlap": ["experts", "inside"]}),
    (2, "qwen3_moe", ["moe", "mlp"], {"ep": 2, "overlap": ["inside"], "dispatcher": "alltoall"}),
    (2, "deepseek_v3", CHEAP, {"pp": 2, "schedule": "zero_bubble"}),
    (2, "deepseek_v3", ["full"], {"pp": 2, "schedule": "zero_bubble", "virtual_stages": 2}),
    (2, "deepseek_v3", ["layernorm", "mla_up_proj"], {"cp": 2, "cp_kind": "ring"}),
    (2, "deepseek_v3", MOE, {"overlap": ["gradients"]}),
    (2, "deepseek_v3", ["full"], {"sharding": "parameters", "overlap": ["parameters", "gradients"]}),
    (2, "deepseek_v3", CHEAP, {"sharding": "parameters"}),
    (2, "deepseek_v3", MOE, {"sharding": "parameters"}),
    (4, "deepseek_v3", ["full"], {"ep": 2, "sharding": "parameters", "dispatcher": "alltoall"}),
    (4, "deepseek_v3", MOE, {"pp": 2, "ep": 2, "overlap": ["experts"], "sharding": "optimizer"}),
    (4, "deepseek_v3", CHEAP, {"tp": 2, "pp": 2, "virtual_stages": 2, "sharding": "gradients"}),
    (4, "mixtral", ["full"], {"tp": 2, "etp": 2, "ep": 2, "dispatcher": "alltoall"}),
]


def same(mine: Record, plain: Record) -> None:
    for what in ("losses", "totals", "parts", "norms", "counts"):
        assert getattr(mine, what) == getattr(plain, what), what
    for found, wanted in zip(mine.gradients, plain.gradients, strict=True):
        assert found.keys() == wanted.keys()
        different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not different


@pytest.mark.parametrize(("world", "name", "words", "keys"), CASES, ids=str)
def test_recompute_trains_to_the_last_bit_as_without(
    world: int, name: str, words: Sequence[str], keys: dict[str, Any]
) -> None:
    plan = Plan(steps=2) if "sharding" in keys else PLAN  # sharding marks modules from step to step
    plain, mine = (ranks(world).run(runs.outcome, name, keys | {"recompute": w}, plan)[0] for w in ("none", words))
    assert plain is not None and mine is not None
    same(mine, plain)


def sent(rank: int, name: str, keys: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Bytes that this rank sends in one step, by collective and group."""
    mesh = runs.mesh_for(name, keys)
    trainer = runs.start(name, mesh, keys, PLAN)
    with meter() as traffic:
        runs.step(name, trainer, runs.own_batches(mesh, keys, PLAN, 1), PLAN, 1)
    return dict(traffic.bytes)


@pytest.mark.parametrize(
    "keys",
    [
        {"tp": 2, "ep": 2, "dispatcher": "alltoall"},
        {"cp": 2, "ep": 2, "dispatcher": "allgather"},
        {"sharding": "parameters"},
    ],
    ids=str,
)
def test_only_moe_and_full_send_anything_twice(keys: dict[str, Any]) -> None:
    plain, cheap, moe, full = (
        ranks(2).run(sent, "deepseek_v3", keys | {"recompute": words}) for words in ("none", CHEAP, ["moe"], ["full"])
    )
    assert cheap == plain
    if "sharding" in keys:
        return
    for rank in range(2):
        assert sum(plain[rank].values()) < sum(moe[rank].values()) <= sum(full[rank].values())


def test_the_models_have_every_module() -> None:
    spec = models.model("deepseek_v3")
    assert spec.layers[0].mlp is not None and spec.layers[1].moe is not None and spec.layers[1].moe.shared is not None
