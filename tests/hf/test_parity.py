"""Every family against transformers: logits, loss, every gradient, and files that go both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import oracle, relative_error, reload, token_ids
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, Tiny

from moesaic.hf import export_decoder, load_decoder, rules
from moesaic.hf.layout import check_layout

LOGIT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_family(tiny: Tiny, tmp_path: Path) -> None:
    theirs = oracle(tiny)
    source, exported, again = tmp_path / "source", tmp_path / "exported", tmp_path / "again"
    theirs.save_pretrained(source)
    notes: list[str] = []
    ours = load_decoder(source, note=notes.append).eval()
    assert not notes

    ids = token_ids(ours.spec.vocab)
    their_output = theirs(ids, labels=ids)
    with torch.no_grad():
        assert relative_error(ours(ids), their_output.logits) < LOGIT_TOLERANCE

    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    loss = ours.loss(ids, labels, step_tokens=int((labels != -100).sum()))
    assert loss.total.item() == pytest.approx(their_output.loss.item(), rel=1e-5)
    compare_gradients(tiny, ours, theirs, loss.total, their_output.loss)

    export_decoder(ours, exported, max_shard_bytes=60_000)
    assert len(list(exported.glob("*.safetensors"))) > 1
    assert same_tensors(source, exported)
    loaded, info = reload(exported)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)
    export_decoder(load_decoder(exported), again)
    assert same_tensors(source, again)


def compare_gradients(tiny: Tiny, ours: torch.nn.Module, theirs: torch.nn.Module, loss, their_loss) -> None:  # type: ignore[no-untyped-def]
    """Our gradients and theirs, both brought into the order on disk, where they must agree name by name."""
    loss.backward()
    their_loss.backward()
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in mine.values() if gradient is not None)
    expected = gradients_on_disk(theirs)
    compared = set()
    for rule in rules(ours.spec):  # type: ignore[attr-defined]
        if rule.name not in mine:
            continue
        gradient = mine[rule.name]
        assert gradient is not None, rule.name
        for piece in rule.layout:
            want = expected[piece.key]
            error = (piece.to_disk(gradient) - want).abs().max().item()
            scale = max(want.abs().max().item(), 1e-3 * largest)
            assert error < GRADIENT_TOLERANCE * scale, (piece.key, error, scale)
            compared.add(piece.key)
    assert {key for key in expected if "e_score_correction_bias" not in key} <= compared


def gradients_on_disk(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Their gradients under the names and layouts that `save_pretrained` gives to the parameters."""
    import tempfile

    with torch.no_grad():
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad, parameter.data = parameter.data, gradient
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            gradients = load_file(Path(folder) / "model.safetensors")
            gradients = {key: gradient.clone() for key, gradient in gradients.items()}
        for parameter in model.parameters():
            parameter.data = parameter.grad
    return gradients


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors under the same names, bit for bit."""
    first, second = {}, {}
    for folder, tensors in ((one, first), (other, second)):
        for file in folder.glob("*.safetensors"):
            tensors.update(load_file(file))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_layouts_cover_every_tensor_once(tiny: Tiny) -> None:
    from moesaic.spec.families import load_model_spec

    for rule in rules(load_model_spec({"model_type": tiny.model_type, **tiny.config})):
        for layout in rule.layouts:
            check_layout(rule, layout)
