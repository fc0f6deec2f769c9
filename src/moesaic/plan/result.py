"""What a search returns: layouts with their price, as objects and as the plain data that `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moesaic.cost.rates import Stack
from moesaic.cost.workload import Workload
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import DENSE, EXPERT, Layout
from moesaic.spec.stages import stages_text

GIB = 2**30
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
TIME_PARTS = (
    "compute", "memory_bound", "host", "dispatch", "tensor", "context", "pipeline", "data", "bubble", "optimizer",
    "offload",
)  # fmt: skip
ALWAYS_OVERLAPPED = ("gradients", "parameters", "tensor")
"""Overlap that a stack which has it always uses, so that no text names it."""
_COMMUNICATION = ("dispatch", "tensor", "context", "pipeline", "data", "offload")


class Scale(NamedTuple):
    """What published runs say of the closed form's seconds for one question: a factor, and bounds of nine in ten."""

    factor: float
    low: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """One layout and what it is expected to cost."""

    layout: Layout
    step_seconds: float
    interval_seconds: tuple[float, float]
    """Bounds that hold the measured step nine times out of ten, by the errors of past predictions."""
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    """Model FLOPs (no recomputation) per second and accelerator, 1e12."""
    memory: dict[str, float]
    """Bytes on the fullest accelerator by MEMORY_PARTS."""
    time: dict[str, float]
    """Exposed seconds of a step by TIME_PARTS; they add up to step_seconds."""
    hidden_seconds: float
    """Communication that runs under other work."""
    available_bytes: float
    """Memory of one accelerator."""
    correction: float = 1.0
    """What published runs multiply the closed form's seconds by; it is in all of the above."""
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> Scale:
        """What its seconds were scaled by."""
        closed = self.step_seconds / self.correction
        return Scale(self.correction, self.interval_seconds[0] / closed, self.interval_seconds[1] / closed)

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB

    @property
    def walls(self) -> dict[str, float]:
        """How close each wall is. `memory`: share of the accelerator's memory in use. The others are shares of the
        step: exposed communication, waiting for the host, and compute, which is all the rest (kernels, bubble,
        optimizer)."""
        share = {name: seconds / self.step_seconds for name, seconds in self.time.items()}
        communication, host = sum(share[name] for name in _COMMUNICATION), share["host"]
        return {
            "memory": self.memory_bytes / self.available_bytes,
            "communication": communication,
            "host": host,
            "compute": 1 - communication - host,
        }

    def as_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "layout": str(layout),
            "options": options(layout),
            "step_seconds": self.step_seconds,
            "interval_seconds": list(self.interval_seconds),
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "memory_gib": self.memory_gib,
            "memory_bytes": self.memory,
            "time_seconds": self.time,
            "hidden_seconds": self.hidden_seconds,
            "correction": self.correction,
            "walls": self.walls,
            "notes": list(self.notes),
        }


def options(layout: Layout) -> dict[str, Any]:
    """What a layout says besides its degrees."""
    facts = {
        "cp_kind": layout.cp_kind if layout.cp > 1 else None,
        "virtual_stages": layout.virtual_stages,
        "micro_batch": layout.micro_batch,
        "sharding": layout.sharding,
        "dispatcher": layout.dispatcher,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "stages": stages_text(layout.stages, 1) if layout.pp > 1 else None,
        "recompute": list(layout.recompute),
        "overlap": list(layout.overlap),
        "offload": list(layout.offload),
    }
    return {name: value for name, value in facts.items() if value is not None}


def layout_text(layout: Layout) -> str:
    """The degrees without those of 1, as in `pp4 dp16 tp2 / edp4 ep8`."""
    sides = [
        " ".join(f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1)
        for names in (DENSE, EXPERT)
    ]
    return " / ".join(filter(None, (sides[0] or "dp1", sides[1] if layout.ep * layout.etp > 1 else "")))


def options_text(layout: Layout) -> str:
    """The options in a few words. What is not there is off: one chunk a stage, a sharded optimizer, gradients,
    parameters and tensor-parallel traffic overlapped where the stack can, nothing recomputed and nothing offloaded."""
    words = [f"mb{layout.micro_batch}"]
    if layout.virtual_stages > 1:
        words.append(f"vpp{layout.virtual_stages}")
    if layout.schedule not in ("1f1b", "interleaved"):
        words.append(layout.schedule)
    if layout.cp > 1:
        words.append(layout.cp_kind)
    if layout.dispatcher != "local":
        words.append(layout.dispatcher)
    if layout.sharding != "optimizer":
        words.append(f"shard {layout.sharding}")
    extra = [word for word in layout.overlap if word not in ALWAYS_OVERLAPPED]
    if extra:
        words.append("overlap " + "+".join(extra))
    if layout.recompute:
        words.append("recompute " + _recompute_text(layout))
    if layout.offload:
        words.append("offload " + "+".join(layout.offload))
    return ", ".join(words)


@dataclass(frozen=True)
class PlanResult:
    """The answer to one question."""

    workload: Workload
    cluster: ClusterSpec
    stack: Stack
    layouts: tuple[Candidate, ...]
    """Best first."""
    front: tuple[Candidate, ...]
    """No other layout is faster and leaves more memory free; fastest first."""
    searched: int
    """Layouts that were priced."""
    fitting: int
    """Of those priced for memory, how many fit."""
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return {
            "searched": self.searched,
            "fitting": self.fitting,
            "seconds": self.seconds,
            "model": self.workload.model.name,
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "seq_len": self.workload.seq_len,
            "global_batch": self.workload.global_batch,
            "precision": self.workload.precision,
            "stack": self.stack.framework,
            "layouts": [each.as_json() | {"against_best": self._against_best(each)} for each in self.layouts],
            "front": [each.as_json() for each in self.front],
            "notes": list(self.notes),
        }

    def _against_best(self, other: Candidate) -> str | None:
        return None if other is self.layouts[0] else why_slower(self.layouts[0], other)


def why_slower(one: Candidate, other: Candidate) -> str:
    """Why `other` loses to `one`: the causes that differ most, in seconds."""
    gaps = {name: other.time[name] - one.time[name] for name in TIME_PARTS}
    lost = other.step_seconds - one.step_seconds
    order = sorted(gaps, key=lambda name: -abs(gaps[name]))
    told = [name for name in order[:3] if abs(gaps[name]) > 0.05 * max(abs(lost), 1e-9)]
    words = [f"{abs(gaps[name]):.3g} s {'more' if gaps[name] > 0 else 'less'} {WORDS[name]}" for name in told]
    return f"{lost:.3g} s slower: " + ", ".join(words or ["no single cause"])


WORDS = {
    "compute": "matmuls and attention",
    "memory_bound": "memory-bound work",
    "host": "waiting for the host",
    "dispatch": "exposed dispatch",
    "tensor": "exposed tensor-parallel traffic",
    "context": "exposed context-parallel traffic",
    "pipeline": "pipeline sends",
    "data": "exposed gradient and parameter traffic",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "copies to the host",
}
"""What the parts of a step are called in sentences."""


def _recompute_text(layout: Layout) -> str:
    sets = layout.recompute_stages or (layout.recompute,)
    text = " | ".join("+".join(each) or "nothing" for each in sets)
    count = layout.recompute_layers
    if layout.recompute_method == "block":
        return f"{text} (full: {count} a stage)"
    return text if count == 1 else f"{text} (full: {count} together)"
