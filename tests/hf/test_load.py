"""What import refuses, and the layouts it accepts besides the published one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from oracle import oracle, relative_error, reload, token_ids
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, Tiny
from torch import Tensor
from transformers import Llama4Config, Llama4ForConditionalGeneration
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moesaic.hf import WeightsError, export_decoder, import_weights, load_decoder
from moesaic.spec.errors import MoesaicError

BY_NAME = {tiny.name: tiny for tiny in TINY_MODELS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that transformers wrote."""
    folders = {}
    for name in ("mixtral", "mixtral-window-tied", "qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3", "llama"):
        folders[name] = tmp_path_factory.mktemp(name)
        oracle(BY_NAME[name]).save_pretrained(folders[name])
    return folders


def copy_of(saved: dict[str, Path], name: str, to: Path) -> tuple[Path, dict[str, Tensor]]:
    """A copy of a folder that may be changed, and its tensors."""
    shutil.copytree(saved[name], to)
    return to, load_file(to / "model.safetensors")


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def refusal(folder: Path) -> str:
    """The sentence with which a folder is refused."""
    with pytest.raises(MoesaicError) as caught:
        load_decoder(folder)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_missing_folder_and_config(tmp_path: Path) -> None:
    assert "not a folder" in refusal(tmp_path / "absent")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path)


