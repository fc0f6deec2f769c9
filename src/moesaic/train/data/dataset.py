"""Batches of tensors, by step number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.train.data.order import permuted, sequences_at
from moesaic.train.data.packing import Sequences
from moesaic.train.data.store import check_vocab


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    ids_BS, labels_BS: int64; labels are the ids one place on, −100 where nothing is trained. positions_BS,
    documents_BS: int64, position within the document and number of the document within the sequence (−1 for filling).
    Without document masks positions_BS is None, and so is documents_BS unless there is filling. tokens: labels that
    count. bytes: UTF-8 bytes of those labels, 0 if unknown.
    """

    ids_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None
    documents_BS: Tensor | None
    tokens: int
    bytes: int

    @property
    def places(self) -> int:
        """Places that hold a token: all but filling."""
        return self.ids_BS.numel() if self.documents_BS is None else int((self.documents_BS >= 0).sum())


class TokenDataset:
    """Sequences in an order that depends on the seed alone.

    `batches(step)` is the same whenever it is asked for and for any micro-batch size, so a resumed run needs the step
    number only. Steps are counted from 0 and never end; each epoch has its own order and each sequence once.
    """

    def __init__(self, sequences: Sequences, *, vocab: int, global_batch: int, micro_batch: int, seed: int) -> None:
        self.sequences = sequences
        self.vocab = vocab
        self.global_batch, self.micro_batch, self.seed = global_batch, micro_batch, seed

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """Tokens in the documents behind the sequences."""
        return self.sequences.stream.tokens

    @property
    def documents(self) -> int:
        """Documents behind the sequences."""
        return self.sequences.stream.documents

    @property
    def knows_bytes(self) -> bool:
        """Whether `Batch.bytes` is counted, so that a loss can be given in bits per byte."""
        store = self.sequences.stream.store
        return store.bytes_table is not None or store.token_bytes is not None

    def document_tokens(self) -> Iterator[NDArray[np.int64]]:
        """The ids of each document in turn, for statistics."""
        for index in range(self.documents):
            yield self.sequences.stream.document_ids(index)

    def epoch(self, step: int) -> float:
        """How often the data has been gone through when `step` begins."""
        return step * self.global_batch / len(self)

    def sequence_numbers(self, step: int) -> NDArray[np.int64]:
        """Numbers of the `global_batch` sequences of a step, int64 [global_batch]."""
        return sequences_at(step * self.global_batch, self.global_batch, len(self), self.seed)

    def batches(self, step: int, share: int = 0, shares: int = 1) -> list[Batch]:
        """The micro-batches of a step; the last is smaller where the micro-batch does not divide the global batch.

        Of `shares` data-parallel ranks, number `share` gets every `shares`-th of them.
        """
        numbers = self.sequence_numbers(step)
        starts = range(0, len(numbers), self.micro_batch)[share::shares]
        return [self.batch(numbers[i : i + self.micro_batch]) for i in starts]

    def once(self, limit: int | None = None) -> Iterator[Batch]:
        """Micro-batches over at most `limit` sequences (all if None), each once, in the same order every time."""
        count = len(self) if limit is None else min(limit, len(self))
        for start in range(0, count, self.micro_batch):
            places = np.arange(start, min(start + self.micro_batch, count))
            yield self.batch(permuted(places, len(self), self.seed, 0))

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        """The sequences `numbers` [B] as tensors. Raises DataError for an id beyond the vocabulary."""
        rows = self.sequences.rows(numbers)
        check_vocab(int(rows.ids_BS.max()), self.vocab, "of the data")
        check_vocab(int(rows.labels_BS.max()), self.vocab, "of the data")
        documents_BS: NDArray[np.int64] | None = rows.documents_BS
        if not self.sequences.mask:
            # One document a row; filling stays marked, so that routing statistics can leave it out.
            documents_BS = np.minimum(rows.documents_BS, 0)
            if not documents_BS.any():
                documents_BS = None
        return Batch(
            torch.from_numpy(rows.ids_BS),
            torch.from_numpy(rows.labels_BS),
            torch.from_numpy(rows.positions_BS) if self.sequences.mask else None,
            None if documents_BS is None else torch.from_numpy(documents_BS),
            rows.tokens,
            rows.bytes,
        )
