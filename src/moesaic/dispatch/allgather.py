"""All ranks get all tokens: each computes its experts' part for every token, and the parts are summed at the owner.

Every rank sends T · D · (n − 1) elements each way for groups of n ranks, whatever the router chose and whatever K is
(MegaScale-MoE, arXiv 2505.11432, §4.2): less than an all-to-all when most tokens have an expert on most ranks.

In parts it goes by source rank, as in that paper's fused kernels (§5.2): own tokens first, then those of other ranks as
they arrive, whose results go back to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.parts import OwnRoute, chunk_bounds, sum_of
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Arrival, Route, Then
from moesaic.mesh import collectives
from moesaic.mesh.group import Group


class AllGatherDispatcher(Dispatcher):
    """Gathers tokens over a group that holds each piece of each expert once."""

    name = "allgather"

    def __init__(self, experts_here: int, first_expert: int, group: Group) -> None:
        super().__init__(experts_here, first_expert)
        self.group = group

    def route(self, ids_TK: Tensor) -> Route:
        """To everybody."""
        return GatherRoute(self.group, collectives.gather_counts(len(ids_TK), self.group))

    def routes_of_parts(self, ids_TK: Tensor, chunks: int) -> list[Route]:
        """Half of the own tokens, those of other ranks in at most `chunks` groups of these, the other half."""
        tokens, counts = len(ids_TK), collectives.gather_counts(len(ids_TK), self.group)
        own_T = torch.arange(tokens, device=ids_TK.device)
        others = self.group.size - 1
        return [
            OwnRoute(tokens, own_T[: tokens // 2]),
            *(
                SourceRoute(self.group, counts, tuple(range(1 + a, 1 + b)))
                for a, b in chunk_bounds(others, min(chunks, others))
            ),
            OwnRoute(tokens, own_T[tokens // 2 :]),
        ]


@dataclass(frozen=True)
class GatherRoute:
    """Rows of all ranks of a group in rank order; rank i has `counts[i]` of them."""

    group: Group
    counts: list[int]

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin an all-gather."""
        return collectives.start_all_gather_rows(x_TW, self.group, self.counts, what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin a reduce-scatter."""
        return collectives.start_reduce_scatter_rows(y_RW, self.group, self.counts, what)


@dataclass(frozen=True)
class SourceRoute:
    """What some ranks of a group get of an all-gather, and what comes from others meanwhile.

    A rank sends its tokens to those `steps` further on and gets those of the ranks `steps` before it, so that every
    rank has a part with the same number of sources. Rank i has `counts[i]` tokens.
    """

    group: Group
    counts: list[int]
    steps: tuple[int, ...]

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin to send all own tokens; the rows of each source come one after another, in rank order."""
        copies = x_TW if len(self.steps) == 1 else x_TW.repeat(len(self.steps), 1)
        return collectives.start_all_to_all(copies, self.group, self._sent(), self._received(), what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin to send each source its rows back."""
        arrival = collectives.start_all_to_all(y_RW, self.group, self._received(), self._sent(), what)
        if len(self.steps) == 1:
            return arrival
        return Then(arrival, lambda rows_NW: sum_of(rows_NW.chunk(len(self.steps))))

    def _sent(self) -> list[int]:
        to = {(self.group.rank + step) % self.group.size for step in self.steps}
        return [self.counts[self.group.rank] if rank in to else 0 for rank in range(self.group.size)]

    def _received(self) -> list[int]:
        sources = {(self.group.rank - step) % self.group.size for step in self.steps}
        return [count if rank in sources else 0 for rank, count in enumerate(self.counts)]
