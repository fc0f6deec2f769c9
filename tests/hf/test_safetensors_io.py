"""The file format: against the safetensors library, and with damaged files."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.hf import WeightsError
from moesaic.hf.safetensors_io import DTYPES, Planned, Weights, read_table, write_header, write_tensor


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0, 3), (7,), (3, 5), (2, 3, 4)]
    return {
        f"{name}.{i}": torch.randn(shape, generator=generator).mul(20).to(dtype)
        for name, dtype in DTYPES.items()
        for i, shape in enumerate(shapes)
    }


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name).view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
        wide = torch.empty(tensor.shape, dtype=torch.float64)
        weights.read_into(name, wide)
        assert torch.equal(wide, tensor.double())


def test_writes_what_the_library_reads(tmp_path: Path) -> None:
    tensors = some_tensors()
    with (tmp_path / "x.safetensors").open("wb") as file:
        write_header(file, [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()])
        for tensor in tensors.values():
            write_tensor(file, tensor, tensor.dtype)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].double(), tensor.double())


def test_damaged_tables_are_refused_or_read(tmp_path: Path) -> None:
    """Bytes changed, cut or doubled at random in the table: an error of ours or a table, nothing else."""
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.float16)}, tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        table = bytearray(content[8 : 8 + length])
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(table))
            table[at : at + chance.randint(0, 3)] = bytes(chance.choice(b'{}[]":,0149-. aeF') for _ in range(2))
        (tmp_path / "bad").write_bytes(struct.pack("<Q", len(table)) + table + content[8 + length :])
        try:
            read_table(tmp_path / "bad")
        except WeightsError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("table", [b"[]", b"3", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}', b"[" * 100_000])
def test_tables_that_are_json_and_nothing_more(tmp_path: Path, table: bytes) -> None:
    (tmp_path / "bad").write_bytes(struct.pack("<Q", len(table)) + table)
    with pytest.raises(WeightsError, match="bad"):
        read_table(tmp_path / "bad")
