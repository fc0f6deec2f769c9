"""Refusing a model that there is no room for, before any of it is made."""

from __future__ import annotations

from moesaic.cost.counts import parameters
from moesaic.mesh.device import device
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec


class RoomError(MoesaicError):
    """A model that takes more memory than is free."""


def require_memory(spec: ModelSpec, bytes_per_parameter: int, what: str) -> None:
    """Raises RoomError when the parameters alone, at `bytes_per_parameter`, are more than the device has free.

    `what` says what these bytes hold beside the parameters. Activations come on top, so this is a lower bound.
    """
    free = device().free_memory_bytes()
    counts = parameters(spec)
    total = counts.total + counts.mtp
    if free is not None and total * bytes_per_parameter > free:
        raise RoomError(
            f"{spec.name} has {total:,} parameters, which {what} take {total * bytes_per_parameter / 2**30:,.1f} GiB, "
            f"and {free / 2**30:,.1f} GiB of memory are free: take a smaller model, or a machine with more memory."
        )
