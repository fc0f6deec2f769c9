"""Documents as tokens: tokenised once, kept in memory-mapped files, shared by all processes that read the same."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.train.data.errors import DataError
from moesaic.train.data.sources import Piece, Source, human_bytes
from moesaic.train.data.tokenizers import Tokenizer

VERSION = 2
SLOW = 100_000_000
"""Bytes of input that take long enough to be announced."""
BATCH_CHARACTERS = 4 << 20
"""Characters that are tokenised together; enough to keep all threads of `tokenizers` busy."""


@dataclass(frozen=True)
class TokenStore:
    """Token ids of all documents.

    ids: one long array, memory-mapped; begin and length, int64 [documents]: document d is ids[begin : begin + length].
    token_bytes: UTF-8 bytes that each token covers, like ids; None where `bytes_table` by id tells, or nothing does.
    max_id: the largest id, None if not looked up. notices: what was left out when the documents were read.
    content: a hash of the tokens and of where documents begin.
    """

    ids: NDArray[Any]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    token_bytes: NDArray[np.uint16] | None = None
    bytes_table: NDArray[np.uint16] | None = None
    max_id: int | None = None
    notices: list[str] = field(default_factory=list)
    content: str = ""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.begin)

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.length.sum())


def cached_tokens(
    source: Source,
    tokenizer: Tokenizer,
    *,
    vocab: int,
    document_end: int | None,
    cache_dir: str | Path,
    console: Console | None = None,
) -> TokenStore:
    """The tokens of `source`, from the cache or tokenised now.

    vocab: ids must be below it. document_end: id put after each document, or None. The cache is a folder in `cache_dir`
    named by a hash of the files (path, size, time of change), the tokenizer and the settings. It appears whole or not
    at all; a second process that wants the same waits for the first. Raises DataError for text without tokens, ids
    beyond `vocab`, and a cache folder that cannot be written.
    """
    folder = Path(cache_dir) / f"tokens-{fingerprint(source, tokenizer, document_end)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock"), console):
            if not (folder / "meta.json").is_file():
                build(source, tokenizer, vocab, document_end, folder, console)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise DataError(
            f"the token cache {folder} cannot be written: {reason}; tokens of {source.size() / 1e6:,.0f} MB of input "
            "need up to twice that. Free some space, or run where there is more."
        ) from error
    store = load(folder, tokenizer)
    check_vocab(store.max_id or 0, vocab, tokenizer.name)
    return store


def fingerprint(source: Source, tokenizer: Tokenizer, document_end: int | None) -> str:
    """A name for the tokens that `source` gives: 24 hexadecimal digits."""
    files = []
    for path in source.all_files():
        stat = path.stat()
        files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    key = [VERSION, source.kind, source.text_key, tokenizer.fingerprint, document_end, files]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


@contextmanager
def locked(path: Path, console: Console | None) -> Iterator[None]:
    """Holds an exclusive lock on `path`; it ends with the process, however that ends."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            (console or Console(stderr=True)).print("waiting for another process that tokenises the same data")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(
    source: Source, tokenizer: Tokenizer, vocab: int, document_end: int | None, folder: Path, console: Console | None
) -> None:
    """Tokenises `source` into `folder`, through a neighbour that is renamed when complete."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    by_token = tokenizer.bytes_table is None
    lengths = array("q")
    content = hashlib.blake2b(digest_size=12)
    state = {"max_id": 0, "open": 0, "empty": 0, "text_bytes": 0}
    try:
        with (
            open(part / "ids.bin", "wb") as ids_file,
            open(part / "bytes.bin", "wb") as bytes_file,
            progress_bar(source.size(), console) as advance,
        ):

            def write_ids(ids: NDArray[Any]) -> None:
                raw = ids.tobytes()
                ids_file.write(raw)
                content.update(raw)

            def close_document() -> None:
                if state["open"] == 0:
                    state["empty"] += 1
                    return
                if document_end is not None:
                    write_ids(np.array([document_end], dtype=dtype))
                    if by_token:
                        bytes_file.write(np.zeros(1, dtype=np.uint16).tobytes())
                    state["open"] += 1
                    state["max_id"] = max(state["max_id"], document_end)
                lengths.append(state["open"])
                state["open"] = 0

            def flush(pieces: list[Piece]) -> None:
                for piece, (ids, covered) in zip(
                    pieces, tokenizer.encode_batch([piece.text for piece in pieces]), strict=True
                ):
                    if ids.size:
                        state["max_id"] = max(state["max_id"], int(ids.max()))
                        check_vocab(state["max_id"], vocab, tokenizer.name)
                        write_ids(ids.astype(dtype))
                        if covered is not None:
                            bytes_file.write(covered.tobytes())
                        state["open"] += ids.size
                    if piece.ends_document:
                        close_document()
                if pieces:
                    advance(pieces[-1].read)

            pending: list[Piece] = []
            waiting = 0
            for piece in source.pieces():
                pending.append(piece)
                waiting += len(piece.text)
                if waiting >= BATCH_CHARACTERS:
                    flush(pending)
                    pending, waiting = [], 0
            flush(pending)
        if not lengths:
            raise DataError(
                f"the data in {source.files[0]} has no text: {state['empty']:,} documents, all of them empty."
            )
        notices = list(source.notices)
        if state["empty"]:
            notices.append(f"{state['empty']:,} empty documents left out")
        np.save(part / "lengths.npy", np.frombuffer(lengths, dtype=np.int64))
        content.update(lengths.tobytes())
        meta = {
            "version": VERSION,
            "dtype": dtype.name,
            "tokens": sum(lengths),
            "documents": len(lengths),
            "max_id": state["max_id"],
            "bytes_by_token": by_token,
            "notices": notices,
            "content": content.hexdigest(),
        }
        (part / "meta.json").write_text(json.dumps(meta, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load(folder: Path, tokenizer: Tokenizer) -> TokenStore:
    """A finished cache. Raises DataError if its files disagree."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        ids = np.memmap(folder / "ids.bin", dtype=meta["dtype"], mode="r")
        length = np.load(folder / "lengths.npy")
        covered = np.memmap(folder / "bytes.bin", dtype=np.uint16, mode="r") if meta["bytes_by_token"] else None
        whole = ids.size == length.sum() == meta["tokens"] and (covered is None or covered.size == ids.size)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the token cache {folder} is damaged ({error}); delete the folder and start again.") from error
    if not whole:
        raise DataError(f"the token cache {folder} is cut short; delete the folder and start again.")
    begin = np.concatenate([[0], np.cumsum(length)[:-1]])
    return TokenStore(
        ids,
        begin,
        length,
        covered,
        tokenizer.bytes_table,
        max_id=meta["max_id"],
        notices=list(meta["notices"]),
        content=meta["content"],
    )


def check_vocab(max_id: int, vocab: int, tokenizer: str) -> None:
    """Raises DataError if token ids reach beyond the model's vocabulary."""
    if max_id >= vocab:
        raise DataError(
            f"token id {max_id:,} is beyond the model's vocabulary of {vocab:,} (tokenizer {tokenizer}); use the "
            f"tokenizer that belongs to the model, or give the model a vocab_size of at least {max_id + 1:,}."
        )


@contextmanager
def progress_bar(total: int, console: Console | None, what: str = "tokenising") -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of the input that vanishes when done; yields a function that takes the bytes read so far.

    Where there is no terminal to draw on, one line for inputs that take a while.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        if total >= SLOW:
            console.print(f"{what}: {human_bytes(total)}")
        yield lambda read: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=max(1, total))
        shown = 0

        def advance(read: int) -> None:
            # Updates take longer than short documents, so only visible ones are made.
            nonlocal shown
            if read - shown >= total / 500:
                shown = read
                progress.update(task, completed=read)

        yield advance
