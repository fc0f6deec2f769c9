"""The token cache: made once, whole or not at all, and noticed when it is damaged."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moesaic.train.data import BytesTokenizer, DataError, JsonTokenizer
from moesaic.train.data import store as store_module
from moesaic.train.data.sources import Piece, Source, open_source
from moesaic.train.data.store import TokenStore, cached_tokens


class CountingTokenizer(BytesTokenizer):
    """Bytes, and a count of the texts encoded; ends the process at the text "kill"."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded = 0

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        self.encoded += len(texts)
        if "kill" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def tokens_of(store: TokenStore) -> list[list[int]]:
    return [store.ids[b : b + n].tolist() for b, n in zip(store.begin, store.length, strict=True)]


def make(path: Path, cache: Path, tokenizer: BytesTokenizer | JsonTokenizer, end: int | None = 256) -> TokenStore:
    return cached_tokens(open_source(path), tokenizer, vocab=400, document_end=end, cache_dir=cache)


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    (tmp_path / "in").mkdir()
    for number, text in enumerate([*texts, ""]):
        (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode())
    return tmp_path / "in"


def test_tokens_document_ends_and_notices(folder: Path, tmp_path: Path, texts: list[str]) -> None:
    store = make(folder, tmp_path / "cache", BytesTokenizer())
    assert tokens_of(store) == [[*text.encode(), 256] for text in texts]
    assert store.max_id == 256 and store.ids.dtype == np.uint16
    assert store.notices == ["1 empty documents left out"]
    bare = make(folder, tmp_path / "cache", BytesTokenizer(), end=None)
    assert tokens_of(bare) == [list(text.encode()) for text in texts]


