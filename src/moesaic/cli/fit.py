"""`moesaic fit`: a training step of one rank without memory, network or data, and whether it fits."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.spec.errors import SpecError

if TYPE_CHECKING:
    from moesaic.cost.memory import StageMemory
    from moesaic.spec.cluster import ClusterSpec
    from moesaic.spec.layout import Layout
    from moesaic.spec.model import ModelSpec
    from moesaic.spec.run import RunSpec
    from moesaic.train.dry_run import DryRun


class Routing(StrEnum):
    """What the routers are supposed to choose."""

    natural = "natural"
    skewed = "skewed"
    worst = "worst"


LARGEST = 8
"""So many consumers of the peak are printed."""
_IMBALANCE = {Routing.natural: 1.0, Routing.skewed: 2.0, Routing.worst: float("inf")}


def fit(
    file: Annotated[Path, typer.Argument(help="Run file (TOML), or run folder.", metavar="RUN")],
    rank: Annotated[int, typer.Option(min=0, help="The rank that is looked at.")] = 0,
    world: Annotated[
        int | None, typer.Option(min=1, help="Processes in all [default: by layout.dp or [cluster], else the fewest]")
    ] = None,
    all_stages: Annotated[
        bool, typer.Option("--all-stages", help="Look at that rank's place in every stage of the pipeline.")
    ] = False,
    routing: Annotated[
        Routing,
        typer.Option(
            help="What the rank's experts get: the mean, twice the mean, or every token's choices as far as they reach."
        ),
    ] = Routing.natural,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one rank's training step on tensors without memory, and print what it holds beside what the planner says.

    With cluster.gpu set, exits with code 2 when it does not fit that accelerator's memory.
    """
    from moesaic.cost.habits import MOESAIC
    from moesaic.cost.memory import stage_memory
    from moesaic.spec.cluster import cluster_of
    from moesaic.spec.legal import fewest_ranks
    from moesaic.spec.run import load_run, resolve_balance
    from moesaic.train.dry_run import dry_run
    from moesaic.train.options import chosen_layout
    from moesaic.train.predicted import workload

    run = load_run(file / "run.toml" if file.is_dir() else file, overrides or [])
    model = run.model_spec()
    run, _ = resolve_balance(run, model)
    size = world or run.world or fewest_ranks(run.layout)
    cluster = cluster_of(run.cluster.model_copy(update={"nodes": None}), size) if run.cluster.gpu else None
    node = cluster.node_size if cluster else run.cluster.gpus_per_node or 8
    layout, _ = chosen_layout(run, model, size, min(node, size))
    imbalance = _IMBALANCE[routing]
    work = replace(workload(run, model), imbalance=imbalance)
    planned = stage_memory(work, layout, MOESAIC)
    tensors = stage_memory(work, layout, replace(MOESAIC, workspace=0))
    layout.dense_coords(rank)  # refuses a rank that is not there
    ranks = _of_every_stage(layout, rank) if all_stages else [rank]
    found = [dry_run(run, model, layout, each, imbalance, min(node, size)) for each in ranks]
    facts = [_facts(each, planned[each.stage], tensors[each.stage], cluster) for each in found]
    if as_json:
        print(json.dumps({"layout": str(layout), "world": size, "routing": routing.value, "ranks": facts}, indent=2))
    else:
        _show(layout, routing, facts)
    _refuse(run, model, layout, facts)


def _of_every_stage(layout: Layout, rank: int) -> list[int]:
    """The ranks of the pipeline that `rank` is in, first stage first."""
    return next(list(group) for group in layout.groups("pp") if rank in group)


