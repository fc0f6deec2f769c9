"""Reading and writing safetensors files a piece at a time.

The format is a length, a JSON table and raw bytes (https://huggingface.co/docs/safetensors). Reading goes from the
file straight into the rows of a tensor, writing from a tensor straight into the file, so neither holds more than one
buffer; a file that is cut short is recognised, with the tensor that suffers, before any weight is touched.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from moesaic.hf.blocks import Block
from moesaic.hf.errors import WeightsError
from moesaic.spec.errors import nearest

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BUFFER_BYTES = 32 << 20
"""Size of the buffer through which tensors pass that need a conversion."""
SKIPPED_BYTES = 1 << 20
"""Entries of at least this size are read in part where a part is wanted; smaller ones are read whole, since seeking
costs more than reading them."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype, its shape, and where its bytes start in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_table(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file.

    Raises:
        WeightsError: the file is missing, is not a safetensors file, or ends before its last tensor does.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= size - 8:
                raise WeightsError(
                    f"{path} is not a whole safetensors file: it has {size} bytes and its table should take {length}."
                )
            table = json.loads(file.read(length))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise WeightsError(f"{path} is not a safetensors file: its table is not JSON.") from None
    if not isinstance(table, dict):
        raise WeightsError(f"{path} is not a safetensors file: its table is a {type(table).__name__}.")
    table.pop("__metadata__", None)
    placed = []
    for name, item in table.items():
        try:
            first, last = (operator.index(offset) for offset in item["data_offsets"])
            shape, dtype = tuple(operator.index(width) for width in item["shape"]), str(item["dtype"])
            if not 0 <= first <= last or any(width < 0 for width in shape):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise WeightsError(f"{path}: the table's entry of {name} is damaged.") from None
        placed.append((first, last, name, shape, dtype))
    entries, cut = {}, None
    for first, last, name, shape, dtype in sorted(placed):
        if dtype not in DTYPES:
            raise WeightsError(f"{path}: {name} has dtype {dtype}, which is not supported.")
        entry = Entry(path, DTYPES[dtype], shape, 8 + length + first)
        if entry.bytes != last - first:
            raise WeightsError(
                f"{path}: {name} of shape {shape} takes {entry.bytes} bytes and is given {last - first}."
            )
        if 8 + length + last > size and cut is None:
            cut = (name, 8 + length + last)
        entries[name] = entry
    if cut is not None:
        raise WeightsError(
            f"{path} is cut short: {cut[0]} ends at byte {cut[1]} and the file has {size}; download or copy it again."
        )
    return entries


