"""Sequences for training, cut from documents.

A stream is a row of document parts laid end to end. Packed, it is cut every `seq_len` tokens; each window reads one
token more than it is long, so that every token of the stream but the first is a label exactly once per epoch and an
input exactly once. Unpacked, every document is cut for itself and the last piece is filled up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.train.data.errors import DataError
from moesaic.train.data.store import TokenStore

IGNORED = -100
"""Label of a place that is not trained, as in PyTorch's cross entropy."""
PADDING_DOCUMENT = -1
"""Document number of places that only fill up a sequence."""


@dataclass(frozen=True)
class Stream:
    """Parts of documents, end to end: part d is store.ids[begin[d] : begin[d] + length[d]]."""

    store: TokenStore
    begin: NDArray[np.int64]
    length: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream."""
        return int(self.length.sum())

    @property
    def documents(self) -> int:
        """Number of documents, or parts of documents."""
        return len(self.length)

    def offsets(self) -> NDArray[np.int64]:
        """Where each part begins in the stream, and the end: int64 [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.length)])

    def document_ids(self, index: int) -> NDArray[np.int64]:
        """The tokens of part `index`, int64."""
        start = int(self.begin[index])
        return np.asarray(self.store.ids[start : start + int(self.length[index])]).astype(np.int64)


@dataclass(frozen=True)
class Rows:
    """Sequences side by side, all int64 [B, S]: inputs, labels (IGNORED where not trained), position in the document,
    number of the document within the sequence (PADDING_DOCUMENT for filling); `bytes`: UTF-8 bytes of all labels."""

    ids_BS: NDArray[np.int64]
    labels_BS: NDArray[np.int64]
    positions_BS: NDArray[np.int64]
    documents_BS: NDArray[np.int64]
    tokens: int
    bytes: int


class Sequences:
    """The sequences of a stream, in stream order, by number.

    mask: no label crosses from one document into the next, positions start anew with each document.
    keep_tail: a last, shorter sequence is filled up; otherwise up to `seq_len` tokens at the end are dropped.
    """

    def __init__(
        self,
        stream: Stream,
        seq_len: int,
        *,
        pack: bool = True,
        mask: bool = True,
        keep_tail: bool = False,
        pad: int = 0,
    ) -> None:
        self.stream, self.seq_len, self.mask, self.pad = stream, seq_len, mask, pad
        self.offsets = stream.offsets()
        self.pack = pack
        if pack:
            labels = max(0, stream.tokens - 1)
            self.count = -(-labels // seq_len) if keep_tail else labels // seq_len
        else:
            # A document of one token has no label, hence no piece.
            pieces = -(-np.maximum(stream.length - 1, 0) // seq_len)
            self.first_piece = np.concatenate([[0], np.cumsum(pieces)])
            self.count = int(self.first_piece[-1])

    def __len__(self) -> int:
        return self.count

    def window(self, number: int) -> tuple[int, int]:
        """Stream positions [start, stop) that sequence `number` reads: inputs and, one further, labels."""
        if self.pack:
            start = number * self.seq_len
            return start, min(start + self.seq_len + 1, int(self.offsets[-1]))
        document = int(np.searchsorted(self.first_piece, number, side="right")) - 1
        start = int(self.offsets[document]) + (number - int(self.first_piece[document])) * self.seq_len
        return start, min(start + self.seq_len + 1, int(self.offsets[document + 1]))

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """The sequences `numbers` [B]."""
        shape = (len(numbers), self.seq_len)
        ids_BS = np.full(shape, self.pad, dtype=np.int64)
        labels_BS = np.full(shape, IGNORED, dtype=np.int64)
        positions_BS = np.broadcast_to(np.arange(self.seq_len, dtype=np.int64), shape).copy()
        documents_BS = np.full(shape, PADDING_DOCUMENT, dtype=np.int64)
        covered = 0
        for row, number in enumerate(numbers):
            ids, document, size = self.read(*self.window(int(number)))
            n = len(ids) - 1
            ids_BS[row, :n], labels = ids[:-1], ids[1:].copy()
            documents_BS[row, :n] = document[:-1] - document[0]
            size = size[1:]
            if self.mask:
                crosses = document[1:] != document[:-1]
                labels[crosses] = IGNORED
                size = size[~crosses]
                begins = np.concatenate([[0], np.flatnonzero(crosses[:-1]) + 1])
                positions_BS[row, :n] -= np.repeat(begins, np.diff(np.append(begins, n)))
            labels_BS[row, :n] = labels
            covered += int(size.sum())
        return Rows(ids_BS, labels_BS, positions_BS, documents_BS, int((labels_BS != IGNORED).sum()), covered)

    def read(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [start, stop) of the stream: ids, number of the document part, UTF-8 bytes covered (0 if unknown)."""
        store, stream = self.stream.store, self.stream
        ids = np.empty(stop - start, dtype=np.int64)
        size = np.zeros(stop - start, dtype=np.int64)
        document = np.empty(stop - start, dtype=np.int64)
        part = int(np.searchsorted(self.offsets, start, side="right")) - 1
        at = start
        while at < stop:
            end = min(int(self.offsets[part + 1]), stop)
            here = int(stream.begin[part]) + at - int(self.offsets[part])
            there, source = slice(at - start, end - start), slice(here, here + end - at)
            ids[there] = store.ids[source]
            document[there] = part
            if store.token_bytes is not None:
                size[there] = store.token_bytes[source]
            at, part = end, part + 1
        if store.bytes_table is not None:
            size = store.bytes_table[ids].astype(np.int64)
        return ids, document, size


def require_sequences(sequences: Sequences, what: str) -> None:
    """Raises DataError if there is not a single sequence, with the length that would fit."""
    if len(sequences):
        return
    tokens = sequences.stream.tokens
    if tokens < 2:
        raise DataError(f"the {what} data has {tokens} token(s); at least 2 are needed. Give more text.")
    if not sequences.pack:
        raise DataError(f"every document of the {what} data has a single token; nothing can be predicted.")
    raise DataError(
        f"the {what} data has {tokens:,} tokens, but one sequence takes train.seq_len + 1 = {sequences.seq_len + 1:,}; "
        f"set train.seq_len to {tokens - 1:,} or less, or give more text."
    )
