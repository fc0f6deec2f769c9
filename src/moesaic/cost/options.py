"""The dispatcher and the overlap that the cost model finds fastest for one layout, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout

from .rates import Stack, rates_for
from .step import step_time
from .workload import Columns, Workload


@dataclass(frozen=True)
class Option:
    """One choice with what it is predicted to take."""

    dispatcher: str
    overlap: tuple[str, ...]
    step_seconds: float


@dataclass(frozen=True)
class Choice:
    """The layout with the fastest options, and all options that were priced, fastest first."""

    layout: Layout
    options: tuple[Option, ...]

    def why(self) -> str:
        """A sentence with the predicted times of the choice and of the best one that differs."""
        best = self.options[0]
        text = f"{best.dispatcher} with overlap {_words(best.overlap)}: {_milliseconds(best.step_seconds)} predicted"
        if len(self.options) == 1:
            return text
        other = self.options[1]
        return f"{text}, {other.dispatcher} with {_words(other.overlap)} {_milliseconds(other.step_seconds)}"


def choose_options(
    work: Workload,
    layout: Layout,
    cluster: ClusterSpec,
    dispatchers: Sequence[str],
    overlaps: Sequence[tuple[str, ...]],
) -> Choice:
    """Price `layout` with each of `dispatchers` and `overlaps` for this package's trainer, and take the fastest; of
    equal ones the first."""
    made = [replace(layout, dispatcher=d, overlap=o) for o in overlaps for d in dispatchers]
    time = step_time(work, Columns.of(made), cluster, rates_for(cluster, Stack("moesaic")))
    order = sorted(range(len(made)), key=lambda row: float(time.total[row]))
    options = tuple(Option(made[row].dispatcher, made[row].overlap, float(time.total[row])) for row in order)
    return Choice(made[order[0]], options)


def _words(overlap: tuple[str, ...]) -> str:
    return ", ".join(overlap) if overlap else "none"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
