"""A token goes to each rank that has at least one of its experts, once.

Two choices on one rank share a row, and that rank's experts sum up what it sends back. So a rank sends, each way,
D elements for each pair of an own token and another rank that it needs: at most T · K · D · (n − 1)/n when every choice
is on a rank of its own (Megatron-Core's volume), and never more than an all-gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.dispatch.allgather import GatherRoute
from moesaic.dispatch.exchange import ExchangeRoute
from moesaic.dispatch.parts import part_routes
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Chain, Route
from moesaic.mesh import collectives
from moesaic.mesh.group import Group


class AllToAllDispatcher(Dispatcher):
    """Sends rows over the expert-parallel group and, where experts are cut, gathers them over the ranks of the cut."""

    name = "alltoall"

    def __init__(self, experts_here: int, first_expert: int, ep: Group, etp: Group) -> None:
        super().__init__(experts_here, first_expert)
        self.ep = ep
        self.etp = etp

    def route(self, ids_TK: Tensor) -> Route:
        """To the ranks of the chosen experts."""
        goes_nT = self._goes(ids_TK)
        tokens_N = goes_nT.nonzero()[:, 1]  # by rank, and for each rank in the order of tokens
        sent = goes_nT.sum(1).tolist()
        received = collectives.exchange_counts(sent, self.ep)
        route = ExchangeRoute(self.ep, len(ids_TK), tokens_N, sent, received)
        if self.etp.size == 1:
            return route
        rows = collectives.gather_counts(sum(received), self.etp)
        return Chain(route, GatherRoute(self.etp, rows))

    def routes_of_parts(self, ids_TK: Tensor, chunks: int) -> list[Route]:
        """Half of what stays here, what travels in chunks of tokens, the other half."""
        cut = part_routes(self._goes(ids_TK), self.ep, chunks)
        routes: list[Route] = [cut.first, *cut.remote, cut.last]
        if self.etp.size == 1:
            return routes
        counts = [len(cut.first.tokens_N), *(sum(each.received) for each in cut.remote), len(cut.last.tokens_N)]
        rows = collectives.exchange_count_lists([[count] * self.etp.size for count in counts], self.etp)
        return [Chain(route, GatherRoute(self.etp, each)) for route, each in zip(routes, rows, strict=True)]

    def _goes(self, ids_TK: Tensor) -> Tensor:
        """Whether a rank holds an expert of a token, [n, T]."""
        goes_Tn = torch.zeros(len(ids_TK), self.ep.size, dtype=torch.bool, device=ids_TK.device)
        return goes_Tn.scatter_(1, ids_TK // self.experts_here, True).t()
