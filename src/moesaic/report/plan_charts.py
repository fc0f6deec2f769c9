"""Charts of a plan as inline SVG: memory by pipeline rank, the front, and the two meshes over nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from moesaic.report.numbers import short, ticks
from moesaic.spec.layout import Layout

GIB = 2**30
MOST_SQUARES = 1024
"""Ranks that a mesh shows at most; more could not be told apart."""
_HUES = 8
_SHADES = (1.0, 0.6, 0.32)


def memory_bars(
    names: Sequence[str],
    colours: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float], str]],
    limits: Sequence[tuple[str, float]],
    *,
    width: int = 1110,
) -> str:
    """A bar for each pipeline rank, stacked by part. A row is (name, bytes of each part, a word on the right).

    `limits` are vertical lines (name, bytes), the hardest first.
    """
    left, right, top, bottom = 64, 190, 22, 30
    pitch = 30 if len(rows) <= 8 else 20 if len(rows) <= 24 else 14
    most = max([sum(values) for _, values, _ in rows] + [size for _, size in limits]) / GIB
    end = top + pitch * len(rows)
    scale = (width - left - right) / most
    parts = []
    for mark in ticks(0.0, most, count=10):
        x = left + mark * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{end}"/>'
            f'<text class="tick" x="{x:.1f}" y="{end + 15}" text-anchor="middle">{short(mark)}</text>'
        )
    parts.append(f'<text class="tick" x="{width - right + 12}" y="{end + 15}">GiB</text>')
    for index, (name, values, word) in enumerate(rows):
        y, tall = top + index * pitch, pitch - (6 if pitch > 14 else 2)
        hint = [name, *(f"{part}: {value / GIB:.2f} GiB" for part, value in zip(names, values, strict=True) if value)]
        parts.append(f"<g><title>{escape(chr(10).join(hint))}</title>")
        x = float(left)
        for value, fill in zip(values, colours, strict=True):
            wide = value / GIB * scale
            if wide > 0:
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 0.6, 0.3):.2f}" height="{tall}" '
                    f'style="fill:{fill}"/>'
                )
            x += wide
        middle = y + tall / 2 + 4
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<text class="value" x="{width - right + 12}" y="{middle:.1f}">{sum(values) / GIB:.1f} GiB</text>'
            f'<text class="tick" x="{width - right + 74}" y="{middle:.1f}">{escape(word)}</text></g>'
        )
    for number, (name, size) in enumerate(limits):
        x = left + size / GIB * scale
        kind = "limit soft" if number else "limit"
        parts.append(
            f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 5}" y2="{end}"/>'
            f'<text class="limit-name" x="{x - 5 if number else x + 5:.1f}" y="{top - 9}" '
            f'text-anchor="{"end" if number else "start"}">{escape(name)} {size / GIB:.1f}</text>'
        )
    return _svg("memory", width, end + bottom, parts)


@dataclass(frozen=True)
class Spot:
    """A layout in the plot of the front."""

    gib: float
    seconds: float
    hint: str
    on_front: bool
    best: bool = False


def front_plot(spots: Sequence[Spot], limits: Sequence[tuple[str, float]], *, width: int = 1110) -> str:
    """Seconds of a step against GiB of memory. `limits` are vertical lines (name, GiB), the hardest first."""
    left, right, top, bottom, height = 56, 110, 26, 36, 340
    xs = [spot.gib for spot in spots] + [size for _, size in limits]
    ys = [spot.seconds for spot in spots]
    x_low, x_high = _widened(min(xs), max(xs), 0.04, 0.0)
    y_low, y_high = _widened(min(ys), max(ys), 0.12, 0.10)

    def px(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (width - left - right)

    def py(y: float) -> float:
        return top + (1 - (y - y_low) / (y_high - y_low)) * (height - top - bottom)

    parts = []
    for mark in ticks(y_low, y_high, count=6):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py(mark):.1f}" y2="{py(mark):.1f}"/>'
            f'<text class="tick" x="{left - 7}" y="{py(mark) + 4:.1f}" text-anchor="end">{short(mark, 4)}</text>'
        )
    for mark in ticks(x_low, x_high, count=10):
        parts.append(
            f'<text class="tick" x="{px(mark):.1f}" y="{height - bottom + 16}" text-anchor="middle">'
            f"{short(mark, 4)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{left}" x2="{width - right}" y1="{height - bottom}" y2="{height - bottom}"/>'
        f'<text class="tick" x="{width - right}" y="{height - 4}" text-anchor="end">GiB on the fullest accelerator'
        f'</text><text class="tick" x="4" y="12">seconds a step</text>'
    )
    for number, (name, size) in enumerate(limits):
        kind = "limit soft" if number else "limit"
        parts.append(
            f'<line class="{kind}" x1="{px(size):.1f}" x2="{px(size):.1f}" y1="{top - 6}" y2="{height - bottom}"/>'
            f'<text class="limit-name" x="{px(size) + (-5 if number else 5):.1f}" y="{top - 10}" '
            f'text-anchor="{"end" if number else "start"}">{escape(name)} {size:.1f}</text>'
        )
    line = sorted((spot.gib, spot.seconds) for spot in spots if spot.on_front)
    if len(line) > 1:
        # A layout with more memory is never slower on the front, so between two of them the leaner one's time holds.
        path = f"M{px(line[0][0]):.1f} {py(line[0][1]):.1f}"
        path += "".join(f"H{px(x):.1f}V{py(y):.1f}" for x, y in line[1:])
        parts.append(f'<path class="front" d="{path}"/>')
    for spot in sorted(spots, key=lambda each: (each.best, each.on_front)):
        x, y = px(spot.gib), py(spot.seconds)
        fill = "var(--held)" if spot.best else "var(--train)"
        look = f'class="spot" r="{7 if spot.best else 5}" style="fill:{fill}"'
        if not spot.on_front and not spot.best:
            look = 'class="spot open" r="4"'
        parts.append(
            f'<g><title>{escape(spot.hint)}</title><circle class="reach" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
            f'<circle {look} cx="{x:.1f}" cy="{y:.1f}"/></g>'
        )
    return _svg("front-plot", width, height, parts)


# ---------------------------------------------------------------- meshes over nodes


@dataclass(frozen=True)
class Meshes:
    """Two pictures of the same ranks, and words about what they show."""

    dense: str
    expert: str
    shown: tuple[int, ...]
    """Ranks, ascending, in whole nodes."""
    ranks: int
    stages: tuple[int, ...]
    """Pipeline ranks among `shown`."""
    colours: int
    """Groups of a pipeline rank until colours repeat."""


def meshes(layout: Layout, node: int, domain: int, *, width: int = 530) -> Meshes:
    """Ranks as squares in nodes of `node`, and in domains of `domain` ranks where these are larger.

    Dense groups are a data-parallel rank's cp × tp block on a pipeline rank, expert groups an ep × etp block. With one
    pipeline rank in sight each group has a hue; with several each of them has one, and groups are its shades. Of more
    than MOST_SQUARES ranks those nodes are shown that hold pipeline rank 0, the first ones if these are too many.
    """
    shown = _shown(layout, node)
    dense = {rank: layout.dense_coords(rank) for rank in shown}
    expert = {rank: layout.expert_coords(rank) for rank in shown}
    stages = tuple(sorted({dense[rank]["pp"] for rank in shown}))
    frame = _Frame.of(len(shown), node, domain, width)

    def look(group: int, stage: int) -> tuple[int, float]:
        return (stage % _HUES, _SHADES[group % len(_SHADES)]) if len(stages) > 1 else (group % _HUES, 1.0)

    def picture(name: str, coords: dict[int, dict[str, int]], group: str, inner: Sequence[str]) -> str:
        inner = [axis for axis in inner if getattr(layout, axis) > 1]
        longest = ".".join(str(getattr(layout, axis) - 1) for axis in inner)
        room = 6 * len(longest) + 1 - 3 * longest.count(".") <= frame.size

        def square(rank: int) -> tuple[int, float, str, str]:
            here = coords[rank]
            label = ".".join(str(here[axis]) for axis in inner) if room else ""
            words = " ".join(f"{axis}{value}" for axis, value in here.items())
            return (*look(here[group], here["pp"]), label, f"rank {rank}, node {rank // node}\n{words}")

        return frame.draw(name, shown, square)

    return Meshes(
        picture("dense", dense, "dp", ("cp", "tp")),
        picture("expert", expert, "edp", ("ep", "etp")),
        shown,
        layout.world,
        stages,
        len(_SHADES) if len(stages) > 1 else _HUES,
    )


def nodes_spanned(groups: Sequence[Sequence[int]], size: int) -> int:
    """Most nodes (or domains) of `size` ranks that one group has members in."""
    return max(len({rank // size for rank in group}) for group in groups)


def _shown(layout: Layout, node: int) -> tuple[int, ...]:
    if layout.world <= MOST_SQUARES:
        return tuple(range(layout.world))
    stage = layout.groups("dp", "cp", "tp")[0]
    nodes = sorted({rank // node for rank in stage})[: max(1, MOST_SQUARES // node)]
    return tuple(rank for each in nodes for rank in range(each * node, min((each + 1) * node, layout.world)))


@dataclass(frozen=True)
class _Frame:
    """Where the squares of a mesh stand. Lengths are pixels of the picture."""

    node: int
    unit: int
    """Nodes in a block: those of a domain, or one."""
    gap: int
    """Ranks after which a node has a gap inside, or 0."""
    size: int
    """Side of a square."""
    across: int
    """Nodes side by side in a block."""
    blocks: int
    """Blocks side by side."""
    width: int

    LEFT = 66
    PAD = 3

    @classmethod
    def of(cls, ranks: int, node: int, domain: int, width: int) -> _Frame:
        """The largest squares with which the picture is no taller than it is wide."""
        unit = domain // node if domain > node and domain % node == 0 and ranks > node else 1
        gap = domain if 1 < domain < node else 0
        for size in (26, 22, 18, 15, 13, 11, 9, 8, 7, 6, 5):
            fit = cls(node, unit, gap, size, 1, 1, width)
            room = max(1, int((width - cls.LEFT) / fit.node_wide))
            across = min(unit, room)
            fit = cls(node, unit, gap, size, across, max(1, room // across), width)
            if fit.node_wide <= width - cls.LEFT and fit.height(ranks) <= 0.8 * width:
                break
        return fit

    @property
    def columns(self) -> int:
        """Squares side by side in a node."""
        return min(self.node, 8)

    @property
    def node_wide(self) -> int:
        gaps = 4 * ((self.columns - 1) // self.gap) if self.gap else 0
        return self.columns * (self.size + 1) - 1 + gaps + 2 * self.PAD + 5

    @property
    def node_tall(self) -> int:
        return -(-self.node // self.columns) * (self.size + 1) - 1 + 2 * self.PAD + 5

    @property
    def block_tall(self) -> int:
        return -(-self.unit // self.across) * self.node_tall + (8 if self.unit > 1 else 0)

    def height(self, ranks: int) -> int:
        """Of the picture of that many ranks."""
        blocks = -(-ranks // (self.node * self.unit))
        return -(-blocks // self.blocks) * self.block_tall + 6

    def draw(self, name: str, ranks: Sequence[int], square: Callable[[int], tuple[int, float, str, str]]) -> str:
        """`square` gives a rank's hue, opacity, label and hint."""
        parts: list[str] = []
        nodes = list(dict.fromkeys(rank // self.node for rank in ranks))
        for place, number in enumerate(nodes):
            block, inside = divmod(place, self.unit)
            x = self.LEFT + (block % self.blocks) * (self.across * self.node_wide + 8 * (self.unit > 1))
            y = 3 + (block // self.blocks) * self.block_tall
            if inside == 0 and self.unit > 1:
                rows = -(-min(self.unit, len(nodes) - place) // self.across)
                parts.append(
                    f'<rect class="domain" x="{x - 4}" y="{y - 3}" rx="4" width="{self.across * self.node_wide + 3}" '
                    f'height="{rows * self.node_tall + 1}"/>'
                )
            x += inside % self.across * self.node_wide
            y += inside // self.across * self.node_tall
            if x == self.LEFT:
                parts.append(
                    f'<text class="tick" x="{self.LEFT - 9}" y="{y + self.node_tall / 2 + 1:.1f}" text-anchor="end">'
                    f"node {number}</text>"
                )
            parts.append(
                f'<rect class="node" x="{x - 0.5}" y="{y - 0.5}" rx="3" width="{self.node_wide - 4}" '
                f'height="{self.node_tall - 4}"/>'
            )
            mine = ranks[place * self.node : (place + 1) * self.node]
            parts += [self._square(rank % self.node, x, y, *square(rank)) for rank in mine]
        return _svg(f"mesh {name}", self.width, self.height(len(ranks)), parts)

    def _square(self, index: int, x: float, y: float, hue: int, opacity: float, label: str, hint: str) -> str:
        row, column = divmod(index, self.columns)
        x += self.PAD + column * (self.size + 1) + (4 * (column // self.gap) if self.gap else 0)
        y += self.PAD + row * (self.size + 1)
        box = (
            f'<rect class="rank-box" x="{x}" y="{y}" width="{self.size}" height="{self.size}" rx="2" '
            f'style="fill:var(--p{hue + 1});fill-opacity:{opacity:g}"/>'
        )
        if label:
            ink = "var(--ink)" if opacity < 0.9 else "#14161a" if hue == 3 else "var(--card)"
            box += (
                f'<text class="rank-name" x="{x + self.size / 2}" y="{y + self.size / 2 + 3.5}" style="fill:{ink}">'
                f"{label}</text>"
            )
        return f"<g><title>{escape(hint)}</title>{box}</g>"


def stage_hues(stages: Sequence[int]) -> list[tuple[str, str]]:
    """Names of pipeline ranks, those of one hue together, and the hue as a CSS colour."""
    same: dict[int, list[str]] = {}
    for stage in stages:
        same.setdefault(stage % _HUES, []).append(str(stage))
    return [
        (f"pipeline rank{'s' if len(names) > 1 else ''} {', '.join(names)}", f"var(--p{hue + 1})")
        for hue, names in same.items()
    ]


def _widened(low: float, high: float, below: float, above: float) -> tuple[float, float]:
    span = high - low or abs(high) or 1.0
    return max(0.0, low - below * span), high + above * span


def _svg(kind: str, width: int, height: float, parts: Sequence[str]) -> str:
    return f'<div class="chart {kind}"><svg viewBox="0 0 {width} {height:g}" role="img">{"".join(parts)}</svg></div>'
