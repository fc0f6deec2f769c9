"""Three steps of training in any layout, and how far they are from the same steps in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.parity import models

from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable
from moesaic.train.metrics import Stopwatch
from moesaic.train.state import TrainState
from moesaic.train.step import train_step

LR = 1e-3


@dataclass
class Record:
    """What one run computed: per step the loss, total loss, terms and gradient norm, and gradients by parameter."""

    losses: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[dict[str, list[int]]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)


def train(name: str, mesh: Mesh, table: LayoutTable, dtype: torch.dtype, seed: int = 3) -> tuple[Record, TrainState]:
    """Train the tiny model `name` for a few steps on `mesh`."""
    spec = models.model(name)
    decoder = Decoder(spec, mesh=mesh)
    decoder.init_weights(seed)
    if models.BIAS_UPDATE.get(name):
        decoder.enable_select_bias()
    trainer = TrainState.of(decoder, dtype, sharding=table.sharding, replicas=table.replicas, eps=1e-6)
    record = Record()
    clip = trainer.optimizer.clip

    def watched_clip(limit: float) -> float:
        record.gradients.append({name: g.clone() for name, g in trainer.optimizer.gradients().items()})
        return clip(limit)

    trainer.optimizer.clip = watched_clip  # type: ignore[method-assign]
    for step in range(1, models.STEPS + 1):
        batches = models.micro_batches(step, table.micro_batch)[mesh.dp.rank :: mesh.dp.size]
        result = train_step(
            trainer.decoder,
            trainer.optimizer,
            batches,
            step=step,
            lr=LR,
            weights=models.WEIGHTS,
            clip=1.0,
            bias_update=models.BIAS_UPDATE.get(name, 0.0),
            clock=Stopwatch(),
            sharding=trainer.sharding,
        )
        record.losses.append(result.loss)
        record.totals.append(result.total_loss)
        record.parts.append(result.parts)
        record.norms.append(result.grad_norm)
        record.counts.append({layer: counts.tolist() for layer, counts in result.counts.items()})
    record.biases = {
        str(i): router.select_bias.clone() for i, router in trainer.decoder.routers() if router.select_bias is not None
    }
    return record, trainer


@functools.cache
def alone(name: str, micro_batch: int, dtype: torch.dtype = torch.float32) -> Record:
    """The same steps in this process alone."""
    return train(name, Mesh.single(), LayoutTable(micro_batch=micro_batch), dtype)[0]


def errors(rank: int, name: str, keys: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Train in the layout that `keys` of [layout] describe, on as many ranks as there are, beside one process.

    Relative differences: `loss`, `total` and `norm` of any step; `terms` of the auxiliary losses; `gradient`: of any
    parameter's piece on this rank, the 2-norm of the difference over that of the whole gradient, with its name.
    `counts` and `bias`: the number of entries that differ.
    """
    table = LayoutTable.model_validate(keys)
    world = torch.distributed.get_world_size()
    layout = resolve_layout(
        table, models.model(name), world, seq_len=models.SEQ_LEN, global_batch=models.GLOBAL_BATCH
    )
    mesh = Mesh.create(layout, 100.0, models.model(name).tied_embeddings)
    expected = alone(name, table.micro_batch, dtype)
    found, trainer = train(name, mesh, table, dtype)

    def worst(pairs: list[tuple[float, float]]) -> float:
        return max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=0.0)

    gradient = 0.0
    for step in range(models.STEPS):
        for parameter, mine in found.gradients[step].items():
            held = trainer.sharding.held[parameter]
            whole = expected.gradients[step][parameter]
            piece = held.cut.take(whole)[held.start : held.stop]
            gradient = max(gradient, float((mine - piece).norm() / whole.norm().clamp(min=1e-6)))
    terms = [
        (found.parts[step].get(term, 0.0), value)
        for step in range(models.STEPS)
        for term, value in expected.parts[step].items()
    ]
    return {
        "loss": worst(list(zip(found.losses, expected.losses, strict=True))),
        "total": worst(list(zip(found.totals, expected.totals, strict=True))),
        "norm": worst(list(zip(found.norms, expected.norms, strict=True))),
        "terms": worst(terms),
        "gradient": gradient,
        "counts": float(sum(found.counts[i] != expected.counts[i] for i in range(models.STEPS))),
        "bias": float(sum(not torch.equal(b, expected.biases[i]) for i, b in found.biases.items())),
        "missing": float(len([n for n in trainer.decoder.cuts if n not in found.gradients[0]])),
    }
