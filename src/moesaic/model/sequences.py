"""Where each token of a batch stands: its position, its document, which tokens may see each other, and which are here.

Built once per forward pass and shared by all layers, so that rotary tables and the cuts between documents are computed
once. Every rank knows the whole rows; it attends for its context part of them, and between modules holds its own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.context import all_context_places, context_places, own_places
from moesaic.model.ring_plan import RingPlan, ring_plan
from moesaic.model.rope import rope_table
from moesaic.spec.model import RopeSpec


class Sequences:
    """B rows of S tokens, flattened row after row wherever a tensor has a single token dimension T = B · S.

    `positions` [1 or B, S] defaults to 0 … S − 1 in every row. `documents` [B, S] numbers the documents packed into a
    row; a document is a run of equal numbers, and a token sees only its own document. Negative numbers mark padding.
    `mesh` says which places of a row are here: `part_length` in the context part, `own_length` in this rank's own.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        device: torch.device | str = "cpu",
        mesh: Mesh | None = None,
    ) -> None:
        self.batch = batch
        self.length = length
        self.is_plain = positions is None and documents is None
        """Whether rows are whole, so that others of this shape stand at the same places."""
        self.positions = torch.arange(length, device=device)[None] if positions is None else positions
        self.documents = documents
        if documents is not None:
            self.positions = self.positions.expand(batch, length)
        self._part_S: Tensor | None = None
        self._own_S: Tensor | None = None
        self.part_length = self.own_length = length
        if mesh is not None and mesh.sequence.size > 1:
            cp, tp, kind = mesh.cp, mesh.tp, mesh.cp_kind
            if cp.size > 1:
                self._part_S = context_places(length, cp.size, cp.rank, kind).to(device)
            self._own_S = own_places(length, cp.size, cp.rank, tp.size, tp.rank, kind).to(device)
            self.part_length, self.own_length = length // cp.size, length // (cp.size * tp.size)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._segments: dict[int | None, tuple[int, ...]] = {}
        self._cp = Group.single("cp") if mesh is None else mesh.cp
        self._ring_plans: dict[tuple[int | None, int | None], RingPlan] = {}

    @classmethod
    def of(cls, ids: Tensor, positions: Tensor | None, documents: Tensor | None, mesh: Mesh | None = None) -> Sequences:
        """The sequences of token ids [B, S]."""
        batch, length = ids.shape
        return cls(batch, length, positions, documents, ids.device, mesh)

    def part(self, values_BS: Tensor) -> Tensor:
        """Of values for whole rows [1 or B, S], those of the context part."""
        return values_BS if self._part_S is None else values_BS.index_select(1, self._part_S)

    def own(self, values_BS: Tensor) -> Tensor:
        """Of values for whole rows [1 or B, S], those of this rank's own tokens."""
        return values_BS if self._own_S is None else values_BS.index_select(1, self._own_S)

    @cached_property
    def part_positions(self) -> Tensor:
        """Positions [1 or B, S/cp] of the context part."""
        return self.part(self.positions)

    @cached_property
    def real(self) -> Tensor | None:
        """Which tokens [B, S] of the whole rows are not padding; None where all are."""
        if self.documents is None:
            return None
        real_BS = self.documents >= 0
        return None if bool(real_BS.all()) else real_BS

    @cached_property
    def own_real(self) -> Tensor | None:
        """Which of this rank's own tokens [B, S_own] are not padding; None where no token of the rows is."""
        return None if self.real is None else self.own(self.real)

    def rope(self, spec: RopeSpec, key: str) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [1 or B, S/cp, 1, R] of a rotary embedding over the context part; `key` identifies
        `spec`."""
        if key not in self._tables:
            lengths = self._document_lengths() if spec.kind == "longrope" else None
            if lengths is not None and lengths.shape[1] > 1:
                lengths = self.part(lengths)
            self._tables[key] = rope_table(spec, self.part_positions, lengths)
        return self._tables[key]

    def tables(self) -> Iterator[Tensor]:
        """The rotary tables made so far, which all layers share."""
        return (table for pair in self._tables.values() for table in pair)

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

    def ring_plan(self, chunk: int | None, window: int | None) -> RingPlan:
        """This rank's work in the ring, for layers that cut segments by `chunk` and see at most `window` tokens."""
        key = (chunk, window)
        if key not in self._ring_plans:
            places = all_context_places(self.length, self._cp.size, "ring")
            ids_BS = self._segment_ids(chunk)
            self._ring_plans[key] = ring_plan(self.batch, ids_BS, places, self._cp.rank, window=window)
        return self._ring_plans[key]

    def _segment_ids(self, chunk: int | None) -> Tensor:
        """The number of its run of `segments` at each place of the whole rows, [B, S] int64, ascending."""
        lengths = torch.tensor(self.segments(chunk))
        return torch.arange(len(lengths)).repeat_interleave(lengths).view(self.batch, self.length)
