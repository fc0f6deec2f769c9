"""A timeline as inline SVG: a group of rows per pipeline rank, a row per stream, time from left to right."""

from __future__ import annotations

from html import escape

from moesaic.cost.timeline import Event, Stream, Timeline
from moesaic.report.numbers import ticks
from moesaic.report.trace import STREAM_TITLES, kind

KINDS: dict[str, tuple[str, str]] = {
    "forward": ("forward", "var(--p1, #2471ce)"),
    "backward": ("backward", "var(--p3, #d96214)"),
    "weights": ("gradients of weights", "var(--p4, #d9a514)"),
    "pair": ("forward and backward together", "var(--p5, #7a5bb5)"),
    "again": ("computed again", "var(--p7, #be185d)"),
    "gather": ("gathering parameters", "var(--p2, #17a2a2)"),
    "reduce": ("reducing gradients", "var(--p8, #4a7c2a)"),
    "optimizer": ("optimizer", "var(--ink, #1d2026)"),
    "offload": ("host", "var(--soft, #5d6470)"),
    "send": ("sending", "var(--p6, #8a8f98)"),
}
"""Word that a name begins with (see `trace.kind`): what the legend says, and a CSS colour."""
OTHER = ("other", "var(--p6, #8a8f98)")

LEFT, RIGHT, TOP, BOTTOM = 116, 14, 6, 30
GAP = 0.7
"""Between ranks, in heights of a thin row."""
MOST_HINTS = 2500
"""Events with a hint of their own; more would make the page slow, so that rows then have one each."""

Box = tuple[float, float]
"""Top and height of a row, in pixels."""


def timeline_svg(timeline: Timeline, *, width: int = 1110, height: int = 460) -> str:
    """A legend and a chart as an HTML fragment; colours are the report's CSS variables, with fallbacks.

    `height` is what the rows of all ranks should share: with few ranks they take less, with very many they take more,
    since no row is thinner than two pixels.
    """
    if not timeline.events:
        return '<p class="none">nothing happens</p>'
    grouped: dict[tuple[int, Stream], list[Event]] = {}
    for event in timeline.events:
        grouped.setdefault((event.rank, event.stream), []).append(event)
    rows, bottom = _rows(timeline, height)
    scale = (width - LEFT - RIGHT) / timeline.makespan
    parts = _names(rows, width - LEFT - RIGHT)
    one_by_one = len(timeline.events) <= MOST_HINTS
    for key, events in grouped.items():
        if one_by_one:
            parts += [_box(event, *rows[key], scale) for event in events]
        else:
            parts.append(_row(timeline, key, events, *rows[key], scale))
    parts.append(_axis(timeline.makespan, scale, bottom, width))
    order = [*KINDS.values(), OTHER]
    seen = {_kind(event) for event in timeline.events}
    legend = "".join(
        f'<span><i style="background:{fill}"></i>{escape(title)}</span>'
        for title, fill in sorted(seen, key=order.index)
    )
    return (
        f'<div class="legend">{legend}</div><div class="chart timeline">'
        f'<svg viewBox="0 0 {width} {bottom + BOTTOM:.0f}" role="img" font-family="system-ui, sans-serif">'
        f"{''.join(parts)}</svg></div>"
    )


def seconds_text(seconds: float, step: float | None = None) -> str:
    """As seconds, milliseconds or microseconds, whichever suits them, or marks `step` seconds apart."""
    size = abs(seconds) if step is None else step
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if size >= u), (1e-6, "µs"))
    return f"{seconds / unit:.4g} {name}"


def _kind(event: Event) -> tuple[str, str]:
    return KINDS.get(kind(event.name), OTHER)


def _rows(timeline: Timeline, height: int) -> tuple[dict[tuple[int, Stream], Box], float]:
    """Every row, and where the last one ends. Compute is twice as tall as other streams, which are in its shade."""
    streams = timeline.streams
    units = sum(2.0 if stream == "compute" else 1.0 for _, stream in streams) + GAP * timeline.ranks
    unit = min(max(height / units, 2.0), 20.0 if timeline.ranks == 1 else 14.0)
    rows: dict[tuple[int, Stream], Box] = {}
    y, last = float(TOP), streams[0][0]
    for rank, stream in streams:
        y += GAP * unit * (rank != last)
        tall = unit * (2.0 if stream == "compute" else 1.0)
        rows[rank, stream] = (y, max(tall - 1, 1.0))
        y, last = y + tall, rank
    return rows, y


