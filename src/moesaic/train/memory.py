"""Refusing a model that there is no room for, before any of it is made."""

from __future__ import annotations

import math
import os

from moesaic.cost.counts import parameters
from moesaic.mesh.device import device
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec


class RoomError(MoesaicError):
    """A model that takes more memory than is free."""


def require_memory(spec: ModelSpec, bytes_per_parameter: int, what: str) -> None:
    """Raises RoomError when the parameters alone, at `bytes_per_parameter`, are more than the device has free.

    `what` says what these bytes hold beside the parameters. Activations come on top, so this is a lower bound.
    """
    counts = parameters(spec)
    total = counts.total + counts.mtp
    _refuse(f"{spec.name} has", total, total * bytes_per_parameter, what)


def require_memory_of_rank(spec: ModelSpec, mesh: Mesh, bytes_per_parameter: int, what: str) -> None:
    """As `require_memory` for what one rank of `mesh` holds, times the ranks that share this machine's memory.

    Sharded state is counted as if all of it were spread, but for the fp32 weights, which are whole until it is.
    """
    layout = mesh.layout
    held = 0.0
    for cut in Decoder(spec, device="meta", mesh=mesh).cuts.values():
        data = mesh.expert(cut.shape[0]).edp if cut.expert else mesh.data
        spread = 1 if layout is None or layout.sharding == "none" else data.size // layout.replicas
        held += math.prod(cut.local_shape) * max(4.0, bytes_per_parameter / spread)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device().kind == "cpu" else 1
    shared = f" for {ranks} ranks on this machine" if ranks > 1 else ""
    counts = parameters(spec)
    _refuse(f"A rank's part of {spec.name} in this layout, of", counts.total + counts.mtp, held * ranks, what + shared)


def _refuse(whose: str, total: int, size: float, what: str) -> None:
    free = device().free_memory_bytes()
    if free is not None and size > free:
        raise RoomError(
            f"{whose} {total:,} parameters, which {what} take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of "
            f"memory are free: take a smaller model, more machines or sharding, or a machine with more memory."
        )
