"""The dispatcher, the overlap and the modules to recompute that the cost model finds fastest for a layout, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec

from .habits import MOESAIC, Habits
from .memory import memory
from .rates import Stack, rates_for
from .step import step_time
from .workload import Columns, Workload

_GIB = 2**30


@dataclass(frozen=True)
class Option:
    """One choice with what it is predicted to take."""

    dispatcher: str
    overlap: tuple[str, ...]
    recompute: tuple[str, ...]
    step_seconds: float
    held_bytes: float
    """Of memory, on the rank that needs most."""
    fits: bool

    def __str__(self) -> str:
        recompute = f", recompute {_words(self.recompute)}" if self.recompute else ""
        return f"{self.dispatcher}, overlap {_words(self.overlap)}{recompute}"


@dataclass(frozen=True)
class Choice:
    """The layout with the fastest options that fit, and all options that were priced: those that fit first, the fastest
    first."""

    layout: Layout
    options: tuple[Option, ...]

    def why(self) -> str:
        """A sentence with the predicted times of the choice and of the best one that differs."""
        best = self.options[0]
        text = f"{best}: {_milliseconds(best.step_seconds)} predicted"
        if len(self.options) == 1:
            return text
        other = self.options[1]
        lacking = "" if other.fits else ", which does not fit"
        return f"{text}, {other} {_milliseconds(other.step_seconds)}{lacking}"

    def recomputes(self, most: int = 8) -> list[str]:
        """Lines of a table of what could be recomputed with the chosen dispatcher and overlap: memory, time, whether it
        fits; `most` of them, from keeping everything on, without sets that another beats in both."""
        best = self.options[0]
        same = [each for each in self.options if (each.dispatcher, each.overlap) == (best.dispatcher, best.overlap)]
        front: list[Option] = []
        for each in sorted(same, key=_order):
            if not front or each.held_bytes < front[-1].held_bytes:
                front.append(each)
        at = front.index(best) if best in front else 0
        first = max(0, min(at - most // 2, len(front) - most))
        lines = [f"{'recompute':<48} {'GiB':>9} {'ms':>9}"]
        for each in front[first : first + most]:
            verdict = "chosen" if each == best else "" if each.fits else "does not fit"
            numbers = f"{each.held_bytes / _GIB:>9.3g} {each.step_seconds * 1e3:>9.4g}"
            lines.append(f"{_words(each.recompute):<48} {numbers}  {verdict}".rstrip())
        return lines


def choose_options(
    work: Workload,
    layout: Layout,
    cluster: ClusterSpec,
    dispatchers: Sequence[str],
    overlaps: Sequence[tuple[str, ...]],
    recomputes: Sequence[tuple[str, ...]] | None = None,
    limit_bytes: float | None = None,
    habits: Habits = MOESAIC,
) -> Choice:
    """Price `layout` with each of `dispatchers`, `overlaps` and `recomputes` (None: its own) for this package's
    trainer, and take the fastest that holds at most `limit_bytes` on every rank; of equal ones the smallest.

    Raises:
        SpecError: none fits.
    """
    sets = [layout.recompute] if recomputes is None else recomputes
    made = [replace(layout, dispatcher=d, overlap=o, recompute=r) for r in sets for o in overlaps for d in dispatchers]
    columns = Columns.of(made)
    seconds = step_time(work, columns, cluster, rates_for(cluster, Stack("moesaic"))).total
    held = memory(work, columns, habits).total
    options = []
    for each, time, size in zip(made, seconds.tolist(), held.tolist(), strict=True):
        fits = limit_bytes is None or size <= limit_bytes
        options.append(Option(each.dispatcher, each.overlap, each.recompute, time, size, fits))
    order = sorted(range(len(made)), key=lambda row: (not options[row].fits, *_order(options[row])))
    if limit_bytes is not None and not options[order[0]].fits:
        least = min(options, key=lambda option: option.held_bytes)
        raise SpecError(
            f"recomputing does not make this layout fit: with {_words(least.recompute)}, the leanest, a rank needs "
            f"{least.held_bytes / _GIB:.3g} GiB, and {limit_bytes / _GIB:.3g} GiB of {cluster.gpu.name} may be used: "
            f"take a smaller micro_batch or seq_len, sharding, or a layout that cuts the model further."
        )
    return Choice(made[order[0]], tuple(options[row] for row in order))


def recompute_sets(model: ModelSpec) -> list[tuple[str, ...]]:
    """Every set of modules to recompute that this model has, keeping everything first and whole layers last."""
    layers = (*model.layers, *model.mtp)
    moes = [layer.moe for layer in layers if layer.moe is not None]
    there = {
        "layernorm": True,
        "core_attn": True,
        "mla_up_proj": any(layer.attention.kind == "mla" for layer in layers),
        "mlp": any(layer.mlp is not None for layer in layers),
        "moe_act": bool(moes),
        "shared_experts": any(moe.shared is not None for moe in moes),
    }
    words = [word for word, here in there.items() if here]
    sets = [chosen for size in range(len(words) + 1) for chosen in combinations(words, size)]
    inside = {"moe_act", "shared_experts"}
    whole = [(*chosen, "moe") for chosen in sets if not inside & set(chosen)] if moes else []
    return [*sets, *whole, ("full",)]


def _order(option: Option) -> tuple[float, float, int]:
    return option.step_seconds, option.held_bytes, len(option.recompute)


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(words) if words else "none"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
