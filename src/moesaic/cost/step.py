"""The time of one optimizer step in closed form, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout

from .rates import Rates
from .workload import Columns, Floats, Workload

if TYPE_CHECKING:
    from .timeline import Piece


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by cause, arrays [N]. All but `hidden` are exposed and add up to `total`."""

    total: Floats
    compute: Floats
    """Matmuls and attention cores of the micro-batches."""
    memory_bound: Floats
    """Norms, activations, rows moved, casts: work limited by memory bandwidth."""
    host: Floats
    """What the host takes to launch kernels beyond the device's own time."""
    dispatch: Floats
    """Moving rows to experts and back."""
    tensor: Floats
    """Tensor-parallel all-gathers and reduce-scatters."""
    context: Floats
    """Context-parallel exchange of keys and values, or of heads."""
    pipeline: Floats
    """Activations sent between pipeline stages."""
    data: Floats
    """Reduction of gradients and gathering of parameters."""
    bubble: Floats
    """Waiting for other pipeline stages."""
    optimizer: Floats
    offload: Floats
    """Copies between device and host memory."""
    hidden: Floats
    """Communication seconds that run under other work."""


def step_time(work: Workload, columns: Columns, cluster: ClusterSpec, rates: Rates) -> StepTime:
    """Seconds of one optimizer step of `work` on each layout of `columns`."""
    raise NotImplementedError


def layer_pieces(work: Workload, layout: Layout, cluster: ClusterSpec, rates: Rates) -> dict[str, tuple[Piece, ...]]:
    """The operations of one micro-batch through one layer of each kind, in order of forward: "dense", "moe", "mtp",
    "embedding" and "head" (kinds that the model lacks are absent), with their seconds."""
    raise NotImplementedError
