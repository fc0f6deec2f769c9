"""`moesaic import` and `moesaic export`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.cli.main import main
from moesaic.hf import export_decoder, load_decoder
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.train.checkpoint import describe, model_state, save_model_checkpoint, write

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder = Decoder(load_model_spec(CONFIG))
    decoder.init_weights(5)
    export_decoder(decoder, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "generation_config.json").write_text("{}")
    return tmp_path / "hf"


def test_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(folder), str(tmp_path / "checkpoint")]) == 0
    assert "parameters" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "back"), "--max-shard-gb", "0.00002"]) == 0
    assert "tokenizer.json" in capsys.readouterr().out
    first = load_file(folder / "model.safetensors")
    second = {k: v for file in (tmp_path / "back").glob("*.safetensors") for k, v in load_file(file).items()}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.items() >= CONFIG.items()
    assert (tmp_path / "back" / "generation_config.json").exists()


def test_precision(folder: Path, tmp_path: Path) -> None:
    assert main(["import", str(folder), str(tmp_path / "checkpoint"), "--dtype", "bf16"]) == 0
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "back")]) == 0
    assert {t.dtype for t in load_file(tmp_path / "back" / "model.safetensors").values()} == {torch.bfloat16}
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "wide" / "model.safetensors").values()} == {torch.float32}


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    out = tmp_path / "out"
    assert "not a folder" in refused("import", tmp_path / "absent", out)
    assert "fp8" in refused("import", folder, out, "--dtype", "fp8")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    assert "model.norm.weight has shape [3]" in refused("import", folder, out)
    assert not out.exists()
    save_file(tensors, folder / "model.safetensors")
    assert main(["import", str(folder), str(out)]) == 0
    assert "not empty" in refused("import", folder, out)
    assert "no checkpoint" in refused("export", tmp_path / "absent", tmp_path / "x")
    assert "not empty" in refused("export", out, folder)
    assert "llama" in refused("export", out, tmp_path / "x", "--family", "llama")
    assert not (tmp_path / "x").exists()


def test_selection_biases_of_training_survive(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Balancing without an auxiliary loss adds biases that the family's format cannot hold: said, and kept in ours."""
    decoder = Decoder(load_model_spec(CONFIG))
    decoder.init_weights(5)
    decoder.enable_select_bias()
    for _, router in decoder.routers():
        router.select_bias.normal_()
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "checkpoint")
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "refused")]) == 2
    assert "moesaic" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "own"), "--family", "moesaic"]) == 0
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "own").eval()(ids), decoder.eval()(ids))


def test_wider_export_of_a_bf16_run_takes_the_fp32_weights(tmp_path: Path) -> None:
    decoder = Decoder(load_model_spec(CONFIG))
    decoder.init_weights(5)
    description = describe(decoder.spec, torch.bfloat16, step=1, tokens=0, seconds=0.0)
    write(tmp_path / "step-1", {"model": model_state(decoder)}, description)
    for dtype, expected in (("", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        assert main(["export", str(tmp_path / "step-1"), str(tmp_path / f"x{dtype}"), "--dtype", dtype]) == 0
        weight = load_file(tmp_path / f"x{dtype}" / "model.safetensors")["lm_head.weight"]
        assert torch.equal(weight, decoder.head.weight.detach().to(expected))  # type: ignore[union-attr]
