"""Steps of training in any layout, and how far they are from the same steps in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.mesh.collectives import gather_objects
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.tables import LayoutTable
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.state import TrainState
from moesaic.train.step import StepResult, train_step
from tests.parity import choices, models

LR = 1e-3
EPS = 1e-4
"""AdamW's ε. Far below typical gradients, and far above what rounding leaves of those that are nearly zero: their first
update would turn it into a difference of weights as large as the learning rate."""
TIMEOUT_SECONDS = 300.0
"""Longest wait of a group: many processes share few cores."""


@dataclass(frozen=True)
class Plan:
    """What is trained beside the layout. Functions are at the top of a module, so that ranks can be told of them.

    `batches(step, micro_batch)`: all micro-batches of a step; `prepare(decoder)` may change the new decoder.
    """

    steps: int = models.STEPS
    weights: LossWeights = models.WEIGHTS
    batches: Callable[[int, int], list[Batch]] = models.micro_batches
    prepare: Callable[[Decoder], None] | None = None
    seed: int = 3


@dataclass
class Record:
    """What one run computed: per step the loss, total loss, terms and gradient norm, and gradients by parameter.

    `gradients` are this rank's pieces, before clipping.
    """

    losses: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[dict[str, list[int]]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    biases: dict[str, Tensor] = field(default_factory=dict)


def mesh_for(name: str, keys: Mapping[str, Any]) -> Mesh:
    """The groups of the layout that `keys` of [layout] describe, on as many ranks as there are."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world == 1:
        return Mesh.single()
    return Mesh.create(choices.layout_of(name, dict(keys), world), TIMEOUT_SECONDS, models.model(name).tied_embeddings)


def start(name: str, mesh: Mesh, keys: Mapping[str, Any], plan: Plan, dtype: torch.dtype = torch.float32) -> TrainState:
    """A new tiny model `name` on `mesh`, ready to train."""
    table = LayoutTable.model_validate(keys)
    decoder = Decoder(models.model(name), mesh=mesh)
    decoder.init_weights(plan.seed)
    if models.BIAS_UPDATE.get(name):
        decoder.enable_select_bias()
    if plan.prepare is not None:
        plan.prepare(decoder)
    return TrainState.of(decoder, dtype, sharding=table.sharding, replicas=table.replicas, eps=EPS)


def own_batches(mesh: Mesh, keys: Mapping[str, Any], plan: Plan, step: int) -> list[Batch]:
    """This rank's micro-batches of a step: data-parallel ranks take them in turn."""
    return plan.batches(step, keys.get("micro_batch", 1))[mesh.dp.rank :: mesh.dp.size]


def step(name: str, trainer: TrainState, batches: list[Batch], plan: Plan, number: int) -> StepResult:
    """One optimizer step."""
    return train_step(
        trainer.decoder,
        trainer.optimizer,
        batches,
        step=number,
        lr=LR,
        weights=plan.weights,
        clip=1.0,
        bias_update=models.BIAS_UPDATE.get(name, 0.0),
        clock=Stopwatch(),
        sharding=trainer.sharding,
    )


def train(
    name: str,
    mesh: Mesh,
    keys: Mapping[str, Any],
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    trainer: TrainState | None = None,
    first: int = 1,
) -> tuple[Record, TrainState]:
    """Train on `mesh` steps `first` … `plan.steps` of the tiny model `name`, a new one unless given."""
    trainer = trainer or start(name, mesh, keys, plan, dtype)
    record = Record()
    clip = trainer.optimizer.clip

    def watched_clip(limit: float) -> float:
        record.gradients.append({name: g.clone() for name, g in trainer.optimizer.gradients().items()})
        return clip(limit)

    trainer.optimizer.clip = watched_clip  # type: ignore[method-assign]
    for number in range(first, plan.steps + 1):
        result = step(name, trainer, own_batches(mesh, keys, plan, number), plan, number)
        record.losses.append(result.loss)
        record.totals.append(result.total_loss)
        record.parts.append(result.parts)
        record.norms.append(result.grad_norm)
        record.counts.append({layer: counts.tolist() for layer, counts in result.counts.items()})
    trainer.optimizer.clip = clip  # type: ignore[method-assign]
    record.biases = {
        str(i): router.select_bias.clone() for i, router in trainer.decoder.routers() if router.select_bias is not None
    }
    return record, trainer


