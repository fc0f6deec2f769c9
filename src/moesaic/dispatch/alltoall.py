"""A token goes to each rank that has at least one of its experts, once.

Two choices on one rank share a row, and that rank's experts sum up what it sends back. So a rank sends, each way,
D elements for each pair of an own token and another rank that it needs: at most T · K · D · (n − 1)/n when every choice
is on a rank of its own (Megatron-Core's volume), and never more than an all-gather.
"""

from __future__ import annotations

from torch import Tensor

from moesaic.dispatch.allgather import GatherRoute
from moesaic.dispatch.exchange import ExchangeRoute, places_of
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
        route = ExchangeRoute.of(places_of(ids_TK, self.experts_here, self.ep.size), self.ep, ids_TK.shape[1])
        return gathered(route, sum(route.received), self.etp)

    def routes_of_parts(self, ids_TK: Tensor, chunks: int) -> list[Route]:
        """Half of what stays here, what travels in chunks of tokens, the other half."""
        cut = part_routes(places_of(ids_TK, self.experts_here, self.ep.size).t(), self.ep, chunks, ids_TK.shape[1])
        routes: list[Route] = [cut.first, *cut.remote, cut.last]
        if self.etp.size == 1:
            return routes
        counts = [len(cut.first.tokens_N), *(sum(each.received) for each in cut.remote), len(cut.last.tokens_N)]
        rows = collectives.exchange_count_lists([[count] * self.etp.size for count in counts], self.etp)
        return [Chain(route, GatherRoute(self.etp, each)) for route, each in zip(routes, rows, strict=True)]


def gathered(route: Route, rows: int, etp: Group) -> Route:
    """`route`, by which that many rows come here, and then to all ranks that have a piece of the same experts."""
    return route if etp.size == 1 else Chain(route, GatherRoute(etp, collectives.gather_counts(rows, etp)))
