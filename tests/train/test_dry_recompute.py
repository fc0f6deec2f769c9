"""Dry run, planner and a real forward pass agree on what is kept where layers or stages recompute differently."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.spec.layout import resolve_layout
from moesaic.spec.model import ModelSpec
from tests.cost.kinds import KINDS
from tests.ranks import ranks
from tests.train.dry_cases import both, run_of
from tests.train.kept import SEQ_LEN, measured, model_of

LATENT, GROUPED = "latent attention, shared expert", "grouped queries, shared expert"
BLOCK: dict[str, Any] = {"recompute": ["full", "layernorm"], "recompute_method": "block", "recompute_layers": 1}
TOGETHER: dict[str, Any] = {"recompute": ["full"], "recompute_layers": 2}
STAGES: dict[str, Any] = {"pp": 2, "recompute_stages": [["full"], ["layernorm", "mla_up_proj"]]}
CASES = [
    (GROUPED, {"recompute": ["full"]}, 1),
    (LATENT, STAGES, 2),
    (GROUPED, TOGETHER | {"tp": 2, "ep": 2}, 2),
    pytest.param(LATENT, BLOCK | {"pp": 2}, 2, marks=pytest.mark.long),
    pytest.param(LATENT, STAGES | {"virtual_stages": 2, "recompute_layers": 2}, 2, marks=pytest.mark.long),
    pytest.param(GROUPED, STAGES | {"sharding": "gradients"}, 4, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "keys", "world"), CASES, ids=str)
def test_a_dry_run_counts_what_the_planner_counts(kind: str, keys: dict[str, Any], world: int) -> None:
    layer = KINDS[kind]
    model = ModelSpec(name="t", family="moesaic", vocab=64, hidden=64, layers=(layer,) * 5, mtp=(layer,))
    run = run_of(keys, "bf16", mtp=True)
    layout = resolve_layout(run.layout, model, world, seq_len=SEQ_LEN, global_batch=64)
    for rank in (0, world - 1):
        found, planned = both(model, run, layout, rank)
        assert found.kept == {module: round(size) for module, size in planned.kept.items()}
        assert found.activations == pytest.approx(planned.activations, rel=1e-9)
        assert found.peak == pytest.approx(planned.allocated, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "how"), [(LATENT, BLOCK), (GROUPED, TOGETHER)], ids=str)
def test_a_real_forward_pass_keeps_as_much(kind: str, how: dict[str, Any]) -> None:
    keys = how | {"ep": 2}
    run, model = run_of(keys, "fp32"), model_of(kind)
    layout = resolve_layout(run.layout, model, 2, seq_len=SEQ_LEN, global_batch=64)
    for rank, by_place in enumerate(ranks(2).run(measured, kind, keys)):
        found, planned = both(model, run, layout, rank)
        kept: dict[str, int] = {}
        for (_, module), size in by_place.items():
            kept[module] = kept.get(module, 0) + size
        assert found.kept == {module: size for module, size in kept.items() if module in found.kept}
        assert found.kept == {module: round(size) for module, size in planned.kept.items()}
