"""Where each token of a batch stands: its position, its document, and which tokens may see each other.

Built once per forward pass and shared by all layers, so that rotary tables and the cuts between documents are computed
once.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.model.rope import rope_table
from moesaic.spec.model import RopeSpec


class Sequences:
    """B rows of S tokens, flattened row after row wherever a tensor has a single token dimension T = B · S.

    `positions` [B, S] defaults to 0 … S − 1 in every row. `documents` [B, S] numbers the documents packed into a row;
    a document is a run of equal numbers, and a token sees only its own document. Negative numbers mark padding.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch = batch
        self.length = length
        self.positions = torch.arange(length, device=device)[None] if positions is None else positions
        self.documents = documents
        if documents is not None:
            self.positions = self.positions.expand(batch, length)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._segments: dict[int | None, tuple[int, ...]] = {}

    @classmethod
    def of(cls, ids: Tensor, positions: Tensor | None, documents: Tensor | None) -> Sequences:
        """The sequences of token ids [B, S]."""
        batch, length = ids.shape
        return cls(batch, length, positions, documents, ids.device)

    @cached_property
    def real(self) -> Tensor | None:
        """Which tokens [B, S] are not padding; None where all are."""
        if self.documents is None:
            return None
        real_BS = self.documents >= 0
        return None if bool(real_BS.all()) else real_BS

    def rope(self, spec: RopeSpec, key: str) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [1 or B, S, 1, R] of a rotary embedding; `key` identifies `spec`."""
        if key not in self._tables:
            lengths = self._document_lengths() if spec.kind == "longrope" else None
            self._tables[key] = rope_table(spec, self.positions, lengths)
        return self._tables[key]

    def _document_lengths(self) -> Tensor:
        """Last position + 1 of each token's document, [1 or B, 1 or S]."""
        if self.documents is None:
            return self.positions.amax(1, keepdim=True) + 1
        runs = self.positions.flatten().split(self.segments())
        lengths = [run.max().expand(len(run)) + 1 for run in runs]
        return torch.cat(lengths).view(self.batch, self.length)

    def segments(self, chunk: int | None = None) -> tuple[int, ...]:
        """Lengths of the runs of tokens that see nothing outside themselves, in order; they sum to T.

        Runs end with the row, with a document, and, given `chunk`, where position // chunk changes.
        """
        if chunk not in self._segments:
            self._segments[chunk] = self._cut(chunk)
        return self._segments[chunk]

    def _cut(self, chunk: int | None) -> tuple[int, ...]:
        rows = (self.length,) * self.batch
        if self.documents is None and chunk is None:
            return rows
        starts = torch.zeros(self.batch, self.length, dtype=torch.bool, device=self.positions.device)
        starts[:, 0] = True
        if self.documents is not None:
            starts[:, 1:] |= self.documents[:, 1:] != self.documents[:, :-1]
        if chunk is not None:
            chunks = self.positions // chunk
            starts[:, 1:] |= chunks[:, 1:] != chunks[:, :-1]
        edges = starts.flatten().nonzero().flatten().tolist() + [self.batch * self.length]
        return tuple(end - start for start, end in pairwise(edges))
