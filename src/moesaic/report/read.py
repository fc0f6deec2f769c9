"""Reads what a run left behind: `run.toml`, `metrics.jsonl` and, where present, summary, baselines and sample."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.spec.errors import MoesaicError

Row = dict[str, Any]


class ReportError(MoesaicError):
    """A folder that no report can be made from."""


@dataclass
class RunRecord:
    """One run as its files describe it; `rows` has each step once, in order."""

    folder: Path
    rows: list[Row]
    run: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    baselines: dict[str, Any] = field(default_factory=dict)
    sample: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The run's name, or that of its folder."""
        name = self.run.get("run", {}).get("name")
        return str(name or self.folder.resolve().name)

    def series(self, *path: str) -> list[tuple[int, float]]:
        """(step, value) of every row that has a finite number at `path`."""
        points = []
        for row in self.rows:
            value: Any = row
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, (int, float)) and math.isfinite(value):
                points.append((int(row["step"]), float(value)))
        return points

    def last(self, *path: str) -> float | None:
        """The last finite number at `path`, or None."""
        points = self.series(*path)
        return points[-1][1] if points else None

    def keys_under(self, key: str) -> list[str]:
        """Names that occur in the tables `key` of the rows, in order of first appearance."""
        seen: dict[str, None] = {}
        for row in self.rows:
            table = row.get(key)
            if isinstance(table, dict):
                seen.update(dict.fromkeys(table))
        return list(seen)

    def expert_counts(self, layer: str) -> list[tuple[int, list[float]]]:
        """(step, tokens per expert) of one layer for every row that has them."""
        counts = []
        for row in self.rows:
            table = row.get("expert_load")
            if isinstance(table, dict) and isinstance(table.get(layer), list) and table[layer]:
                counts.append((int(row["step"]), [float(count) for count in table[layer]]))
        width = max((len(count) for _, count in counts), default=0)
        return [(step, count) for step, count in counts if len(count) == width]


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Raises ReportError if the folder or its metrics are missing or hold no complete step. A line cut off by a
    crash is left out and mentioned in `warnings`.
    """
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: give the folder of a run, the one that holds metrics.jsonl.")
    if not metrics.is_file():
        raise ReportError(
            f"{folder} has no metrics.jsonl: it is not a run's folder, or its run stopped before the first step."
        )
    rows, broken = _read_rows(metrics)
    if not rows:
        raise ReportError(f"{metrics} has no complete step yet ({broken} broken lines): train first, then report.")
    record = RunRecord(folder=folder, rows=rows)
    if broken:
        record.warnings.append(f"{broken} line(s) of metrics.jsonl were cut off or unreadable and are left out.")
    record.run = _read_toml(folder / "run.toml", record)
    record.summary = _read_json(folder / "summary.json", record)
    record.baselines = _read_json(folder / "baselines.json", record)
    sample = folder / "sample.txt"
    if sample.is_file():
        record.sample = sample.read_text(encoding="utf-8", errors="replace")
    return record


def _read_rows(path: Path) -> tuple[list[Row], int]:
    by_step: dict[int, Row] = {}
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            broken += 1
            continue
        # A resumed run may write a step again, and an evaluation may be a row of its own.
        by_step[step] = {**by_step.get(step, {}), **row}
    return [by_step[step] for step in sorted(by_step)], broken


def _read_toml(path: Path, record: RunRecord) -> dict[str, Any]:
    if not path.is_file():
        record.warnings.append("run.toml is missing, so the run's settings are not shown.")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        record.warnings.append(f"run.toml is unreadable ({error}), so the run's settings are not shown.")
        return {}


def _read_json(path: Path, record: RunRecord) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        record.warnings.append(f"{path.name} is unreadable ({error}) and is left out.")
        return {}
    return content if isinstance(content, dict) else {}
