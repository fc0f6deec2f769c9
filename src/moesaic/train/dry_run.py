"""One rank's training step without memory, network or data: the real code on tensors that have shapes only.

Model, optimizer, sharding, dispatchers and schedule are the trainer's. What is not reached: kernels, and what they
allocate inside; the allocator, its gaps and its rounding; and the router's choice, in whose place a routing is supposed
(`supposed`). Experts run by grouped products, and attention by a kernel that keeps no scores, as on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moesaic.mesh.device import without_device
from moesaic.mesh.dry import expecting
from moesaic.mesh.group import forget_connections
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.layer import Layer
from moesaic.model.losses import LossWeights
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train.data import Batch
from moesaic.train.meter import Made, Meter, Peak
from moesaic.train.metrics import Stopwatch
from moesaic.train.predicted import workload
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
    """The step of `rank` in `layout`. Its experts get `imbalance` times the mean of rows, or all there are.

    Raises:
        SpecError: the layout runs micro-batches on threads.
    """
    if "experts" in layout.overlap:
        raise SpecError(
            "layout.overlap 'experts' runs two micro-batches on threads of their own, which a dry run cannot follow: "
            "leave it out, and add one micro-batch's activations to what is found."
        )
    if layout.offload:
        raise SpecError(
            f"layout.offload {layout.offload[0]!r} moves tensors to host memory, which a dry run does not follow: "
            "leave it out, and take off what the planner says that it frees."
        )
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
                moments={"fp32": torch.float32, "bf16": torch.bfloat16}[keys.moment_dtype],
                split_masters=keys.master == "split",
                beta1=keys.beta1,
                beta2=keys.beta2,
                eps=keys.eps,
                weight_decay=keys.weight_decay,
            )
            count = enough_micro_batches(layout, keys.global_batch)
            clock, meter = Stopwatch(), _Meter(state)
            clock.also = meter.phase
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
                    clock=clock,
                    sharding=state.sharding,
                )
            kept = Counter[str]()
            for each in meter.kept():
                for (_, module), size in each.items():
                    kept[module] += size
            for module in _ELSEWHERE:
                kept.pop(module, None)
            peaks = meter.peaks()
            highest = max((peaks["forward"], peaks["backward"]), key=lambda peak: peak.total).categories
            # Without sharding a gradient is complete, and known for one, when the optimizer's phase begins. With
            # sharding the fullest moment may be the first forward pass, when there are none yet.
            known = peaks["backward" if state.sharding.is_on else "optimizer"].categories["gradients"]
            gradients = max(highest["gradients"], known)
            plain = sum(p.numel() * p.itemsize for p in decoder.parameters() if not isinstance(p, DTensor))
            return DryRun(
                rank,
                mesh.pp.rank,
                parameters=plain if layout.sharding == "parameters" else highest["parameters"],
                gradients=gradients,
                optimizer=highest["optimizer"],
                activations=meter.most_kept(kept),
                kept={module: size // count for module, size in kept.items()},
                peaks=peaks,
            )


_ELSEWHERE = ("output", "positions", "loss", "embedding")
"""What is alive when a forward pass ends and is no activation kept for backward: what waits to be sent, tables that all
micro-batches share, and the loss's gradients, which the planner counts with the logits."""


def enough_micro_batches(layout: Layout, global_batch: int) -> int:
    """The micro-batches of a step, or as many as it takes until a rank holds no more than before."""
    enough = layout.pp + 2 if layout.virtual_stages == 1 else 3 * layout.pp
    return min(layout.micro_batches(global_batch), enough)


def _batch(rows: int, seq_len: int) -> Batch:
    ids, labels = (torch.empty(rows, seq_len, dtype=torch.int64, device="meta") for _ in range(2))
    return Batch(ids, labels, None, None, rows * seq_len, 0)


class _Meter(Meter):
    """A meter that takes what sharding gathered for weights and their gradients, not for activations."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(state.decoder, state.held())
        self._began: dict[Made, int] = {}
        """Since which event a pass keeps what another stage sent; before, it was on its way."""
        self._sharding = state.sharding

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._enter_module(module, args)
        if isinstance(module, Layer) and self._passing is not None:
            # What another stage sent is there before the pass that keeps it.
            sent = [made for made in self._known([args[0]]) if made.phase != self._phase]
            for made in (made for made in sent if made not in self._passing):
                self._passing.append(made)
                self._began[made] = len(self._events)

    def most_kept(self, modules: Container[str]) -> int:
        """The most bytes of `modules` that forward passes kept for backward, of all passes at once."""
        counted = {made for each in self._kept for made in each if made.place[1] in modules and made.numel > 1}
        begins = {event: made for made, event in self._began.items() if made in counted}
        now = most = 0
        for event, (_, made, change) in enumerate(self._events):
            now += begins[event].bytes if event in begins else 0
            now += change if made in counted and event >= self._began.get(made, 0) else 0
            most = max(most, now)
        return most

    def _end_pass(self, passing: list[Made]) -> None:
        for category, tensors in zip(("parameters", "gradients"), self._sharding.gathered(), strict=True):
            for made in self._known(tensors):
                made.category = category
        super()._end_pass(passing)


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
            setattr(FSDPParamGroup, "_validate_no_meta_params", lambda self: None)  # noqa: B010  (torch's own, untyped)
        yield
    finally:
        if check is not None:
            setattr(FSDPParamGroup, "_validate_no_meta_params", check)  # noqa: B010
        dist.destroy_process_group()
        forget_connections()
