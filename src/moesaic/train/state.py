"""What a rank trains: its part of the model, how that is spread, and the optimizer over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.mesh.device import device
from moesaic.mesh.group import Group
from moesaic.model.decoder import Decoder
from moesaic.train.checkpoint import State
from moesaic.train.gradients import GradientSums
from moesaic.train.optimizer import Optimizer
from moesaic.train.sharded_state import rng_entry, shards_of
from moesaic.train.sharding import Sharding


@dataclass
class TrainState:
    """`decoder` computes; `optimizer` owns the fp32 masters; `sharding` says which rows of each parameter are here."""

    decoder: Decoder
    optimizer: Optimizer
    sharding: Sharding

    @classmethod
    def of(
        cls, decoder: Decoder, dtype: torch.dtype, *, sharding: str = "none", replicas: int = 1, **adamw: Any
    ) -> TrainState:
        """Prepare a decoder with fp32 weights for training in `dtype`. `adamw`: see `Optimizer`."""
        mesh = decoder.mesh
        decoder.dtype = dtype
        spread = Sharding(decoder, mesh, sharding, replicas, dtype)
        decoder.to(device().torch_device)
        sums = None
        if mesh.world.size > 1:
            sums = GradientSums(mesh, spread.held)
        optimizer = Optimizer(decoder, dtype=dtype, sums=sums, **adamw)
        return cls(decoder, optimizer, spread)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name: weights (the fp32 masters) and buffers that are here."""
        plain = {name: t for name, t in self.decoder.state_dict().items() if not isinstance(t, DTensor)}
        return {**plain, **self.optimizer.masters}

    def saved(self, group: Group | None) -> State:
        """What a checkpoint holds of this rank, as live tensors: weights (the fp32 masters) and buffers, moments,
        random state. `group`: all ranks, None for one process."""
        held = self.sharding.held
        buffers = {
            name: t for name, t in self.decoder.state_dict(keep_vars=True).items() if name not in self.optimizer.masters
        }
        if group is None:
            moments: Any = self.optimizer.state()
            weights: Any = dict(self.optimizer.masters)
        else:

            def shards(tensors: dict[str, Tensor]) -> dict[str, Any]:
                return shards_of(
                    {n: (held[n].cut, t.detach(), (held[n].start, held[n].stop)) for n, t in tensors.items()}
                )

            states = self.optimizer.state()
            kinds = {kind for each in states.values() for kind in each if kind != "step"}
            cut = {kind: shards({name: each[kind] for name, each in states.items()}) for kind in kinds}
            moments = {
                name: {"step": each["step"]} | {kind: cut[kind][name] for kind in cut} for name, each in states.items()
            }
            weights = shards(dict(self.optimizer.masters))
        names = [name for name in self.decoder.state_dict() if name in weights]
        return {
            "model": {name: weights[name] for name in names} | buffers,
            "optimizer": moments,
            "rng": rng_entry(device().rng_state(), group or Group.single("checkpoint")),
        }
