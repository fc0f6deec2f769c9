"""Reads what a run left behind: its settings, metrics and log and, where present, baselines and a sample."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import parse_run

Row = dict[str, Any]


class ReportError(MoesaicError):
    """A folder that no report can be made from."""


@dataclass
class RunRecord:
    """One run as its files describe it; `rows` has each step once, in order."""

    folder: Path
    rows: list[Row]
    run: dict[str, Any] = field(default_factory=dict)
    model: ModelSpec | None = None
    baselines: dict[str, Any] = field(default_factory=dict)
    sample: str = ""
    log: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The run's name, or that of its folder."""
        name = self.run.get("run", {}).get("name")
        return str(name or self.folder.resolve().name)

    @property
    def first_words(self) -> str:
        """What the run said when it began: model, machine, threads."""
        line = self.log.partition("\n")[0]
        return re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line)

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

    def sums(self, key: str) -> list[tuple[int, float]]:
        """(step, sum) of every row in which `key` is a table of numbers, such as one per layer."""
        return [
            (int(row["step"]), float(sum(row[key].values()))) for row in self.rows if isinstance(row.get(key), dict)
        ]

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
        """(step, load per expert: tokens or shares) of one layer for every row that has them."""
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
    record.model = _read_model(record)
    record.baselines = _read_json(folder / "baselines.json", record)
    record.sample = _read_text(folder / "sample.txt")
    record.log = _read_text(folder / "run.log")
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


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_model(record: RunRecord) -> ModelSpec | None:
    if not record.run:
        return None
    try:
        return parse_run(record.run).model_spec()
    except MoesaicError as error:
        record.warnings.append(f"The model of run.toml cannot be described: {error}")
        return None


def _read_json(path: Path, record: RunRecord) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        record.warnings.append(f"{path.name} is unreadable ({error}) and is left out.")
        return {}
    return content if isinstance(content, dict) else {}
