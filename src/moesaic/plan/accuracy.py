"""How far predictions are from published measurements, and whether their intervals hold what they say.

A run that the corrections were fitted to is predicted without any run of the same model and accelerator (its group);
any other run by all of them. So corrections never score a row that they have seen, and the width of its interval is
from other rows. The closed form below them has constants that were set looking at some of the same rows (`cost.rates`,
sources b, w, g and x), and the list of terms was chosen looking at all: figures of groups left out are optimistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.cost.corrections import NINE_IN_TEN, Corrections, Description, corrections, describe
from moesaic.cost.memory import memory
from moesaic.cost.rates import rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Floats
from moesaic.spec.errors import MoesaicError

from .published import Published, Run, Skipped, read_published

GIB = 2**30
LEFT_OUT, FULL = "left out", "all"


@dataclass(frozen=True)
class Priced:
    """Runs and their predicted times before corrections."""

    runs: tuple[Run, ...]
    description: Description
    seconds: Floats
    """By the closed form, [N]."""
    measured: Floats
    """Seconds of a step as published, [N]."""
    failed: tuple[Skipped, ...] = ()

    @property
    def groups(self) -> list[str]:
        """Model and accelerator of each run."""
        return [f"{run.model} on {run.cluster.gpu.name}" for run in self.runs]

    @property
    def ratio(self) -> Floats:
        """log(measured / predicted), [N]."""
        return np.log(self.measured / self.seconds)

    @property
    def keys(self) -> tuple[str, ...]:
        """What identifies each run by content, whatever its id."""
        return tuple(key_of(run) for run in self.runs)


def key_of(run: Run) -> str:
    """Model, machine, workload, layout and what was measured, in words."""
    lay, work = run.layout, run.work
    return (
        f"{run.model}|{run.cluster.gpu.name}|{run.cluster.gpus}|{run.precision}|{work.seq_len}|{work.global_batch}|"
        f"{lay.micro_batch}|{lay.pp}.{lay.virtual_stages}.{lay.cp}.{lay.tp}.{lay.ep}.{lay.etp}|{run.seconds:.4g}"
    )


def price(runs: Sequence[Run]) -> Priced:
    """Predicted seconds of every run, without corrections; those that cannot be priced are in `failed`."""
    kept, parts, seconds, failed = [], [], [], []
    for run in runs:
        try:
            columns = Columns.of([run.layout])
            time = step_time(run.work, columns, run.cluster, rates_for(run.cluster, run.stack))
            part = describe(run.work, columns, run.cluster, run.stack, time, run.traits)
        except MoesaicError as error:
            failed.append(Skipped(run.id, str(error)))
            continue
        total = float(time.total[0])
        if not (math.isfinite(total) and total > 0):
            failed.append(Skipped(run.id, f"its predicted time is {total}, which is no time."))
            continue
        kept.append(run)
        parts.append(part)
        seconds.append(total)
    measured = np.array([run.seconds for run in kept])
    description = Description.join(parts) if parts else Description({"age": np.zeros(0)}, {})
    return Priced(tuple(kept), description, np.array(seconds), measured, tuple(failed))


@dataclass(frozen=True)
class Scored:
    """Predictions of `runs` with the corrections, arrays [N]."""

    priced: Priced
    mean: Floats
    """Estimate of log(measured / predicted)."""
    spread: Floats
    protocol: tuple[str, ...]
    """`left out`: without the run's group; `all`: a run that no fit has seen."""

    @property
    def seconds(self) -> Floats:
        return self.priced.seconds * np.exp(self.mean)

    @property
    def error(self) -> Floats:
        """predicted / measured − 1 of the step's seconds."""
        return self.seconds / self.priced.measured - 1

    @property
    def covered(self) -> np.ndarray[Any, Any]:
        """Whether the interval holds the measurement."""
        return np.abs(self.priced.ratio - self.mean) <= NINE_IN_TEN * self.spread


def score(priced: Priced, fitted: Corrections) -> Scored:
    """Predicts every run: those that were fitted without their group, the others by everything. The spread of the
    former is stretched by what the residuals of other folds need, not by their own."""
    count = len(priced.runs)
    left, left_spread = fitted.left_out()
    stretched = left_spread * stretch_elsewhere((left - fitted.ratio) / left_spread, fold_of(fitted))
    if priced.keys == fitted.keys:
        return Scored(priced, left, stretched, (LEFT_OUT,) * count)
    mean, spread = np.zeros(count), np.zeros(count)
    known, groups = set(fitted.keys), np.array(priced.groups, dtype=object)
    seen = np.array([key in known for key in priced.keys], dtype=bool)
    for group in dict.fromkeys(groups[seen]):
        mask, place = seen & (groups == group), np.flatnonzero(fitted.group == group)[0]
        mean[mask], spread[mask] = fitted.without(group).estimate(priced.description.take(mask))
        spread[mask] *= stretched[place] / left_spread[place]
    if (~seen).any():
        mean[~seen], spread[~seen] = fitted.estimate(priced.description.take(~seen))
    return Scored(priced, mean, spread, tuple(LEFT_OUT if was else FULL for was in seen))


