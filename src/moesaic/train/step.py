"""One optimizer step: forward and backward over the micro-batches, then one update.

Sum everywhere, divide once: the number of trained tokens of the step is known before the first backward, every
micro-batch divides its sums by it, and gradients just add up. How the batch is cut does not change the result, except
through what is itself defined over micro-batches: their balancing losses, and noise drawn by a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossParts, LossWeights
from moesaic.train import nonfinite
from moesaic.train.balancing import take_counts, update_select_bias
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.optimizer import Optimizer


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
) -> StepResult:
    """Train on the micro-batches of step `step` and return its numbers.

    Raises NonFiniteError, with the weights as they were, when the loss or the gradient is NaN or infinite.
    """
    step_tokens = sum(batch.tokens for batch in batches)
    decoder.train()
    optimizer.zero_grad()
    take_counts(decoder.routers())

    cross_entropy = total = 0.0
    parts: dict[str, float] = {}
    for batch in batches:
        with clock.phase("forward"):
            loss = batch_loss(decoder, batch, weights, step_tokens)
        with clock.phase("backward"):
            loss.total.backward()
        cross_entropy += float(loss.cross_entropy_sum)
        total += float(loss.total.detach())
        for name, value in loss.parts.items():
            parts[name] = parts.get(name, 0.0) + float(value)

    with clock.phase("optimizer"):
        norm = optimizer.clip(clip)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise _non_finite(decoder, optimizer, batches, weights, step_tokens, step, total, norm)
        optimizer.step(lr)
        counts = take_counts(decoder.routers())
        if bias_update:
            for layer, router in decoder.routers():
                assert router.select_bias is not None
                update_select_bias(router.select_bias, counts[str(layer)], bias_update)

    positions = sum(batch.places for batch in batches)
    return StepResult(cross_entropy / max(1, step_tokens), total, parts, norm, step_tokens, positions, counts)


def batch_loss(decoder: Decoder, batch: Batch, weights: LossWeights, step_tokens: int) -> LossParts:
    """The LossParts of one micro-batch, as its share of a step with `step_tokens` trained tokens."""
    where = decoder.embed.weight.device
    ids_BS, labels_BS = batch.ids_BS.to(where), batch.labels_BS.to(where)
    positions_BS = None if batch.positions_BS is None else batch.positions_BS.to(where)
    documents_BS = None if batch.documents_BS is None else batch.documents_BS.to(where)
    return decoder.loss(ids_BS, labels_BS, positions_BS, documents_BS, weights=weights, step_tokens=max(1, step_tokens))


@torch.no_grad()
def evaluate(decoder: Decoder, batches: Iterable[Batch]) -> dict[str, float]:
    """Held-out cross-entropy in nats per token, and in bits per byte where the batches know their bytes."""
    decoder.eval()
    nats, tokens, size = 0.0, 0, 0
    for batch in batches:
        nats += float(batch_loss(decoder, batch, LossWeights(), batch.tokens).cross_entropy_sum)
        tokens += batch.tokens
        size += batch.bytes
    decoder.train()
    found = {"validation_loss": nats / max(1, tokens)}
    if size:
        found["validation_bits_per_byte"] = nats / math.log(2) / size
    return found


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
    """Runs the step's micro-batches again under watch. Nothing of the failed step has touched the weights yet."""
    optimizer.zero_grad()
    take_counts(decoder.routers())

    def loss_of(batch: Batch) -> Tensor:
        return batch_loss(decoder, batch, weights, step_tokens).total

    found = nonfinite.explain(decoder, [partial(loss_of, batch) for batch in batches])
    what = f"the loss is {total}"
    if math.isfinite(total):
        what = f"the loss is {total:.4f} but the gradient norm is {norm}"
    return nonfinite.NonFiniteError(f"Step {step}: {what}: {found}.")
