"""What a dispatcher promises, and how its two directions are differentiated.

`dispatch` brings tokens to the ranks that hold their experts, `combine` brings back sums over experts. Each is also a
pair of start and finish, so that other work can stand between; in backward that work stands between the same two, since
autograd runs nodes in the reverse order of their making. Dispatchers own no parameters.

Letters: T own tokens, K choices per token, R rows on this rank, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.parts import ChunkRoute, OwnRoute, chunk_bounds, sum_of
from moesaic.dispatch.route import Arrival, Route
from moesaic.mesh.autograd import Finish, Leg, Start


@dataclass(frozen=True)
class Dispatched:
    """The rows that this rank's experts compute.

    rows_RD: one row per token that has work here; ids_RK: experts of this rank that each row goes through, counted from
    this rank's first, −1 for choices that are elsewhere; weights_RK: the router weights of those choices, fp32.
    `handle` is for `combine`.
    """

    rows_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    handle: Route


class Dispatcher(ABC):
    """Tokens to experts and back. All ranks of the expert group call the same methods in the same order."""

    name: str

    def __init__(self, experts_here: int, first_expert: int) -> None:
        self.experts_here = experts_here
        self.first_expert = first_expert

    @abstractmethod
    def route(self, ids_TK: Tensor) -> Route:
        """The route of tokens that chose the experts `ids_TK` (of all experts). May wait for other ranks' counts."""

    def routes_of_parts(self, ids_TK: Tensor, chunks: int) -> list[Route]:
        """Routes whose sum is `route`, in the order in which experts should compute them.

        Those that do not travel come first and last. Here `chunks` ranges of tokens, each on its own route.
        """
        tokens = len(ids_TK)
        return [ChunkRoute(self.route(ids_TK[a:b]), a, b, tokens) for a, b in chunk_bounds(tokens, chunks)]

    def leg(self, ids_TK: Tensor) -> DispatchLeg:
        """The message that brings tokens with these choices, over `route` unless a library makes routes as it sends."""
        return self.leg_over(self.route(ids_TK), ids_TK)

    def leg_over(self, route: Route, ids_TK: Tensor) -> DispatchLeg:
        """The message that brings tokens with these choices over this route."""
        return _DispatchLeg(route, ids_TK, self.first_expert, self.experts_here)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Tokens x_TD with their choices to the ranks of these experts. Gradients flow to x and to the weights."""
        return self.start_dispatch(x_TD, ids_TK, weights_TK).finish()

    def combine(self, y_RD: Tensor, handle: Route) -> Tensor:
        """For each own token the sum of its rows y on all ranks, y_TD."""
        return self.start_combine(y_RD, handle).finish()

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> PendingDispatch:
        """Begin `dispatch`. x may not change before `finish`."""
        return self._start(self.leg(ids_TK), x_TD, weights_TK)

    def start_parts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, chunks: int) -> list[PendingDispatch]:
        """Begin `dispatch` in parts, those that travel cut in `chunks`, the same number on all ranks.

        Finish them in order, each followed by its experts and `start_combine`; `finish_parts` then gives y_TD.
        """
        routes = self.routes_of_parts(ids_TK, chunks)
        wide_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        # What travels is on its way before anything is copied for the own parts.
        order = sorted(range(len(routes)), key=lambda i: isinstance(routes[i], OwnRoute))
        started = {i: self._start(self.leg_over(routes[i], ids_TK), x_TD, wide_TK) for i in order}
        return [started[i] for i in range(len(routes))]

    @staticmethod
    def finish_parts(combines: list[PendingCombine]) -> Tensor:
        """The sum of all parts, y_TD."""
        # Own parts first: backward goes the other way, and sends gradients off before it copies rows for itself.
        order = sorted(range(len(combines)), key=lambda i: not combines[i].stays)
        found = {i: combines[i].finish() for i in order}
        return sum_of([found[i] for i in range(len(combines))])

    @staticmethod
    def _start(leg: DispatchLeg, x_TD: Tensor, weights_TK: Tensor) -> PendingDispatch:
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        token = Start.apply(leg, x_TD, weights_TK.to(wide))

        def finish() -> Dispatched:
            rows_RD, weights_RK = Finish.apply(leg, token)
            ids_RK, leg.ids_RK = leg.ids_RK, None  # autograd keeps the leg, and need not keep these
            assert ids_RK is not None
            return Dispatched(rows_RD, ids_RK, weights_RK, leg.route)

        return PendingDispatch(finish)

    def start_combine(self, y_RD: Tensor, handle: Route) -> PendingCombine:
        """Begin `combine`. y may not change before `finish`."""
        leg = _CombineLeg(handle)
        token = Start.apply(leg, y_RD)
        return PendingCombine(lambda: Finish.apply(leg, token)[0], stays=isinstance(handle, OwnRoute))


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch under way."""

    _finish: Callable[[], Dispatched]

    def finish(self) -> Dispatched:
        """Wait for the rows."""
        return self._finish()