class Weights:
    """The tensors of a folder, one file or many."""

    def __init__(self, folder: Path) -> None:
        """Reads the tables of all files.

        Raises:
            WeightsError: no folder, no safetensors in it, an index that disagrees with its files, a cut file.
        """
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a folder.")
        index = folder / INDEX_NAME
        if index.is_file():
            self._read_index(index)
            return
        paths = [folder / SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else sorted(folder.glob("*.safetensors"))
        if not paths:
            pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
            hint = f"; {pickled[0]} has to be converted to safetensors first" if pickled else ""
            raise WeightsError(f"{folder} holds no *.safetensors file{hint}.")
        for path in paths:
            self.entries.update(read_table(path))

    def _read_index(self, index: Path) -> None:
        try:
            where: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            if not all(isinstance(file, str) for file in where.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            raise WeightsError(
                f"{index} is not an index of safetensors files: it has no readable weight_map."
            ) from None
        tables = {}
        for file in sorted(set(where.values())):
            if not (self.folder / file).is_file():
                lost = sum(name == file for name in where.values())
                raise WeightsError(f"{self.folder / file} is missing; {index.name} lists {lost} tensors in it.")
            tables[file] = read_table(self.folder / file)
        for name, file in where.items():
            if name not in tables[file]:
                raise WeightsError(f"{name} is missing from {self.folder / file}, where {index.name} says it is.")
            self.entries[name] = tables[file][name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def entry(self, name: str) -> Entry:
        """The entry of `name`.

        Raises:
            WeightsError: there is none.
        """
        if name not in self.entries:
            raise WeightsError(f"{self.folder} holds no tensor {name}: {nearest(name, self.entries)}")
        return self.entries[name]

    def read(self, name: str) -> Tensor:
        """The whole tensor, in the dtype on disk."""
        entry = self.entry(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        _read_bytes(entry, name, entry.start, out)
        return out

    def read_entry(self, name: str, index: int) -> Tensor:
        """Entry `index` of the first axis, in the dtype on disk."""
        entry = self.entry(name)
        out = torch.empty(entry.shape[1:], dtype=entry.dtype)
        _read_bytes(entry, name, entry.start + index * (entry.bytes // entry.shape[0]), out)
        return out

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Entries start … stop − 1 of the first axis, in the dtype on disk."""
        entry = self.entry(name)
        out = torch.empty((stop - start, *entry.shape[1:]), dtype=entry.dtype)
        _read_bytes(entry, name, entry.start + start * (entry.bytes // entry.shape[0]), out)
        return out

    def read_blocks(self, name: str, shape: tuple[int, ...], blocks: Sequence[Block]) -> None:
        """Copies blocks of a tensor, seen in `shape`, to their targets. Nothing is read twice."""
        entry = self.entry(name)
        _read_blocks(Entry(entry.path, entry.dtype, shape, entry.start), name, blocks)

    def read_into(self, name: str, view: Tensor) -> None:
        """Copies a tensor into `view`, which has the same elements in the same order but any strides and dtype."""
        entry = self.entry(name)
        if _takes_bytes(entry, view):
            _read_bytes(entry, name, entry.start, view)
            return
        for start, part in _chunks(entry, view):
            buffer = torch.empty(part.shape, dtype=entry.dtype)
            _read_bytes(entry, name, start, buffer)
            part.copy_(buffer)


def _read_blocks(entry: Entry, name: str, blocks: Sequence[Block]) -> None:
    """Goes along the first axis from one edge of a block to the next. Entries of which all is wanted, and small ones,
    pass through a buffer together; of large ones the wanted part is read entry by entry."""
    tail = entry.shape[1:]
    row = prod(tail) * entry.dtype.itemsize
    edges = sorted({edge for block in blocks for edge in block.ranges[0]})
    for start, stop in pairwise(edges):
        active = [part for block in blocks if (part := block.inside(start, stop)) is not None]
        if not active:
            continue
        whole = all(edge == (0, size) for block in active for edge, size in zip(block.ranges[1:], tail, strict=True))
        if whole and len(active) == 1 and _takes_bytes(entry, active[0].target):
            _read_bytes(entry, name, entry.start + start * row, active[0].target)
        elif tail and (row > BUFFER_BYTES or (not whole and row >= SKIPPED_BYTES)):
            for i in range(start, stop):
                inner = Entry(entry.path, entry.dtype, tail, entry.start + i * row)
                _read_blocks(inner, name, [block.entry(i) for block in active])
        else:
            step = max(1, BUFFER_BYTES // max(1, row))
            for first in range(start, stop, step):
                last = min(stop, first + step)
                buffer = torch.empty((last - first, *tail), dtype=entry.dtype)
                _read_bytes(entry, name, entry.start + first * row, buffer)
                for block in active:
                    part = block.inside(first, last)
                    assert part is not None
                    part.target.copy_(buffer[(slice(None), *part.slices[1:])])


def _takes_bytes(entry: Entry, target: Tensor) -> bool:
    """Whether the bytes on disk are those of the target."""
    return entry.dtype == target.dtype and target.is_contiguous() and target.device.type == "cpu"


def _chunks(entry: Entry, view: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cuts `view` along its first axis into parts of about one buffer, each with the byte where it starts."""
    if view.dim() == 0 or entry.bytes <= BUFFER_BYTES:
        yield entry.start, view
        return
    row = entry.bytes // view.shape[0]
    if row > BUFFER_BYTES and view.dim() > 1 and view.stride(0) != 0:
        for i in range(view.shape[0]):
            part = Entry(entry.path, entry.dtype, tuple(view.shape[1:]), entry.start + i * row)
            yield from _chunks(part, view[i])
        return
    rows = max(1, BUFFER_BYTES // row)
    for start in range(0, view.shape[0], rows):
        yield entry.start + start * row, view[start : start + rows]


def _read_bytes(entry: Entry, name: str, start: int, out: Tensor) -> None:
    """Fills a contiguous CPU tensor from the file."""
    target = out.detach().reshape(-1).view(torch.uint8).numpy().data
    with entry.path.open("rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(target):
            count = file.readinto(target[done:])
            if not count:
                raise WeightsError(f"{entry.path} ended while {name} was read; it changed or the disk failed.")
            done += count


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardPlan:
    """Which tensor goes into which file: in the order given, a new file whenever the next tensor would not fit."""

    def __init__(self, tensors: Iterable[Planned], max_shard_bytes: int) -> None:
        shards: list[list[Planned]] = [[]]
        filled = 0
        for tensor in tensors:
            if shards[-1] and filled + tensor.bytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.bytes
        count = len(shards)
        names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self.shards: list[tuple[str, list[Planned]]] = list(zip(names, shards, strict=True))

    @cached_property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.bytes for _, shard in self.shards for tensor in shard)

    def write_index(self, folder: Path) -> None:
        """Writes the index that names each tensor's file, if there is more than one file."""
        if len(self.shards) == 1:
            return
        where = {tensor.name: file for file, shard in self.shards for tensor in shard}
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_header(file: BinaryIO, shard: list[Planned]) -> None:
    """Writes the table of a file; the tensors' bytes follow in the same order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        table[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def write_tensor(file: BinaryIO, view: Tensor, dtype: torch.dtype) -> None:
    """Writes the elements of `view` in its order as `dtype`, part by part."""
    step = max(1, BUFFER_BYTES // max(1, view.numel() * dtype.itemsize // max(1, view.shape[0] if view.dim() else 1)))
    for part in view.split(step) if view.dim() else (view,):
        data = part.detach().to(device="cpu", dtype=dtype).contiguous()
        file.write(data.reshape(-1).view(torch.uint8).numpy().data)
