"""The sweep of `benchmarks.links` as one SVG: seconds of a layer over link speed, a panel per top-k and ranks.

Written by hand, so that drawing needs nothing installed. Each panel has ours as the cost model chooses it, our best,
and every peer, and both axes are logarithmic; a link without a limit stands at the right edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks import links_tables as tables
from benchmarks.links_tables import OURS, Setting

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 190, 46, 26, 26
COLOURS = {
    "moesaic, as chosen": "#0b6e4f",
    "moesaic, best": "#6ac79f",
    "megatron_alltoall": "#c0392b",
    "megatron_allgather": "#e59866",
    "torchtitan_fp32": "#2e5fa3",
    "hf": "#8e44ad",
    "deepspeed": "#7f8c8d",
    "automodel": "#b7950b",
}
FASTER = 10e9
"""Where a link without a limit is drawn, bit/s."""


def draw(settings: Sequence[Setting]) -> str:
    """SVG of all layers among `settings` that were measured over several links."""
    layers = [each for each in settings if each.work == "layer"]
    links: dict[tuple[int, int, int], set[str]] = {}
    for each in layers:
        links.setdefault((each.ranks, each.shape["topk"], each.shape["experts"]), set()).add(each.link)
    panels = sorted(panel for panel, over in links.items() if len(over) > 1)
    columns = max(1, min(4, len(panels)))
    rows = math.ceil(len(panels) / columns)
    width = columns * (WIDTH + GAP) + LEFT
    height = rows * (HEIGHT + TOP + GAP) + TOP + 20 * math.ceil(len(COLOURS) / 4)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        x, y = LEFT + number % columns * (WIDTH + GAP), TOP + number // columns * (HEIGHT + TOP + GAP)
        ranks, topk, experts = panel
        here = [s for s in layers if (s.ranks, s.shape["topk"], s.shape["experts"]) == panel]
        parts.append(_panel(here, f"{ranks} ranks, top {topk} of {experts}: seconds over link", x, y))
    for number, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + number % 4 * 200, height - 8 - 20 * (1 - number // 4)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def lines(settings: Sequence[Setting]) -> dict[str, list[tuple[float, float]]]:
    """By name in the legend, (bit/s, seconds) by ascending bit/s."""
    found: dict[str, list[tuple[float, float]]] = {}
    for setting in sorted(settings, key=lambda each: tables.bits(each.link)):
        at = min(tables.bits(setting.link), FASTER)
        mine, taken = tables.ours(setting), tables.chosen(setting)
        points = {name: name for name in tables.peers(setting) if name in COLOURS}
        points |= {f"{OURS}, best": mine[0]} if mine else {}
        points |= {f"{OURS}, as chosen": taken} if taken in mine else {}
        for legend, name in points.items():
            found.setdefault(legend, []).append((at, setting.found[name].middle))
    return found


def _panel(settings: Sequence[Setting], title: str, x: float, y: float) -> str:
    drawn = lines(settings)
    seconds = [value for points in drawn.values() for _, value in points]
    links = sorted({min(tables.bits(each.link), FASTER) for each in settings})
    if not seconds:
        return ""
    low, high = min(seconds) * 0.9, max(seconds) * 1.1
    left, right = links[0] / 1.2, links[-1] * 1.2

    def place(at: float, value: float) -> tuple[float, float]:
        across = math.log(at / left) / math.log(right / left)
        up = math.log(value / low) / math.log(high / low)
        return x + across * WIDTH, y + HEIGHT * (1 - up)

    parts = [
        f'<text x="{x}" y="{y - 8}">{title}</text>',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
    ]
    for at in links:
        across, _ = place(at, low)
        text = "none" if at == FASTER else f"{at / 1e6:g}"
        parts.append(f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{y}" y2="{y + HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{across:.1f}" y="{y + HEIGHT + 13}" text-anchor="middle">{text}</text>')
    for value in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50):
        if low <= value <= high:
            _, down = place(left, value)
            parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x - 4}" y="{down + 4:.1f}" text-anchor="end">{value:g}</text>')
    for name, points in drawn.items():
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*point) for point in points))
        thick = 2.5 if name.startswith(OURS) else 1.3
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="{thick}"/>')
    return "\n".join(parts)