@dataclass(frozen=True)
class PendingCombine:
    """A combine under way, or rows that have nowhere to go."""

    _finish: Callable[[], Tensor]
    stays: bool = False

    def finish(self) -> Tensor:
        """Wait for the sums, y_TD."""
        return self._finish()


class DispatchLeg(Leg):
    """Tokens and weights out, their gradients back. Has a route and, once finished, the choices that are here."""

    route: Route
    ids_RK: Tensor | None


class _DispatchLeg(DispatchLeg):
    def __init__(self, route: Route, ids_TK: Tensor, first: int, experts: int) -> None:
        self.route, self.first, self.experts = route, first, experts
        self.ids_TK: Tensor | None = ids_TK
        self.arrivals: list[Arrival | None] = []

    def start(self, *tensors: Tensor) -> None:
        x_TD, weights_TK = tensors
        assert self.ids_TK is not None
        # Choices and weights are one message: numbers of the same size, whatever they mean.
        choices_TJ = torch.cat(
            (self.ids_TK.to(_BITS[weights_TK.itemsize]), weights_TK.view(_BITS[weights_TK.itemsize])), 1
        )
        self.ids_TK, self.weights_dtype = None, weights_TK.dtype
        self.arrivals = [
            self.route.start_spread(choices_TJ, "routing"),
            self.route.start_spread(x_TD, "dispatch"),
        ]

    def finish(self) -> tuple[Tensor, ...]:
        choices, rows = self.arrivals
        assert choices is not None and rows is not None
        self.arrivals = []
        rows_RD = rows.wait()  # first: another lane may use this wait, and the choices arrive meanwhile
        ids_RK, weights_RK = choices.wait().chunk(2, 1)
        ids_RK = ids_RK.long() - self.first
        self.ids_RK = ids_RK.masked_fill_((ids_RK < 0) | (ids_RK >= self.experts), -1)
        return rows_RD, weights_RK.contiguous().view(self.weights_dtype)

    def start_backward(self, *grads: Tensor) -> None:
        names = ("dispatch gradient", "routing gradient")
        self.arrivals = [
            self.route.start_collect(grad, name) if wanted else None
            for grad, name, wanted in zip(grads, names, self.wants, strict=True)
        ]

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        arrivals, self.arrivals = self.arrivals, []
        return tuple(None if arrival is None else arrival.wait() for arrival in arrivals)


class _CombineLeg(Leg):
    def __init__(self, route: Route) -> None:
        self.route = route
        self.arrival: Arrival | None = None

    def start(self, *tensors: Tensor) -> None:
        self.arrival = self.route.start_collect(tensors[0], "combine")

    def finish(self) -> tuple[Tensor, ...]:
        return (self._arrived(),)

    def start_backward(self, *grads: Tensor) -> None:
        self.arrival = self.route.start_spread(grads[0], "combine gradient")

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        return (self._arrived(),)

    def _arrived(self) -> Tensor:
        assert self.arrival is not None
        arrival, self.arrival = self.arrival, None
        return arrival.wait()


_BITS = {4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as the router weights."""
