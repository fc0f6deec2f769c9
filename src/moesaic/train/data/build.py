"""From the tables of a run file to training and validation data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moesaic.train.data.bpe import train_bpe
from moesaic.train.data.dataset import TokenDataset
from moesaic.train.data.errors import DataError
from moesaic.train.data.files import resolve
from moesaic.train.data.megatron import read_megatron
from moesaic.train.data.packing import Sequences, Stream, require_sequences
from moesaic.train.data.sources import open_source
from moesaic.train.data.split import SPLIT_SEED, split, whole
from moesaic.train.data.store import TokenStore, cached_tokens, check_vocab
from moesaic.train.data.tokenizers import BytesTokenizer, JsonTokenizer, load_tokenizer

if TYPE_CHECKING:
    from moesaic.spec.run import RunSpec
    from moesaic.spec.tables import DataTable


@dataclass(frozen=True)
class Data:
    """What a run trains on.

    validation is None when nothing is held out, tokenizer when tokens come from a file and no tokenizer goes with
    them. notices: what was found, left out or derived, one line each, to be shown once and kept in the run's record.
    content: a hash of all tokens, training and validation, so that a resumed run can tell whether they are the same.
    """

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: BytesTokenizer | JsonTokenizer | None
    notices: list[str] = field(default_factory=list)
    content: str = ""


def build_data(run: RunSpec, vocab: int, cache_dir: str | Path, console: Console | None = None) -> Data:
    """The data of a run.

    vocab: size of the model's vocabulary. cache_dir: folder for tokenised files, shared by runs at will. Raises
    DataError for data, tokenizers and sizes that do not fit each other.
    """
    table = run.data
    if table.path is None:
        raise DataError("data.path is not set; give a text file, a folder, JSONL, parquet, Arrow or a Megatron pair.")
    notices: list[str] = []
    kind, _ = resolve(table.path, table.format)
    tokenizer: BytesTokenizer | JsonTokenizer | None = tokenizer_of(table, cache_dir, kind, console)
    store = read_tokens(table, table.path, tokenizer, vocab, cache_dir, notices, console)
    if kind == "megatron" and tokenizer is not None and not may_have_made(tokenizer, store):
        tokenizer = None
    if table.validation_path is not None:
        if table.validation_fraction > 0:
            raise DataError(
                f"both data.validation_path and data.validation_fraction = {table.validation_fraction:g} are set; "
                "keep one of them."
            )
        train = whole(store)
        held_out: Stream | None = whole(
            read_tokens(table, table.validation_path, tokenizer, vocab, cache_dir, notices, console)
        )
    else:
        train, held_out, how = split(store, table.validation_fraction)
        notices.append(f"validation: {how}")
    pad = tokenizer.document_end if tokenizer is not None and tokenizer.document_end is not None else 0
    seq_len = run.train.seq_len

    def dataset(stream: Stream, what: str) -> TokenDataset:
        training = what == "training"
        sequences = Sequences(
            stream,
            seq_len,
            pack=table.pack,
            mask=table.document_mask,
            keep_tail=not training,
            pad=pad if pad < vocab else 0,
        )
        require_sequences(sequences, what)
        size = (
            f"{stream.tokens:,} tokens in {stream.documents:,} documents, {len(sequences):,} sequences of {seq_len:,}"
        )
        if training:
            passes = run.train.steps * run.train.global_batch / len(sequences)
            size += f", seen {passes:.3g} times in {run.train.steps:,} steps"
        notices.append(f"{what}: {size}")
        return TokenDataset(
            sequences,
            vocab=vocab,
            global_batch=run.train.global_batch,
            micro_batch=run.layout.micro_batch,
            seed=run.train.seed if training else SPLIT_SEED,
        )

    validation = dataset(held_out, "validation") if held_out is not None else None
    content = train.store.content
    if held_out is not None and held_out.store is not train.store:
        content += "-" + held_out.store.content
    return Data(dataset(train, "training"), validation, tokenizer, notices, content)


def tokenizer_of(
    table: DataTable, cache_dir: str | Path, kind: str, console: Console | None = None
) -> BytesTokenizer | JsonTokenizer:
    """The tokenizer of a run; "bpe:8192" trains a byte-level BPE of 8192 ids on data.path, kept in the cache folder."""
    name = table.tokenizer
    if not name.startswith("bpe:"):
        return load_tokenizer(name)
    size = name.removeprefix("bpe:")
    if not size.isdecimal():
        raise DataError(f'data.tokenizer {name!r} has no size; write "bpe:8192" for a BPE of 8,192 tokens.')
    if kind == "megatron" or table.path is None:
        raise DataError(f"data.tokenizer {name!r} needs text to learn from; a Megatron pair has token ids only.")
    source = open_source(table.path, table.format, table.text_key)
    return load_tokenizer(train_bpe(source, int(size), Path(cache_dir) / f"bpe-{size}", console=console))


def read_tokens(
    table: DataTable,
    path: str,
    tokenizer: BytesTokenizer | JsonTokenizer | None,
    vocab: int,
    cache_dir: str | Path,
    notices: list[str],
    console: Console | None,
) -> TokenStore:
    """The tokens at `path`, from the cache, from a Megatron pair or tokenised now; adds to `notices`."""
    kind, files = resolve(path, table.format)
    if kind == "megatron":
        return read_pair(files[0], tokenizer, vocab, notices)
    if tokenizer is None:
        raise DataError(f"{path} is text, but the training data are tokens without a tokenizer; set data.tokenizer.")
    end = tokenizer.document_end if table.add_document_end else None
    if table.add_document_end and end is None:
        notices.append(f"tokenizer {tokenizer.name} has no token that ends a document; documents are laid end to end")
    if end is not None and end >= vocab:
        raise DataError(
            f"the document end of tokenizer {tokenizer.name} is id {end:,}, beyond the model's {vocab:,} ids; "
            f"give the model a vocab_size of at least {end + 1:,}, or set data.add_document_end = false."
        )
    source = open_source(path, table.format, table.text_key)
    store = cached_tokens(source, tokenizer, vocab=vocab, document_end=end, cache_dir=cache_dir, console=console)
    notices.append(f"data: {source.describe()}")
    notices.extend(f"data: {notice}" for notice in store.notices)
    return store


def read_pair(
    prefix: Path, tokenizer: BytesTokenizer | JsonTokenizer | None, vocab: int, notices: list[str]
) -> TokenStore:
    """A Megatron pair; the tokenizer, if it can have made the tokens, tells the bytes that they cover."""
    store = read_megatron(prefix)
    if store.max_id is not None:
        check_vocab(store.max_id, vocab, f"unknown, from {prefix}.bin")
    notices.append(f"data: megatron, {store.tokens:,} tokens in {prefix}.bin, with the document ends that it has")
    if tokenizer is None or tokenizer.bytes_table is None or not may_have_made(tokenizer, store):
        notices.append("data: bytes per token are unknown, so no bits per byte; a byte-level data.tokenizer tells them")
        return store
    return replace(store, bytes_table=tokenizer.bytes_table)


def may_have_made(tokenizer: BytesTokenizer | JsonTokenizer, store: TokenStore) -> bool:
    """Whether all ids of `store` are ids of `tokenizer`."""
    return store.max_id is not None and store.max_id < tokenizer.vocab_size
