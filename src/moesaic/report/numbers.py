"""Numbers for people: short texts, axis ticks, and thinning of long series."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Point = tuple[float, float]


def short(value: float | None, digits: int = 3) -> str:
    """12345 → '12.3k', 0.00042 → '0.00042', 46.7e9 → '46.7B'; None → '–'."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return _significant(value / limit, digits) + suffix
    return _significant(value, digits)


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -5:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gib(size: float | None) -> str:
    """Bytes as MiB or GiB."""
    if size is None:
        return "–"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def duration(seconds: float | None) -> str:
    """75 → '1 min 15 s'."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def bins(count: int, wanted: int) -> list[tuple[int, int]]:
    """Split range(count) into at most `wanted` slices of nearly equal length."""
    wanted = max(1, min(count, wanted))
    edges = [round(index * count / wanted) for index in range(wanted + 1)]
    return [(start, end) for start, end in itertools.pairwise(edges) if end > start]


def thin(points: Sequence[Point], wanted: int = 400) -> list[Point]:
    """At most `wanted` points: the mean of each slice; the first and last point stay as they are."""
    if len(points) <= wanted:
        return list(points)
    thinned = [
        (
            sum(x for x, _ in points[start:end]) / (end - start),
            sum(y for _, y in points[start:end]) / (end - start),
        )
        for start, end in bins(len(points), wanted - 2)
    ]
    return [points[0], *thinned, points[-1]]


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """Centred moving mean over `span` points, narrower at the ends."""
    half = max(0, span // 2)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        start, end = index - reach, index + reach + 1
        result.append((x, (sums[end] - sums[start]) / (end - start)))
    return result
