"""What a rank trains: its part of the model, how that is spread, and the optimizer over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.mesh.device import device
from moesaic.mesh.group import Group
from moesaic.mesh.host_memory import HostMemory
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import Layout
from moesaic.spec.options import OFFLOAD_BLOCKS
from moesaic.train.checkpoint import State, model_state
from moesaic.train.gradients import GradientSums
from moesaic.train.offload import SMALLEST, ActivationOffload
from moesaic.train.optimizer import Optimizer
from moesaic.train.overlapped import OverlappedSums
from moesaic.train.packed import Storing
from moesaic.train.sharded_state import Shards, rng_entry, shards_of
from moesaic.train.sharding import Sharding


@dataclass(frozen=True)
class Host:
    """What waits in host memory: `what` of `spec.options.OFFLOAD`; of the optimizer's state a `fraction`; of the kept
    activations those of `modules`, tensors of `smallest` bytes and more. `folder`: where files stand for it."""

    what: tuple[str, ...] = ()
    fraction: float = 1.0
    modules: tuple[str, ...] = OFFLOAD_BLOCKS
    smallest: int = SMALLEST
    folder: Path | None = None

    @classmethod
    def of(cls, layout: Layout, folder: Path | None = None) -> Host:
        """As a layout says."""
        return cls(layout.offload, layout.offload_fraction, layout.offload_modules, folder=folder)


@dataclass
class TrainState:
    """`decoder` computes; `optimizer` owns the fp32 masters; `sharding` says which rows of each parameter are here."""

    decoder: Decoder
    optimizer: Optimizer
    sharding: Sharding
    activations: ActivationOffload | None = None
    """What sends kept activations to the host, if anything does."""

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        dtype: torch.dtype,
        *,
        sharding: str = "none",
        replicas: int = 1,
        host: Host | None = None,
        moments: torch.dtype = torch.float32,
        split_masters: bool = False,
        **adamw: Any,
    ) -> TrainState:
        """Prepare a decoder with fp32 weights for training in `dtype`. `host` says what waits in host memory, `moments`
        and `split_masters` how the rest of the state is kept; `adamw`: see `Optimizer`.

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
        host = host or Host()
        memory = HostMemory(host.folder) if host.what else None
        storing = Storing(moments, split_masters, memory if "optimizer" in host.what else None, host.fraction)
        optimizer = Optimizer(decoder, dtype=dtype, sums=sums, storing=storing, **adamw)
        if sums is not None and "gradients" in overlap:
            optimizer.overlap = OverlappedSums(decoder, sums, optimizer.masters)
        activations = None
        if "activations" in host.what:
            assert memory is not None
            activations = ActivationOffload(decoder, memory, host.modules, host.smallest)
        return cls(decoder, optimizer, spread, activations)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name: buffers, and weights (the fp32 masters where they are here)."""
        plain = {name: t for name, t in self.decoder.state_dict().items() if not isinstance(t, DTensor)}
        packed = self.optimizer.packed
        here = {n: m for n, m in self.optimizer.masters.items() if n not in packed or packed[n].stays}
        return {**plain, **here}

    def held(self) -> dict[str, list[Tensor]]:
        """What stands on the device between steps, by what it is for: `parameters` that compute, masters and moments of
        the `optimizer`, `other` buffers. What is stored of a spread parameter is its master; what computes is gathered.
        """
        moments = [each[kind] for each in self.optimizer.state().values() for kind in ("exp_avg", "exp_avg_sq")]
        moments += [tensor for each in self.optimizer.packed.values() for tensor in each.here]
        return {
            "parameters": [p for p in self.decoder.parameters() if not isinstance(p, DTensor)],
            "optimizer": [*self.optimizer.masters.values(), *moments],
            "other": list(self.decoder.buffers()),
        }

    def saved(self, group: Group) -> State:
        """What a checkpoint holds of this rank: weights (the fp32 masters) and buffers, moments, random state. `group`:
        all ranks. Tensors are live, or copies of what is stored otherwise: whoever reads into them calls `take`."""
        weights: dict[str, Any]
        moments: dict[str, dict[str, Any]]
        weights, moments = self.optimizer.saved()  # type: ignore[assignment]
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

    def take(self, read: State) -> None:
        """Go on from what `saved` returned, whose tensors have been read into."""

        def local(tensor: Any) -> Tensor:
            return tensor.local if isinstance(tensor, Shards) else tensor  # type: ignore[no-any-return]

        weights = {name: local(read["model"][name]) for name in self.optimizer.masters}
        moments = {name: {k: local(t) for k, t in each.items()} for name, each in read["optimizer"].items()}
        self.optimizer.take(weights, moments)

    def _shards(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's rows of parameters, or of what has their shape, as parts of the whole ones."""
        held = self.sharding.held
        rows = {name: (held[name].start, held[name].stop) for name in tensors}
        return dict(shards_of({name: (held[name].cut, t.detach(), rows[name]) for name, t in tensors.items()}))
