"""One optimizer step: forward and backward over the micro-batches, then one update.

Sum everywhere, divide once: the number of trained tokens of the step is known before the first backward, every
micro-batch divides its sums by it, and gradients just add up. How the batch is cut does not change the result, except
through what is itself defined over micro-batches: their balancing losses, and noise drawn by a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from moesaic.mesh.collectives import all_reduce, gather_objects
from moesaic.mesh.device import device
from moesaic.mesh.group import Group, progress
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.forced import Forced
from moesaic.model.losses import IGNORED, LossWeights
from moesaic.schedule.orders import Action, Pair, paired, pipeline_order, splits_backward
from moesaic.schedule.pipeline import run_pipeline
from moesaic.train import nonfinite
from moesaic.train.balancing import sum_counts, take_counts, update_select_bias
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.optimizer import Optimizer
from moesaic.train.sharding import Sharding
from moesaic.train.stages import LossSums, StageWork, Work, on_device


@dataclass
class StepResult:
    """Numbers of one step. `counts` has the tokens per expert of each layer; losses are means over trained tokens;
    `positions` are the places of its sequences that hold a token, trained or not."""

    loss: float
    total_loss: float
    parts: dict[str, float]
    grad_norm: float
    tokens: int
    positions: int
    counts: dict[str, Tensor] = field(default_factory=dict)


def train_step(
    decoder: Decoder,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    step: int,
    lr: float,
    weights: LossWeights,
    clip: float,
    bias_update: float,
    clock: Stopwatch,
    sharding: Sharding | None = None,
    forced: Forced | None = None,
) -> StepResult:
    """Train on this rank's micro-batches of step `step` and return the step's numbers, the same on every rank.

    Raises NonFiniteError, with the weights as they were, when the loss or the gradient is NaN or infinite.
    """
    mesh = decoder.mesh
    progress.step = step
    tokens_here, places_here = sum(batch.tokens for batch in batches), sum(batch.places for batch in batches)
    step_tokens, positions = _totals([tokens_here, places_here], mesh.dp)
    decoder.train()
    optimizer.zero_grad()
    take_counts(decoder.routers())

    if sharding is not None:
        sharding.begin_step()
    work = Work(
        decoder,
        batches,
        weights=weights,
        step_tokens=step_tokens,
        clock=clock,
        sharding=sharding,
        reduction=optimizer.overlap,
    )
    if forced is not None:
        forced.begin_step(step)
        work.forced = forced
    if mesh.pp.size == 1:
        work.run()
    else:
        _run_schedule(work)
    sums = _sum_losses(work.sums, weights, mesh)
    if forced is not None:
        forced.end_step()

    with clock.phase("optimizer"):
        if sharding is not None:
            sharding.end_backward()
        optimizer.sum_gradients()
        norm = optimizer.clip(clip)
        if not (math.isfinite(sums["total"]) and math.isfinite(norm)):
            raise _non_finite(decoder, optimizer, batches, weights, step_tokens, step, sums["total"], norm)
        optimizer.step(lr)
        counts = sum_counts(take_counts(decoder.routers()), mesh)
        if bias_update:
            for layer, router in decoder.routers():
                assert router.select_bias is not None
                update_select_bias(router.select_bias, counts[str(layer)], bias_update)

    parts = {name: value for name, value in sums.items() if name not in ("nats", "total")}
    loss = sums["nats"] / max(1, step_tokens)
    return StepResult(loss, sums["total"], parts, norm, step_tokens, positions, counts)


def _totals(numbers: list[int], group: Group) -> list[int]:
    """Each number summed over the group."""
    if group.size == 1:
        return numbers
    here = torch.tensor(numbers, device=device().torch_device if group.needs_device else None)
    return [int(number) for number in all_reduce(here, group).tolist()]


def _sum_losses(sums: LossSums, weights: LossWeights, mesh: Mesh) -> dict[str, float]:
    """`nats`, `total` and the auxiliary terms over all ranks. Which terms there are follows from their weights, so that
    ranks with different layers agree on it."""
    if mesh.world.size == 1:
        found = {name: float(value) for name, value in sums.parts.items()}
        return {"nats": float(sums.nats), "total": float(sums.total)} | found
    names = [name for name, weight in vars(weights).items() if weight]
    zero = torch.zeros_like(sums.nats)
    values = torch.stack([sums.nats, sums.total, *(sums.parts.get(name, zero) for name in names)])
    return dict(zip(["nats", "total", *names], all_reduce(values, mesh.world).tolist(), strict=True))


def _run_schedule(work: Work) -> None:
    """Run a step's micro-batches through the pipeline in the order that the layout names."""
    mesh = work.decoder.mesh
    assert mesh.layout is not None
    if "experts" in work.overlap:
        pairs = paired(mesh.pp.rank, mesh.pp.size, mesh.layout.virtual_stages, len(work.micros))
        _run_actions(work, pairs, work.runners())
        return
    actions = pipeline_order(
        mesh.layout.schedule, mesh.pp.rank, mesh.pp.size, mesh.layout.virtual_stages, len(work.micros)
    )
    _run_actions(work, actions, work.runners(split_backward=splits_backward(actions)))


