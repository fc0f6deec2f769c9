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

SEEN = """\
**What has seen these rows.** Left-out figures are optimistic, and so are those of the closed form, whose constants
(`moesaic.cost.rates`) are not all from kernels and collectives:

- Megatron-Bridge's performance tables: the host's time per layer, waits for counts of rows, and the shares of the fp8,
  mxfp8 and nvfp4 peaks, which were set looking at its runs;
- AWS's runs over EFA: what an exchange and a row cost on that network;
- MegaScale-MoE's figures and tables 3 and 5: the rates of that stack, and of rows moved by framework operations;
- all rows: which terms the corrections have, and where the fit of their widths starts.

The other constants are from measured kernels, collectives and traces of others, or assumed.
"""
"""Which constants of `cost.rates` are from sources of published rows (its letters b, w, g and x)."""
_FEW = 8
"""Rows below which a source or an accelerator says nothing about corrections."""


def made_worse(summary: Mapping[str, Any]) -> list[str]:
    """A sentence about the sets of rows whose median or mean error corrections raise; none where there are none."""
    named = [(name, summary[name]) for name in _SETS if name in summary]
    for by in ("hardware", "source"):
        word_of = {"hardware": "on", "source": "from"}[by]
        named += [(f"{word_of} {word}", e) for word, e in summary.get(f"by {by}", {}).items() if e["rows"] >= _FEW]
    found = []
    for name, entry in named:
        closed = entry.get("without corrections")
        raised = [key for key in ("median", "mean") if closed and entry[key] > closed[key] + 0.0005]
        if closed and raised:
            figures = " and ".join(f"{key} {closed[key]:.1%} to {entry[key]:.1%}" for key in raised)
            found.append(f"{name} ({entry['rows']} rows: {figures})")
    return [f"Corrections make worse, with their groups left out: {'; '.join(found)}."] if found else []


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
            f"lowest {ranks['lowest']:.2f}; of the closed form alone, by which the planner ranks: mean "
            f"{ranks['closed form']['mean']:.2f}, lowest {ranks['closed form']['lowest']:.2f}"
        )
    lines += made_worse(summary)
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
            "value. Intervals are meant to hold nine of ten: those of a row are as wide as the rows of the other "
            "folds need, so that coverage is a measured figure. Over all rows it is near 90 % wherever folds are "
            "alike; by hardware and by source, below, it says more."
        ),
        "",
        SEEN,
        *_table(("rows", "how", "n", "median", "mean", "p90", "largest", "in interval"), list(_headline(summary))),
        "",
        (
            "`FLOPs over one constant utilisation` is the arithmetic that needs no cost model, by the same protocol: "
            "what the closed form and its corrections add is the difference. `one row left out` is what to expect of a "
            "row whose model and accelerator were seen in other layouts or releases. `moesaic plan` applies one factor "
            "to all layouts of a question, so that it ranks them by the closed form."
        ),
        "",
    ]
    worse = made_worse(summary)
    lines += [*worse, ""] if worse else []
    ranks = summary.get("rank correlation", {})
    if ranks.get("groups"):
        lines += ["## Order of layouts", "", "Spearman's correlation of predicted and measured tokens/s/GPU.", ""]
        kinds = [ranks.get("closed form"), ranks, ranks.get("leave one row out")]
        rows: list[tuple[Any, ...]] = [
            (group, entry["runs"], *(_number(_correlation(kind, group)) for kind in kinds))
            for group, entry in ranks["groups"].items()
        ]
        for name in ("mean", "lowest"):
            rows.append((name, "", *(_number(kind.get(name) if kind else None) for kind in kinds)))
        lines += [*_table(("group", "runs", "closed form alone", "group left out", "one row left out"), rows), ""]
    for by in BY:
        entries = summary.get(f"by {by}", {})
        lines += [f"## By {by}", ""]
        lines += _table(
            (by, "n", "median", "mean", "p90", "largest", "in interval", "closed form: median", "mean"),
            [
                (
                    word,
                    e["rows"],
                    *(f"{e[key]:.1%}" for key in ("median", "mean", "p90", "max")),
                    f"{e['coverage']:.0%}",
                    *(f"{e['without corrections'][key]:.1%}" for key in ("median", "mean")),
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


def _correlation(kind: Mapping[str, Any] | None, group: str) -> float | None:
    found: float | None = ((kind or {}).get("groups", {}).get(group) or {}).get("correlation")
    return found


def _number(value: float | None) -> str:
    return "—" if value is None or value != value else f"{value:.2f}"
