"""Exporting a checkpoint weight by weight, whichever ranks wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moesaic.hf import export_decoder
from moesaic.mesh.cut import Box, Cut, Piece
from moesaic.mesh.group import Group
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.train.checkpoint import CheckpointError, describe, model_state, save_model_checkpoint, write
from moesaic.train.exchange import export_checkpoint
from moesaic.train.sharded_state import Shards, shards_of
from moesaic.train.stored import StoredModel
from tests.ranks import ranks

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
}
MIB = 1 << 20


def made(config: dict[str, Any]) -> Decoder:
    decoder = Decoder(load_model_spec(config))
    decoder.init_weights(5)
    for name, buffer in decoder.named_buffers():
        if name.endswith("select_bias"):
            buffer.copy_(torch.arange(len(buffer)) / 8)
    return decoder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def cut_in_two(tensor: Tensor, rank: int) -> Cut:
    """Experts to one rank or the other, matrices by rows, gate and up apart; vectors are on both."""
    shape = tuple(tensor.shape)
    return Cut(shape, () if len(shape) < 2 else (Piece(0, 2, rank, 2 if len(shape) == 2 and shape[0] % 2 == 0 else 1),))


def save_half(rank: int, config: dict[str, Any], folder: str, dtype: str) -> None:
    """What one of two ranks writes: its layer of a pipeline's two, its half of everything else."""
    decoder = made(config)
    state = {
        name: (cut, cut.take(tensor), None)
        for name, tensor in decoder.state_dict().items()
        if not name.startswith(f"layers.{1 - rank}.")
        for cut in [Cut(tuple(tensor.shape)) if name.startswith("layers.") else cut_in_two(tensor, rank)]
    }
    trained = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    described = describe(decoder.spec, trained, step=7, tokens=0, seconds=0.0)
    group = Group.create("checkpoint", [(0, 1)], 60.0)
    write(Path(folder), {"model": shards_of(state), "optimizer": {"step": torch.tensor(7)}}, described, group)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
def test_what_ranks_wrote_exports_as_if_one_had(config: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """Byte for byte what the decoder in memory exports: in the trained type, and wider."""
    ranks(2).run(save_half, config, str(tmp_path / "step-7"), dtype)
    decoder = made(config)
    for wanted in (None, "fp32"):
        kind = torch.bfloat16 if wanted is None and dtype == "bf16" else torch.float32
        export_checkpoint(tmp_path / "step-7", tmp_path / f"x{wanted}", dtype=wanted, max_shard_bytes=30_000)
        export_decoder(decoder, tmp_path / f"y{wanted}", dtype=kind, max_shard_bytes=30_000)
        found = contents(tmp_path / f"x{wanted}")
        assert len(found) > 3
        assert found == contents(tmp_path / f"y{wanted}")


@pytest.mark.parametrize("family", [None, "moesaic"])
def test_one_process_checkpoints(family: str | None, tmp_path: Path) -> None:
    decoder = made(CONFIG)
    if family is not None:
        decoder.enable_select_bias()
        for _, router in decoder.routers():
            assert router.select_bias is not None
            router.select_bias.fill_(0.25)
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "step-1")
    export_checkpoint(tmp_path / "step-1", tmp_path / "x", family=family)
    export_decoder(decoder, tmp_path / "y", family=family)
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


def test_every_weight_is_read_once_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made(DEEPSEEK)
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "step-1")
    seen: list[str] = []
    last: list[weakref.ref[Tensor]] = []
    real = StoredModel.read

    def watch(self: StoredModel, name: str) -> Tensor:
        assert all(reference() is None for reference in last), f"{seen[-1]} is still held when {name} is read"
        seen.append(name)
        tensor = real(self, name)
        last.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(StoredModel, "read", watch)
    export_checkpoint(tmp_path / "step-1", tmp_path / "x")
    assert sorted(seen) == sorted(model_state(decoder))


def test_a_weight_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    """A data file of the right size whose bytes are not a checkpoint's."""
    decoder = made(CONFIG)
    save_model_checkpoint(decoder, decoder.spec, tmp_path / "c" / "step-1")
    (data,) = (tmp_path / "c" / "step-1").glob("*.distcp")
    data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(CheckpointError, match=r"step-1 cannot be read"):
        export_checkpoint(tmp_path / "c" / "step-1", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with pytest.raises(CheckpointError, match=r"holds no weight layers\.9"):
        StoredModel(tmp_path / "c" / "step-1").read("layers.9")


EXPORT = """
import json, sys
from pathlib import Path
import torch
from moesaic.train.exchange import export_checkpoint
def peak():
    # The high-water mark of this process: ru_maxrss would start from that of the parent.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
torch.set_num_threads(1)
before = peak()
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), dtype=sys.argv[3])
print(json.dumps(peak() - before))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 4])
def test_peak_memory_is_that_of_the_largest_weight(tmp_path: Path, dtype: str, parts: int) -> None:
    """A model of 290 MB whose largest weight has 32 MiB, written whole or in parts: no more than twice that weight, a
    buffer of 32 MiB, and as much again that the allocator may keep."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_experts": 32, "head_dim": 64}
    spec = load_model_spec({**CONFIG, **sizes, "intermediate_size": 1024, "moe_intermediate_size": 256})
    state = {name: tensor.fill_(0.01) for name, tensor in Decoder(spec).state_dict().items()}
    largest = max(4 * tensor.numel() for tensor in state.values())
    assert largest == 32 * MIB and sum(4 * tensor.numel() for tensor in state.values()) > 8 * largest
    shards = {}
    for name, tensor in state.items():
        count = parts if tensor.dim() == 3 else 1
        cuts = [Cut(tuple(tensor.shape), (Piece(0, count, part),)) for part in range(count)]
        boxes = [box for cut in cuts for box in cut.boxes()]
        shards[name] = in_boxes(tensor, boxes)
    write(tmp_path / "step-1", {"model": shards}, describe(spec, torch.float32, step=1, tokens=0, seconds=0.0))
    del state, shards
    run = [sys.executable, "-c", EXPORT, str(tmp_path / "step-1"), str(tmp_path / "out"), dtype]
    found = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert found < 2 * largest + 64 * MIB
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(prod(tensor.shape) for tensor in written.values()) * 4 > 8 * largest


def in_boxes(tensor: Tensor, boxes: list[Box]) -> Shards:
    """A whole tensor that is saved as several boxes, as if as many ranks held one each."""
    return Shards(tuple(tensor.shape), tensor, [replace(box, place=box.offsets) for box in boxes])
