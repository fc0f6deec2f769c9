"""Multi-token prediction blocks, in the names DeepSeek-V3 and GLM-4.5 publish, against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import oracle, randomise, relative_error, reload, token_ids
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, Tiny
from transformers.modeling_layers import MtpModel

from moesaic.hf import WeightsError, export_decoder, load_decoder
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights

NAMES = ("deepseek_v3", "glm4_moe")


def with_mtp(name: str) -> Tiny:
    tiny = next(tiny for tiny in TINY_MODELS if tiny.name == name)
    return Tiny(f"{name}-mtp", tiny.model_type, {**tiny.config, "num_nextn_predict_layers": 1})


def save_both(tiny: Tiny, folder: Path) -> tuple[torch.nn.Module, MtpModel]:
    """A main model and its prediction block, written as released checkpoints hold them: one more layer."""
    main = oracle(tiny)
    mtp = MtpModel(main, 1).eval()
    for name, tensor in mtp.layers.state_dict().items():
        randomise(name, tensor)
    main.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # The block's layer is saved as layer 1 of a copy of the main model, so that its names are the published ones.
    copy = oracle(tiny)
    copy.model.layers[1].load_state_dict(mtp.layers[0].mtp_block.state_dict())
    copy.save_pretrained(folder / "copy")
    last = f"model.layers.{main.config.num_hidden_layers}"
    for name, tensor in load_file(folder / "copy" / "model.safetensors").items():
        if name.startswith("model.layers.1."):
            tensors[name.replace("model.layers.1", last)] = tensor
    tensors[f"{last}.enorm.weight"] = mtp.layers[0].enorm.weight.detach()
    tensors[f"{last}.hnorm.weight"] = mtp.layers[0].hnorm.weight.detach()
    tensors[f"{last}.eh_proj.weight"] = mtp.layers[0].eh_proj.weight.detach()
    tensors[f"{last}.shared_head.norm.weight"] = mtp.layers[0].post_norm.weight.detach()
    tensors[f"{last}.embed_tokens.weight"] = main.model.embed_tokens.weight.detach().clone()
    tensors[f"{last}.shared_head.head.weight"] = main.lm_head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    return main, mtp


@pytest.mark.parametrize("name", NAMES)
def test_loss_of_the_prediction_block(name: str, tmp_path: Path) -> None:
    main, mtp = save_both(with_mtp(name), tmp_path / "source")
    ours = load_decoder(tmp_path / "source").eval()
    ids = token_ids(ours.spec.vocab)
    with torch.no_grad():
        hidden = main.model(ids).last_hidden_state
        places = torch.arange(ids.shape[1] - 1)[None]
        ahead = mtp.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
        logits = main.lm_head(ahead)[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), reduction="sum")
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        parts = ours.loss(ids, labels, weights=LossWeights(mtp=1.0), step_tokens=1).parts
    assert relative_error(parts["mtp"], expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_published_names_both_ways(name: str, tmp_path: Path) -> None:
    main, _ = save_both(with_mtp(name), tmp_path / "source")
    ours = load_decoder(tmp_path / "source")
    export_decoder(ours, tmp_path / "exported")
    source, exported = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "exported"))
    assert source.keys() == exported.keys()
    assert all(torch.equal(source[key], exported[key]) for key in source)
    loaded, info = reload(tmp_path / "exported")
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ids = token_ids(97)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, main(ids).logits)


def test_absent_block_is_said_and_initialised(tmp_path: Path) -> None:
    tiny = with_mtp("deepseek_v3")
    oracle(tiny).save_pretrained(tmp_path)
    notes: list[str] = []
    ours = load_decoder(tmp_path, note=notes.append)
    assert len(notes) == 1 and "no multi-token prediction block" in notes[0]
    fresh = Decoder(ours.spec)
    fresh.init_weights(0)
    expected = fresh.state_dict()
    mine = {key: value for key, value in ours.state_dict().items() if key.startswith("mtp.")}
    assert mine and all(torch.equal(expected[key], value) for key, value in mine.items())


def test_block_that_the_config_leaves_out_is_said(tmp_path: Path) -> None:
    save_both(with_mtp("deepseek_v3"), tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert '"num_nextn_predict_layers": 1' in config
    changed = config.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    (tmp_path / "config.json").write_text(changed)
    notes: list[str] = []
    load_decoder(tmp_path, note=notes.append)
    assert len(notes) == 1 and "multi-token prediction blocks (layers from 3) were not read" in notes[0]


def test_half_a_block_is_refused(tmp_path: Path) -> None:
    save_both(with_mtp("deepseek_v3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lacks 1 tensor \(model.layers.3.eh_proj.weight\)"):
        load_decoder(tmp_path)
