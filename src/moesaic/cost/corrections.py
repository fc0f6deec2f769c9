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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from importlib import resources
from typing import Any

import numpy as np

from moesaic.spec.cluster import ClusterSpec

from .rates import Stack
from .step import StepTime
from .workload import DISPATCHERS, RECOMPUTE, SHARDING, Bools, Columns, Floats, Workload, chosen

SHARES = (
    "compute", "memory_bound", "host", "dispatch", "tensor", "context", "pipeline", "data", "bubble", "optimizer",
)  # fmt: skip
"""Parts of a predicted step whose rates may differ from what the closed form takes."""
NEWEST = 2026.6
"""The year that a stack of unknown age is taken to be of."""
NOMINAL = 0.90
_Z90 = 1.6449


@dataclass(frozen=True)
class Traits:
    """What is known of a run beside workload, layout, cluster and stack."""

    year: float | None = None
    """When it was measured or released, as a year with a fraction; None takes the stack's release, else the newest."""
    graphs: str = "none"
    """`none`, `part` or `full`: how much of a step is launched as CUDA graphs."""
    routing: str = ""
    """`forced`, `natural`, `dropped` (tokens beyond a capacity), or empty where not printed."""
    network: str = ""
    """`efa`, or empty for what the accelerator's maker has."""
    backend: str = ""
    """Of DeepEP where it is not its own: `uccl` or `nvshmem`."""
    granularity: str = ""
    """Of low-precision scales: `tensor` or `block`."""
    printed: bool = True
    """Dispatcher or recipe are known, not guessed."""
    tuned: bool = True
    """A run for speed, not one that checks that a recipe works."""
    assumptions: int = 0
    """How many of a published row's cells were assumed."""

    @classmethod
    def of(cls, stack: Stack) -> Traits:
        """Those that follow from a stack: graphs are of the whole step from Megatron-Bridge's containers of 26.06 on."""
        whole = (_released(stack.release) or NEWEST) > 2026.4
        graphs = ("full" if whole else "part") if stack.graphs else "none"
        return cls(graphs=graphs, routing="forced" if stack.balanced else "natural")


NUMBERS = (
    "age", "tokens", "rows", "width", "hidden", "layers", "gpus", "ep", "etp", "tp", "cp", "pp", "virtual_stages",
    "batch", "seq_len", "moe", "overlap", "recompute", "full", "fsdp", "printed", "tuned",
)  # fmt: skip
WORDS = (
    "model",
    "gpu",
    "precision",
    "granularity",
    "graphs",
    "dispatcher",
    "network",
    "backend",
    "framework",
    "routing",
)


@dataclass(frozen=True)
class Description:
    """N runs as the corrections see them."""

    numbers: dict[str, Floats]
    """By name of `NUMBERS` and `SHARES`, arrays [N]; sizes are logarithms to base 2."""
    words: dict[str, np.ndarray[Any, Any]]
    """By name of `WORDS`, arrays [N] of text."""

    def __len__(self) -> int:
        return len(self.numbers["age"])

    def take(self, rows: Any) -> Description:
        """Some of the runs, by index or mask."""
        return Description({k: v[rows] for k, v in self.numbers.items()}, {k: v[rows] for k, v in self.words.items()})

    @staticmethod
    def join(parts: Sequence[Description]) -> Description:
        """All of them, one after the other."""
        return Description(
            {k: np.concatenate([p.numbers[k] for p in parts]) for k in parts[0].numbers},
            {k: np.concatenate([p.words[k] for p in parts]) for k in parts[0].words},
        )


def describe(
    work: Workload, columns: Columns, cluster: ClusterSpec, stack: Stack, time: StepTime, traits: Traits | None = None
) -> Description:
    """The layouts of `columns`, whose predicted times are `time`, as the corrections see them."""
    traits = traits or Traits.of(stack)
    model, one = work.model, np.ones(len(columns))
    moe = next((layer.moe for layer in model.layers if layer.moe is not None), None)
    tokens = columns.micro_batch * work.seq_len / (columns.cp * columns.tp)
    rows = tokens * moe.router.top_k * columns.ep * columns.etp / moe.router.experts if moe else one * 2048
    width = moe.expert.width / columns.etp if moe else one * 2048
    year = traits.year or _released(stack.release) or NEWEST
    numbers: dict[str, Any] = {
        "age": min(max(NEWEST - year, 0.0), 2.0) * one,
        "tokens": np.log2(tokens) - 12,
        "rows": np.log2(rows) - 11,
        "width": np.log2(width) - 11,
        "hidden": (np.log2(model.hidden) - 12) * one,
        "layers": (np.log2(len(model.layers)) - 6) * one,
        "gpus": np.log2(columns.world) - 6,
        **{name: np.log2(getattr(columns, name)) for name in ("ep", "etp", "tp", "cp", "pp", "virtual_stages")},
        "batch": np.log2(work.global_batch) * one,
        "seq_len": (np.log2(work.seq_len) - 12) * one,
        "moe": float(moe is not None) * one,
        "overlap": columns.overlaps("experts"),
        "recompute": np.array([len(chosen(RECOMPUTE, int(bit))) for bit in columns.recompute]),
        "full": columns.recomputes("full"),
        "fsdp": columns.sharding == SHARDING.index("parameters"),
        "printed": float(traits.printed) * one,
        "tuned": float(traits.tuned) * one,
    }
    numbers |= {name: getattr(time, name) / time.total for name in SHARES}
    words = {
        "model": model.name,
        "gpu": cluster.gpu.name,
        "precision": work.precision,
        **{name: getattr(traits, name) for name in ("granularity", "graphs", "network", "backend", "routing")},
        "framework": stack.framework,
    }
    arrays = {name: np.array([word] * len(columns), dtype=object) for name, word in words.items()}
    arrays["dispatcher"] = np.array([DISPATCHERS[number] for number in columns.dispatcher], dtype=object)
    return Description({name: np.asarray(value, np.float64) for name, value in numbers.items()}, arrays)


