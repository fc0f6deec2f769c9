"""What `folding.py` measured as tables: one per layer cell, and one over all layouts of a number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.peers.parallel.registry import PARALLEL_PEERS
from benchmarks.rounds import Row
from benchmarks.tables import command, finite, machine
from benchmarks.teams import ParallelCell, Plan

OURS = "moesaic"
Table = list[list[str]]


def is_ours(row: Row) -> bool:
    """Whether a row is moesaic's, in whichever variant."""
    return PARALLEL_PEERS[row.peer].adapter == "ours"


def comparable(row: Row) -> bool:
    """Whether a peer did the same work: no failure, and its experts in fp32."""
    return bool(row.times) and not row.error and not is_ours(row) and not PARALLEL_PEERS[row.peer].fp32_is_bf16


def fastest_peer(cell: ParallelCell, by: str = "best") -> Row | None:
    """The comparable peer with the most tokens per second."""
    return max(filter(comparable, cell.rows), key=lambda row: cell.speed(row, by), default=None)


def ratio(cell: ParallelCell, row: Row | None, by: str = "best") -> float:
    """moesaic's tokens per second over the row's; NaN where a side is missing."""
    return cell.speed(cell.row(OURS), by) / cell.speed(row, by)


def heading(cell: ParallelCell) -> str:
    ranks = cell.degrees.world
    if cell.work == "layer":
        return f"One MoE layer on {ranks} ranks, ep{ranks}: {cell.shape.text()} per rank; fp32"
    return f"A training step on {ranks} ranks in {cell.degrees.text()}; fp32"


def _number(value: float, digits: int = 0, unit: str = "") -> str:
    return f"{value:,.{digits}f}{unit}" if math.isfinite(value) else "-"


def layer_table(cell: ParallelCell) -> Table:
    """Header and one row per peer."""
    table = [
        [
            "peer",
            "tokens/s, best",
            "median",
            "moesaic / peer, best",
            "median",
            "CPU s, all ranks",
            "peak above idle, MB a rank",
        ]
    ]
    for row in cell.rows:
        title = row.title
        if row.error:
            title += " (failed)"
        elif PARALLEL_PEERS[row.peer].fp32_is_bf16:
            title += " (computes in bf16: not compared)"
        table.append(
            [
                title,
                _number(cell.speed(row)),
                _number(cell.speed(row, "median")),
                _number(ratio(cell, row), 2),
                _number(ratio(cell, row, "median"), 2),
                _number(row.best_cpu, 2),
                _number(row.extra_mb),
            ]
        )
    return table


def step_table(cells: Sequence[ParallelCell]) -> Table:
    """Header and one row per layout: ours, then each peer's tokens/s, ours over it, and its memory."""
    names = [row.peer for row in cells[0].rows if row.peer != OURS]
    titles = [PARALLEL_PEERS[name].title for name in names]
    head = ["layout", "moesaic: tokens/s, best", "median", "peak above idle, MB a rank", "over the fastest peer, best"]
    table = [[*head, "median", *titles]]
    for cell in cells:
        ours = cell.row(OURS)
        table.append(
            [
                cell.degrees.text(),
                _number(cell.speed(ours)),
                _number(cell.speed(ours, "median")),
                _number(ours.extra_mb if ours else math.nan),
                _number(ratio(cell, fastest_peer(cell)), 2),
                _number(ratio(cell, fastest_peer(cell, "median"), "median"), 2),
                *(_beside(cell, cell.row(name)) for name in names),
            ]
        )
    return table


def _beside(cell: ParallelCell, row: Row | None) -> str:
    if row is None or row.peer in cell.misfits:
        return "-"
    if not row.times or row.error:
        return "failed"
    text = f"{_number(cell.speed(row))}; {_number(ratio(cell, row), 2)}×; {_number(row.extra_mb)} MB"
    return f"({text})" if PARALLEL_PEERS[row.peer].fp32_is_bf16 else text


