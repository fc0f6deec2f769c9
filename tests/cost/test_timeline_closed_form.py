"""Two ways to the time of a step: the closed form that ranks layouts, and the timeline of the same pieces.

They share the seconds of operations and nothing after them: bubbles, uneven stages and overlap are a formula in one and
an order of events in the other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.cost.layer_timeline import StageSeconds, stage_seconds
from moesaic.cost.pipeline_timeline import simulate_step
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import layer_pieces, step_time
from moesaic.cost.timeline import Contention
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import load_cluster
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import parse_layout, resolve_layout
from moesaic.spec.stages import Stage

GPUS, BATCH, LENGTH = 1024, 8192, 4096


DEEP, FOLDED = "pp8 dp128 / edp2 ep64", "pp4 dp16 cp4 tp4 / edp4 ep64"


@pytest.mark.parametrize(
    "text,virtual_stages,overlap",
    [
        (DEEP, 4, ()),
        (DEEP, 4, ("shared_experts",)),
        (DEEP, 4, ("between",)),
        (DEEP, 4, ("inside",)),
        (DEEP, 4, ("experts", "weight_gradients")),
        ("pp16 dp64 / edp1 ep64", 1, ()),
        (FOLDED, 4, ()),
        (FOLDED, 4, ("tensor",)),
        (FOLDED, 4, ("tensor", "experts", "weight_gradients")),
    ],
)
def test_deepseek_v3_takes_as_long_either_way(text: str, virtual_stages: int, overlap: tuple[str, ...]) -> None:
    model = load_model_spec("deepseek-v3")
    cluster, work = load_cluster("h800", GPUS), Workload(model, LENGTH, BATCH, precision="fp8")
    table = parse_layout(text).model_copy(update={"virtual_stages": virtual_stages, "dispatcher": "deepep"})
    layout = resolve_layout(table, model, GPUS, seq_len=LENGTH, global_batch=BATCH)
    layout = replace(layout, overlap=overlap)
    rates = rates_for(cluster, Stack())
    closed = step_time(work, Columns.of([layout]), cluster, rates)
    wanted = float((closed.total - closed.data - closed.host)[0])

    pieces = layer_pieces(work, layout, cluster, rates)
    contention = Contention(1 + rates.slowdown, 1 + rates.slowdown)
    known: dict[tuple[str, ...], StageSeconds] = {}

    def seconds(stage: Stage) -> StageSeconds:
        kinds = ["embedding"] * stage.embed
        kinds += ["dense" if model.layers[layer].moe is None else "moe" for layer in stage.layers]
        kinds += ["mtp"] * (stage.mtp * len(model.mtp)) + ["head"] * stage.head
        key = tuple(kinds)
        if key not in known:
            known[key] = stage_seconds([pieces[kind] for kind in kinds], overlap, contention=contention)
        return known[key]

    stages = [seconds(stage) for stage in layout.stages]
    timeline = simulate_step(
        [stage.forward for stage in stages],
        [stage.backward_input for stage in stages],
        [stage.backward_weight for stage in stages],
        1e-4,
        layout.schedule,
        layout.micro_batches(BATCH),
        virtual_stages=virtual_stages,
        stage_backward=[stage.backward for stage in stages],
        stage_pair=[stage.pair for stage in stages] if "experts" in overlap else None,
        optimizer_seconds=float(closed.optimizer[0]),
    )
    print(f"\n{layout} {overlap}: timeline {timeline.makespan:.2f} s, closed form {wanted:.2f} s")
    assert timeline.makespan == pytest.approx(wanted, rel=0.06)