@pytest.mark.parametrize("batch", [1, 50, 1 << 20])
def test_bytes_by_token(
    folder: Path, tmp_path: Path, texts: list[str], metaspace_file: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BATCH_CHARACTERS", batch)
    tokenizer = JsonTokenizer(metaspace_file)
    assert tokenizer.document_end is not None
    store = make(folder, tmp_path / "cache", tokenizer, end=tokenizer.document_end)
    assert store.token_bytes is not None and store.bytes_table is None
    for text, b, n in zip(texts, store.begin, store.length, strict=True):
        assert int(store.token_bytes[b : b + n].sum()) == len(text.encode())
        assert store.token_bytes[b + n - 1] == 0 and store.ids[b + n - 1] == tokenizer.document_end
        assert store.ids[b : b + n - 1].tolist() == tokenizer.encode(text)


def test_second_time_nothing_is_encoded_and_notices_stay(folder: Path, tmp_path: Path) -> None:
    first, again = CountingTokenizer(), CountingTokenizer()
    one = make(folder, tmp_path / "cache", first)
    two = make(folder, tmp_path / "cache", again)
    assert first.encoded > 0 and again.encoded == 0
    assert tokens_of(one) == tokens_of(two) and one.notices == two.notices


def test_any_change_makes_new_tokens(folder: Path, tmp_path: Path, byte_level_file: Path) -> None:
    cache = tmp_path / "cache"
    make(folder, cache, BytesTokenizer())
    make(folder, cache, BytesTokenizer(), end=None)
    make(folder, cache, JsonTokenizer(byte_level_file), end=0)
    (folder / "0.txt").write_text("something else")
    make(folder, cache, BytesTokenizer())
    stat = (folder / "0.txt").stat()
    os.utime(folder / "0.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    make(folder, cache, BytesTokenizer())
    assert len(list(cache.glob("tokens-*/meta.json"))) == 5
    assert not list(cache.glob("*.part"))


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    with pytest.raises(DataError, match="line 2"):
        make(path, tmp_path / "cache", BytesTokenizer())
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def run_and_die(path: Path, cache: Path) -> None:
    make(path, cache, CountingTokenizer())


def test_a_killed_process_leaves_no_lock_and_no_half_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_CHARACTERS", 1)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "kill"}\n')
    process = multiprocessing.get_context("fork").Process(target=run_and_die, args=(path, tmp_path / "cache"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").glob("*.part"))) == 1
    assert not list((tmp_path / "cache").glob("*/meta.json"))
    store = make(path, tmp_path / "cache", BytesTokenizer())
    assert tokens_of(store) == [[*b"good", 256], [*b"kill", 256]]
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_second_process_waits_for_the_first(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    inside, proceed = context.Event(), context.Event()

    class Slow(Source):
        def pieces(self) -> Iterator[Piece]:
            inside.set()
            assert proceed.wait(60)
            return super().pieces()

    def first() -> None:
        source = Slow("text", open_source(folder).files)
        cached_tokens(source, BytesTokenizer(), vocab=400, document_end=256, cache_dir=cache)

    process = context.Process(target=first)
    process.start()
    assert inside.wait(60)

    class Announces(Console):
        def print(self, *objects: object, **options: object) -> None:
            said.append(str(objects[0]) if objects else "")
            proceed.set()

    said: list[str] = []
    tokenizer = CountingTokenizer()
    cached_tokens(
        open_source(folder), tokenizer, vocab=400, document_end=256, cache_dir=cache, console=Announces(quiet=True)
    )
    process.join()
    assert process.exitcode == 0 and tokenizer.encoded == 0
    assert said == ["waiting for another process that tokenises the same data"]


def test_ids_beyond_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    wanted = r"token id 2\d\d is beyond the model's vocabulary of 200 \(tokenizer bytes\).*vocab_size of at least 2\d\d"
    for _ in range(2):
        with pytest.raises(DataError, match=wanted):
            cached_tokens(
                open_source(folder), BytesTokenizer(), vocab=200, document_end=None, cache_dir=tmp_path / "cache"
            )
    make(folder, tmp_path / "cache", BytesTokenizer())
    with pytest.raises(DataError, match="token id 256 is beyond the model's vocabulary of 256"):
        cached_tokens(open_source(folder), BytesTokenizer(), vocab=256, document_end=256, cache_dir=tmp_path / "cache")


def test_only_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match="has no text: 3 documents, all of them empty"):
        make(path, tmp_path / "cache", BytesTokenizer())


def test_full_disk_and_cache_that_is_a_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"token cache .* cannot be written"):
        make(folder, tmp_path / "file", BytesTokenizer())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.np, "save", full)
    with pytest.raises(DataError, match=r"cannot be written: the disk is full.*Free some space"):
        make(folder, tmp_path / "cache", BytesTokenizer())
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def test_long_inputs_are_announced_where_no_bar_can_be_drawn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(slow: int, cache: str) -> str:
        monkeypatch.setattr(store_module, "SLOW", slow)
        out = io.StringIO()
        cached_tokens(
            open_source(folder),
            BytesTokenizer(),
            vocab=400,
            document_end=256,
            cache_dir=tmp_path / cache,
            console=Console(file=out),
        )
        return out.getvalue()

    size = sum(path.stat().st_size for path in folder.iterdir())
    assert said(size, "one") == f"tokenising: {size} bytes\n"
    assert said(size, "one") == ""
    assert said(size + 1, "two") == ""


def test_damaged_caches_get_a_sentence(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "cache", BytesTokenizer())
    [cache] = (tmp_path / "cache").glob("tokens-*/")
    whole = (cache / "ids.bin").read_bytes()
    (cache / "ids.bin").write_bytes(whole[:-2])
    with pytest.raises(DataError, match="is cut short; delete the folder"):
        make(folder, tmp_path / "cache", BytesTokenizer())
    (cache / "ids.bin").write_bytes(whole)
    meta = json.loads((cache / "meta.json").read_text())
    (cache / "meta.json").write_text(json.dumps(meta)[:-5])
    with pytest.raises(DataError, match="is damaged"):
        make(folder, tmp_path / "cache", BytesTokenizer())
