"""`moesaic layout`: who is where in a layout, and which layouts are legal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from moesaic.spec.layout import Layout

_ROWS = 64
"""Ranks that the table shows; --json has all."""
_USES = {
    "tp": "cut dense weights",
    "cp": "attention",
    "dp": "batch",
    "pp": "activations",
    "data": "dense gradients",
    "sequence": "one sequence",
    "stage": "same layers",
    "ep": "token exchange",
    "etp": "cut expert weights",
    "edp": "expert gradients",
    "ep_etp": "all experts once",
}


def layout(
    source: Annotated[
        str,
        typer.Argument(help="Run file (TOML), run folder, preset, config.json, or its folder.", metavar="RUN_OR_MODEL"),
    ],
    world: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**17, help="Processes in all [default: by layout.dp or [cluster], else the fewest possible]"
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes in one node [default: cluster.gpus_per_node, else 8]")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    degrees: Annotated[
        str | None,
        typer.Option("--layout", metavar="DEGREES", help="Degrees, as in 'pp2 dp2 tp2 / ep4'; others are 1."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every legal layout of the world, whatever the degrees given.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show both meshes of a layout: ranks, groups and which of them cross nodes, and the stages of the pipeline.

    An illegal layout is refused with the equation that failed and the nearest legal ones.
    """
    from moesaic.spec.errors import SpecError
    from moesaic.spec.families import load_model_spec
    from moesaic.spec.layout import legal_layouts, parse_degrees, resolve_layout
    from moesaic.spec.legal import fewest_ranks
    from moesaic.spec.run import parse_run
    from moesaic.spec.toml import read_toml

    texts = list(overrides or [])
    given: dict[str, int] = {} if degrees is None else parse_degrees(degrees)
    edp = given.pop("edp", None)
    texts += [f"layout.{name}={degree}" for name, degree in given.items()]
    file = Path(source) / "run.toml"
    bare = not source.endswith(".toml") and not file.is_file()
    if not bare:
        file = file if file.is_file() else Path(source)
        run = parse_run(read_toml(file), texts, name=file.stem, source=str(file), check=False)
        model = run.model_spec()
    else:
        run, model = parse_run({}, texts, check=False), load_model_spec(source)
    if run.layout.dp != "auto" and run.layout.dp < 1:
        raise SpecError(f'layout.dp is {run.layout.dp}, but it takes a degree of at least 1, or "auto".')
    # Of a bare model neither sequence nor batch is known, unless --set gives them.
    known = run.train.model_fields_set if bare else {"seq_len", "global_batch"}
    seq_len = run.train.seq_len if "seq_len" in known else None
    batch = run.train.global_batch if "global_batch" in known else None
    ranks, node = world or run.world or fewest_ranks(run.layout), gpus_per_node or run.cluster.gpus_per_node or 8
    if everything:
        legal = legal_layouts(model, ranks, table=run.layout, seq_len=seq_len, global_batch=batch)
        _list((str(each) for each in legal), ranks, as_json)
        return
    resolved = resolve_layout(run.layout, model, ranks, seq_len=seq_len, global_batch=batch)
    if edp is not None and edp != resolved.edp:
        raise SpecError(f"--layout gives edp{edp}, but world / (pp·etp·ep) makes it edp{resolved.edp}: {resolved}.")
    facts = describe(resolved, node, len(model.mtp))
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _show(resolved, facts)


