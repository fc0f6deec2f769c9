"""Cells as tables: for a terminal and for Markdown, the same rows."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.registry import PEERS
from benchmarks.rounds import MALLOC, Cell, Row

OURS = "moesaic"


def comparable(cell: Cell, row: Row) -> bool:
    """Whether a row did the work that the cell says: no failure, and its own dtype."""
    return not row.error and not (cell.dtype == "fp32" and PEERS[row.peer].fp32_is_bf16)


def seconds_or_more(row: Row) -> tuple[float, bool]:
    """Best seconds, or the limit that it passed; and whether the number is only a lower bound."""
    if math.isfinite(row.best):
        return row.best, False
    return (row.over_limit if row.over_limit is not None else math.nan), True


def fastest_peer(cell: Cell) -> Row | None:
    """The comparable peer with the smallest seconds; one that never finished counts with its limit."""
    rows = [row for row in cell.rows if row.peer != OURS and comparable(cell, row)]
    rows = [row for row in rows if math.isfinite(seconds_or_more(row)[0])]
    return min(rows, key=lambda row: seconds_or_more(row)[0], default=None)


def leanest_peer(cell: Cell) -> Row | None:
    """The comparable peer with the smallest peak above its idle process."""
    rows = [row for row in cell.rows if row.peer != OURS and comparable(cell, row) and math.isfinite(row.extra_mb)]
    return min(rows, key=lambda row: row.extra_mb, default=None)


def verdict(cell: Cell) -> dict[str, Any]:
    """Ours against the fastest and the leanest peer, and against the plain product; NaN where a side is missing."""
    ours, fast, lean = cell.row(OURS), fastest_peer(cell), leanest_peer(cell)
    seconds = ours.best if ours else math.nan
    peer_seconds, bound = seconds_or_more(fast) if fast else (math.nan, False)
    dtype, rate = cell.reference
    rows = [row for row in cell.rows if row.peer != OURS and comparable(cell, row) and math.isfinite(row.best_cpu)]
    thrift = min(rows, key=lambda row: row.best_cpu, default=None)
    cpu = ours.best_cpu if ours else math.nan
    return {
        "thriftiest": thrift.peer if thrift else "",
        "cpu_speedup": thrift.best_cpu / cpu if thrift else math.nan,
        "fastest": fast.peer if fast else "",
        "speedup": peer_seconds / seconds,
        "at_least": bound,
        "share_of_matmul": cell.shape.flops() / seconds / rate,
        "matmul_dtype": dtype,
        "leanest": lean.peer if lean else "",
        "memory_ratio": ours.extra_mb / lean.extra_mb if ours and lean else math.nan,
    }


def _number(value: float, digits: int, bound: bool = False) -> str:
    if not math.isfinite(value):
        return "-"
    return ("> " if bound else "") + f"{value:.{digits}f}"


def lines(cell: Cell) -> list[list[str]]:
    """Header and rows of one cell's table."""
    ours = cell.row(OURS)
    ours_seconds = ours.best if ours else math.nan
    _, rate = cell.reference
    share = "layer" in cell.work
    ours_cpu = ours.best_cpu if ours else math.nan
    head = [
        "peer",
        "s",
        "peer / moesaic",
        "CPU s",
        "CPU: peer / moesaic",
        "GFLOP/s",
        *(["of plain product"] if share else []),
    ]
    table = [[*head, "peak above idle, MB", "peak, MB"]]
    for row in cell.rows:
        seconds, bound = seconds_or_more(row)
        speed = math.nan if bound else cell.shape.flops() / seconds
        title = row.title
        if cell.dtype == "fp32" and PEERS[row.peer].fp32_is_bf16:
            title += " (computes in bf16: not compared)"
        if row.error:
            title += " (failed)"
        ratio = _number(seconds / ours_seconds, 2, bound) if row.peer != OURS else "1"
        shares = [_number(100 * speed / rate, 0) + (" %" if math.isfinite(speed / rate) else "")] if share else []
        table.append(
            [
                title,
                _number(seconds, 3 if seconds < 10 else 1, bound),
                ratio,
                _number(row.best_cpu, 2),
                _number(row.best_cpu / ours_cpu, 2) if row.peer != OURS else "1",
                _number(speed / 1e9, 0),
                *shares,
                _number(row.extra_mb, 0),
                _number(row.peak_mb, 0),
            ]
        )
    return table


def heading(cell: Cell) -> str:
    return f"{cell.shape.text()}; {cell.dtype}, {cell.malloc} malloc"


def summary(cell: Cell) -> str:
    """One sentence under a table."""
    v = verdict(cell)
    parts = []
    if v["fastest"]:
        more = "at least " if v["at_least"] else ""
        parts.append(f"moesaic is {more}{v['speedup']:.2f}× the fastest peer ({PEERS[v['fastest']].title})")
    if v["thriftiest"]:
        parts.append(f"in processor time {v['cpu_speedup']:.2f}× the thriftiest ({PEERS[v['thriftiest']].title})")
    if math.isfinite(v["share_of_matmul"]):
        rates = ", ".join(f"{dtype} {max(rates) / 1e9:.0f}" for dtype, rates in cell.matmul.items())
        parts.append(
            f"{100 * v['share_of_matmul']:.0f} % of the plain {v['matmul_dtype']} product "
            f"(measured beside it, GFLOP/s: {rates})"
        )
    if math.isfinite(v["memory_ratio"]):
        parts.append(
            f"peak memory above idle {v['memory_ratio']:.2f}× that of the leanest ({PEERS[v['leanest']].title})"
        )
    others = [cores for row in cell.rows for cores in row.others]
    if others:
        parts.append(f"other processes used {sum(others) / len(others):.2f} cores on average meanwhile")
    return "; ".join(parts) + "." if parts else ""


def text(cell: Cell) -> str:
    """For a terminal."""
    table = lines(cell)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    body = [
        "  ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    notes = [f"  {row.title}: {row.error}" for row in cell.rows if row.error]
    return "\n".join(["", heading(cell), *body, *notes, summary(cell), *profiles(cell)])


def profiles(cell: Cell) -> list[str]:
    """Where the profiled rows spend their time, one line each."""
    return [
        f"  {row.title}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, _, share in row.profile if share > 0.015)
        for row in cell.rows
        if row.profile
    ]


def markdown(cell: Cell) -> str:
    head, *rows = lines(cell)
    out = [f"**{heading(cell)}**", "", "| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    out += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*out, "", summary(cell), *profiles(cell), ""])


def machine() -> dict[str, Any]:
    """What the numbers depend on, for the record."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(names),
        "instructions": [flag for flag in wanted if flag in flags],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "malloc": MALLOC,
    }


def command() -> str:
    """How this process was started, with paths outside the working folder by their last part only."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv)
    return " ".join(["python", *(shlex.quote(word) for word in words)])


def save(cells: Sequence[Cell], started: datetime, json_path: Path | None, markdown_path: Path | None) -> None:
    """Writes what was measured so far; called after every cell, so that a stopped run keeps its numbers."""
    record = {
        "command": command(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now().isoformat(timespec="seconds"),
        "machine": machine(),
        "cells": [{**cell.as_json(), "verdict": verdict(cell)} for cell in cells],
    }
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(finite(record), indent=1) + "\n")
    if markdown_path:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text("\n".join(markdown(cell) for cell in cells))


def finite(value: Any) -> Any:
    """JSON has no NaN: those become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
