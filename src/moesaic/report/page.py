"""The report of one run: a single HTML file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

import moesaic
from moesaic.report import balance
from moesaic.report.charts import Level, Line, line_chart, share_bar, stacked_bars
from moesaic.report.facts import fact_table, headline, tiles, warnings
from moesaic.report.numbers import duration, short, smooth
from moesaic.report.read import ReportError, RunRecord, read_run

PHASE_NAMES = {"eval": "evaluation", "data": "reading data"}
PHASE_COLOURS = [f"var(--p{index})" for index in range(1, 9)]


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder from its metrics and return its path.

    Works while the run is still going: it shows the steps so far. Raises ReportError for a folder without metrics,
    or one that cannot be written to.
    """
    record = read_run(Path(run_dir))
    path = record.folder / "report.html"
    partial = path.with_name(f".report-{os.getpid()}.html")
    try:
        partial.write_text(render(record), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ReportError(f"{path} could not be written: {error.strerror}; mend that and run moesaic report.") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(record: RunRecord) -> str:
    """The page as text."""
    assets = resources.files("moesaic.report")
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
    name = escape(record.title)
    body = "".join(
        [
            headline(record),
            warnings(record),
            tiles(record),
            _loss(record),
            balance.section(record),
            _time(record),
            _curves(record),
            _sample(record),
            _facts(record),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name} · moesaic</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style></head><body><main>{body}'
        f"<footer>Written by moesaic {escape(moesaic.__version__)} from {len(record.rows)} steps of metrics.jsonl."
        f"</footer></main><script>{script}</script></body></html>\n"
    )


def card(title: str, text: str, *content: str) -> str:
    """A titled box; `text` is one line that says how to read it."""
    note = f"<p>{escape(text)}</p>" if text else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{note}{"".join(content)}</section>'


def _loss(record: RunRecord) -> str:
    train = record.series("loss")
    span = max(1, len(train) // 60)
    lines = []
    if span > 1:
        lines.append(Line("each step", train, "var(--train)", faint=True))
    lines.append(Line("training", smooth(train, span), "var(--train)"))
    lines.append(Line("held-out", record.series("validation_loss"), "var(--held)", dots=True))
    levels = [
        Level(name, float(record.baselines[name]["loss"]), f"var(--{name})")
        for name in ("unigram", "bigram")
        if isinstance(record.baselines.get(name), dict) and "loss" in record.baselines[name]
    ]
    text = "Mean cross-entropy per token in nats, before auxiliary terms; lower is better."
    if levels:
        text += " Dashed: what counting single tokens (unigram) or pairs of tokens (bigram) reaches on the same text."
    chart = line_chart(lines, width=1110, height=330, levels=levels, text=lambda value: f"{value:.3g}")
    return card("Loss", text, chart)


def _time(record: RunRecord) -> str:
    names = record.keys_under("seconds_by_phase")
    if not names:
        return ""
    rows = []
    for row in record.rows:
        table = row.get("seconds_by_phase")
        if isinstance(table, dict):
            rows.append((int(row["step"]), [float(table.get(name) or 0.0) for name in names]))
    totals = [sum(values[index] for _, values in rows) for index in range(len(names))]
    order = sorted(range(len(names)), key=lambda index: -totals[index])
    names = [PHASE_NAMES.get(names[index], names[index]) for index in order]
    totals = [totals[index] for index in order]
    rows = [(step, [values[index] for index in order]) for step, values in rows]
    colours = [PHASE_COLOURS[index % len(PHASE_COLOURS)] for index in range(len(names))]
    share = card(
        "Where the time went",
        f"{duration(sum(totals))} measured over {len(rows)} steps.",
        share_bar(names, colours, totals, duration),
    )
    over = card(
        "Seconds per step, by phase",
        "Each bar is the mean of the steps under it; hover for numbers.",
        stacked_bars(names, colours, rows),
    )
    return f'<div class="grid2">{share}{over}</div>'


def _curves(record: RunRecord) -> str:
    speed = record.series("tokens_per_second")
    flops = record.series("matmul_share")
    charts = [
        card("Throughput", "Tokens per second.", line_chart(_single("tokens/s", speed, "var(--p2)"), zero=True)),
    ]
    if flops:
        charts.append(
            card(
                "Model FLOP/s",
                "As a share of this machine's measured matmul rate.",
                line_chart(_single("share", flops, "var(--p4)"), zero=True, text=lambda value: f"{value:.0%}"),
            )
        )
    charts.append(
        card(
            "Gradient norm",
            "Before clipping." + _clip(record),
            line_chart(_single("norm", record.series("grad_norm"), "var(--p3)"), zero=True),
        )
    )
    charts.append(card("Learning rate", "", line_chart([Line("rate", record.series("lr"), "var(--p1)")], zero=True)))
    for name in record.keys_under("loss_parts"):
        title = PART_TITLES.get(name, name.replace("_", " "))
        text = PART_TEXTS.get(name, "Before its coefficient.")
        charts.append(card(title, text, line_chart(_single(title, record.series("loss_parts", name), "var(--p5)"))))
    memory = [(step, size / 2**20) for step, size in record.series("peak_memory_bytes")]
    if memory:
        charts.append(
            card(
                "Memory",
                "The most that the process has held so far, in MiB.",
                line_chart([Line("most so far", memory, "var(--p8)")], zero=True),
            )
        )
    return f'<div class="grid2">{"".join(charts)}</div>'


PART_TITLES = {
    "batch_aux": "Batch balancing loss",
    "sequence_aux": "Sequence balancing loss",
    "global_aux": "Global balancing loss",
    "z": "Router z-loss",
    "mtp": "Multi-token prediction loss",
}
_BALANCE_TEXT = "Mean over layers, before its coefficient; 1 is perfect balance."
PART_TEXTS = {
    "batch_aux": _BALANCE_TEXT,
    "sequence_aux": _BALANCE_TEXT,
    "global_aux": _BALANCE_TEXT,
    "z": "Mean squared log-sum-exp of the routers' logits, before its coefficient.",
    "mtp": "Cross-entropy of the tokens further ahead in nats, before its coefficient.",
}


def _single(name: str, points: Sequence[tuple[float, float]], colour: str) -> list[Line]:
    span = max(1, len(points) // 40)
    if span == 1:
        return [Line(name, points, colour)]
    return [Line(name, points, colour, faint=True), Line(name, smooth(points, span), colour)]


def _clip(record: RunRecord) -> str:
    clip = record.run.get("train", {}).get("clip")
    if not isinstance(clip, (int, float)) or clip <= 0:
        return ""
    norms = record.series("grad_norm")
    above = sum(1 for _, norm in norms if norm > clip)
    return f" Above the clipping limit of {short(float(clip))} in {above} of {len(norms)} steps." if norms else ""


def _sample(record: RunRecord) -> str:
    if not record.sample.strip():
        return ""
    return card("A sample from the trained model", "", f"<pre>{escape(record.sample)}</pre>")


def _facts(record: RunRecord) -> str:
    settings = record.folder / "run.toml"
    content = ""
    if record.run and settings.is_file():
        text = escape(settings.read_text(encoding="utf-8", errors="replace"))
        content = f"<details><summary>run.toml</summary><pre>{text}</pre></details>"
    if record.log:
        content += f"<details><summary>run.log</summary><pre>{escape(record.log)}</pre></details>"
    return card("The run", "", fact_table(record), content)
