"""Out of memory: what took it, and the cheapest change to the layout that would fit.

`out-of-memory-RANK.json` in the run's folder has what the sentence on the terminal is made of:

    rank, step, phase
    bytes, limit_bytes   what was in use when it ran out, and what there is
    consumers            {what: bytes}, largest first; `source` says whether metered or predicted by `cost.memory`
    ways_out             [{change, bytes, seconds}]: changes that are predicted to fit, fastest first
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moesaic.cost.memory import memory
from moesaic.cost.options import recompute_sets
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns
from moesaic.spec.cluster import ClusterSpec, cluster_of, load_cluster
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import recompute_instead
from moesaic.spec.run import RunSpec
from moesaic.train.folder import RunError
from moesaic.train.options import changed_layout
from moesaic.train.predicted import habits_here, workload

GIB = 2**30


class OutOfMemory(RunError):
    """Training needs more memory than there is."""

    exit_code = 1


@dataclass(frozen=True)
class WayOut:
    """A change to [layout], with the prediction for the rank that needs most and for a step."""

    change: str
    bytes: int
    seconds: float


def ways_out(run: RunSpec, model: ModelSpec, layout: Layout, limit: float) -> tuple[list[WayOut], WayOut]:
    """Changes that are predicted to need at most `limit` bytes, fastest first; and of all the one that needs least.

    Tried are all sets of modules to recompute, smaller micro-batches, more sharding, and the first two together.
    Seconds are those of [cluster], or of an H100 where it names no accelerator: only their order matters.
    """
    pairs = list(_changes(run, model, layout))
    columns, work = Columns.of([one for _, one in pairs]), workload(run, model)
    held = memory(work, columns, habits_here()).total
    cluster = _cluster(run, layout.world)
    time = step_time(work, columns, cluster, rates_for(cluster, Stack("moesaic"))).total
    found = [WayOut(what, int(held[row]), float(time[row])) for row, (what, _) in enumerate(pairs)]
    fitting = [found[row] for row in np.argsort(time, kind="stable") if held[row] <= limit]
    return fitting, found[int(np.argmin(held))]


def _cluster(run: RunSpec, world: int) -> ClusterSpec:
    try:
        return cluster_of(run.cluster.model_copy(update={"nodes": None}), world)
    except SpecError:
        return load_cluster("h100", world)


def _changes(run: RunSpec, model: ModelSpec, layout: Layout) -> Iterator[tuple[str, Layout]]:
    sets = [layout.recompute, *recompute_sets(model)]
    fixed = {"overlap": list(layout.overlap), "dispatcher": layout.dispatcher if layout.ep * layout.etp > 1 else "auto"}
    smaller = [count for count in range(layout.micro_batch, 0, -1) if layout.micro_batch % count == 0]
    levels = ("none", "optimizer", "gradients", "parameters")
    more = levels[levels.index(layout.sharding) :] if max(layout.dp * layout.cp, layout.edp) > 1 else [layout.sharding]
    seen = set()
    for count in smaller:
        for words in sets:
            for level in more:
                changed = {"recompute": list(words), "micro_batch": count, "sharding": level}
                before = {"recompute": list(layout.recompute), "micro_batch": layout.micro_batch,
                          "sharding": layout.sharding}  # fmt: skip
                shown = {key: to for key, to in changed.items() if to != before[key]}
                if "recompute" in shown:
                    shown = recompute_instead(run.layout, words) | shown
                what = " and ".join(
                    f"no layout.{key}" if to is None else f"layout.{key} = {_toml(to)}" for key, to in shown.items()
                )
                one = changed_layout(run, model, layout.world, **fixed, **changed)
                if what not in seen and one is not None:
                    seen.add(what)
                    yield what or "the layout as it is", one


def _toml(value: Any) -> str:
    return str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'


def sentence(record: dict[str, Any], last: str, path: str) -> str:
    """What there is to say about an out-of-memory record; `last` names the last checkpoint."""
    largest = [f"{what} {_size(size)}" for what, size in list(record["consumers"].items())[:3]]
    where = f" in {record['phase']} of step {record['step']}" if record["phase"] else ""
    limit = record["limit_bytes"]
    there = "" if limit is None else f" of {_size(limit)}"
    text = (
        f"Memory ran out{where} at {_size(record['bytes'])}{there}: most went to {', '.join(largest)} "
        f"({record['source']}). {last} "
    )
    if record["ways_out"]:
        best = record["ways_out"][0]
        return (
            f"{text}The cheapest way out: {best['change']} (predicted to need {_size(best['bytes'])}), and --resume; "
            f"others are in {path}."
        )
    least = record["least"]
    return (
        f"{text}No single change of the layout is predicted to fit; {least['change']} needs least, "
        f"{_size(least['bytes'])}: lower train.seq_len (now {record['seq_len']}), or take more devices and --resume."
    )


def describe(
    run: RunSpec,
    model: ModelSpec,
    layout: Layout,
    *,
    rank: int,
    step: int,
    phase: str,
    used: int,
    limit: int | None,
    consumers: dict[str, int],
    source: str,
) -> dict[str, Any]:
    """The record: see the module's text. Where no limit is known, what was in use is taken for it."""
    fitting, least = ways_out(run, model, layout, used if limit is None else limit)
    fitting = [way for way in fitting if way.change != "the layout as it is"]
    return {
        "rank": rank,
        "step": step,
        "phase": phase,
        "bytes": used,
        "limit_bytes": limit,
        "source": source,
        "consumers": dict(sorted(consumers.items(), key=lambda pair: -pair[1])),
        "ways_out": [asdict(way) for way in fitting[:8]],
        "least": asdict(least),
        "seq_len": run.train.seq_len,
    }


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
