"""Megatron's indexed files, against bytes written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data import DataError
from moesaic.train.data.megatron import read_megatron, write_megatron


def by_hand(prefix: Path) -> None:
    """Three sequences in two documents, [10 11 12] [13] | [14 15], uint16, laid out as the format says."""
    prefix.with_suffix(".bin").write_bytes(bytes([10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15, 1]))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        b"\x01\0\0\0\0\0\0\0"  # version
        b"\x08"  # uint16
        b"\x03\0\0\0\0\0\0\0"  # sequences
        b"\x03\0\0\0\0\0\0\0"  # document boundaries
        b"\x03\0\0\0\x01\0\0\0\x02\0\0\0"  # lengths
        b"\0\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0"  # offsets
        b"\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0"  # boundaries
    )


def documents(prefix: Path) -> list[list[int]]:
    store = read_megatron(prefix)
    return [store.ids[b : b + n].tolist() for b, n in zip(store.begin, store.length, strict=True)]


def test_reads_bytes_written_by_hand(tmp_path: Path) -> None:
    by_hand(tmp_path / "data")
    store = read_megatron(tmp_path / "data")
    assert documents(tmp_path / "data") == [[10, 11, 12, 13], [14, 271]]
    assert (store.max_id, store.tokens, store.documents) == (271, 6, 2)
    assert isinstance(store.ids, np.memmap)


def test_writes_the_same_bytes(tmp_path: Path) -> None:
    by_hand(tmp_path / "hand")
    write_megatron(tmp_path / "ours", [[[10, 11, 12], [13]], [14, 271]], dtype=np.uint16)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"hand{suffix}").read_bytes()


@settings(deadline=None, max_examples=50)
@given(
    content=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=9),
    dtype=st.sampled_from([np.uint8, np.int16, np.uint16, np.int32, np.int64]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, content: list[list[int]], dtype: type) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "data"
    write_megatron(prefix, content, dtype=dtype)
    assert documents(prefix) == content


def test_documents_may_lie_in_any_order_and_be_empty(tmp_path: Path) -> None:
    np.arange(6, dtype="<i4").tofile(tmp_path / "d.bin")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 4) + struct.pack("<2i2q4q", 2, 4, 16, 0, 0, 1, 1, 2)
    (tmp_path / "d.idx").write_bytes(index)
    assert documents(tmp_path / "d") == [[4, 5], [0, 1, 2, 3]]


def test_sequence_modes_at_the_end_are_allowed(tmp_path: Path) -> None:
    by_hand(tmp_path / "data")
    path = tmp_path / "data.idx"
    path.write_bytes(path.read_bytes() + b"\0\0\0")
    assert len(documents(tmp_path / "data")) == 2


def change(path: Path, position: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[position : position + len(new)] = new
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("position", "new", "wanted"),
    [
        (0, b"TNTIDX", r"is not a Megatron index: it begins b'TNTIDX"),
        (9, b"\x02", "index version 2; version 1"),
        (17, b"\x06", "data type code 6, which is no integer type"),
        (17, b"\x63", "data type code 99"),
        (18, b"\x09", r"cut short: 9 sequences and 3 document boundaries take 166 bytes, it has 94"),
        (34, b"\xff\xff\xff\xff", "corrupt: it has negative lengths"),
        (46, b"\x01", "offsets between two tokens"),
        (62, b"\x0a", r"data\.bin is cut short: the index reaches byte 14, it has 12"),
        (86, b"\x02", "3 document boundaries do not run from 0 to 3"),
        (54, b"\x08", "sequence 1 does not follow the one before it"),
    ],
)
def test_corrupt_index_gets_a_sentence(tmp_path: Path, position: int, new: bytes, wanted: str) -> None:
    by_hand(tmp_path / "data")
    change(tmp_path / "data.idx", position, new)
    with pytest.raises(DataError, match=wanted):
        read_megatron(tmp_path / "data")


def test_missing_short_and_empty_files_get_a_sentence(tmp_path: Path) -> None:
    by_hand(tmp_path / "data")
    with pytest.raises(DataError, match=r"none\.idx is missing"):
        read_megatron(tmp_path / "none")
    (tmp_path / "data.bin").write_bytes((tmp_path / "data.bin").read_bytes()[:7])
    with pytest.raises(DataError, match="reaches byte 12, it has 7"):
        read_megatron(tmp_path / "data")
    (tmp_path / "data.idx").write_bytes((tmp_path / "data.idx").read_bytes()[:20])
    with pytest.raises(DataError, match="not a Megatron index"):
        read_megatron(tmp_path / "data")
    write_megatron(tmp_path / "void", [])
    with pytest.raises(DataError, match=r"void\.bin is empty: 0 sequences"):
        read_megatron(tmp_path / "void")


def test_negative_ids_get_a_sentence(tmp_path: Path) -> None:
    write_megatron(tmp_path / "data", [[3, -7]])
    with pytest.raises(DataError, match="holds the token id -7"):
        read_megatron(tmp_path / "data")