def fold_of(fitted: Corrections) -> np.ndarray[Any, Any]:
    """Number of the fold of each fitted run, [R]: groups whose widths were fitted together without them; each group is
    one where widths were fitted once."""
    named = {group: str(fitted.folds.get(group, group)) for group in fitted.group}
    codes = {name: code for code, name in enumerate(dict.fromkeys(named.values()))}
    return np.array([codes[named[group]] for group in fitted.group], np.int64)


def stretch_elsewhere(standard: Floats, folds: np.ndarray[Any, Any]) -> Floats:
    """What spreads are to be multiplied by for 90 % intervals, [R], for each row by the rows of other folds.

    standard: residuals over their spreads. The quantile is that of nine in ten, so that intervals hold nine of ten rows
    of the other folds; how many of its own rows they hold is then a figure that can be wrong.
    """
    found = np.ones(len(standard))
    for fold in set(folds.tolist()):
        others = np.abs(standard[folds != fold])
        if len(others):
            found[folds == fold] = np.quantile(others, 0.9) / NINE_IN_TEN
    return found


def leave_one_out(priced: Priced, fitted: Corrections) -> Floats | None:
    """log(measured / predicted) of each run from all observations but itself; None unless exactly the fitted runs are
    given. (Rasmussen and Williams, eq. 5.12)"""
    if priced.keys != fitted.keys:
        return None
    return fitted.leave_one_out()[0]


def constant_utilisation(priced: Priced) -> Floats:
    """log(measured / predicted) of a plain baseline under the same protocol: FLOPs over peak over one constant
    utilisation per kind (dense, experts), the geometric mean of all other groups' rows."""
    flops = np.array([run.flops_per_token * run.work.tokens / run.cluster.gpus for run in priced.runs])
    peak = np.array([_peak(run) for run in priced.runs])
    log = np.log(priced.measured / (flops / peak))
    kind = np.array([bool(run.work.model.moe_layers) for run in priced.runs])
    groups = np.array(priced.groups, dtype=object)
    error = np.zeros(len(log))
    for group in dict.fromkeys(groups):
        inside = groups == group
        for value in (True, False):
            others = ~inside & (kind == value)
            mask = inside & (kind == value)
            if mask.any():
                error[mask] = (log[others].mean() if others.any() else log.mean()) - log[mask]
    return error


def _peak(run: Run) -> float:
    peaks = run.cluster.gpu.peak_flops
    for name in {"nvfp4": ("fp4", "fp8"), "fp8": ("fp8",), "mxfp8": ("fp8",)}.get(run.precision, ()):
        if name in peaks:
            return peaks[name]
    return peaks["bf16"]


# ---------------------------------------------------------------- summary


