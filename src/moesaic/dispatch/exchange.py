"""Copies of tokens to the ranks of one group that need them, and their sums back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dispatch.route import Arrival, Then
from moesaic.mesh import collectives
from moesaic.mesh.dry import expected
from moesaic.mesh.group import Group


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

    @classmethod
    def of(cls, goes_Tn: Tensor, group: Group, top_k: int) -> ExchangeRoute:
        """The route of tokens that go to each rank of the group that `goes_Tn` names, for `top_k` choices each. Waits
        for other ranks' counts."""
        if (counts := expected()) is not None:
            sent, received = (f(len(goes_Tn), top_k, group.size) for f in (counts.sent, counts.received))
            tokens_N = goes_Tn.new_empty(sum(sent), dtype=torch.int64)
            return cls(group, len(goes_Tn), tokens_N, sent, received)
        goes_nT = goes_Tn.t()
        # By rank, and for each rank in the order of tokens. A copy, since autograd keeps it and not the ranks.
        tokens_N = goes_nT.nonzero()[:, 1].clone()
        sent = goes_nT.sum(1).tolist()
        return cls(group, len(goes_Tn), tokens_N, sent, collectives.exchange_counts(sent, group))

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin an all-to-all of copies of tokens."""
        return self.start_rows(x_TW.index_select(0, self.tokens_N), what)

    def start_rows(self, rows_NW: Tensor, what: str) -> Arrival:
        """Begin an all-to-all of rows that are made already, one for each copy."""
        return collectives.start_all_to_all(rows_NW, self.group, self.sent, self.received, what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin the all-to-all back."""
        arrival = collectives.start_all_to_all(y_RW, self.group, self.received, self.sent, what)
        places_N, starts_T = self._bags  # made here, while rows travel

        return Then(arrival, lambda rows_NW: sum_bags(rows_NW, places_N, starts_T))

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        return bags_of(self.tokens_N, self.tokens)


def bags_of(tokens_N: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Places in `tokens_N` ordered by token, and where each of `tokens` tokens' begin; one more for the end."""
    sorted_N, places_N = tokens_N.sort(stable=True)
    return places_N, torch.searchsorted(sorted_N, torch.arange(tokens + 1, device=sorted_N.device))


def sum_bags(rows_NW: Tensor, places_N: Tensor, starts_T: Tensor) -> Tensor:
    """The sum of each token's rows, [T, W], with the `bags_of` their tokens.

    A lookup in a table of rows is the sum wanted: it reads each once and adds in fp32, always in the same order.
    """
    return F.embedding_bag(places_N, rows_NW, starts_T, mode="sum", include_last_offset=True)


def places_of(ids_TK: Tensor, each: int, places: int) -> Tensor:
    """Which of `places` with `each` experts the choices need, bool [T, places]."""
    goes_Tn = torch.zeros(len(ids_TK), places, dtype=torch.bool, device=ids_TK.device)
    return goes_Tn.scatter_(1, ids_TK // each, True)
