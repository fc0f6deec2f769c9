"""What the cost model says of the memory of a run's own trainer on this device."""

from __future__ import annotations

from dataclasses import replace

from moesaic.cost.habits import MOESAIC, Habits
from moesaic.cost.memory import StageMemory, stage_memory
from moesaic.cost.workload import Workload
from moesaic.mesh.device import device
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec


def habits_here() -> Habits:
    """This trainer's habits on this device: a processor has no context, no allocator's reserve, no workspaces and no
    grouped products."""
    if device().kind == "cuda":
        return MOESAIC
    return replace(MOESAIC, workspace=0, context=0, reserved_share=0.0, grouped_products=False)


def workload(run: RunSpec, spec: ModelSpec) -> Workload:
    """What a run trains, for the cost model."""
    keys = run.train
    precision = "fp32" if keys.dtype == "fp32" else "bf16"
    return Workload(
        spec,
        keys.seq_len,
        keys.global_batch,
        precision=precision,  # type: ignore[arg-type]
        mtp=keys.mtp_weight > 0,
        moment_bytes=2 if keys.moment_dtype == "bf16" else 4,
        master=keys.master,
    )


def predict(run: RunSpec, spec: ModelSpec, layout: Layout) -> list[StageMemory]:
    """`cost.memory` of each pipeline rank, with this trainer's habits on this device."""
    return stage_memory(workload(run, spec), layout, habits_here())
