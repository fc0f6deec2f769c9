"""The memory of a run's first steps: metered, set beside the planner's prediction, and kept with the run.

memory.json in the run's folder describes the last metered step:

    step
    ranks   [one entry per rank]
        rank, pipeline_rank
        kept        {layer (−1 outside of layers): {module: bytes}}: what the micro-batch that kept most left for backward
        predicted   {weights, gradients, optimizer, activations, logits, buffers, total}: `cost.memory` of that rank
        peaks       {phase: {total, categories: {…}, consumers: {…}, allocated}}: the moment of most bytes;
                    `allocated` is the device allocator's own peak, null on a CPU
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.cost.habits import MOESAIC, Habits
from moesaic.cost.memory import StageMemory, stage_memory
from moesaic.cost.workload import Workload
from moesaic.mesh.collectives import gather_objects
from moesaic.mesh.device import device
from moesaic.mesh.mesh import Mesh
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train.meter import Meter, Peak
from moesaic.train.metrics import Stopwatch
from moesaic.train.state import TrainState

FILE = "memory.json"
LIMIT_BYTES: int | None = None
"""Bytes of tensors at which a metered step runs out of memory, as on a device that has no more. For tests."""

MIB = 2**20
Record = dict[str, Any]


class Metered:
    """Meters steps 1 to `steps` of a run. A context manager, so that a failure leaves no meter on."""

    def __init__(
        self, run: RunSpec, spec: ModelSpec, layout: Layout, mesh: Mesh, state: TrainState, clock: Stopwatch
    ) -> None:
        self.steps, self.folder = run.run.memory_steps, Path(run.run.dir)
        self.mesh, self.state, self.clock = mesh, state, clock
        self.run, self.spec, self.layout = run, spec, layout
        self.meter: Meter | None = None
        self.step = 0

    def __enter__(self) -> Metered:
        return self

    def __exit__(self, *error: Any) -> None:
        self._off()

    def begin(self, step: int) -> None:
        """Step `step` begins."""
        if step > self.steps:
            return
        self.step, state = step, self.state
        moments = [each[kind] for each in state.optimizer.state().values() for kind in ("exp_avg", "exp_avg_sq")]
        parameters = [*state.decoder.parameters(), *state.decoder.buffers()]
        held = {"parameters": parameters, "optimizer": [*state.optimizer.masters.values(), *moments]}
        self.meter = Meter(state.decoder, held, LIMIT_BYTES)
        self.meter.__enter__()
        self.clock.also = self.meter.phase

    def end(self) -> list[str]:
        """The step is over: its table for the terminal, on the first rank."""
        meter = self.meter
        if meter is None:
            return []
        self._off()
        here = self._record(meter)
        ranks = gather_objects(here, self.mesh.world)
        if self.mesh.world.rank:
            return []
        write(self.folder, {"step": self.step, "ranks": ranks})
        most = max(ranks, key=lambda one: max(peak["total"] for peak in one["peaks"].values()))
        return table(self.step, most, len(ranks))

    def _off(self) -> None:
        if self.meter is not None:
            self.clock.also = None
            self.meter.__exit__(None, None, None)
            self.meter = None

    def _record(self, meter: Meter) -> Record:
        predicted = predict(self.run, self.spec, self.layout)[self.mesh.pp.rank]
        kept: dict[str, dict[str, int]] = {}
        passes = meter.kept()
        for (layer, module), size in max(passes, key=lambda one: sum(one.values()), default={}).items():
            kept.setdefault(str(layer), {})[module] = size
        return {
            "rank": self.mesh.world.rank,
            "pipeline_rank": self.mesh.pp.rank,
            "kept": kept,
            "predicted": {name: int(getattr(predicted, name)) for name in (*_PREDICTED, "total")},
            "peaks": {name: _peak(peak, meter.allocated.get(name)) for name, peak in meter.peaks().items()},
        }


_PREDICTED = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


def _peak(peak: Peak, allocated: int | None) -> Record:
    return {
        "total": peak.total, "categories": peak.categories, "consumers": peak.consumers, "allocated": allocated,
    }  # fmt: skip


def habits_here() -> Habits:
    """This trainer's habits on this device: a processor has no context, no allocator's reserve and no workspaces."""
    return MOESAIC if device().kind == "cuda" else replace(MOESAIC, workspace=0, context=0, reserved_share=0.0)


def workload(run: RunSpec, spec: ModelSpec) -> Workload:
    """What a run trains, for the cost model."""
    keys = run.train
    precision = "fp32" if keys.dtype == "fp32" else "bf16"
    return Workload(spec, keys.seq_len, keys.global_batch, precision=precision, mtp=keys.mtp_weight > 0)  # type: ignore[arg-type]


def predict(run: RunSpec, spec: ModelSpec, layout: Layout) -> list[StageMemory]:
    """`cost.memory` of each pipeline rank, with this trainer's habits on this device."""
    return stage_memory(workload(run, spec), layout, habits_here())


def write(folder: Path, record: Record, name: str = FILE) -> None:
    """Put a record into the run's folder, whole or not at all."""
    temporary = folder / f".tmp-{name}"
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    temporary.replace(folder / name)


def read(folder: Path, name: str = FILE) -> Record | None:
    """The record in a run's folder, if there is a readable one."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def table(step: int, one: Record, ranks: int) -> list[str]:
    """Predicted beside measured at the peak of forward and backward, in MiB, and the peak of each phase."""
    phase = max(one["peaks"], key=lambda name: one["peaks"][name]["total"])
    found, said = one["peaks"][phase]["categories"], one["predicted"]
    rows = [
        ("weights", said["weights"], found["parameters"]),
        ("gradients", said["gradients"], found["gradients"]),
        ("optimizer", said["optimizer"], found["optimizer"]),
        ("kept activations", said["activations"], found["activations"]),
        ("logits, buffers", said["logits"] + said["buffers"], found["temporaries"] + found["workspaces"]),
        ("other", said["overhead"], found["other"]),
        ("all", said["total"], one["peaks"][phase]["total"]),
    ]
    whose = f" of rank {one['rank']}, the fullest of {ranks}" if ranks > 1 else ""
    lines = [f"Memory{whose} in step {step}, at its peak in {phase}, MiB:       predicted   measured"]
    lines += [f"  {name:<18}{predicted / MIB:>46,.1f} {measured / MIB:>10,.1f}" for name, predicted, measured in rows]
    phases = ", ".join(f"{name} {peak['total'] / MIB:,.1f}" for name, peak in one["peaks"].items() if name != "other")
    return [*lines, f"  peak by phase: {phases}"]
