"""What the closed form misses, learnt from published measurements: a factor on the time of a step, with an interval.

The model is one of log(measured / predicted). It is the sum of few terms with a meaning (`terms`: the stack's age, the
accelerator, the precision, graphs, each share of the predicted step, …), every one shrunk towards zero by a prior of
its own width, and of a smooth part that lets near neighbours of a measured run follow it (a Gaussian process with a
linear and a squared-exponential kernel; Rasmussen and Williams, Gaussian Processes for Machine Learning, section 2.7).
An unseen model or accelerator so gets what is known of its stack and precision, and a wide interval.

The observations and the widths, both in data/corrections.json, are written by `benchmarks/fit_rates.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from importlib import resources
from typing import Any

import numpy as np

from .correction_terms import BLOCKS, NUMBERS, SHARES, WORDS, Description, Traits, block_of, describe, terms
from .workload import Bools, Floats

__all__ = [
    "BLOCKS",
    "NINE_IN_TEN",
    "Corrections",
    "Description",
    "Traits",
    "Widths",
    "alike",
    "block_of",
    "corrections",
    "describe",
    "distances",
    "from_json",
    "kernel",
    "terms",
    "to_json",
]

NINE_IN_TEN = 1.6449
"""Standard deviations on each side that hold 90 % of a normal distribution."""

_SCALES = {
    "tokens": 1.0, "rows": 1.0, "width": 1.0, "hidden": 1.0, "gpus": 0.5, "ep": 1.0, "tp": 1.5, "layers": 2.0,
    "age": 2.0, "pp": 1.0, "virtual_stages": 0.5, "cp": 1.0, "batch": 1 / 3, "etp": 1.0,
}  # fmt: skip
"""How far apart two runs are along a number, per unit of it."""
_APART = (
    "gpu",
    "precision",
    "graphs",
    "dispatcher",
    "backend",
    "routing",
    "model",
    "framework",
    "network",
    "granularity",
)
_APART_NUMBERS = ("overlap", "tuned", "fsdp", "printed", "recompute")


@dataclass(frozen=True)
class Widths:
    """Everything that was fitted but the coefficients, which follow from the observations."""

    terms: dict[str, float]
    """Prior width of each term's coefficient."""
    model: float = 0.06
    """The same, of a value of its own for every model, for every accelerator, and for every pair of both."""
    gpu: float = 0.03
    pair: float = 0.03
    near: float = 0.16
    """Width of the smooth part."""
    reach: float = 1.0
    """Distance along numbers, and"""
    word: float = 10.0
    """number of differing words, over which the smooth part forgets."""
    noise: float = 0.04
    """Spread of one measurement."""


def kernel(a: Description, b: Description, widths: Widths) -> Floats:
    """Prior covariance [A, B] of log(measured / predicted) of two lists of runs."""
    scale = np.array(list(widths.terms.values())) ** 2
    ta, tb = terms(a), terms(b)
    linear = (np.stack([ta[t][0] for t in widths.terms], 1) * scale) @ np.stack([tb[t][0] for t in widths.terms], 1).T
    same = alike(a, b)
    linear = linear + widths.model**2 * same["model"] + widths.gpu**2 * same["gpu"]
    linear = linear + widths.pair**2 * (same["model"] & same["gpu"])
    return linear + widths.near**2 * np.exp(-_far(a, b, same, widths))


def alike(a: Description, b: Description) -> dict[str, Bools]:
    """Which runs of two lists have a word in common, [A, B] by name of the words that set runs apart."""
    found = {}
    for name in _APART:
        codes = {word: code for code, word in enumerate({*a.words[name], *b.words[name]})}
        of_a, of_b = (np.array([codes[word] for word in d.words[name]], np.int64) for d in (a, b))
        found[name] = of_a[:, None] == of_b[None]
    return found


def _far(a: Description, b: Description, same: Mapping[str, Any], widths: Widths) -> Floats:
    along, differing = distances(a, b, same)
    return along / (2 * widths.reach**2) + differing / widths.word


def distances(a: Description, b: Description, same: Mapping[str, Any]) -> tuple[Floats, Floats]:
    pa, pb = (np.stack([d.numbers[k] * s for k, s in _SCALES.items()], 1) for d in (a, b))
    along = np.maximum((pa**2).sum(1)[:, None] + (pb**2).sum(1)[None] - 2 * pa @ pb.T, 0.0)
    differing = sum(1.0 - same[name] for name in _APART)
    for name in _APART_NUMBERS:
        differing = differing + (a.numbers[name][:, None] != b.numbers[name][None])
    return along, differing


def prior_variance(d: Description, widths: Widths) -> Floats:
    """Diagonal of `kernel(d, d)`, [N]."""
    found = terms(d)
    linear: Floats = np.zeros(len(d))
    for name, width in widths.terms.items():
        linear = linear + (found[name][0] * width) ** 2
    return linear + widths.model**2 + widths.gpu**2 + widths.pair**2 + widths.near**2


# ---------------------------------------------------------------- corrections


