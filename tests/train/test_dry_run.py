"""A dry run of a rank counts what the planner counts, byte for byte, and what a real step keeps."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.spec.layout import resolve_layout
from tests.ranks import ranks
from tests.train.dry_cases import both, drawn, run_of
from tests.train.kept import SEQ_LEN, measured, model_of

PEAK = 0.02
"""How far the planner's peak may be off: it leaves out single numbers per token, and forward passes between layers."""


def same_as_the_planner(seed: int, peak: float = PEAK) -> list[float]:
    """The planner's peak over the dry run's, of the first rank and the last."""
    model, run, layout = drawn(seed)
    ratios = []
    for rank in {0, layout.world - 1}:
        found, planned = both(model, run, layout, rank)
        where = f"seed {seed}, rank {rank}: {layout}, {layout.dispatcher}, {layout.sharding}, {run.train.dtype}"
        assert found.kept == {module: round(size) for module, size in planned.kept.items()}, where
        counted = {
            "parameters": planned.weights,
            "gradients": planned.gradients,
            "optimizer": planned.optimizer,
            "activations": planned.activations,
        }
        assert {name: getattr(found, name) for name in counted} == pytest.approx(counted, rel=1e-9), where
        assert found.peak == pytest.approx(planned.allocated, rel=peak), where
        ratios.append(planned.allocated / found.peak)
    return ratios


@pytest.mark.parametrize("seed", range(6))
def test_a_dry_run_counts_what_the_planner_counts(seed: int) -> None:
    same_as_the_planner(seed)


@pytest.mark.long
def test_many_dry_runs_count_what_the_planner_counts() -> None:
    ratios = [ratio for seed in range(6, 106) for ratio in same_as_the_planner(seed, 0.1)]
    off = sorted(abs(ratio - 1) for ratio in ratios)
    print(
        f"{len(off)} ranks: peak within 1 % of the dry run's on {sum(each <= 0.01 for each in off)}, median "
        f"{off[len(off) // 2]:.2%}, from {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    )


def test_the_peak_is_named_by_the_modules_whose_gradients_are_computed() -> None:
    model, run = model_of("grouped queries, shared expert"), run_of({}, "bf16")
    layout = resolve_layout(run.layout, model, 1, seq_len=SEQ_LEN, global_batch=64)
    peak = both(model, run, layout, 0)[0].peaks["backward"]
    assert sum(peak.consumers.values()) == peak.total
    assert peak.consumers["temporaries of experts"] > 0
    assert peak.consumers.get("temporaries of loss", 0) < peak.consumers["temporaries of experts"]


REAL: list[tuple[str, dict[str, Any], int]] = [
    ("grouped queries, shared expert", {}, 1),
    ("latent attention, shared expert", {}, 1),
    ("grouped queries, shared expert", {"ep": 2}, 2),
    ("latent attention, shared expert", {"tp": 2, "ep": 2}, 2),
    ("grouped queries, dense", {"cp": 2}, 2),
]


@pytest.mark.parametrize(("kind", "keys", "world"), REAL)
def test_a_dry_run_keeps_what_a_real_forward_pass_keeps(kind: str, keys: dict[str, Any], world: int) -> None:
    run, model = run_of(keys, "fp32"), model_of(kind)
    layout = resolve_layout(run.layout, model, world, seq_len=SEQ_LEN, global_batch=64)
    real = [measured(0, kind, keys)] if world == 1 else ranks(world).run(measured, kind, keys)
    for rank, by_place in enumerate(real):
        found, _ = both(model, run, layout, rank)
        kept: dict[str, int] = {}
        for (_, module), size in by_place.items():
            kept[module] = kept.get(module, 0) + size
        assert found.kept == {module: size for module, size in kept.items() if module in found.kept}
        assert sum(found.kept.values()) > 0
