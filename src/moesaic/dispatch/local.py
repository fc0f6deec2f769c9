"""Every rank has all experts."""

from __future__ import annotations

from torch import Tensor

from moesaic.dispatch.protocol import Dispatched, Dispatcher, PendingCombine, PendingDispatch
from moesaic.dispatch.route import Route, StraightRoute


class LocalDispatcher(Dispatcher):
    """Nothing travels."""

    name = "local"

    def route(self, ids_TK: Tensor) -> Route:
        """Straight on."""
        return StraightRoute()

    def routes_of_parts(self, ids_TK: Tensor, chunks: int) -> list[Route]:
        """One: nothing travels that could be hidden."""
        return [StraightRoute()]

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> PendingDispatch:
        """Nothing to begin."""
        here = Dispatched(x_TD, ids_TK, weights_TK, StraightRoute())
        return PendingDispatch(lambda: here)

    def start_combine(self, y_RD: Tensor, handle: Route) -> PendingCombine:
        """Nothing to begin."""
        return PendingCombine(lambda: y_RD)
