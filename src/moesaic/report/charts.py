"""Charts as inline SVG: lines, stacked bars and heat maps. Colours are CSS variables, so that both themes work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from moesaic.report.numbers import Point, bins, short, thin, ticks
from moesaic.report.png import colour, heat_png, shade

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 10, 34


@dataclass
class Line:
    """One curve; `colour` is a CSS colour, `faint` draws it thin behind the others and leaves it out of the legend."""

    name: str
    points: Sequence[Point]
    colour: str
    faint: bool = False
    dots: bool = False


@dataclass
class Level:
    """A horizontal reference line, such as a baseline's loss."""

    name: str
    value: float
    colour: str


def line_chart(
    lines: Sequence[Line],
    *,
    width: int = 540,
    height: int = 220,
    levels: Sequence[Level] = (),
    x_name: str = "step",
    zero: bool = False,
    top: float | None = None,
    text: Callable[[float], str] = short,
) -> str:
    """Curves over steps. `zero` starts the value axis at 0; `top` cuts it; `text` writes values."""
    lines = [line for line in lines if line.points]
    if not lines:
        return '<p class="none">not recorded</p>'
    thinned = [(line, thin(line.points)) for line in lines]
    xs = [x for _, points in thinned for x, _ in points]
    ys = [y for _, points in thinned for _, y in points] + [level.value for level in levels]
    x_low, x_high = min(xs), max(xs)
    if x_high <= x_low:
        x_high = x_low + 1
    y_low, y_high = (0.0 if zero else min(ys)), (top if top is not None else max(ys))
    if y_high <= y_low:
        y_low, y_high = (0.0, y_low * 2 or 1.0) if zero or y_low > 0 else (y_low - 1, y_low + 1)
    margin = 0.06 * (y_high - y_low)
    y_high += margin
    y_low -= 0 if zero else margin
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - BOTTOM

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * inner_w

    def py(y: float) -> float:
        return TOP + (1 - (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)) * inner_h

    parts = [_axes(width, height, (x_low, x_high), (y_low, y_high), px, py, x_name, text)]
    for level in levels:
        y = py(level.value)
        parts.append(
            f'<line class="level" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'style="stroke:{level.colour}"/>'
            f'<text class="label" x="{width - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end" '
            f'style="fill:{level.colour}">{escape(level.name)} {text(level.value)}</text>'
        )
    for line, points in thinned:
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        kind = "curve faint" if line.faint else "curve"
        parts.append(f'<polyline class="{kind}" points="{path}" style="stroke:{line.colour}"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" style="fill:{line.colour}">'
                f"<title>{escape(line.name)}: {text(y)} at {x_name} {short(x, 6)}</title></circle>"
                for x, y in points
            ]
    shown = [(line, points) for line, points in thinned if not line.faint]
    hover = {
        "box": [LEFT, TOP, inner_w, inner_h],
        "x": [x_low, x_high],
        "name": x_name,
        "series": [
            {
                "name": line.name,
                "colour": line.colour,
                "x": [round(x, 2) for x, _ in points],
                "text": [text(y) for _, y in points],
            }
            for line, points in shown
        ],
    }
    legend = _legend([(line.name, line.colour) for line, _ in shown]) if len(shown) > 1 or levels else ""
    return f"{legend}{_svg('lines', width, height, parts, hover)}"


def stacked_bars(
    names: Sequence[str],
    colours: Sequence[str],
    rows: Sequence[tuple[float, Sequence[float]]],
    *,
    width: int = 540,
    height: int = 220,
    x_name: str = "step",
    text: Callable[[float], str] = short,
) -> str:
    """Bars over steps, stacked by name; many steps share a bar, which shows their mean."""
    if not rows:
        return '<p class="none">not recorded</p>'
    bars = []
    for start, end in bins(len(rows), 60):
        part = rows[start:end]
        means = [sum(values[index] for _, values in part) / len(part) for index in range(len(names))]
        bars.append((part[0][0], part[-1][0], means))
    y_high = max(sum(means) for _, _, means in bars) * 1.06 or 1.0
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - BOTTOM
    x_low, x_high = rows[0][0], max(rows[-1][0], rows[0][0] + 1)

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * inner_w

    def py(y: float) -> float:
        return TOP + (1 - y / y_high) * inner_h

    parts = [_axes(width, height, (x_low, x_high), (0.0, y_high), px, py, x_name, text)]
    slot = inner_w / len(bars)
    for index, (first, last, means) in enumerate(bars):
        base = 0.0
        span = f"{x_name} {first:g}" if first == last else f"{x_name}s {first:g}–{last:g}"
        hint = "\n".join([span, *(f"{name}: {text(value)}" for name, value in zip(names, means, strict=True) if value)])
        parts.append(f"<g><title>{escape(hint)}</title>")
        for value, fill in zip(means, colours, strict=True):
            if value > 0:
                y = py(base + value)
                parts.append(
                    f'<rect x="{LEFT + index * slot + 0.4:.2f}" y="{y:.2f}" width="{max(slot - 0.8, 0.4):.2f}" '
                    f'height="{py(base) - y:.2f}" style="fill:{fill}"/>'
                )
                base += value
        parts.append("</g>")
    return _svg("bars", width, height, parts)


