"""Runs as the corrections see them, and the terms that log(measured / predicted) is a sum of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.spec.cluster import ClusterSpec

from .rates import Stack
from .step import StepTime
from .workload import DISPATCHERS, RECOMPUTE, SHARDING, Columns, Floats, Workload, chosen

SHARES = (
    "compute", "memory_bound", "host", "dispatch", "tensor", "context", "pipeline", "data", "bubble", "optimizer",
)  # fmt: skip
"""Parts of a predicted step whose rates may differ from what the closed form takes."""
NEWEST = 2026.6
"""The year that a stack of unknown age is taken to be of."""


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
        """Those that follow from a stack: graphs are of the whole step from containers of 26.06 on."""
        whole = (_released(stack.release) or NEWEST) > 2026.4
        graphs = ("full" if whole else "part") if stack.graphs else "none"
        return cls(graphs=graphs, routing="forced" if stack.balanced else "natural")


NUMBERS = (
    "age", "tokens", "rows", "width", "hidden", "layers", "gpus", "ep", "etp", "tp", "cp", "pp", "virtual_stages",
    "batch", "seq_len", "passes", "short", "moe", "overlap", "recompute", "full", "fsdp", "printed", "tuned",
)  # fmt: skip
WORDS = (
    "model",
    "gpu",
    "architecture",
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
        "passes": columns.micro_batches(work.global_batch) * len(model.layers) / columns.pp / time.total / 1000,
        "short": 0.1 / time.total,
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
        "architecture": cluster.gpu.architecture,
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


BLOCKS = ("shares", "stack", "links", "sizes")
_OF_BLOCK = (
    ("shares", r"^share "),
    ("links", r"efa|uccl|nvshmem|all-?to-?all|deepep|hybridep|overlap"),
    ("stack", r"age|graph|stack|fp8|bf16|nvfp4|low precision|dropped|natural|tuned|printed|blackwell|hopper"),
)


def block_of(term: str) -> str:
    """Which of `BLOCKS` a term belongs to: terms of a block have the widths of their priors times one factor."""
    return next((block for block, pattern in _OF_BLOCK if re.search(pattern, term)), "sizes")


def terms(d: Description) -> dict[str, tuple[Floats, float]]:
    """Every term as (its values [N], the prior width of its coefficient before it was fitted): log(measured /
    predicted) is the sum of coefficients times values."""
    n, w = d.numbers, d.words
    moe, age, tokens = n["moe"], n["age"], n["tokens"]

    def word(name: str, *values: str) -> Floats:
        return np.isin(w[name].astype(str), values).astype(np.float64)

    blackwell, hopper = word("architecture", "blackwell"), word("architecture", "hopper")
    part, whole, bare = (word("graphs", name) for name in ("part", "full", "none"))
    small = -(0.5 * tokens + n["hidden"])
    efa, dispatch = word("network", "efa"), n["dispatch"]
    # What a step becomes if every pass of a micro-batch through a layer waits so many milliseconds more.
    wait, long_wait = np.log1p(2 * n["passes"]), np.log1p(8 * n["passes"])
    alltoall, low = word("dispatcher", "alltoall"), 1 - word("precision", "bf16")
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
    waits = {
        "experts": moe,
        "no graphs": bare * moe,
        "graphs of parts": part * moe,
        "no graphs, age": bare * moe * age,
        "all-to-all": alltoall * moe,
        "low precision": low * moe * (1 - whole),
        "efa": efa,
        "efa, deepep": efa * (1 - alltoall),
    }
    found |= {f"wait, {name}": (wait * where, 0.25) for name, where in waits.items()}
    found["long wait, efa"] = (long_wait * efa, 0.3)
    found["short steps"] = (np.log1p(n["short"]), 0.5)
    found["short steps, experts"] = (np.log1p(n["short"]) * moe, 0.5)
    for name in ("uccl", "nvshmem"):
        found[name] = (word("backend", name), 0.3)
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
