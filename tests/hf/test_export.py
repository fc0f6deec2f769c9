"""What export writes besides tensors, and what it does when it cannot."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import TINY_MODELS

from moesaic.hf import WeightsError, export, export_decoder, export_tensors, load_decoder
from moesaic.hf.safetensors_io import Planned, ShardPlan
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec

BY_NAME = {tiny.name: tiny for tiny in TINY_MODELS}


def decoder_of(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    tiny = BY_NAME[name]
    decoder = Decoder(load_model_spec({"model_type": tiny.model_type, **tiny.config}), dtype=dtype)
    decoder.init_weights(1)
    return decoder


def test_shards_keep_their_size() -> None:
    sizes = [30, 50, 30, 120, 10, 90]
    plan = ShardPlan([Planned(str(i), (size,), torch.uint8) for i, size in enumerate(sizes)], 100)
    assert [[t.bytes for t in shard] for _, shard in plan.shards] == [[30, 50], [30], [120], [10, 90]]
    assert [name for name, _ in plan.shards] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert plan.bytes == sum(sizes)


def test_index_and_metadata(tmp_path: Path) -> None:
    result = export_decoder(decoder_of("mixtral"), tmp_path / "m", max_shard_bytes=50_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    seen = {}
    for file in (tmp_path / "m").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            seen |= dict.fromkeys(opened.keys(), file.name)
    assert seen == index["weight_map"]
    parameters = sum(parameter.numel() for parameter in decoder_of("mixtral").parameters())
    assert index["metadata"]["total_size"] == result.bytes == 4 * parameters


def test_dtype_is_converted_but_not_of_selection_biases(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    export_decoder(decoder, tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    kinds = {tensor.dtype for name, tensor in tensors.items() if "e_score_correction_bias" not in name}
    assert kinds == {torch.bfloat16}
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert torch.equal(tensors["model.norm.weight"], decoder.norm.weight.detach().bfloat16())
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_side_files_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "unrelated.txt"):
        (source / name).write_text(name)
    result = export_decoder(decoder_of("llama"), tmp_path / "m", side_from=source)
    assert result.files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "tokenizer.json"


def test_an_existing_folder_is_kept_or_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(WeightsError, match="not empty"):
        export_decoder(decoder_of("llama"), folder)
    assert [path.name for path in folder.iterdir()] == ["precious"]
    export_decoder(decoder_of("llama"), folder, overwrite=True)
    assert not (folder / "precious").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("existing", [False, True])
def test_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    decoder = decoder_of("llama")
    folder = tmp_path / "m"
    if existing:
        export_decoder(decoder, folder)
    written = []

    def full(file, view, dtype) -> None:  # type: ignore[no-untyped-def]
        written.append(view.numel())
        if len(written) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, view, dtype)

    real = export.write_tensor
    monkeypatch.setattr(export, "write_tensor", full)
    with pytest.raises(WeightsError, match=r"disk is full: .* needs \d+ bytes and \d+ are free") as caught:
        export_decoder(decoder, folder, overwrite=existing)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == (["m"] if existing else [])
    if existing:
        load_decoder(folder)


def test_too_little_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WeightsError, match="1000 free"):
        export_decoder(decoder_of("llama"), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    decoder = decoder_of("llama")
    state = dict(decoder.state_dict())
    with pytest.raises(WeightsError, match=r"norm.weight has shape \[3\], and .* asks for \[40\]"):
        export_tensors(decoder.spec, {**state, "norm.weight": torch.ones(3)}, tmp_path / "m")
    del state["norm.weight"]
    with pytest.raises(WeightsError, match=r"norm\.weight is missing"):
        export_tensors(decoder.spec, state, tmp_path / "m")


def test_selection_biases_that_the_family_lacks(tmp_path: Path) -> None:
    """Training without an auxiliary loss gives Mixtral biases, for which its format has no place: dropping zeros is
    exact, dropping others is refused, and our own format keeps them."""
    decoder = decoder_of("mixtral")
    decoder.enable_select_bias()
    export_decoder(decoder, tmp_path / "zeros")
    decoder.layers[1].moe.router.select_bias.fill_(0.25)  # type: ignore[union-attr, operator]
    with pytest.raises(WeightsError, match=r"no place for layers\.1\.moe\.router\.select_bias"):
        export_decoder(decoder, tmp_path / "refused")
    export_decoder(decoder, tmp_path / "own", family="moesaic")
    again = load_decoder(tmp_path / "own")
    assert again.spec.family == "moesaic"
    assert_same(decoder, again)
    export_decoder(again, tmp_path / "own2")
    assert_same(decoder, load_decoder(tmp_path / "own2"))


@pytest.mark.parametrize("name", [tiny.name for tiny in TINY_MODELS])
def test_own_format_holds_every_model(name: str, tmp_path: Path) -> None:
    decoder = decoder_of(name, torch.bfloat16)
    export_decoder(decoder, tmp_path / "m", family="moesaic")
    assert set(load_file(tmp_path / "m" / "model.safetensors")) == set(decoder.state_dict())
    assert_same(decoder, load_decoder(tmp_path / "m", torch.bfloat16))


def test_own_architecture(tmp_path: Path) -> None:
    """A model that no family covers: learned positions, plain MLPs with biases, learned mixing of a shared expert."""
    config = {
        "model_type": "moesaic",
        "vocab_size": 31,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "num_experts": [0, 4],
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 20,
        "shared_combine": "learned",
        "position_embedding": "learned",
        "max_position_embeddings": 16,
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "mlp_bias": True,
        "attention_bias": True,
        "hidden_act": "gelu",
    }
    decoder = Decoder(load_model_spec(config))
    decoder.init_weights(1)
    export_decoder(decoder, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == config
    assert_same(decoder, load_decoder(tmp_path / "m"))
    with pytest.raises(WeightsError, match=r"have no place for positions\.weight"):
        export_decoder(decoder, tmp_path / "n", family="mixtral")


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