def _names(rows: dict[tuple[int, Stream], Box], inner: float) -> list[str]:
    """The ground of every row, on which waiting shows, and names beside them where there is room."""
    parts = []
    by_rank: dict[int, list[Box]] = {}
    for (rank, stream), (y, tall) in rows.items():
        by_rank.setdefault(rank, []).append((y, tall))
        parts.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{inner}" height="{tall:.1f}" style="fill:var(--grid, #ecebe6)"/>'
        )
        if tall >= 8:
            parts.append(_text(LEFT - 7, y + tall / 2 + 3.5, stream, "end", 10.5))
    tops = [mine[0][0] for mine in by_rank.values()]
    pitch = tops[1] - tops[0] if len(tops) > 1 else 99.0
    every = next((step for step in (1, 2, 4, 8, 16, 32) if pitch * step >= 12), 64)
    for number, (rank, mine) in enumerate(by_rank.items()):
        if number % every == 0:
            middle = (mine[0][0] + mine[-1][0] + mine[-1][1]) / 2
            parts.append(_text(2, middle + 4, f"rank {rank}", "start", 11.5))
    return parts


def _box(event: Event, y: float, tall: float, scale: float) -> str:
    """One event, with its name and times on hover, and a short name inside where there is room."""
    wide = event.seconds * scale
    x = LEFT + event.start * scale
    fill = _kind(event)[1]
    hint = f"{event.name}\n{seconds_text(event.seconds)}, from {seconds_text(event.start)} on"
    gap = 0.6 if wide > 3 else 0.0
    box = f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(wide - gap, 0.3):.2f}" height="{tall:.1f}" style="fill:{fill}"/>'
    label = _label(event)
    size = min(10.5, tall * 0.8)
    if size >= 6 and wide >= 0.62 * size * len(label) + 3:
        box += _text(x + wide / 2, y + tall / 2 + size * 0.36, label, "middle", size, "#fff")
    return f"<g><title>{escape(hint)}</title>{box}</g>"


def _row(timeline: Timeline, key: tuple[int, Stream], events: list[Event], y: float, tall: float, scale: float) -> str:
    """All events of a row as one path per kind, with one hint."""
    paths: dict[tuple[str, str], list[str]] = {}
    reach: dict[tuple[str, str], float] = {}
    for event in events:
        start, stop = LEFT + event.start * scale, LEFT + event.stop * scale
        which = _kind(event)
        path = paths.setdefault(which, [])
        if path and start - reach[which] < 0.05:  # too close to see: make the box before it longer
            begin = path[-1].partition(" ")[0]
            path[-1] = f"{begin} {stop:.1f}"
        else:
            path.append(f"{start:.1f} {stop:.1f}")
        reach[which] = stop
    shapes = []
    for (_, fill), spans in paths.items():
        boxes = "".join(f"M{a} {y:.1f}H{b}V{y + tall:.1f}H{a}z" for a, b in (span.split(" ") for span in spans))
        shapes.append(f'<path d="{boxes}" style="fill:{fill}"/>')
    rank, stream = key
    busy = timeline.busy(stream, rank=rank) / timeline.makespan
    hint = f"rank {rank}, {STREAM_TITLES[stream]}: {len(events)} pieces of work, busy for {busy:.1%} of the step"
    return f"<g><title>{escape(hint)}</title>{''.join(shapes)}</g>"


def _label(event: Event) -> str:
    """The word after the kind: which micro-batch, which piece."""
    return " | ".join(part.split(" ")[1] if " " in part else part for part in event.name.split(" | "))


def _axis(end: float, scale: float, bottom: float, width: int) -> str:
    marks = ticks(0.0, end, count=max(2, width // 120))
    step = marks[1] - marks[0] if len(marks) > 1 else end
    y = bottom + 3
    line, soft = "var(--line, #e4e2dc)", "var(--soft, #5d6470)"
    parts = f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" style="stroke:{line}"/>'
    for mark in marks:
        x = LEFT + mark * scale
        parts += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" style="stroke:{soft}"/>'
        parts += _text(min(x, width - 20), bottom + 20, seconds_text(mark, step), "middle", 11.5)
    return parts


def _text(x: float, y: float, text: str, anchor: str, size: float, fill: str = "var(--soft, #5d6470)") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:.1f}" style="fill:{fill};'
        f'pointer-events:none">{escape(text)}</text>'
    )
