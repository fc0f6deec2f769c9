"""Sources: the same documents from every format, and a sentence for every file that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesaic.train.data import DataError
from moesaic.train.data import sources as sources_module
from moesaic.train.data.files import find_files, resolve
from moesaic.train.data.sources import character_boundary, open_source


def documents(path: Path | str, kind: str = "auto", text_key: str = "text") -> list[str]:
    """All documents of a source, pieces joined."""
    out, open_part = [], ""
    for piece in open_source(path, kind, text_key).pieces():
        open_part += piece.text
        if piece.ends_document:
            out.append(open_part)
            open_part = ""
    assert open_part == ""
    return out


def write_text(folder: Path, texts: list[str]) -> Path:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return folder


def write_jsonl(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts) + "\n")
    return path


def write_gzip(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder, texts).read_bytes()))
    return path


def write_parquet(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.parquet"
    pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), path, row_group_size=2)
    return path


def write_arrow_stream(folder: Path, texts: list[str]) -> Path:
    path, table = folder / "stream.arrow", pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_arrow_file(folder: Path, texts: list[str]) -> Path:
    path = folder / "file.arrow"
    table = pa.table({"text": pa.array(texts).dictionary_encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write_dataset(folder: Path, texts: list[str]) -> Path:
    import datasets

    # The order on disk is not the order of the rows: an indices file maps one to the other.
    backwards = datasets.Dataset.from_dict({"text": texts[::-1]})
    backwards.select(range(len(texts) - 1, -1, -1)).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_splits(folder: Path, texts: list[str]) -> Path:
    import datasets

    parts = {"train": datasets.Dataset.from_dict({"text": texts}), "test": datasets.Dataset.from_dict({"text": ["no"]})}
    datasets.DatasetDict(parts).save_to_disk(str(folder / "splits"))
    return folder / "splits"


FORMATS = [
    (write_text, "text"),
    (write_jsonl, "jsonl"),
    (write_gzip, "jsonl"),
    (write_parquet, "parquet"),
    (write_arrow_stream, "arrow"),
    (write_arrow_file, "arrow"),
    (write_dataset, "arrow"),
    (write_splits, "arrow"),
]


@pytest.mark.parametrize(("write", "kind"), FORMATS)
def test_same_documents_in_every_format(
    tmp_path: Path, texts: list[str], write: Callable[[Path, list[str]], Path], kind: str
) -> None:
    path = write(tmp_path, texts)
    assert resolve(path)[0] == kind
    assert documents(path) == texts
    assert documents(path, kind) == texts
    source = open_source(path)
    assert [piece.read for piece in source.pieces()][-1] <= source.size()


def test_folder_takes_the_format_of_most_of_its_bytes(tmp_path: Path, texts: list[str]) -> None:
    write_parquet(tmp_path, texts)
    (tmp_path / "README.md").write_text("about the data")
    assert documents(tmp_path) == texts
    (tmp_path / "README.md").write_text("about the data" * 10_000)
    assert resolve(tmp_path)[0] == "text"
    assert documents(tmp_path, "parquet") == texts


def test_folder_order_hidden_files_and_globs(tmp_path: Path) -> None:
    for name in ("b/2.py", "a/z.py", "a.py", "b/1.txt", ".git/x.py", "__pycache__/c.py", "b/.hidden.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert documents(tmp_path) == ["a.py", "a/z.py", "b/1.txt", "b/2.py"]
    assert documents(f"{tmp_path}/b/*.py") == ["b/2.py"]
    assert [path.name for path in find_files(f"{tmp_path}/**/*.py")] == ["c.py", "a.py", "z.py", "2.py"]


def test_nothing_is_normalised(tmp_path: Path) -> None:
    text = "\ufeffline\r\nline\rline\n\u2028e\u0301"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents(tmp_path / "a.txt") == [text]


def test_long_files_come_in_pieces_that_end_after_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "BLOCK", 64)
    lines = "".join(f"line {n} " + "ü🙂" * (n % 7) + "\n" for n in range(100))
    for text in (lines, lines.replace("\n", ""), lines + "\n" * 200, "x" * 64, "x" * 128):
        (tmp_path / "a.txt").write_bytes(text.encode())
        pieces = list(open_source(tmp_path / "a.txt").pieces())
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        if text is lines:
            assert len(pieces) > 5 and all(piece.text.endswith("\n") for piece in pieces)


def test_character_boundary() -> None:
    raw = "aü🙂".encode()
    assert [character_boundary(raw[:n]) for n in range(1, 8)] == [1, 1, 3, 3, 3, 3, 7]


def test_files_that_are_not_text_are_left_out_and_counted(tmp_path: Path, texts: list[str]) -> None:
    write_text(tmp_path, texts)
    (tmp_path / "000.gif").write_bytes(b"GIF89a\0\0")
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    source = open_source(tmp_path)
    assert [piece.text for piece in source.pieces()] == texts
    assert source.notices == [
        f"2 of {len(texts) + 2} files are not UTF-8 text: left out, the first is {tmp_path / '000.gif'}"
    ]


def test_half_surrogates_in_json_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b \\ud83d\\ude42"}\n{"text": null}\n\n{"text": "\\\\ud800"}\n')
    source = open_source(path)
    assert [piece.text for piece in source.pieces()] == ["a\ufffd b 🙂", "", "\\ud800"]
    assert source.notices == ["1 documents had half surrogate pairs, which became U+FFFD"]


def refused(path: Path | str, wanted: str, kind: str = "auto", text_key: str = "text") -> None:
    with pytest.raises(DataError, match=wanted) as caught:
        documents(path, kind, text_key)
    assert str(caught.value).rstrip().endswith((".", "?"))


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    refused(tmp_path / "corpus.text", r"does not exist.*did you mean 'corpus\.txt'\?")
    refused(tmp_path / "none" / "x", "does not exist")
    refused(f"{tmp_path}/*.md", "no file matches")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no files")
    refused(tmp_path / "empty" / "x", "is empty")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a file nor a folder")
    refused(tmp_path, "has no parquet files", "parquet")


def test_unknown_format(tmp_path: Path) -> None:
    refused(tmp_path, r"unknown data\.format 'parket'; did you mean 'parquet'\?", "parket")


def test_empty_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    refused(tmp_path / "a.txt", "is empty: 1 files of 0 bytes")
    (tmp_path / "a.txt").write_bytes(b"text\0binary")
    refused(tmp_path / "a.txt", r"not UTF-8 text \(byte 4 is 0x00\)")
    (tmp_path / "a.txt").write_bytes(b"text\xff")
    refused(tmp_path / "a.txt", r"not UTF-8 text \(byte 4 is 0xFF\)")
    (tmp_path / "b.txt").write_bytes(b"\xfe")
    refused(tmp_path, "none of the 2 data files is UTF-8 text")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    refused(tmp_path / "a.txt", "cannot be read: Permission denied")


def test_json_lines_with_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"txt": "x", "other": 1}\n')
    refused(path, r"line 2 of .*a\.jsonl has no 'text': did you mean 'txt'\? Set data\.text_key")
    path.write_text('{"text": "x"}\n{"text": "x"\n')
    refused(path, "line 2 of .* is not JSON")
    path.write_text("[" * 200_000)
    refused(path, "line 1 of .* is not JSON")
    path.write_text('["text"]\n')
    refused(path, "is a JSON list, not an object with a 'text' key")
    path.write_text('{"text": 5}\n')
    refused(path, "'text' in line 1 of .* is a int, not text")
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    refused(path, "cannot be read to its end")


def test_tables_with_faults(tmp_path: Path, texts: list[str]) -> None:
    path = write_parquet(tmp_path, texts)
    refused(path, r"has no 'content': .*known are 'n', 'text'|did you mean 'text'", text_key="content")
    refused(path, r"column 'n' of .* is int64, not text", text_key="n")
    path.write_bytes(path.read_bytes()[:-10])
    refused(path, "not a readable parquet file")
    path = write_arrow_stream(tmp_path, texts)
    refused(path, "has no 'txt': did you mean 'text'", text_key="txt")
    path.write_bytes(b"no arrow here at all")
    refused(path, "not a readable Arrow file")


def test_saved_datasets_with_faults(tmp_path: Path, texts: list[str]) -> None:
    import datasets

    path = write_dataset(tmp_path, texts)
    refused(path, "has no 'txt': did you mean 'text'", text_key="txt")
    (path / "state.json").write_text("{}")
    refused(path, "cannot be loaded by Hugging Face datasets")
    parts = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": texts})})
    parts.save_to_disk(str(tmp_path / "parts"))
    refused(tmp_path / "parts", "has the splits test and no 'train'")
