"""A token goes to each rank that has at least one of its experts, once.

Two choices on one rank share a row, and that rank's experts sum up what it sends back. So a rank sends, each way,
D elements for each pair of an own token and another rank that it needs: at most T · K · D · (n − 1)/n when every choice
is on a rank of its own (Megatron-Core's volume), and never more than an all-gather.
"""

from __future__ import annotations

from torch import Tensor

from moesaic.dispatch.allgather import GatherRoute
from moesaic.dispatch.exchange import ExchangeRoute, places_of
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
        route = ExchangeRoute.of(places_of(ids_TK, self.experts_here, self.ep.size), self.ep)
        return gathered(route, sum(route.received), self.etp)


def gathered(route: Route, rows: int, etp: Group) -> Route:
    """`route`, by which that many rows come here, and then to all ranks that have a piece of the same experts."""
    return route if etp.size == 1 else Chain(route, GatherRoute(etp, collectives.gather_counts(rows, etp)))
