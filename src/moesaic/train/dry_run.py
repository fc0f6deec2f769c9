"""One rank's training step without memory, network or data: the real code on tensors that have shapes only.

Model, optimizer, sharding, dispatchers and schedule are the trainer's. What is not reached: kernels, and what they
allocate inside; the allocator, its gaps and its rounding; and the router's choice, in whose place a routing is supposed
(`supposed`). Experts run by grouped products, and attention by a kernel that keeps no scores, as on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moesaic.cost.workload import Workload
from moesaic.mesh.device import without_device
from moesaic.mesh.dry import expecting
from moesaic.mesh.group import forget_connections
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train.data import Batch
from moesaic.train.meter import Meter, Peak
from moesaic.train.metrics import Stopwatch
from moesaic.train.shapes_only import ShapesOnly
from moesaic.train.state import TrainState
from moesaic.train.step import train_step
from moesaic.train.supposed import Supposed


@dataclass(frozen=True)
class DryRun:
    """Bytes of one rank."""

    rank: int
    stage: int
    """Its place in the pipeline."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward, of all micro-batches in flight, at their most."""
    kept: dict[str, int]
    """What one micro-batch keeps for backward, by module, on all of the rank's stages."""
    peaks: dict[str, Peak]
    """The moment of each phase with most bytes."""

    @property
    def peak(self) -> int:
        """Most bytes of tensors at once."""
        return max(peak.total for peak in self.peaks.values())

    @property
    def buffers(self) -> int:
        """What is there at that moment beside state and kept activations: gradients on their way, gathered weights,
        what a module or the optimizer works in."""
        return self.peak - self.parameters - self.gradients - self.optimizer - self.activations


def dry_run(
    run: RunSpec, spec: ModelSpec, layout: Layout, rank: int, imbalance: float = 1.0, ranks_per_node: int = 8
) -> DryRun:
    """The step of `rank` in `layout`. Its experts get `imbalance` times the mean of rows, or all there are."""
    keys, balance = run.train, run.balance
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[keys.dtype]
    weights = LossWeights(
        z=balance.z_loss,
        batch_aux=balance.batch_aux,
        sequence_aux=balance.sequence_aux,
        global_aux=balance.global_aux,
        mtp=keys.mtp_weight,
    )
    with without_device(), _one_of(rank, layout.world), ShapesOnly():
        mesh = Mesh.create(layout, 60.0, spec.tied_embeddings, ranks_per_node)
        decoder = Decoder(spec, device="meta", mesh=mesh)
        if balance.bias_update:
            decoder.enable_select_bias()
        supposed = Supposed(workload(run, spec), layout, mesh, imbalance)
        supposed.watch(decoder)
        with expecting(supposed):
            state = TrainState.of(
                decoder,
                dtype,
                sharding=layout.sharding,
                replicas=layout.replicas,
                beta1=keys.beta1,
                beta2=keys.beta2,
                eps=keys.eps,
                weight_decay=keys.weight_decay,
            )
            count = enough_micro_batches(layout, keys.global_batch)
            moments = [tensor for each in state.optimizer.state().values() for tensor in each.values()]
            parameters = list(decoder.parameters())
            masters = list(state.optimizer.masters.values())
            held = {"parameters": parameters, "masters": masters, "optimizer": moments, "other": decoder.buffers()}
            meter = Meter(decoder, held)
            with meter:
                train_step(
                    decoder,
                    state.optimizer,
                    [_batch(layout.micro_batch, keys.seq_len) for _ in range(count)],
                    step=1,
                    lr=0.0,
                    weights=weights,
                    clip=keys.clip,
                    bias_update=balance.bias_update,
                    clock=_Phases(meter),
                    sharding=state.sharding,
                )
            peaks = meter.peaks()
            kept = Counter[str]()
            for each in meter.kept():
                for (_, module), size in each.items():
                    kept[module] += size
            return DryRun(
                rank,
                mesh.pp.rank,
                parameters=_bytes(parameters),
                gradients=sum(_bytes([master.grad]) for master in masters if master.grad is not None),
                optimizer=_optimizer_bytes(parameters, masters, moments),
                activations=max(peak.categories["activations"] for peak in peaks.values()),
                kept={module: size // count for module, size in kept.items() if size},
                peaks=peaks,
            )


def workload(run: RunSpec, spec: ModelSpec, imbalance: float = 1.0) -> Workload:
    """What the planner is asked about."""
    keys = run.train
    precision = "fp32" if keys.dtype == "fp32" else "bf16"
    return Workload(
        spec, keys.seq_len, keys.global_batch, precision=precision, mtp=keys.mtp_weight > 0, imbalance=imbalance
    )


def enough_micro_batches(layout: Layout, global_batch: int) -> int:
    """The micro-batches of a step, or as many as it takes until a rank holds no more than before."""
    enough = layout.pp + 2 if layout.virtual_stages == 1 else 3 * layout.pp
    return min(layout.micro_batches(global_batch), enough)


def _batch(rows: int, seq_len: int) -> Batch:
    ids, labels = (torch.empty(rows, seq_len, dtype=torch.int64, device="meta") for _ in range(2))
    return Batch(ids, labels, None, None, rows * seq_len, 0)


def _optimizer_bytes(parameters: list[Tensor], masters: list[Tensor], moments: list[Tensor]) -> int:
    """Masters that are no parameters themselves, and moments; not the few bytes that count updates."""
    here = {id(tensor) for tensor in parameters}
    own = [master for master in masters if id(master) not in here]
    return _bytes(own) + _bytes([moment for moment in moments if moment.dim() or moment.numel() > 1])


def _bytes(tensors: list[Tensor]) -> int:
    """Of what is here, parts of spread tensors too."""
    here = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(tensor.numel() * tensor.itemsize for tensor in here)


class _Phases(Stopwatch):
    """Tells a meter of the step's phases."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The phase `name`."""
        with self._meter.phase(name):
            yield


@contextlib.contextmanager
def _one_of(rank: int, world: int) -> Iterator[None]:
    """A process group in which this process is `rank` of `world` and nothing is sent."""
    if world == 1:
        yield
        return
    importlib.import_module("torch.distributed._tools.fake_collectives")  # for tensors without memory
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    # FSDP2 takes tensors without memory for weights that somebody forgot to fill.
    check = getattr(FSDPParamGroup, "_validate_no_meta_params", None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        if check is not None:
            FSDPParamGroup._validate_no_meta_params = lambda self: None
        yield
    finally:
        if check is not None:
            FSDPParamGroup._validate_no_meta_params = check
        dist.destroy_process_group()
        forget_connections()