def errors(log_error: Floats) -> dict[str, float]:
    """Rows and mean, median, 90th percentile and largest absolute error, of log(predicted / measured)."""
    absolute = np.abs(np.exp(log_error) - 1)
    return {
        "rows": len(absolute),
        "mean": float(absolute.mean()),
        "median": float(np.median(absolute)),
        "p90": float(np.quantile(absolute, 0.9)),
        "max": float(absolute.max()),
    }


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's: the correlation of ranks, equal values sharing theirs; nan where one of them is constant."""

    def ranks(values: Floats) -> Floats:
        order = np.sort(values)
        return (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right")) / 2

    a, b = ranks(first), ranks(second)
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def subsets(priced: Priced) -> dict[str, np.ndarray[Any, Any]]:
    """The sets of runs that are reported apart."""
    experts = np.array([bool(run.work.model.moe_layers) for run in priced.runs], dtype=bool)
    gpus = np.array([run.cluster.gpus for run in priced.runs])
    found = {
        "all": np.ones(len(gpus), dtype=bool),
        "experts, 16 to 1,536 GPUs": experts & (gpus >= 16) & (gpus <= 1536),
        "experts, up to 8 GPUs": experts & (gpus <= 8),
        "dense": ~experts,
    }
    return {name: mask for name, mask in found.items() if mask.any()}


BY: dict[str, Callable[[Run], str]] = {
    "source": lambda run: run.source,
    "hardware": lambda run: run.cluster.gpu.name,
    "model": lambda run: run.model,
    "precision": lambda run: run.precision,
}


def summary(scored: Scored, fitted: Corrections) -> dict[str, Any]:
    """Figures over all runs; one figure per run, that of its step time."""
    priced, log_error = scored.priced, scored.mean - scored.priced.ratio
    base, plain = constant_utilisation(priced), -priced.ratio
    one_out = leave_one_out(priced, fitted)
    found: dict[str, Any] = {"runs": len(priced.runs), "protocol": {}}
    for name in (LEFT_OUT, FULL):
        found["protocol"][name] = scored.protocol.count(name)
    for name, mask in subsets(priced).items():
        entry: dict[str, Any] = errors(log_error[mask]) | {"coverage": float(scored.covered[mask].mean())}
        entry["without corrections"] = errors(plain[mask])
        entry["constant utilisation"] = errors(base[mask])
        if one_out is not None:
            entry["leave one row out"] = errors((one_out - priced.ratio)[mask])
        found[name] = entry
    found["rank correlation"] = _ranks(rank_correlations(priced, scored.seconds))
    found["rank correlation"]["closed form"] = _ranks(rank_correlations(priced, priced.seconds))
    if one_out is not None:
        ranked = _ranks(rank_correlations(priced, priced.seconds * np.exp(one_out)))
        found["rank correlation"]["leave one row out"] = ranked
    for name, of in BY.items():
        words = np.array([of(run) for run in priced.runs], dtype=object)
        found[f"by {name}"] = {
            word: errors(log_error[words == word])
            | {"coverage": float(scored.covered[words == word].mean())}
            | {"without corrections": errors(plain[words == word])}
            for word in sorted(set(words))
        }
    return found


def _ranks(ranked: dict[str, tuple[float, int]]) -> dict[str, Any]:
    values = [value for value, _ in ranked.values() if not math.isnan(value)]
    return {
        "groups": {
            name: {"correlation": None if math.isnan(value) else value, "runs": count}
            for name, (value, count) in ranked.items()
        },
        "mean": float(np.mean(values)) if values else None,
        "lowest": float(np.min(values)) if values else None,
    }


def rank_correlations(priced: Priced, seconds: Floats) -> dict[str, tuple[float, int]]:
    """Of predicted (from `seconds`, [N]) and measured tokens/s/GPU inside every group of expert runs with five or more
    layouts: (Spearman's correlation, runs)."""
    groups, found = np.array(priced.groups, dtype=object), {}
    work = np.array([run.work.tokens / run.cluster.gpus for run in priced.runs])
    for group in sorted(set(groups)):
        mask = groups == group
        places = np.flatnonzero(mask)
        layouts = {priced.runs[place].layout for place in places}
        if len(layouts) >= 5 and priced.runs[places[0]].work.model.moe_layers:
            predicted, measured = (work / time for time in (seconds, priced.measured))
            found[group] = (rank_correlation(predicted[mask], measured[mask]), len(places))
    return found


# ---------------------------------------------------------------- the whole report


@dataclass(frozen=True)
class Report:
    """What `moesaic accuracy` prints."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    skipped: list[dict[str, str]]
    remarks: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Plain data; error is predicted / measured − 1."""
        return {"summary": self.summary, "rows": self.rows, "skipped": self.skipped, "remarks": list(self.remarks)}


def accuracy(path: Path) -> Report:
    """Predicts every row of a published table that can be, and compares.

    Raises:
        SpecError: the file cannot be read as such a table, or none of its rows can be priced.
    """
    return report(read_published(path), corrections())


def report(published: Published, fitted: Corrections) -> Report:
    """As `accuracy`, of a table that was read, with given corrections."""
    priced = price(published.runs)
    skipped = sorted((*published.skipped, *priced.failed), key=lambda s: s.id)
    shown = [{"id": entry.id, "reason": entry.reason} for entry in skipped]
    if not priced.runs:
        return Report({"runs": 0, "skipped": len(shown)}, [], shown, published.remarks)
    scored = score(priced, fitted)
    rows = [row for place in range(len(priced.runs)) for row in _rows(scored, place)]
    figures = summary(scored, fitted) | {"skipped": len(shown)}
    held = [row["error"] for row in rows if row["quantity"] == "memory_gib"]
    if held:
        figures["memory"] = errors(np.log1p(np.array(held)))
    return Report(figures, rows, shown, published.remarks)


def _rows(scored: Scored, place: int) -> list[dict[str, Any]]:
    run, seconds = scored.priced.runs[place], float(scored.seconds[place])
    factor = math.exp(NINE_IN_TEN * float(scored.spread[place]))
    middle = run.quantities(seconds)
    ends = (run.quantities(seconds / factor), run.quantities(seconds * factor))
    rows = []
    for quantity, predicted in middle.items():
        low, high = sorted(end[quantity] for end in ends)
        rows.append(_row(run, quantity, predicted) | {"interval": [low, high], "fit": scored.protocol[place]})
    if "memory_gib" in run.measured:
        held = memory(run.work, Columns.of([run.layout]))
        rows.append(_row(run, "memory_gib", float(held.allocated[0]) / GIB))
    return rows


def _row(run: Run, quantity: str, predicted: float) -> dict[str, Any]:
    measured = run.measured[quantity]
    row: dict[str, Any] = {
        "id": run.id,
        "quantity": quantity,
        "measured": measured,
        "predicted": predicted,
        "error": predicted / measured - 1,
    }
    if run.assumed:
        row["assumed"] = list(run.assumed)
    return row