def _run_actions(work: Work, actions: Sequence[Action | Pair], runners: dict[int, StageWork]) -> None:
    mesh = work.decoder.mesh
    run_pipeline(actions, runners, mesh.links, pp_rank=mesh.pp.rank, pp_size=mesh.pp.size)


def _loss(decoder: Decoder, batch: Batch, weights: LossWeights, step_tokens: int) -> Tensor:
    """What one micro-batch runs backward on, in one process."""
    micro = on_device(decoder, batch)
    return decoder.run_stage(0, None, micro, weights=weights, step_tokens=max(1, step_tokens))[1].total


@torch.no_grad()
def evaluate(decoder: Decoder, batches: Iterable[Batch]) -> dict[str, float]:
    """Held-out cross-entropy in nats per token, and in bits per byte where the batches know their bytes.

    Every rank is given all micro-batches; data-parallel ranks share them out.
    """
    decoder.eval()
    mesh = decoder.mesh
    nats, tokens, size = 0.0, 0, 0
    waiting: list[Batch] = []

    def run() -> float:
        mine = waiting[mesh.dp.rank] if mesh.dp.rank < len(waiting) else _blank(waiting[0])
        work = Work(decoder, [mine], weights=LossWeights(), step_tokens=1)
        # Without a pipeline the one stage is first and last, and nothing is sent.
        _run_actions(work, [Action("F", 0, index) for index in decoder.stages], work.runners(backward=False))
        return float(work.sums.nats)

    for batch in batches:
        tokens += batch.tokens
        size += batch.bytes
        # All ranks of a stage work together, so a data-parallel rank without a batch of its own runs one that counts
        # nothing; that needs the shape of the others.
        if waiting and waiting[0].ids_BS.shape != batch.ids_BS.shape:
            nats += run()
            waiting.clear()
        waiting.append(batch)
        if len(waiting) == mesh.dp.size:
            nats += run()
            waiting.clear()
    if waiting:
        nats += run()
    if mesh.world.size > 1:
        nats = float(all_reduce(mesh.on_device(torch.tensor([nats], dtype=torch.float64)), mesh.world))
    decoder.train()
    found = {"validation_loss": nats / max(1, tokens)}
    if size:
        found["validation_bits_per_byte"] = nats / math.log(2) / size
    return found


def _blank(batch: Batch) -> Batch:
    """A micro-batch of the same shape in which nothing is trained."""
    return replace(batch, labels_BS=torch.full_like(batch.labels_BS, IGNORED), tokens=0, bytes=0)


def _non_finite(
    decoder: Decoder,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    weights: LossWeights,
    step_tokens: int,
    step: int,
    total: float,
    norm: float,
) -> nonfinite.NonFiniteError:
    """Runs the step's micro-batches again under watch. Nothing of the failed step has touched the weights yet.

    With several ranks the first parameters without finite gradients are named instead, and where they are.
    """
    what = f"the loss is {total}"
    if math.isfinite(total):
        what = f"the loss is {total:.4f} but the gradient norm is {norm}"
    if decoder.mesh.world.size > 1:
        here = next((name for name, g in optimizer.gradients().items() if not bool(torch.isfinite(g).all())), None)
        found = [
            f"`{name}` on rank {rank}"
            for rank, name in enumerate(gather_objects(here, decoder.mesh.world))
            if name is not None
        ]
        where = "all gradients are finite"
        if found:
            where = f"after the sums over ranks not finite: the gradient of {', of '.join(found[:4])}"
        return nonfinite.NonFiniteError(f"Step {step}: {what}: {where}.")
    optimizer.zero_grad()
    take_counts(decoder.routers())
    losses = [partial(_loss, decoder, batch, weights, step_tokens) for batch in batches]
    reason = nonfinite.explain(decoder, losses)
    return nonfinite.NonFiniteError(f"Step {step}: {what}: {reason}.")
