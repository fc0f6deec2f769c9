"""All ranks get all tokens: each computes its experts' part for every token, and the parts are summed at the owner.

Every rank sends T · D · (n − 1) elements each way for groups of n ranks, whatever the router chose and whatever K is
(MegaScale-MoE, arXiv 2505.11432, §4.2): less than an all-to-all when most tokens have an expert on most ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class GatherRoute:
    """Rows of all ranks of a group in rank order; rank i has `counts[i]` of them."""

    group: Group
    counts: list[int]

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin an all-gather."""
        n = self.group.size
        sent = [len(x_TW)] * n
        return collectives.start_all_to_all(x_TW.repeat(n, 1), self.group, sent, self.counts, what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin a reduce-scatter, which adds in rank order."""
        n, own = self.group.size, self.counts[self.group.rank]
        parts = collectives.start_all_to_all(y_RW, self.group, self.counts, [own] * n, what)
        return Then(parts, lambda parts: _sum(parts.unflatten(0, (n, own))))


def _sum(parts: Tensor) -> Tensor:
    """Sum over the first dimension in order, in fp32 for narrower floats."""
    if parts.itemsize < 4:
        return parts.sum(0, dtype=torch.float32).to(parts.dtype)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