def _released(release: str) -> float | None:
    match = re.match(r"(2\d)\.(\d\d)\b", release)
    return 2000 + int(match[1]) + (int(match[2]) - 0.5) / 12 if match else None


# ---------------------------------------------------------------- terms


def terms(d: Description) -> dict[str, tuple[Floats, float]]:
    """Every term as (its values [N], the prior width of its coefficient before it was fitted): log(measured /
    predicted) is the sum of coefficients times values."""
    n, w = d.numbers, d.words
    moe, age, tokens = n["moe"], n["age"], n["tokens"]

    def word(name: str, *values: str) -> Floats:
        return np.isin(w[name].astype(str), values).astype(np.float64)

    blackwell = np.array(["B" in name and "MI" not in name for name in w["gpu"]], np.float64)
    hopper = np.array([name[:2] in ("H1", "H2", "H8") for name in w["gpu"]], np.float64)
    part, whole, bare = (word("graphs", name) for name in ("part", "full", "none"))
    small = -(0.5 * tokens + n["hidden"])
    efa, dispatch = word("network", "efa"), n["dispatch"]
    found: dict[str, tuple[Floats, float]] = {
        "all": (np.ones(len(d)), 1.0),
        "experts": (moe, 0.15),
        "blackwell": (blackwell, 0.2),
        "hopper": (hopper, 0.2),
        "age": (age, 0.06),
        "age, experts": (age * moe, 0.1),
    }
    for name in ("bf16", "fp8", "mxfp8", "nvfp4"):
        found[name] = (word("precision", name), 0.1)
        found[f"{name}, blackwell"] = (word("precision", name) * blackwell, 0.08)
    found["fp8 by block"] = (word("precision", "fp8") * word("granularity", "block"), 0.1)
    for name in ("torchtitan", "automodel", "fsdp", "megascale", "primus"):
        found[f"stack {name}"] = (word("framework", name), 0.2)
    found |= {
        "graphs of parts": (part * moe, 0.15),
        "graph of the step": (whole * moe, 0.2),
        "graphs of parts, age": (part * moe * age, 0.1),
        "small work": (small * moe, 0.1),
        "small work, no graphs": (small * bare * moe, 0.15),
        "small work, graphs of parts": (small * part * moe, 0.1),
        "small work, no graphs, age": (small * age * bare * moe, 0.1),
    }
    for name in SHARES:
        found[f"share {name}"] = (n[name], 0.4)
    for name in ("alltoall", "deepep", "hybridep"):
        found[f"{name}, share"] = (dispatch * word("dispatcher", name), 0.3)
        found[name] = (word("dispatcher", name) * moe, 0.1)
    overlap = n["overlap"]
    found |= {
        "efa, share": (dispatch * efa, 0.5),
        "efa": (efa, 0.3),
        "efa, small work": (efa * small, 0.2),
        "efa, overlap": (efa * overlap, 0.2),
        "overlap": (overlap, 0.15),
        "overlap, share": (dispatch * overlap, 0.3),
        "overlap, graph of the step": (overlap * whole, 0.1),
    }
    for name in ("uccl", "nvshmem"):
        found[name] = (word("backend", name), 0.3)
        found[f"{name}, ep"] = (word("backend", name) * (n["ep"] - 4), 0.2)
        found[f"{name}, tokens"] = (word("backend", name) * tokens, 0.1)
    found |= {
        "natural routing": (word("routing", "natural"), 0.15),
        "dropped tokens": (word("routing", "dropped"), 0.15),
        "dropped tokens, age": (word("routing", "dropped") * age, 0.1),
        "not tuned": (1 - n["tuned"], 0.2),
        "not printed": ((1 - n["printed"]) * moe, 0.15),
        "not printed, small work": ((1 - n["printed"]) * moe * small, 0.1),
        "sharded parameters": (n["fsdp"], 0.2),
        "sharded parameters, experts": (n["fsdp"] * moe, 0.2),
        "sharded parameters, size": (n["fsdp"] * n["gpus"], 0.05),
        "rows of an expert": (n["rows"] * moe, 0.1),
        "width of an expert": (n["width"] * moe, 0.1),
        "hidden": (n["hidden"], 0.1),
        "layers": (n["layers"], 0.05),
        "gpus": (n["gpus"], 0.03),
        "tokens": (tokens, 0.1),
        "tp": (n["tp"], 0.1),
        "tp, experts": (n["tp"] * moe, 0.1),
        "ep": (n["ep"], 0.05),
        "etp": (n["etp"] * moe, 0.2),
        "cp": (n["cp"], 0.05),
        "recompute": (np.minimum(n["recompute"], 1), 0.05),
        "recompute of layers": (n["full"], 0.1),
        "sequence": (n["seq_len"], 0.05),
    }
    return found


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
    model: float = 0.08
    """The same, of a value of its own for every model, and for every accelerator."""
    gpu: float = 0.06
    near: float = 0.12
    """Width of the smooth part."""
    reach: float = 2.5
    """Distance along numbers, and"""
    word: float = 3.0
    """number of differing words, over which the smooth part forgets."""
    noise: float = 0.05
    """Spread of one measurement."""


