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

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> PendingDispatch:
        """Nothing to begin."""
        here = Dispatched(x_TD, ids_TK, weights_TK, StraightRoute())
        return PendingDispatch(lambda: here)

    def start_parts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, chunks: int) -> list[PendingDispatch]:
        """One: nothing travels that could be hidden."""
        return [self.start_dispatch(x_TD, ids_TK, weights_TK)]

    def start_combine(self, y_RD: Tensor, handle: Route) -> PendingCombine:
        """Nothing to begin."""
        return PendingCombine(lambda: y_RD)