def describe(layout: Layout, gpus_per_node: int, mtp: int) -> dict[str, Any]:
    """A layout as plain data, which is what `--json` prints: ranks with their coordinates, groups by name with those
    that cross nodes, and stages. Nodes hold `gpus_per_node` consecutive ranks each."""
    from moesaic.spec.layout import EXPERT_GROUPS, GROUPS
    from moesaic.spec.stages import stages_text

    # Layers whose experts lie on the same mesh share its groups.
    meshes: dict[int, int | None] = {ep: experts for experts, ep in layout.experts_ep} or {1: None}
    several = len(meshes) > 1
    ranks = []
    for rank in range(layout.world):
        row = {"rank": rank, "node": rank // gpus_per_node, **layout.dense_coords(rank)}
        for ep, experts in meshes.items():
            coords = layout.expert_coords(rank, experts)
            row |= {f"{axis}-{ep}" if several else axis: coords[axis] for axis in ("edp", "ep", "etp")}
        ranks.append(row)
    partitions = {name: (axes, layout.groups(*axes)) for name, axes in GROUPS.items()}
    for ep, experts in meshes.items():
        for name, axes in EXPERT_GROUPS.items():
            key = f"{name}-{ep}" if several else name
            partitions[key] = (axes, layout.expert_groups(*axes, experts=experts))
    groups = {}
    for name, (axes, partition) in partitions.items():
        crossing = [group for group in partition if group[0] // gpus_per_node != group[-1] // gpus_per_node]
        groups[name] = {"axes": axes, "size": len(partition[0]), "ranks": partition, "cross_nodes": crossing}
    return {
        "layout": str(layout),
        "world": layout.world,
        "gpus_per_node": gpus_per_node,
        "nodes": -(-layout.world // gpus_per_node),
        "order": layout.order,
        "dispatcher": layout.dispatcher,
        "schedule": layout.schedule,
        "sharding": layout.sharding,
        "replicas": layout.replicas,
        "cp_kind": layout.cp_kind,
        "experts": [
            {"experts": experts, "ep": ep, "edp": layout.layer_edp(experts), "experts_per_rank": experts // ep}
            for experts, ep in layout.experts_ep
        ],
        "stages": [
            {"stage": i, "pp": i % layout.pp, "chunk": i // layout.pp, "holds": str(stage)}
            for i, stage in enumerate(layout.stages)
        ],
        "stages_text": stages_text(layout.stages, mtp),
        "ranks": ranks,
        "groups": groups,
    }


def _list(layouts: Iterator[str], world: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(list(layouts), indent=2))
        return
    count = 0
    for text in layouts:
        print(text)
        count += 1
    print(f"{count} legal {'layout' if count == 1 else 'layouts'} of {world} {'rank' if world == 1 else 'ranks'}")


def _show(layout: Layout, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(facts["layout"], style="bold"))
    for line in _lines(layout, facts):
        console.print(Text(line))
    for table in (_rank_table(facts), _group_table(facts), _stage_table(facts)):
        console.print()
        console.print(table)
    if facts["world"] > _ROWS:
        console.print(Text(f"\nThe first {_ROWS} of {facts['world']} ranks are shown; --json has all."))


def _lines(layout: Layout, facts: dict[str, Any]) -> list[str]:
    kind = f"{layout.cp_kind} context parallelism, " if layout.cp > 1 else ""
    copies = f" in {layout.replicas} copies" if layout.replicas > 1 else ""
    pipeline = f"schedule {layout.schedule}, order {layout.order}, " if layout.pp > 1 else ""
    nodes = facts["nodes"]
    first = (
        f"{layout.world} ranks on {nodes} {'node' if nodes == 1 else 'nodes'} of {facts['gpus_per_node']}; "
        f"{kind}{pipeline}dispatcher {layout.dispatcher}, sharding {layout.sharding}{copies}"
    )
    experts = [
        f"{entry['experts']} experts: {entry['experts_per_rank']} on each of {entry['ep']} ranks, {entry['edp']} "
        f"{'copy' if entry['edp'] == 1 else 'copies'} per stage"
        for entry in facts["experts"]
    ]
    return [first, *experts, f"stages {facts['stages_text']}"]


def _rank_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in facts["ranks"][0]:
        table.add_column(name, justify="right")
    for row in facts["ranks"][:_ROWS]:
        table.add_row(*(str(value) for value in row.values()))
    return table


def _group_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("group")
    table.add_column("size", justify="right")
    table.add_column("groups", justify="right")
    for header in ("for", "cross nodes", "ranks"):
        table.add_column(header, overflow="fold")
    for name, group in facts["groups"].items():
        if group["size"] == 1:
            continue
        total, crossing = len(group["ranks"]), len(group["cross_nodes"])
        which = "none" if not crossing else f"all {total}" if crossing == total else f"{crossing} of {total}: "
        if 0 < crossing < total:
            which += _several(group["cross_nodes"])
        use = _USES[name.partition("-")[0]]
        table.add_row(name, str(group["size"]), str(total), use, which, _several(group["ranks"]))
    return table


def _stage_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("pp", justify="right")
    table.add_column("holds")
    for stage in facts["stages"]:
        table.add_row(str(stage["stage"]), str(stage["pp"]), stage["holds"])
    return table


def _several(groups: list[tuple[int, ...]], most: int = 4) -> str:
    shown = ", ".join(_compact(group) for group in groups[:most])
    return shown + (f", … ({len(groups)})" if len(groups) > most else "")


def _compact(ranks: tuple[int, ...]) -> str:
    """Ranks in brackets: `[0–7]` where consecutive, `[0,4,8,…,60]` where they are many."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"[{ranks[0]}–{ranks[-1]}]"
    shown = [str(rank) for rank in ranks]
    return "[" + ",".join(shown if len(shown) <= 6 else [*shown[:3], "…", shown[-1]]) + "]"
