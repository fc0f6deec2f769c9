"""The part of a report that shows how evenly tokens spread over experts."""

from __future__ import annotations

from html import escape

from moesaic.report.charts import Line, heat_key, heat_over_time, heat_table, line_chart
from moesaic.report.read import RunRecord

MAX_LAYERS = 64
MAX_CELLS = 300_000
"""Cells of all heat maps over time together; more experts share the steps into fewer columns."""


def final_loads(record: RunRecord) -> list[tuple[str, list[float]]]:
    """(layer, tokens per expert) summed over the last tenth of the recorded steps, at least one step."""
    loads = []
    for layer in layers(record):
        counts = record.expert_counts(layer)
        last = counts[-max(1, len(counts) // 10) :]
        loads.append((layer, [sum(column) for column in zip(*(values for _, values in last), strict=True)]))
    return loads


def layers(record: RunRecord) -> list[str]:
    """Names of the layers with recorded loads, by number."""
    names = [name for name in record.keys_under("expert_load") if record.expert_counts(name)]
    return sorted(names, key=lambda name: (0, int(name), name) if name.isdigit() else (1, 0, name))


def section(record: RunRecord) -> str:
    """Cards: load per expert at the end and over time, max/mean, dead experts."""
    names = layers(record)
    parts = []
    if names:
        loads = final_loads(record)
        steps = max(1, len(record.expert_counts(names[0])) // 10)
        shown = names[:MAX_LAYERS]
        experts = sum(len(load) for _, load in loads)
        columns = max(24, min(180, MAX_CELLS // experts))
        over_time = "".join(
            f"<div><h3>layer {escape(name)}</h3>{heat_over_time(record.expert_counts(name), columns=columns)}</div>"
            for name in shown
        )
        more = f"<p>{len(names) - MAX_LAYERS} more layers are left out here.</p>" if len(names) > MAX_LAYERS else ""
        parts.append(
            _card(
                "Load per expert at the end",
                f"Tokens over the last {steps} recorded step{'s' * (steps > 1)}, relative to the layer's mean: "
                "1 is perfect balance.",
                heat_key() + heat_table(loads),
            )
        )
        parts.append(
            _card(
                "Load per expert over time",
                "One row per expert, the first step at the left.",
                f'{heat_key()}<div class="layers">{over_time}</div>{more}',
            )
        )
    imbalance = _imbalance(record)
    dead = record.sums("dead_experts")
    dropped = record.series("dropped_tokens")
    row = ""
    if imbalance:
        row += _card(
            "Busiest expert, max/mean",
            "Per layer; the thick line is the worst layer. 1 is perfect balance.",
            line_chart(imbalance),
        )
    if dead:
        lines = [Line("experts without a token", dead, "var(--bad)")]
        if any(value for _, value in dropped):
            lines.append(Line("dropped tokens", dropped, "var(--p4)"))
        row += _card(
            "Experts without a token",
            "All layers, in the tokens of one step.",
            line_chart(lines, zero=True, top=max(1.0, *(value for line in lines for _, value in line.points))),
        )
    return "".join(parts) + (f'<div class="grid2">{row}</div>' if row else "")


def _imbalance(record: RunRecord) -> list[Line]:
    names = record.keys_under("load_max_over_mean")
    by_layer = [record.series("load_max_over_mean", name) for name in names]
    by_layer = [points for points in by_layer if points]
    if not by_layer:
        return []
    worst: dict[int, float] = {}
    for points in by_layer:
        for step, value in points:
            worst[step] = max(value, worst.get(step, value))
    lines = [Line("layer", points, "var(--p6)", faint=True) for points in by_layer]
    return [*lines, Line("worst layer", sorted(worst.items()), "var(--held)")]


def _card(title: str, text: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p>{escape(text)}</p>{content}</section>'
