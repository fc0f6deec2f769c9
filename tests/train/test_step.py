"""One step: how the batch is cut does not matter, and the losses are those of the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.families import load_model_spec
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.optimizer import Optimizer
from moesaic.train.step import evaluate, train_step

SPEC = {
    "model_type": "mixtral",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def decoder_for(dtype=torch.float32):
    decoder = Decoder(load_model_spec(SPEC), dtype=dtype)
    decoder.init_weights(1)
    return decoder


def sequences(count=8, length=12):
    """Sequences with very different numbers of trained tokens, one of them with none."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 50, (count, length), generator=generator)
    labels = torch.randint(0, 50, (count, length), generator=generator)
    for row in range(count):
        labels[row, : row * length // (count - 1)] = -100
    return ids, labels


def cut(ids, labels, size):
    return [
        Batch(i, lab, None, None, int((lab != -100).sum()), 2 * int((lab != -100).sum()))
        for i, lab in zip(ids.split(size), labels.split(size), strict=True)
    ]


def gradients_after(size, weights, dtype=torch.float32):
    decoder = decoder_for(dtype)
    optimizer = Optimizer(decoder)
    found = {}
    optimizer.step = lambda lr: found.update({n: m.grad.clone() for n, m in optimizer.masters.items()})
    result = train_step(
        decoder,
        optimizer,
        cut(*sequences(), size),
        step=1,
        lr=1.0,
        weights=weights,
        clip=0.0,
        bias_update=0.0,
        clock=Stopwatch(),
    )
    return result, found


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(sequence_aux=0.1, z=0.1)])
def test_any_cut_into_micro_batches_gives_the_same_gradients(weights):
    whole, expected = gradients_after(8, weights)
    for size in (1, 2, 4):
        parts, got = gradients_after(size, weights)
        assert parts.tokens == whole.tokens and parts.positions == whole.positions
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
        assert parts.total_loss == pytest.approx(whole.total_loss, rel=1e-6)
        assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert all(torch.equal(parts.counts[layer], whole.counts[layer]) for layer in whole.counts)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


def test_bf16_gradients_of_any_cut_agree_to_bf16():
    _, expected = gradients_after(8, LossWeights(), torch.bfloat16)
    _, got = gradients_after(2, LossWeights(), torch.bfloat16)
    for name, gradient in expected.items():
        assert got[name].dtype == torch.float32
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, name


def test_the_loss_is_the_mean_over_trained_tokens():
    result, _ = gradients_after(2, LossWeights())
    ids, labels = sequences()
    decoder = decoder_for()
    with torch.no_grad():
        logits = decoder(ids)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert result.loss == pytest.approx(float(expected), rel=1e-6)
    held_out = evaluate(decoder, cut(ids, labels, 3))
    assert held_out["validation_loss"] == pytest.approx(float(expected), rel=1e-6)
    assert held_out["validation_bits_per_byte"] == pytest.approx(float(expected) / math.log(2) / 2, rel=1e-6)


def test_every_choice_is_counted_once_and_evaluation_counts_none():
    decoder = decoder_for()
    optimizer = Optimizer(decoder)
    batches = cut(*sequences(), 2)
    evaluate(decoder, batches)
    result = train_step(
        decoder,
        optimizer,
        batches,
        step=1,
        lr=0.0,
        weights=LossWeights(),
        clip=1.0,
        bias_update=0.0,
        clock=Stopwatch(),
    )
    for counts in result.counts.values():
        assert int(counts.sum()) == 8 * 12 * 2
    assert all(int(router.step_counts.sum()) == 0 for _, router in decoder.routers())