def test_no_weights(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = copy_of(saved, "llama", tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    sentence = refusal(folder)
    assert "no *.safetensors" in sentence and "pytorch_model.bin" in sentence


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file(saved: dict[str, Path], tmp_path: Path, keep: float) -> None:
    folder, tensors = copy_of(saved, "llama", tmp_path / "m")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    sentence = refusal(folder)
    assert str(file) in sentence
    if keep >= 0.5:
        named = next(name for name in tensors if name in sentence)
        assert "cut short" in sentence and str(len(content[: int(len(content) * keep)])) in sentence, named


def test_not_a_safetensors_file(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = copy_of(saved, "llama", tmp_path / "m")
    (folder / "model.safetensors").write_bytes((40).to_bytes(8, "little") + b"x" * 200)
    assert "not JSON" in refusal(folder)


def test_missing_shard(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "llama", tmp_path / "m")
    where = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    where["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)
    save_file({"other": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")
    assert "lm_head.weight is missing from" in refusal(folder)


def test_missing_tensor_leaves_the_decoder_alone(saved: dict[str, Path], tmp_path: Path) -> None:
    decoder = load_decoder(saved["mixtral"])
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    folder, tensors = copy_of(saved, "mixtral", tmp_path / "m")
    gone = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    write(folder, {name: tensor + 1 for name, tensor in tensors.items() if name != gone})
    with pytest.raises(WeightsError, match=r"lacks 1 tensor \(model.layers.1.block_sparse_moe.experts.3.w3.weight\)"):
        import_weights(folder, decoder)
    assert all(torch.equal(before[name], tensor) for name, tensor in decoder.state_dict().items())


def test_unexpected_tensor(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "llama", tmp_path / "m")
    write(folder, {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    sentence = refusal(folder)
    assert "holds 1 tensor (model.layers.0.self_attn.q_proj.bias)" in sentence and "does not ask for" in sentence


def test_wrong_shape(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "qwen3_moe", tmp_path / "m")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    write(folder, {**tensors, name: tensors[name].T})
    sentence = refusal(folder)
    assert name in sentence and "[20, 40]" in sentence and "[40, 20]" in sentence


def test_another_model(saved: dict[str, Path]) -> None:
    decoder = load_decoder(saved["llama"])
    with pytest.raises(WeightsError):
        import_weights(saved["mixtral"], decoder)


def test_unknown_model_type(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = copy_of(saved, "mixtral", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "model_type": "mixtrall"}))
    assert "'mixtral'" in refusal(folder)


def test_quantised_with_something_else(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "llama", tmp_path / "m")
    config = {**config_of(folder), "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "'gptq'" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config_of(saved["llama"])))
    write(folder, {**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.int8)})
    assert "lm_head.weight is stored as int8" in refusal(folder)


def test_head_of_a_tied_model_is_left_out(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "mixtral-window-tied", tmp_path / "m")
    write(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    notes: list[str] = []
    load_decoder(folder, note=notes.append)
    assert len(notes) == 1 and "lm_head.weight" in notes[0]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_dtypes(saved: dict[str, Path], tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    folder, tensors = copy_of(saved, "deepseek_v3", tmp_path / "m")
    write(folder, {name: tensor.to(stored) for name, tensor in tensors.items()})
    state = load_decoder(folder, wanted).state_dict()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(state["layers.1.attn.kv_b.weight"], tensors[name].to(stored).to(wanted))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(state["layers.1.moe.router.select_bias"], tensors[bias].to(stored).float())


def test_text_model_of_llama4(tmp_path: Path) -> None:
    """A text-and-image checkpoint as released: nested config, prefixed names, vision tensors left out with a note."""
    sides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {**sides, "image_size": 28, "patch_size": 14, "vision_output_dim": 16}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=dict(BY_NAME["llama4_text"].config), vision_config=vision)
    model = Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "source")
    notes: list[str] = []
    ours = load_decoder(tmp_path / "source", note=notes.append).eval()
    assert len(notes) == 1 and "outside the text model" in notes[0]
    export_decoder(ours, tmp_path / "exported")
    text, info = reload(tmp_path / "exported")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = token_ids(97)
    with torch.no_grad():
        expected = model.language_model(ids).logits
        assert relative_error(ours(ids), expected) < 1e-5
        assert relative_error(text(ids).logits, expected) < 1e-5


def test_kimi_k2(saved: dict[str, Path], tmp_path: Path) -> None:
    """Kimi-K2's own model_type stands for DeepSeek-V3's architecture and stays in the export."""
    folder, tensors = copy_of(saved, "deepseek_v3", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "model_type": "kimi_k2"}))
    decoder = load_decoder(folder)
    assert same_state(decoder, load_decoder(saved["deepseek_v3"]))
    export_decoder(decoder, tmp_path / "x")
    assert config_of(tmp_path / "x")["model_type"] == "kimi_k2"
    assert load_file(tmp_path / "x" / "model.safetensors").keys() == tensors.keys()


def test_multimodal_prefix(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = copy_of(saved, "llama", tmp_path / "m")
    write(folder, {f"language_model.{name}": tensor for name, tensor in tensors.items()} | {"vision.w": torch.ones(3)})
    notes: list[str] = []
    decoder = load_decoder(folder, note=notes.append)
    assert same_state(decoder, load_decoder(saved["llama"]))
    assert len(notes) == 1 and "1 tensors outside the text model" in notes[0]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe"])
def test_stacked_experts(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """transformers' own module names, which it writes when asked not to restore the published ones."""
    model = oracle(BY_NAME[name])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any("experts.gate_up_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    assert same_state(load_decoder(tmp_path), load_decoder(saved[name]))


def test_fp8_blocks(saved: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V3's format, with small blocks that do not divide the matrices."""
    folder, tensors = copy_of(saved, "deepseek_v3", tmp_path / "m")
    config = {**config_of(folder), "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 12]}}
    (folder / "config.json").write_text(json.dumps(config))
    stored, expected = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" not in name:
            continue
        rows, columns = tensor.shape
        scales = torch.rand(-(-rows // 16), -(-columns // 12)) + 0.5
        stored[name] = tensor.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        wide = torch.empty(rows, columns)
        for i in range(rows):
            for j in range(columns):
                wide[i, j] = stored[name][i, j].float() * scales[i // 16, j // 12]
        expected[name] = wide
    write(folder, stored)
    shutil.copytree(folder, tmp_path / "e")
    (tmp_path / "e" / "config.json").write_text(json.dumps(config_of(saved["deepseek_v3"])))
    write(tmp_path / "e", expected)
    assert same_state(load_decoder(folder), load_decoder(tmp_path / "e"))

    name = "model.layers.0.mlp.down_proj.weight"
    write(folder, {**stored, f"{name}_scale_inv": torch.ones(1, 1)})
    assert f"{name}_scale_inv has shape [1, 1]" in refusal(folder)
    del stored[f"{name}_scale_inv"]
    write(folder, stored)
    assert "scales" in refusal(folder)


def test_mxfp4_blocks(tmp_path: Path) -> None:
    """gpt-oss as released, against transformers' own unpacking."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tiny = Tiny("gpt_oss-mxfp4", "gpt_oss", {**BY_NAME["gpt_oss"].config, **sizes})
    oracle(tiny).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    packed, unpacked = dict(tensors), dict(tensors)
    for part, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        key = f"model.layers.0.mlp.experts.{part}"
        blocks = torch.randint(0, 256, (5, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 130, (5, rows, columns // 32), dtype=torch.uint8, generator=generator)
        del packed[key]
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        unpacked[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    write(tmp_path, unpacked)
    expected = load_decoder(tmp_path)
    write(tmp_path, packed)
    config = {**config_of(tmp_path), "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same_state(load_decoder(tmp_path), expected)


def test_released_spelling_of_a_config(saved: dict[str, Path], tmp_path: Path) -> None:
    """Checkpoints published before transformers 5 spell the rotary embedding and the dtype differently."""
    folder, _ = copy_of(saved, "deepseek_v3", tmp_path / "m")
    config = config_of(folder)
    del config["rope_parameters"], config["dtype"]
    scaling = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    config |= {"rope_theta": 10000, "rope_scaling": {**scaling, "original_max_position_embeddings": 64}}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    theirs, _ = reload(folder)
    ids = token_ids(97)
    with torch.no_grad():
        assert relative_error(load_decoder(folder).eval()(ids), theirs(ids).logits) < 1e-5


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_more_than_the_memory(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model larger than the machine is refused before it is built."""
    monkeypatch.setattr(Path, "read_text", lambda self, *args, **kwargs: little(self))
    with pytest.raises(WeightsError, match=r"takes 0\.0 GiB as float32 and 0\.0 GiB of memory are free"):
        load_decoder(saved["llama"])


def little(path: Path) -> str:
    if path == Path("/proc/meminfo"):
        return "MemTotal:  99999999 kB\nMemAvailable: 3 kB\nSwapFree: 0 kB\n"
    return path.read_bytes().decode()