def kernel(a: Description, b: Description, widths: Widths) -> Floats:
    """Prior covariance [A, B] of log(measured / predicted) of two lists of runs."""
    scale = np.array(list(widths.terms.values())) ** 2
    ta, tb = terms(a), terms(b)
    linear = (np.stack([ta[t][0] for t in widths.terms], 1) * scale) @ np.stack([tb[t][0] for t in widths.terms], 1).T
    same = alike(a, b)
    linear = linear + widths.model**2 * same["model"] + widths.gpu**2 * same["gpu"]
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
    linear = sum((found[name][0] * width) ** 2 for name, width in widths.terms.items())
    return linear + widths.model**2 + widths.gpu**2 + widths.near**2


# ---------------------------------------------------------------- corrections


@dataclass(frozen=True)
class Corrected:
    """Seconds of steps with the corrections, arrays [N]."""

    seconds: Floats
    low: Floats
    high: Floats
    """Ends of the interval that holds a measurement nine times of ten."""
    spread: Floats
    """Standard deviation of log(measured / seconds)."""


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
    stretch: float = 1.0
    """Makes intervals hold what they say under cross-validation."""
    keys: tuple[str, ...] = ()
    """What identifies each observed run by content."""

    @cached_property
    def _solved(self) -> tuple[Floats, Floats]:
        return _solve(self.seen, self.ratio, self.widths)

    def estimate(self, d: Description) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of log(measured / predicted) of each run, [N], from all observations."""
        return _posterior(d, self.seen, self._solved, self.widths, self.stretch)

    def without(self, group: str) -> Corrections:
        """The corrections as they would be had no run of `group` been seen."""
        keep = self.group != group
        return Corrections(
            self.seen.take(keep), self.ratio[keep], self.group[keep], self.folds.get(group, self.widths),
            stretch=self.stretch,
        )  # fmt: skip

    def leave_one_out(self) -> Floats:
        """log(measured / predicted) of each observed run from all the others, [R]: ratio − weight / diagonal of the
        inverse covariance (Rasmussen and Williams, eq. 5.12)."""
        inverse, weights = self._solved
        return self.ratio - weights / (inverse**2).sum(0)

    def apply(self, d: Description, seconds: Floats) -> Corrected:
        """Corrects the predicted `seconds` [N] of the runs `d`."""
        mean, spread = self.estimate(d)
        middle, half = seconds * np.exp(mean), _Z90 * spread
        return Corrected(middle, middle * np.exp(-half), middle * np.exp(half), spread)


def _solve(seen: Description, ratio: Floats, widths: Widths) -> tuple[Floats, Floats]:
    """(inverse of the lower Cholesky factor, weights of the observations)."""
    covariance = kernel(seen, seen, widths) + widths.noise**2 * np.eye(len(seen))
    inverse = np.linalg.inv(np.linalg.cholesky(covariance))
    return inverse, inverse.T @ (inverse @ ratio)


def _posterior(
    d: Description, seen: Description, solved: tuple[Floats, Floats], widths: Widths, stretch: float
) -> tuple[Floats, Floats]:
    inverse, weights = solved
    cross = kernel(d, seen, widths)
    variance = prior_variance(d, widths) - ((cross @ inverse.T) ** 2).sum(1)
    return cross @ weights, stretch * np.sqrt(np.maximum(variance, 0.0) + widths.noise**2)


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
        {group: Widths(**widths) for group, widths in table["folds"].items()},
        float(table["stretch"]),
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
        "folds": {group: _plain(widths) for group, widths in c.folds.items()},
        "stretch": round(c.stretch, 4),
    }


def _plain(widths: Widths) -> dict[str, Any]:
    return {
        f.name: {k: round(v, 4) for k, v in widths.terms.items()}
        if f.name == "terms"
        else round(getattr(widths, f.name), 4)
        for f in fields(widths)
    }
