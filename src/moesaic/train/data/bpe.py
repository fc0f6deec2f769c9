"""A byte-level BPE tokenizer trained on the user's own text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from moesaic.train.data.errors import DataError
from moesaic.train.data.sources import Source, open_source
from moesaic.train.data.store import fingerprint, locked, progress_bar
from moesaic.train.data.tokenizers import DOCUMENT_END, BytesTokenizer

SMALLEST, LARGEST = 257, 1 << 22
"""256 bytes and the document end; and far more than any model has, for which memory is claimed at once."""


def train_bpe(
    files: str | Path | Sequence[str | Path] | Source,
    vocab: int,
    out: str | Path,
    *,
    console: Console | None = None,
) -> Path:
    """Trains a byte-level BPE of `vocab` ids (256 bytes and the document end among them) and writes it to `out`.

    files: a path as in data.path, a list of files, or a source. out: a tokenizer.json, or a folder to put one in.
    Does nothing if `out` was already trained on the same files with the same size. Returns the path of the
    tokenizer.json. Raises DataError for a vocabulary below 257 or above 2^22, for data without text and for text too
    small to give that many ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < SMALLEST:
        raise DataError(f"a BPE vocabulary of {vocab} is too small: 256 bytes and the document end are {SMALLEST}.")
    if vocab > LARGEST:
        raise DataError(f"a BPE vocabulary of {vocab:,} is too large: at most {LARGEST:,} tokens can be learned.")
    source = as_source(files)
    target = Path(out)
    if target.suffix != ".json":
        target = target / "tokenizer.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = target.with_name(target.stem + ".source.json")
    wanted = {"vocab": vocab, "source": fingerprint(source, BytesTokenizer(), None)}
    with locked(target.with_suffix(".lock"), console):
        if target.is_file() and record.is_file() and read_record(record) == wanted:
            return target
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[DOCUMENT_END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with progress_bar(source.size(), console, "learning the tokenizer") as advance:

            def texts() -> Iterator[str]:
                for piece in source.pieces():
                    yield piece.text
                    advance(piece.read)

            backend.train_from_iterator(texts(), trainer)
        found = backend.get_vocab_size()
        if found < vocab:
            raise DataError(
                f"the text in {source.files[0]} ({source.size():,} bytes) gives only {found:,} different BPE tokens, "
                f"fewer than the {vocab:,} asked for; ask for {found:,} or give more text."
            )
        for path, content in ((target, backend.to_str(pretty=False)), (record, json.dumps(wanted))):
            write_whole(path, content)
    return target


def write_whole(path: Path, content: str) -> None:
    """Writes a file whole or not at all. Raises DataError, a full disk among the reasons."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; make room or set MOESAIC_CACHE.") from error
    finally:
        part.unlink(missing_ok=True)


def as_source(files: str | Path | Sequence[str | Path] | Source) -> Source:
    """A source from whatever names files."""
    if isinstance(files, Source):
        return files
    if isinstance(files, (str, Path)):
        return open_source(files)
    paths = [Path(file) for file in files]
    if not paths:
        raise DataError("the list of files to train a tokenizer on is empty.")
    for path in paths:
        if not path.is_file():
            raise DataError(f"the data file {path} does not exist.")
    return Source("text", paths)


def read_record(path: Path) -> object:
    """What an earlier training wrote, None if it is unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
