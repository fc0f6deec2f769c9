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
from moesaic.train.checkpoint import State, model_state
from moesaic.train.gradients import GradientSums
from moesaic.train.optimizer import Optimizer
from moesaic.train.overlapped import OverlappedSums
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
        """Prepare a decoder with fp32 weights for training in `dtype`. `adamw`: see `Optimizer`.

        The layout of the decoder's mesh says what overlaps and what is compressed.
        """
        mesh = decoder.mesh
        overlap = mesh.layout.overlap if mesh.layout is not None else ()
        compress = mesh.layout is not None and "gradients" in mesh.layout.compression
        decoder.dtype = dtype
        spread = Sharding(
            decoder,
            mesh,
            sharding,
            replicas,
            dtype,
            ahead="parameters" in overlap,
            under_backward="gradients" in overlap,
            compress=compress,
        )
        decoder.to(device().torch_device)
        sums = GradientSums(mesh, spread.held, compress) if mesh.world.size > 1 else None
        optimizer = Optimizer(decoder, dtype=dtype, sums=sums, **adamw)
        if sums is not None and "gradients" in overlap:
            optimizer.overlap = OverlappedSums(decoder, sums, optimizer.masters)
        return cls(decoder, optimizer, spread)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name: weights (the fp32 masters) and buffers that are here."""
        plain = {name: t for name, t in self.decoder.state_dict().items() if not isinstance(t, DTensor)}
        return {**plain, **self.optimizer.masters}

    def saved(self, group: Group) -> State:
        """What a checkpoint holds of this rank, as live tensors: weights (the fp32 masters) and buffers, moments,
        random state. `group`: all ranks."""
        weights: dict[str, Any] = dict(self.optimizer.masters)
        moments: dict[str, dict[str, Any]] = self.optimizer.state()
        if group.size > 1:
            weights = self._shards(weights)
            # Moments are as large as their parameter; the count of updates is a number.
            kinds = ("exp_avg", "exp_avg_sq")
            cut = {kind: self._shards({name: each[kind] for name, each in moments.items()}) for kind in kinds}
            moments = {name: each | {kind: cut[kind][name] for kind in kinds} for name, each in moments.items()}
        return {
            "model": model_state(self.decoder, weights),
            "optimizer": moments,
            "rng": rng_entry(device().rng_state(), group),
        }

    def _shards(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's rows of parameters, or of what has their shape, as parts of the whole ones."""
        held = self.sharding.held
        rows = {name: (held[name].start, held[name].stop) for name in tensors}
        return dict(shards_of({name: (held[name].cut, t.detach(), rows[name]) for name, t in tensors.items()}))
