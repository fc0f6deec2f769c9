"""A token goes to each rank that has at least one of its experts, once.

Two choices on one rank share a row, and that rank's experts sum up what it sends back. So a rank sends, each way,
D elements for each pair of an own token and another rank that it needs: at most T · K · D · (n − 1)/n when every choice
is on a rank of its own (Megatron-Core's volume), and never more than an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dispatch.allgather import GatherRoute
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Arrival, Chain, Route, Then
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
        n = self.ep.size
        goes_Tn = torch.zeros(len(ids_TK), n, dtype=torch.bool, device=ids_TK.device)
        goes_nT = goes_Tn.scatter_(1, ids_TK // self.experts_here, True).t()
        tokens_N = goes_nT.nonzero()[:, 1]  # by rank, and for each rank in the order of tokens
        sent = goes_nT.sum(1).tolist()
        received = collectives.exchange_counts(sent, self.ep)
        route = ExchangeRoute(self.ep, len(ids_TK), tokens_N, sent, received)
        if self.etp.size == 1:
            return route
        rows = collectives.gather_counts(sum(received), self.etp)
        return Chain(route, GatherRoute(self.etp, rows))


@dataclass
class ExchangeRoute:
    """Of T tokens, those numbered `tokens_N` go out: the first `sent[0]` to rank 0 of the group, and so on.

    `received`: how many come from each rank.
    """

    group: Group
    tokens: int
    tokens_N: Tensor
    sent: list[int]
    received: list[int]

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin an all-to-all of copies of tokens."""
        rows_NW = x_TW.index_select(0, self.tokens_N)
        return collectives.start_all_to_all(rows_NW, self.group, self.sent, self.received, what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin the all-to-all back."""
        arrival = collectives.start_all_to_all(y_RW, self.group, self.received, self.sent, what)
        places_N, starts_T = self._bags  # made here, while rows travel

        def sum_by_token(rows_NW: Tensor) -> Tensor:
            # A lookup in a table of rows is the sum wanted: it reads each once and adds in fp32, in the order of ranks.
            return F.embedding_bag(places_N, rows_NW, starts_T, mode="sum", include_last_offset=True)

        return Then(arrival, sum_by_token)

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """Places in `tokens_N` ordered by token, and where each token's begin; one more for the end."""
        sorted_N, places_N = self.tokens_N.sort(stable=True)
        return places_N, torch.searchsorted(sorted_N, torch.arange(self.tokens + 1, device=sorted_N.device))