def summary(cells: Sequence[ParallelCell]) -> str:
    """Where moesaic leads least, and what else used the machine."""
    found = [(ratio(cell, peer), cell, peer) for cell in cells if (peer := fastest_peer(cell))]
    found = [each for each in found if math.isfinite(each[0])]
    parts = []
    if found:
        least, cell, peer = min(found, key=lambda each: each[0])
        where = "" if len(found) == 1 else f" (at least, over {len(found)} common layouts: {cell.degrees.text()})"
        parts.append(f"moesaic is {least:.2f}× the fastest peer, {peer.title}{where}")
    others = [cores for cell in cells for row in cell.rows for cores in row.others]
    if others:
        parts.append(f"other processes used {sum(others) / len(others):.2f} cores on average meanwhile")
    return "; ".join(parts) + "." if parts else ""


def failures(cells: Sequence[ParallelCell]) -> list[str]:
    """A line for each row that should have run and did not."""
    return [
        f"- {cell.degrees.text()}, {row.title}: {row.error}"
        for cell in cells
        for row in cell.rows
        if row.error and row.peer not in cell.misfits
    ]


def misfits(cells: Sequence[ParallelCell]) -> list[str]:
    """A line for each reason why a peer is not on some layouts."""
    reasons = dict.fromkeys(
        (row.title, cell.misfits[row.peer])
        for cell in cells
        for row in cell.rows
        if row.peer in cell.misfits and not is_ours(row)
    )
    return [f"- {title}: {reason}" for title, reason in reasons]


def groups(cells: Sequence[ParallelCell]) -> list[list[ParallelCell]]:
    """Cells that share a table: each layer alone, all layouts of a number of ranks together."""
    together: dict[tuple[str, int], list[ParallelCell]] = {}
    for cell in cells:
        together.setdefault((cell.work, cell.degrees.world), []).append(cell)
    return [group if group[0].work == "step" else [cell] for group in together.values() for cell in group[:1]]


def _parts(cells: Sequence[ParallelCell]) -> list[tuple[str, Table, list[str]]]:
    parts = []
    for group in groups(cells):
        first = group[0]
        if first.work == "layer":
            parts.append((heading(first), layer_table(first), [summary(group), *failures(group)]))
        else:
            title = f"A training step on {first.degrees.world} ranks: {first.shape.text()}; fp32"
            key = "A peer's cell: tokens/s; moesaic over it; peak above idle of its fullest rank."
            notes = [key, summary(group), *misfits(group), *failures(group)]
            parts.append((title, step_table(group), notes))
    return parts


def text(cells: Sequence[ParallelCell]) -> str:
    """For a terminal."""
    out = []
    for title, table, notes in _parts(cells):
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        body = [
            "  ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        ]
        out += ["", title, *body, *filter(None, notes)]
    return "\n".join(out)


def markdown(cells: Sequence[ParallelCell]) -> str:
    out = []
    for title, (head, *rows), notes in _parts(cells):
        out += [f"**{title}**", "", "| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        out += ["| " + " | ".join(row) + " |" for row in rows]
        sentences = [note for note in notes if note and not note.startswith("- ")]
        lines = [note for note in notes if note.startswith("- ")]
        out += ["", " ".join(sentences), "", *lines, *([""] if lines else [])]
    return "\n".join(out)


def save(
    cells: Sequence[ParallelCell], plan: Plan, started: datetime, json_path: Path | None, markdown_path: Path | None
) -> None:
    """Writes what was measured so far; called after every cell, so that a stopped run keeps its numbers."""
    record = {
        "command": command(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now().isoformat(timespec="seconds"),
        "machine": machine(),
        "malloc": plan.malloc,
        "threads": plan.threads,
        "cells": [cell.as_json() for cell in cells],
    }
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(finite(record), indent=1) + "\n")
    if markdown_path:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text(markdown(cells))