def share_bar(
    names: Sequence[str], colours: Sequence[str], values: Sequence[float], text: Callable[[float], str]
) -> str:
    """One bar split into shares, with a table of names, amounts and percentages under it."""
    total = sum(values) or 1.0
    pieces, entries = [], []
    for name, fill, value in zip(names, colours, values, strict=True):
        share = value / total
        pieces.append(
            f'<span style="width:{share * 100:.3f}%;background:{fill}" title="{escape(name)}: {share:.1%}"></span>'
        )
        entries.append(
            f'<tr><td><i style="background:{fill}"></i>{escape(name)}</td><td>{text(value)}</td>'
            f"<td>{share:.1%}</td></tr>"
        )
    return f'<div class="share">{"".join(pieces)}</div><table class="shares">{"".join(entries)}</table>'


def heat_over_time(counts: Sequence[tuple[int, Sequence[float]]], *, width: int = 540, columns: int = 180) -> str:
    """Experts (rows) over steps (columns); the colour is an expert's tokens relative to the layer's mean."""
    table = []
    spans = []
    for start, end in bins(len(counts), columns):
        part = [values for _, values in counts[start:end]]
        sums = [sum(column) for column in zip(*part, strict=True)]
        mean = sum(sums) / len(sums)
        table.append([value / mean if mean else None for value in sums])
        spans.append([counts[start][0], counts[end - 1][0]])
    cells = [[shade(column[expert]) for column in table] for expert in range(len(table[0]))]
    height = max(72, min(200, 9 * len(cells)))
    hover = {
        "box": [0, 0, width, height],
        "spans": spans,
        "loads": [[None if value is None else round(value, 2) for value in column] for column in table],
        "experts": len(cells),
    }
    picture = (
        f'<rect class="frame" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"/>'
        f'<image href="{heat_png(cells)}" x="0" y="0" width="{width}" height="{height}" preserveAspectRatio="none"/>'
    )
    return _svg("heat", width, height, [picture], hover)


def heat_table(rows: Sequence[tuple[str, Sequence[float]]], *, width: int = 1100) -> str:
    """Layers (rows) by experts (columns): load relative to the layer's mean, with numbers where they fit."""
    experts = max(len(values) for _, values in rows)
    left, cell_h, top = 60, 22 if len(rows) <= 32 else 12, 18
    cell_w = (width - left - 2) / experts
    parts = []
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024) if cell_w * step >= 24 or step == 1024)
    for expert in range(0, experts, every):
        x = left + (expert + 0.5) * cell_w
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top - 6}" text-anchor="middle">{expert}</text>')
    for index, (name, values) in enumerate(rows):
        y = top + index * cell_h
        if cell_h >= 16 or index % 2 == 0:
            parts.append(
                f'<text class="tick" x="{left - 8}" y="{y + cell_h / 2 + 4:.1f}" text-anchor="end">'
                f"layer {escape(name)}</text>"
            )
        mean = sum(values) / len(values)
        ratios = [value / mean if mean else None for value in values]
        if experts > 64:
            picture = heat_png([[shade(ratio) for ratio in ratios]])
            parts.append(
                f'<image href="{picture}" x="{left}" y="{y}" width="{cell_w * len(values):.1f}" '
                f'height="{cell_h - 1}" preserveAspectRatio="none"/>'
            )
            continue
        for expert, ratio in enumerate(ratios):
            rgb, opacity = colour(shade(ratio))
            x = left + expert * cell_w
            label = "–" if ratio is None else f"{ratio:.2f}"
            parts.append(
                f"<g><title>layer {escape(name)}, expert {expert}: {label} × the mean</title>"
                f'<rect class="cell" x="{x:.1f}" y="{y}" width="{cell_w - 1:.1f}" height="{cell_h - 1}" '
                f'style="fill:rgb{rgb};fill-opacity:{opacity:.2f}"/>'
            )
            if cell_w >= 30 and cell_h >= 16:
                parts.append(
                    f'<text class="value" x="{x + cell_w / 2:.1f}" y="{y + cell_h / 2 + 4:.1f}" '
                    f'text-anchor="middle">{label}</text>'
                )
            parts.append("</g>")
    return _svg("cells", width, top + cell_h * len(rows), parts)


def heat_key() -> str:
    """The legend of both heat maps."""
    steps = []
    for ratio, label in (
        (0, "none"),
        (0.25, "¼×"),
        (0.5, "½×"),
        (0.75, ""),
        (1, "mean"),
        (1.4, ""),
        (2, "2×"),
        (4, "4×"),
    ):
        rgb, opacity = colour(shade(ratio))
        steps.append(f'<span><i style="background:rgba({rgb[0]},{rgb[1]},{rgb[2]},{opacity:.2f})"></i>{label}</span>')
    return f'<div class="key">{"".join(steps)}</div>'


def _axes(
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    px: Callable[[float], float],
    py: Callable[[float], float],
    x_name: str,
    text: Callable[[float], str],
) -> str:
    parts = []
    for value in ticks(*y_range, count=max(2, (height - TOP - BOTTOM) // 44)):
        y = py(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text(value)}</text>'
        )
    for value in ticks(*x_range, count=max(2, width // 110)):
        parts.append(
            f'<text class="tick" x="{px(value):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">'
            f"{short(value, 4)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>'
        f'<text class="tick" x="{width - RIGHT}" y="{height - 3}" text-anchor="end">{escape(x_name)}</text>'
    )
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{fill}"></i>{escape(name)}</span>' for name, fill in entries)
    return f'<div class="legend">{items}</div>'


def _svg(kind: str, width: int, height: int, parts: Sequence[str], hover: dict[str, object] | None = None) -> str:
    data = ""
    if hover is not None:
        # "</" in a name would end the script element early.
        content = json.dumps(hover, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
        data = f'<script type="application/json">{content}</script>'
    return (
        f'<div class="chart {kind}"><svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>{data}</div>'
    )