@dataclass(frozen=True)
class Corrections:
    """Observed runs and what was fitted to them."""

    seen: Description
    """The observed runs, [R]."""
    ratio: Floats
    """log(measured / predicted) of each."""
    group: np.ndarray[Any, Any]
    """Model and accelerator of each: what is left out together in cross-validation."""
    widths: Widths
    folds: dict[str, Widths] = field(default_factory=dict)
    """Widths fitted without a group's runs."""
    stretch: tuple[float, float] = (1.0, 1.0)
    """Makes intervals hold what they say under cross-validation: of runs whose model and accelerator were seen
    together, and of others."""
    keys: tuple[str, ...] = ()
    """What identifies each observed run by content."""

    @cached_property
    def _solved(self) -> tuple[Floats, Floats]:
        return _solve(self.seen, self.ratio, self.widths)

    def estimate(self, d: Description) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of log(measured / predicted) of each run, [N], from all observations."""
        mean, spread = _posterior(d, self.seen, self._solved, self.widths)
        pairs = set(zip(self.seen.words["model"], self.seen.words["gpu"], strict=True))
        known = [pair in pairs for pair in zip(d.words["model"], d.words["gpu"], strict=True)]
        return mean, spread * np.where(known, *self.stretch)

    def without(self, group: str) -> Corrections:
        """The corrections as they would be had no run of `group` been seen."""
        keep = self.group != group
        return Corrections(
            self.seen.take(keep), self.ratio[keep], self.group[keep], self.folds.get(group, self.widths),
            stretch=self.stretch,
        )  # fmt: skip

    def left_out(self) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of log(measured / predicted) of each observed run from those of other groups, [R]:
        what `without` gives, from one inverse per fold. With A the covariance, the residual of the rows g is
        (A⁻¹)gg⁻¹ (A⁻¹ ratio)g, and its covariance (A⁻¹)gg⁻¹."""
        mean, variance = np.zeros(len(self.seen)), np.zeros(len(self.seen))
        groups = list(dict.fromkeys(self.group))
        for widths in _distinct(self.folds.get(group, self.widths) for group in groups):
            root, weights = _solve(self.seen, self.ratio, widths)
            inverse = root.T @ root
            for group in groups:
                if self.folds.get(group, self.widths) == widths:
                    place = np.flatnonzero(self.group == group)
                    inner = np.linalg.inv(inverse[np.ix_(place, place)])
                    mean[place] = self.ratio[place] - inner @ weights[place]
                    variance[place] = np.diag(inner)
        return mean, self.stretch[1] * np.sqrt(variance)

    def leave_one_out(self) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of log(measured / predicted) of each observed run from all the others, [R]:
        ratio − weight / diagonal of the inverse covariance (Rasmussen and Williams, eq. 5.12)."""
        inverse, weights = self._solved
        diagonal = (inverse**2).sum(0)
        return self.ratio - weights / diagonal, self.stretch[0] / np.sqrt(diagonal)


def _solve(seen: Description, ratio: Floats, widths: Widths) -> tuple[Floats, Floats]:
    """(inverse of the lower Cholesky factor, weights of the observations)."""
    covariance = kernel(seen, seen, widths) + widths.noise**2 * np.eye(len(seen))
    inverse = np.linalg.inv(np.linalg.cholesky(covariance))
    return inverse, inverse.T @ (inverse @ ratio)


def _posterior(
    d: Description, seen: Description, solved: tuple[Floats, Floats], widths: Widths
) -> tuple[Floats, Floats]:
    inverse, weights = solved
    cross = kernel(d, seen, widths)
    variance = prior_variance(d, widths) - ((cross @ inverse.T) ** 2).sum(1)
    return cross @ weights, np.sqrt(np.maximum(variance, 0.0) + widths.noise**2)


@lru_cache(maxsize=1)
def corrections() -> Corrections:
    """The corrections that ship with moesaic."""
    text = resources.files("moesaic.cost").joinpath("data", "corrections.json").read_text(encoding="utf-8")
    return from_json(json.loads(text))


def from_json(table: Mapping[str, Any]) -> Corrections:
    """The inverse of `to_json`."""
    columns, rows = table["columns"], table["rows"]
    held = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
    seen = Description(
        {name: np.array(held[name], np.float64) for name in (*NUMBERS, *SHARES)},
        {name: np.array(held[name], dtype=object) for name in WORDS},
    )
    return Corrections(
        seen,
        np.array(held["ratio"], np.float64),
        np.array(held["group"], dtype=object),
        Widths(**table["widths"]),
        {group: Widths(**fold["widths"]) for fold in table["folds"] for group in fold["groups"]},
        (float(table["stretch"][0]), float(table["stretch"][1])),
        tuple(held["key"]),
    )


def to_json(c: Corrections) -> dict[str, Any]:
    """Plain data that `from_json` reads back, to four digits."""
    names = (*NUMBERS, *SHARES)
    rows = [
        [
            c.keys[row],
            c.group[row],
            round(float(c.ratio[row]), 5),
            *(round(float(c.seen.numbers[name][row]), 4) for name in names),
            *(str(c.seen.words[name][row]) for name in WORDS),
        ]
        for row in range(len(c.seen))
    ]
    return {
        "columns": ["key", "group", "ratio", *names, *WORDS],
        "rows": rows,
        "widths": _plain(c.widths),
        "folds": [
            {"groups": [g for g, w in c.folds.items() if w == widths], "widths": _plain(widths)}
            for widths in _distinct(c.folds.values())
        ],
        "stretch": [round(value, 4) for value in c.stretch],
    }


def _distinct(values: Iterable[Widths]) -> list[Widths]:
    found: list[Widths] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _plain(widths: Widths) -> dict[str, Any]:
    return {
        f.name: {k: round(v, 4) for k, v in widths.terms.items()}
        if f.name == "terms"
        else round(getattr(widths, f.name), 4)
        for f in fields(widths)
    }
