"""A route: where the tokens of one forward pass go.

Moving rows to the ranks of their experts is a linear map from own tokens [T, W] to the rows here [R, W]; bringing
results back, summed by token, is its transpose. Dispatch is the map and combine the transpose, and in backward they
change places. So these two are all that a dispatcher has to say, each cut in a start and a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Arrival(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """The rows, when they are there."""


@dataclass(frozen=True)
class Here:
    """Rows that need not travel."""

    rows: Tensor

    def wait(self) -> Tensor:
        """The rows."""
        return self.rows


@dataclass(frozen=True)
class Then:
    """Rows on their way to what `function` makes of them on arrival."""

    first: Arrival
    function: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """The result of `function`."""
        return self.function(self.first.wait())


class Route(Protocol):
    """The way of T own tokens to R rows on this rank, and back. `what` names the message in errors and in the meter."""

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin to send own tokens to where they are needed; the rows that arrive here are [R, W]."""

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin to send rows back; what arrives is [T, W], for each own token the sum of its rows on all ranks."""


class StraightRoute:
    """Everything is here: R = T."""

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """The tokens themselves."""
        return Here(x_TW)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """The rows themselves."""
        return Here(y_RW)


@dataclass(frozen=True)
class Chain:
    """One route after another: the rows of `first` are the tokens of `second`."""

    first: Route
    second: Route

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin the first part; the second follows on arrival."""
        arrival = self.first.start_spread(x_TW, what)
        if isinstance(arrival, Here):
            return self.second.start_spread(arrival.rows, what)
        return Then(arrival, lambda x: self.second.start_spread(x, what).wait())

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """The second part, whose end the first needs to begin."""
        return self.first.start_collect(self.second.start_collect(y_RW, what).wait(), what)