@functools.cache
def alone(name: str, micro_batch: int, dtype: torch.dtype = torch.float32, plan: Plan = Plan()) -> Record:
    """The same steps in this process alone."""
    return train(name, Mesh.single(), {"micro_batch": micro_batch}, plan, dtype)[0]


@functools.cache
def told(name: str, micro_batch: int, dtype: torch.dtype, plan: Plan) -> Record:
    """`alone`, which the first rank works out and tells the others."""
    if not torch.distributed.is_initialized():
        return alone(name, micro_batch, dtype, plan)
    found = [alone(name, micro_batch, dtype, plan) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def difference(pairs: list[tuple[float, float]]) -> float:
    """The largest relative difference of a number from what it should be."""
    return max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=0.0)


def errors(
    rank: int,
    name: str,
    keys: dict[str, Any],
    plan: Plan = Plan(),
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Train in the layout that `keys` of [layout] describe, on as many ranks as there are, beside one process.

    Relative differences: `loss`, `total` and `norm` of any step; `terms` of the auxiliary losses; `gradient`: of any
    parameter's piece on this rank, the 2-norm of the difference over that of the whole gradient. `counts` and `bias`:
    the number of entries that differ; `missing`: parameters without a gradient that have one alone.
    """
    mesh = mesh_for(name, keys)
    expected = told(name, keys.get("micro_batch", 1), dtype, plan)
    found, trainer = train(name, mesh, keys, plan, dtype)
    gradient, missing = 0.0, 0
    for mine, all_of_step in zip(found.gradients, expected.gradients, strict=True):
        missing += len((all_of_step.keys() & trainer.decoder.cuts.keys()) ^ mine.keys())
        for parameter, piece in mine.items():
            held = trainer.sharding.held[parameter]
            whole = all_of_step[parameter]
            difference_here = piece - held.cut.take(whole)[held.start : held.stop]
            gradient = max(gradient, float(difference_here.norm() / whole.norm().clamp(min=1e-6)))
    terms = [
        (found.parts[i].get(term, 0.0), value)
        for i, parts in enumerate(expected.parts)
        for term, value in parts.items()
    ]
    return {
        "loss": difference(list(zip(found.losses, expected.losses, strict=True))),
        "total": difference(list(zip(found.totals, expected.totals, strict=True))),
        "norm": difference(list(zip(found.norms, expected.norms, strict=True))),
        "terms": difference(terms),
        "gradient": gradient,
        "counts": float(sum(a != b for a, b in zip(found.counts, expected.counts, strict=True))),
        "bias": float(sum(not torch.equal(b, expected.biases[i]) for i, b in found.biases.items())),
        "missing": float(missing),
    }


def outcome(
    rank: int,
    name: str,
    keys: dict[str, Any],
    plan: Plan = Plan(),
    dtype: torch.dtype = torch.float32,
) -> Record | None:
    """Train in a layout; the record with whole gradients and all biases, on the first rank."""
    mesh = mesh_for(name, keys)
    record, trainer = train(name, mesh, keys, plan, dtype)
    record.gradients = [assembled(trainer, gradients) for gradients in record.gradients]
    for each in gather_objects(record.biases, mesh.world):
        record.biases |= each
    return record if rank == 0 else None


def assembled(trainer: TrainState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks, by parameter.

    Raises AssertionError where ranks that hold the same piece have other bits, or where a piece is nowhere.
    """
    held, shapes = trainer.sharding.held, {name: cut.shape for name, cut in trainer.decoder.cuts.items()}
    pieces = {name: (held[name].cut.boxes(held[name].start, held[name].stop), x) for name, x in tensors.items()}
    whole: dict[str, Tensor] = {}
    for all_pieces, all_shapes in gather_objects((pieces, shapes), trainer.decoder.mesh.world):
        for name, (boxes, local) in all_pieces.items():
            out = whole.setdefault(name, torch.full(all_shapes[name], torch.nan))
            for box in boxes:
                here = out[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
                there = box.of(local.detach())
                assert bool(here.isnan().all()) or torch.equal(here, there), f"copies of {name} differ"
                here.copy_(there)
    for name, tensor in whole.items():
        assert not bool(tensor.isnan().any()), f"part of {name} is on no rank"
    return whole
