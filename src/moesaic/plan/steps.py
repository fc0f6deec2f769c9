"""One layout's step on explicit streams, to look at and to check the closed form with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.cost.compute import Machine
from moesaic.cost.layer_timeline import StageSeconds, simulate_layers, stage_seconds
from moesaic.cost.pipeline_timeline import simulate_step
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import layer_names, layer_pieces, next_stage_seconds
from moesaic.cost.timeline import Contention, Piece, Timeline
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout
from moesaic.spec.stages import Stage

from .result import Candidate

_ROUNDS = 3
"""Micro-batches that a picture shows, in multiples of the pipeline's depth; more of them only repeat."""


@dataclass(frozen=True)
class StepPicture:
    """A simulated step, cut to as many micro-batches as a picture can show, and one layer of it."""

    timeline: Timeline
    shown: int
    """Micro-batches in `timeline`."""
    micro_batches: int
    """Micro-batches of the whole step."""
    layer: Timeline
    """Forward and backward of one expert layer (a dense one in models without) of one micro-batch, or of two where
    they overlap."""
    step_seconds: float
    """Of the whole step: the simulated part, and the rest of the micro-batches at the pace of the slowest rank, and the
    waits for the host, which no stream shows."""


def step_picture(work: Workload, cluster: ClusterSpec, stack: Stack, candidate: Candidate) -> StepPicture:
    """Simulates a candidate's step: a layer at the grain of its operations, the pipeline at the grain of stages.

    Times are those of the closed form, without the corrections of published runs.
    """
    layout, rates = candidate.layout, rates_for(cluster, stack)
    pieces = layer_pieces(work, layout, cluster, rates)
    contention = Contention(1 + rates.slowdown, 1 + rates.slowdown)
    stages = _stages(work, layout, pieces, contention)
    whole = layout.micro_batches(work.global_batch)
    shown = min(whole, max(4, _ROUNDS * layout.pp * layout.virtual_stages // 2 // layout.pp * layout.pp))
    paired = "experts" in layout.overlap and (layout.pp == 1 or layout.virtual_stages > 1)
    count = len(stages)
    timeline = simulate_step(
        [each.forward for each in stages],
        [each.backward_input for each in stages],
        [each.backward_weight for each in stages],
        float(next_stage_seconds(Machine.of(work, Columns.of([layout]), cluster, rates))[0]),
        layout.schedule,
        shown,
        virtual_stages=layout.virtual_stages,
        stage_backward=[each.backward for each in stages],
        stage_pair=[each.pair for each in stages] if paired else None,
        # The exposed part only, so nothing of it is hidden once more.
        gradient_seconds=[candidate.time["data"] / candidate.correction / count] * count,
        overlap=(),
        optimizer_seconds=candidate.time["optimizer"] / candidate.correction,
        offload_seconds=candidate.time["offload"] / candidate.correction,
        contention=contention,
    )
    pace = max(
        sum(each.pair if paired else each.forward + each.backward for each in stages[rank :: layout.pp])
        for rank in range(layout.pp)
    )
    kind = "moe" if "moe" in pieces else "dense"
    return StepPicture(
        timeline,
        shown,
        whole,
        simulate_layers([pieces[kind]], layout.overlap, contention=contention),
        timeline.makespan + (whole - shown) * pace + candidate.time["host"] / candidate.correction,
    )


def _stages(
    work: Workload, layout: Layout, pieces: dict[str, tuple[Piece, ...]], contention: Contention
) -> list[StageSeconds]:
    known: dict[tuple[str, ...], StageSeconds] = {}
    found, names = [], layer_names(work.model)
    for stage in layout.stages:
        kinds = tuple(_kinds(work, names, stage))
        if kinds not in known:
            known[kinds] = stage_seconds([pieces[kind] for kind in kinds], layout.overlap, contention=contention)
        found.append(known[kinds])
    return found


def _kinds(work: Workload, names: Sequence[str], stage: Stage) -> Sequence[str]:
    kinds = ["embedding"] if stage.embed else []
    kinds += [names[layer] for layer in stage.layers]
    kinds += ["mtp"] * len(work.model.mtp) if stage.mtp and work.mtp else []
    return [*kinds, "head"] if stage.head else kinds
