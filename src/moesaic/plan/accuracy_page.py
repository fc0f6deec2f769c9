"""The report of `moesaic accuracy` as text for a terminal and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from .accuracy import BY, Report

_SETS = ("all", "experts, 16 to 1,536 GPUs", "experts, up to 8 GPUs", "dense")
_WAYS = (
    ("groups left out", None),
    ("one row left out", "leave one row out"),
    ("closed form without corrections", "without corrections"),
    ("FLOPs over one constant utilisation", "constant utilisation"),
)
_UNITS = {
    "step_time_s": "s",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU",
    "mfu": "% MFU",
    "memory_gib": "GiB",
}


def overview(report: Report) -> str:
    """The main figures, a line each."""
    summary = report.summary
    lines = [f"{summary['runs']} rows priced, {summary.get('skipped', 0)} not."]
    for name in _SETS:
        entry = summary.get(name)
        if entry is None:
            continue
        lines.append(
            f"{name}: {entry['rows']} rows, error median {entry['median']:.1%}, mean {entry['mean']:.1%}, p90 "
            f"{entry['p90']:.1%}, largest {entry['max']:.1%}; {entry['coverage']:.0%} within their 90 % interval"
        )
    ranks = summary.get("rank correlation", {})
    if ranks.get("mean") is not None:
        lines.append(
            f"rank correlation in {len(ranks['groups'])} groups of five or more layouts: mean {ranks['mean']:.2f}, "
            f"lowest {ranks['lowest']:.2f}"
        )
    if "memory" in summary:
        entry = summary["memory"]
        lines.append(f"memory: {entry['rows']} rows, error mean {entry['mean']:.1%}, largest {entry['max']:.1%}")
    lines += report.remarks
    reasons: dict[str, list[str]] = defaultdict(list)
    for skipped in report.skipped:
        reasons[skipped["reason"]].append(skipped["id"])
    for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"not priced, {len(ids)} ({_some(ids)}): {reason}")
    return "\n".join(lines)


def markdown(report: Report, name: str) -> str:
    """The whole report: figures, what was left out and why, every row."""
    summary = report.summary
    lines = [
        "# Accuracy of predicted step times",
        "",
        (
            f"Written by `moesaic accuracy {name} --out docs/accuracy.md`. {summary['runs']} rows of published "
            f"measurements are priced and {summary.get('skipped', 0)} are not, each with its reason below."
        ),
        "",
        (
            "A row that the corrections were fitted to is predicted **without any row of the same model and "
            "accelerator** (all releases and precisions together), and so are the widths of the corrections' terms. "
            "One figure per row, that of its step time; error is predicted / measured − 1, figures are of its absolute "
            "value. Intervals are meant to hold nine of ten. The constants of the closed form are from measured "
            "kernels and collectives, not from these rows; where the fit of widths starts, and which terms there are, "
            "was chosen looking at all of them."
        ),
        "",
        *_table(("rows", "how", "n", "median", "mean", "p90", "largest", "in interval"), list(_headline(summary))),
        "",
        (
            "`FLOPs over one constant utilisation` is the arithmetic that needs no cost model, by the same protocol: "
            "what the closed form and its corrections add is the difference. `one row left out` is what to expect of a "
            "row whose model and accelerator were seen in other layouts or releases."
        ),
        "",
    ]
    ranks = summary.get("rank correlation", {})
    if ranks.get("groups"):
        one = ranks.get("leave one row out", {}).get("groups", {})
        lines += ["## Order of layouts", "", "Spearman's correlation of predicted and measured tokens/s/GPU.", ""]
        rows = [
            (group, v["runs"], _number(v["correlation"]), _number(one.get(group, {}).get("correlation")))
            for group, v in ranks["groups"].items()
        ]
        lines += [*_table(("group", "runs", "group left out", "one row left out"), rows), ""]
    for by in BY:
        entries = summary.get(f"by {by}", {})
        lines += [f"## By {by}", ""]
        lines += _table(
            (by, "n", "median", "mean", "p90", "largest", "in interval"),
            [
                (
                    word,
                    e["rows"],
                    *(f"{e[key]:.1%}" for key in ("median", "mean", "p90", "max")),
                    f"{e['coverage']:.0%}",
                )
                for word, e in entries.items()
            ],
        )
        lines.append("")
    lines += ["## Rows", "", "Interval of 90 %. Cells that were assumed are under the table.", ""]
    lines += _table(
        ("id", "quantity", "measured", "predicted", "interval", "error"),
        [
            (
                row["id"],
                _UNITS.get(row["quantity"], row["quantity"]),
                f"{row['measured']:.5g}",
                f"{row['predicted']:.5g}",
                " to ".join(f"{end:.4g}" for end in row["interval"]) if "interval" in row else "",
                f"{row['error']:+.1%}",
            )
            for row in report.rows
        ],
    )
    lines += ["", "## What was assumed", ""]
    lines += [f"- {what}: {_some(ids, 12)}" for what, ids in _assumed(report.rows)]
    lines += ["", "## Rows that are not priced", ""]
    reasons: dict[str, list[str]] = defaultdict(list)
    for skipped in report.skipped:
        reasons[skipped["reason"]].append(skipped["id"])
    lines += [f"- {_some(ids, 60)}: {reason}" for reason, ids in sorted(reasons.items(), key=lambda i: -len(i[1]))]
    if report.remarks:
        lines += ["", "## Remarks", "", *(f"- {remark}" for remark in report.remarks)]
    return "\n".join(lines) + "\n"


def _headline(summary: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    for name in _SETS:
        for how, key in _WAYS:
            entry = summary.get(name)
            if entry is None:
                continue
            covered = f"{entry['coverage']:.0%}" if key is None else ""
            entry = entry if key is None else entry.get(key)
            if entry is None:
                continue
            figures = (f"{entry[k]:.1%}" for k in ("median", "mean", "p90", "max"))
            yield name, how, entry["rows"], *figures, covered


def _assumed(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for what in row.get("assumed", ()):
            if row["id"] not in found[what]:
                found[what].append(row["id"])
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    cells = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return [f"| {cells[0]} |", "|" + " --- |" * len(head), *(f"| {row} |" for row in cells[1:])]


def _some(ids: list[str], most: int = 4) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def _number(value: float | None) -> str:
    return "—" if value is None or value != value else f"{value:.2f}"
