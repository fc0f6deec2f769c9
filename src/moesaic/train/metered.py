"""The memory of a run's first steps: metered, set beside the planner's prediction, and kept with the run.

memory.json in the run's folder describes the last metered step:

    step
    ranks   [one entry per rank]
        rank, pipeline_rank
        kept        {layer (−1 outside of layers): {module: bytes}}, of the micro-batch that left most for backward
        predicted   {weights, gradients, optimizer, activations, logits, buffers, total}: `cost.memory` of that rank
        peaks       {phase: {total, categories: {…}, consumers: {…}, allocated}}: the moment of most bytes;
                    `allocated` is the device allocator's own peak, null on a CPU
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from moesaic.mesh.collectives import gather_objects
from moesaic.mesh.device import device
from moesaic.mesh.mesh import Mesh
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train import way_out
from moesaic.train.checkpoint import Checkpoints
from moesaic.train.folder import last_checkpoint
from moesaic.train.meter import Meter, Peak
from moesaic.train.metrics import Stopwatch
from moesaic.train.predicted import predict
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        meter = self.meter
        self._off()
        if error is not None and device().is_out_of_memory(error):
            raise self._out_of_memory(meter) from error

    def begin(self, step: int) -> None:
        """Step `step` begins."""
        self.step, state = step, self.state
        if step > self.steps:
            return
        self.meter = Meter(state.decoder, state.held(), LIMIT_BYTES)
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

    def _out_of_memory(self, meter: Meter | None) -> way_out.OutOfMemory:
        """What to say when memory ran out, metered or not; the snapshot goes into the run's folder."""
        rank = self.mesh.world.rank
        limit = device().total_memory_bytes() if LIMIT_BYTES is None else LIMIT_BYTES
        if meter is not None:
            # Leaving a phase sees as much as its fullest moment did: what failed stands in the traceback.
            phase, peak = max(meter.peaks().items(), key=lambda item: (item[1].total, item[0] != "other"))
            phase, used, consumers, source = "" if phase == "other" else phase, peak.total, peak.consumers, "metered"
        else:
            said = predict(self.run, self.spec, self.layout)[self.mesh.pp.rank]
            consumers = {f"activations of {module}": int(size * said.in_flight) for module, size in said.kept.items()}
            consumers |= {name: int(getattr(said, name)) for name in _PREDICTED if name != "activations"}
            phase, used, source = "", device().peak_memory_bytes(), "predicted"
        record = way_out.describe(
            self.run, self.spec, self.layout, rank=rank, step=self.step, phase=phase, used=used, limit=limit,
            consumers=consumers, source=source,
        )  # fmt: skip
        name = f"out-of-memory-{rank}.json"
        write(self.folder, record, name)
        last = last_checkpoint(Checkpoints(self.folder / "checkpoints", 0))
        return way_out.OutOfMemory(way_out.sentence(record, last, str(self.folder / name)))


_PREDICTED = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


def _peak(peak: Peak, allocated: int | None) -> Record:
    return {
        "total": peak.total, "categories": peak.categories, "consumers": peak.consumers, "allocated": allocated,
    }  # fmt: skip


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
