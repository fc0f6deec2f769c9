"""Megatron's indexed token files: a `.bin` of token ids and an `.idx` that says where sequences and documents begin.

Version 1 of the index, all little-endian: 9 bytes `MMIDIDX\\0\\0`, version u64, data type code u8, number of sequences
u64, number of document boundaries u64, lengths i32 [sequences], byte offsets into the .bin i64 [sequences], document
boundaries i64 [boundaries] as sequence numbers, the first 0 and the last the number of sequences
(megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from moesaic.train.data.errors import DataError
from moesaic.train.data.store import TokenStore

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
SCAN_LIMIT = 4 << 30
"""Bytes of tokens up to which the largest id is looked up at start; beyond, every batch is checked as it is read."""

HASHED = 1 << 20
"""Tokens at either end of the .bin that, with the whole index, tell one data set from another."""


def read_megatron(prefix: str | Path) -> TokenStore:
    """The documents of `prefix`.bin and `prefix`.idx, memory-mapped, tokens as they are.

    Raises DataError if either file is missing, cut short or inconsistent.
    """
    index_path, data_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index_path, data_path):
        if not path.is_file():
            raise DataError(f"{path} is missing; a Megatron data set is the pair {prefix}.bin and {prefix}.idx.")
    try:
        raw = index_path.read_bytes()
        data_bytes = data_path.stat().st_size
    except OSError as error:
        raise DataError(f"{index_path} cannot be read: {error.strerror}.") from error
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise DataError(f"{index_path} is not a Megatron index: it begins {raw[:9]!r}, not {MAGIC!r}.")
    _, version, code, sequences, boundaries = HEADER.unpack_from(raw)
    if version != 1:
        raise DataError(f"{index_path} has index version {version}; version 1 is what this reads. Preprocess again.")
    if code not in TYPES or not np.issubdtype(TYPES[code], np.integer):
        raise DataError(f"{index_path} has data type code {code}, which is no integer type; token ids need one.")
    needed = HEADER.size + sequences * 12 + boundaries * 8
    # One more byte per sequence (its mode) follows in multimodal files.
    if len(raw) < needed:
        raise DataError(
            f"{index_path} is cut short: {sequences:,} sequences and {boundaries:,} document boundaries take "
            f"{needed:,} bytes, it has {len(raw):,}. Copy it again."
        )
    dtype = np.dtype(TYPES[code]).newbyteorder("<")
    position = HEADER.size
    length = np.frombuffer(raw, "<i4", sequences, position).astype(np.int64)
    pointer = np.frombuffer(raw, "<i8", sequences, position + 4 * sequences)
    boundary = np.frombuffer(raw, "<i8", boundaries, position + 12 * sequences)
    if sequences == 0 or data_bytes == 0:
        raise DataError(f"{data_path} is empty: {sequences:,} sequences, {data_bytes:,} bytes.")
    if (length < 0).any() or (pointer < 0).any() or (pointer % dtype.itemsize).any():
        raise DataError(f"{index_path} is corrupt: it has negative lengths or offsets between two tokens.")
    end = int((pointer + length * dtype.itemsize).max())
    if end > data_bytes:
        raise DataError(
            f"{data_path} is cut short: the index reaches byte {end:,}, it has {data_bytes:,}. Copy it again."
        )
    sane = boundaries >= 2 and boundary[0] == 0 and boundary[-1] == sequences and (np.diff(boundary) >= 0).all()
    if not sane:
        raise DataError(
            f"{index_path} is corrupt: its {boundaries:,} document boundaries do not run from 0 to {sequences:,}."
        )
    first = boundary[:-1][np.diff(boundary) > 0]
    tokens_before = np.concatenate([[0], np.cumsum(length)])
    document_length = np.diff(tokens_before[np.append(first, sequences)])
    start = pointer // dtype.itemsize
    follows = np.ones(sequences, dtype=bool)
    follows[1:] = start[1:] == start[:-1] + length[:-1]
    follows[first] = True
    if not follows.all():
        broken = int(np.flatnonzero(~follows)[0])
        raise DataError(
            f"{index_path}: sequence {broken:,} does not follow the one before it in its document; "
            "write the pair again with one document after another."
        )
    ids = np.memmap(data_path, dtype=dtype, mode="r")
    max_id = int(ids.max()) if data_bytes <= SCAN_LIMIT else None
    if np.issubdtype(dtype, np.signedinteger) and data_bytes <= SCAN_LIMIT and int(ids.min()) < 0:
        raise DataError(f"{data_path} holds the token id {int(ids.min())}; ids are 0 or more. Preprocess again.")
    filled = document_length > 0
    content = hashlib.blake2b(raw, digest_size=12)
    for part in (ids[:HASHED], ids[-HASHED:]):
        content.update(part.tobytes())
    return TokenStore(ids, start[first][filled], document_length[filled], max_id=max_id, content=content.hexdigest())


def write_megatron(
    prefix: str | Path, documents: Iterable[ArrayLike | list[ArrayLike]], dtype: DTypeLike = np.int32
) -> None:
    """Writes `prefix`.bin and `prefix`.idx.

    documents: one array of token ids each, or a list of arrays for a document of several sequences.
    """
    kind = np.dtype(dtype)
    code = next(number for number, known in TYPES.items() if np.dtype(known) == kind)
    lengths: list[int] = []
    boundaries = [0]
    data_path, index_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with open(f"{data_path}.part", "wb") as stream:
        for document in documents:
            sequences = document if isinstance(document, list) and np.ndim(document[0]) else [document]
            for sequence in sequences:
                array = np.asarray(sequence)
                stream.write(array.astype(kind.newbyteorder("<")).tobytes())
                lengths.append(array.size)
            boundaries.append(len(lengths))
    length = np.array(lengths, dtype="<i4")
    pointer = np.concatenate([[0], np.cumsum(length, dtype=np.int64)[:-1]]) * kind.itemsize
    with open(f"{index_path}.part", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(boundaries)))
        stream.write(length.tobytes())
        stream.write(pointer.astype("<i8").tobytes())
        stream.write(np.array(boundaries, dtype="<i8").tobytes())
    os.replace(f"{data_path}.part", data_path)
    os.replace(f"{index_path}.part", index_path)
