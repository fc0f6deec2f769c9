"""All ranks get all tokens: each computes its experts' part for every token, and the parts are summed at the owner.

Every rank sends T · D · (n − 1) elements each way for groups of n ranks, whatever the router chose and whatever K is
(MegaScale-MoE, arXiv 2505.11432, §4.2): less than an all-to-all when most tokens have an expert on most ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.parts import part_routes
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Arrival, Route
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
        """Half of the own tokens, other ranks' in chunks, the other half; each sum comes back to its owner."""
        goes_nT = torch.ones(self.group.size, len(ids_TK), dtype=torch.bool, device=ids_TK.device)
        cut = part_routes(goes_nT, self.group, chunks, self.group.size)
        return [cut.first, *cut.remote, cut.last]


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
