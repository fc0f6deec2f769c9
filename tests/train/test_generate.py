"""Sampling."""

from __future__ import annotations

import pytest
import torch

from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.families import load_model_spec
from moesaic.train import loop
from moesaic.train.checkpoint import save_model_checkpoint
from moesaic.train.generate import continue_text, generate, sample

TINY = {
    "model_type": "mixtral",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}


def tiny():
    decoder = Decoder(load_model_spec(TINY))
    decoder.init_weights(0)
    return decoder


def test_temperature_zero_takes_the_likeliest_each_time():
    decoder = tiny()
    got = list(generate(decoder, [1, 2, 3], 5, temperature=0.0))
    seen = [1, 2, 3]
    for _ in range(5):
        with torch.no_grad():
            seen.append(int(decoder(torch.tensor([seen]))[0, -1].argmax()))
    assert got == seen[3:]


def test_the_seed_decides_and_the_window_slides():
    decoder = tiny()
    texts = [list(generate(decoder, [1] * 40, 20, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 20


def test_it_stops_after_the_document_end():
    decoder = tiny()
    first = next(generate(decoder, [5], 1, temperature=0.0))
    assert list(generate(decoder, [5], 9, temperature=0.0, stop=first)) == [first]


def test_sampling_follows_the_softmax_of_the_top_k():
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(logits_V, 0.5, 2, generator) for _ in range(4000)])
    share = float((drawn == 0).float().mean())
    assert share == pytest.approx(float(torch.sigmoid(torch.tensor(2.0))), abs=0.02)
    assert int(drawn.max()) == 1


def test_text_from_a_run(make_run, console, tmp_path):
    assert loop.train(make_run("talks"), console=console) == 0
    text = "".join(continue_text(tmp_path / "talks", "the gate", 10, temperature=0.0, top_k=0, seed=0))
    assert text.startswith("the gate") and len(text) > len("the gate")


def test_a_checkpoint_without_a_tokenizer_asks_for_one(tmp_path):
    decoder = tiny()
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "alone")
    with pytest.raises(MoesaicError, match="--tokenizer"):
        list(continue_text(tmp_path / "alone", "x", 1, temperature=1.0, top_k=0, seed=0))
    pieces = continue_text(tmp_path / "alone", "x", 3, temperature=1.0, top_k=0, seed=0, tokenizer="bytes")
    assert "".join(pieces).startswith("x")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    decoder = Decoder(load_model_spec(TINY | {"vocab_size": 100}))
    decoder.init_weights(0)
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "small")
    with pytest.raises(MoesaicError, match=r"token id 120, but .* knows 100 ids"):
        list(continue_text(tmp_path / "small", "x", 3, temperature=1.0, top_k=0, seed=0, tokenizer="bytes"))


def test_no_temperature_is_too_low() -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0, 3.0 - 1e-6])
    for temperature in (1e-320, 1e-40, 1e-9):
        assert sample(logits_V, temperature, 0, torch.Generator().manual_seed(0)) == 1
