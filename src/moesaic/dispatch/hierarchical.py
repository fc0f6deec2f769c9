"""A token crosses to a node once, whatever number of its experts live there, and fans out inside.

Results are summed inside the node first (in fp32, in the order of ranks) and cross once. So a rank sends to other
nodes, each way, D elements for each pair of an own token and another node that it needs, which is the least that any
dispatcher without compression can send. Rows cross between ranks of the same place on each node, as in DeepSeek-V3
(arXiv 2412.19437, §3.2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.dispatch.alltoall import gathered
from moesaic.dispatch.exchange import ExchangeRoute, places_of
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Chain, Route
from moesaic.mesh.group import Group


class HierarchicalDispatcher(Dispatcher):
    """Sends rows over `across`, one rank on each node, then over `inside`, the ranks of a node, then over `etp`.

    Expert-parallel rank i is rank i % m on node i // m, for m = `inside.size`.
    """

    name = "hierarchical"

    def __init__(self, experts_here: int, first_expert: int, across: Group, inside: Group, etp: Group) -> None:
        super().__init__(experts_here, first_expert)
        self.across = across
        self.inside = inside
        self.etp = etp

    def route(self, ids_TK: Tensor) -> Route:
        """To the nodes of the chosen experts, and there to their ranks."""
        nodes, each = self.across.size, self.inside.size
        goes_Tnm = places_of(ids_TK, self.experts_here, nodes * each).unflatten(1, (nodes, each))
        over = ExchangeRoute.of(goes_Tnm.any(2), self.across, ids_TK.shape[1])
        # Which ranks of its node a copy is for goes ahead, a byte for each: the second leg is planned with it.
        asked_Nm = torch.cat(
            [goes_Tnm[:, node].index_select(0, here) for node, here in enumerate(over.tokens_N.split(over.sent))]
        )
        goes_Rm = over.start_rows(asked_Nm.to(torch.uint8), "ranks asked").wait().bool()
        fan = ExchangeRoute.of(goes_Rm, self.inside, ids_TK.shape[1])
        return gathered(Chain(over, fan), sum(fan.received), self.etp)