def _facts(found: DryRun, planned: StageMemory, tensors: StageMemory, cluster: ClusterSpec | None) -> dict[str, Any]:
    """One rank as plain data, in bytes. `tensors`: what is planned without workspaces, which are no tensors."""
    workspaces = planned.allocated - tensors.allocated
    kept = {
        module: {"dry_run": found.kept.get(module, 0), "planner": planned.kept.get(module, 0.0)}
        for module in sorted({*found.kept, *planned.kept})
    }
    rows = {
        "parameters": (found.parameters, planned.weights),
        "gradients": (found.gradients, planned.gradients),
        "optimizer": (found.optimizer, planned.optimizer),
        "activations": (found.activations, planned.activations),
        "buffers": (found.buffers, tensors.logits + tensors.buffers),
        "peak": (found.peak, tensors.allocated),
    }
    peaks = {
        phase: {
            "total": peak.total,
            **{name: size for name, size in peak.categories.items() if size},
            "consumers": peak.consumers,
        }
        for phase, peak in found.peaks.items()
    }
    facts: dict[str, Any] = {
        "rank": found.rank,
        "stage": found.stage,
        "categories": {name: {"dry_run": a, "planner": b} for name, (a, b) in rows.items()},
        "kept": kept,
        "phases": peaks,
        "workspaces": workspaces,
        "needed": found.peak + workspaces + planned.overhead,
    }
    if cluster is not None:
        facts |= {"gpu": cluster.gpu.name, "memory": cluster.gpu.memory_bytes}
        facts["fits"] = facts["needed"] <= cluster.gpu.memory_bytes
    return facts


def _refuse(run: RunSpec, model: ModelSpec, layout: Layout, facts: list[dict[str, Any]]) -> None:
    """Raises SpecError with the way out if the rank that needs most does not fit."""
    from moesaic.train.way_out import ways_out

    worst = max(facts, key=lambda each: each["needed"])
    if worst.get("fits", True):
        return
    sizes = {name: each["dry_run"] for name, each in worst["categories"].items() if name != "peak"}
    largest = max(sizes, key=lambda name: sizes[name])
    # What the planner does not foresee, and what the routing adds, stays whatever changes.
    beyond = max(0.0, worst["needed"] - worst["categories"]["peak"]["planner"])
    fitting, least = ways_out(run, model, layout, worst["memory"] - beyond)
    way_out = (
        f"Set {fitting[0].change}, predicted to be the fastest way to fit."
        if fitting
        else f"Recompute, micro-batches and sharding alone cannot free enough ({_gib(least.bytes)} GiB predicted at "
        "the least): take a larger ep, pp, tp, cp or world."
    )
    raise SpecError(
        f"rank {worst['rank']} needs {_gib(worst['needed'])} GiB and {worst['gpu']} has {_gib(worst['memory'])} GiB: "
        f"its {largest} take {_gib(sizes[largest])} GiB. {way_out}"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def _show(layout: Layout, routing: Routing, facts: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{layout}, {layout.world} ranks, {routing.value} routing; GiB of one rank", highlight=False)
    for each in facts:
        table = Table(box=None, title=f"rank {each['rank']}, stage {each['stage']}", title_justify="left")
        for name in ("", "dry run", "planner"):
            table.add_column(name, justify="right" if name else "left")
        for name, sizes in each["categories"].items():
            table.add_row(name, _gib(sizes["dry_run"]), _gib(sizes["planner"]))
        table.add_section()
        table.add_row("kept by one micro-batch")
        for module, sizes in each["kept"].items():
            table.add_row(f"  {module}", f"{sizes['dry_run'] / 2**30:.4f}", f"{sizes['planner'] / 2**30:.4f}")
        table.add_section()
        table.add_row("peak by phase")
        for phase, sizes in each["phases"].items():
            if phase != "other":
                table.add_row(f"  {phase}", _gib(sizes["total"]))
        fullest = max(each["phases"], key=lambda phase: each["phases"][phase]["total"])
        table.add_section()
        table.add_row(f"largest at the peak, in {fullest}")
        for name, size in list(each["phases"][fullest]["consumers"].items())[:LARGEST]:
            table.add_row(f"  {name}", f"{size / 2**30:.4f}")
        console.print(table)
        if "gpu" in each:
            fits = "fits" if each["fits"] else "does not fit"
            console.print(
                f"{_gib(each['needed'])} GiB with workspaces, the context and what the allocator reserves: {fits} "
                f"{each['gpu']} with {_gib(each['memory'])} GiB",
                highlight=False,
            )
