"""What `benchmarks.links` measured, as numbers and Markdown: medians, ratios, crossings and predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.peers.parallel.registry import PARALLEL_PEERS

OURS = "moesaic"
LINKS = ("none", "2gbit", "1gbit", "400mbit", "200mbit")


@dataclass
class Measured:
    """One candidate in one setting."""

    seconds: list[list[float]] = field(default_factory=list)
    """Of each iteration, that of its slowest rank; one list per round."""
    sent: list[float] = field(default_factory=list)
    """Bytes that left a host over its link in an iteration, mean over hosts; one number per round."""

    @property
    def middle(self) -> float:
        """The median of all iterations; NaN if there are none."""
        found = [seconds for turn in self.seconds for seconds in turn]
        return median(found) if found else math.nan

    @property
    def megabytes(self) -> float:
        """Sent in an iteration."""
        return median(self.sent) / 1e6 if self.sent else math.nan


@dataclass
class Setting:
    """One workload over one link: what everybody took, and what the cost model said of ours."""

    work: str
    """layer or step."""
    link: str
    hosts: int
    ranks_per_host: int
    shape: dict[str, int]
    found: dict[str, Measured] = field(default_factory=dict)
    """By candidate. Ours begin with moesaic."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds of a training step of one such layer (or of the step), by candidate of ours."""
    errors: dict[str, str] = field(default_factory=dict)
    degrees: str = ""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(table: dict[str, Any]) -> Setting:
    """What `as_json` made."""
    return Setting(**{**table, "found": {name: Measured(**each) for name, each in table["found"].items()}})


def ours(setting: Setting) -> list[str]:
    """Candidates of ours, fastest first."""
    return _sorted(setting, (name for name in setting.found if name.startswith(OURS)))


def peers(setting: Setting) -> list[str]:
    """Comparable peers, fastest first: those that compute in bf16 here are not."""
    return _sorted(
        setting,
        (
            name
            for name in setting.found
            if not name.startswith(OURS) and not (name in PARALLEL_PEERS and PARALLEL_PEERS[name].fp32_is_bf16)
        ),
    )


def _sorted(setting: Setting, names: Iterable[str]) -> list[str]:
    known = [name for name in names if math.isfinite(setting.found[name].middle)]
    return sorted(known, key=lambda name: setting.found[name].middle)


def chosen(setting: Setting) -> str:
    """The one of ours that the cost model takes; without its prices the all-to-all."""
    priced = [name for name in setting.predicted if name in ours(setting)]
    return min(priced, key=lambda name: setting.predicted[name], default=f"{OURS} alltoall")


def speedup(setting: Setting, name: str, over: str) -> float:
    """Seconds of `over` divided by those of `name`: above 1 where `name` is faster; NaN where one is missing."""
    empty = Measured()
    return setting.found.get(over, empty).middle / setting.found.get(name, empty).middle


def bits(link: str) -> float:
    """Bit/s of a rate as `tc` writes it; infinite for "none"."""
    for unit, size in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if link.endswith(unit):
            return float(link.removesuffix(unit)) * size
    return math.inf


def link_for_share(plain: float, limited: float, link: str, share: float) -> str:
    """The link at which communication is `share` of a step that takes `plain` seconds without a limit and `limited`
    over `link`, if what the link adds is inverse to its rate."""
    added = max(limited - plain, 1e-6)
    wanted = plain * share / (1 - share)
    return f"{max(1, round(bits(link) * added / wanted / 1e6))}mbit"


def crossing(points: Sequence[tuple[float, float]]) -> float:
    """Where a line through points (x, difference), x ascending, passes zero first; where it never does, −∞ if it is
    above zero everywhere and ∞ if it is below, NaN without points."""
    for (x0, d0), (x1, d1) in pairwise(points):
        if d0 == 0:
            return x0
        if d0 * d1 < 0:
            return x0 + (x1 - x0) * d0 / (d0 - d1)
    if not points:
        return math.nan
    x, last = points[-1]
    return x if last == 0 else math.copysign(math.inf, -last)


# ---------------------------------------------------------------- tables


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """Markdown; the first `text` columns are words."""
    marks = ["---" if i < text else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, marks, *rows))


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def setting_table(setting: Setting) -> str:
    """Everybody in one setting."""
    best = next(iter(peers(setting)), "")
    rows = [
        [
            name,
            _number(each.middle),
            _number(speedup(setting, name, best), 2),
            _number(each.megabytes, 1),
            _number(setting.predicted.get(name, math.nan)),
        ]
        for name, each in sorted(setting.found.items(), key=lambda item: item[1].middle)
    ]
    header = ["candidate", "seconds", "speed over the fastest peer", "MB a host sends", "predicted step s"]
    return f"{title(setting)}\n\n{_lines(header, rows)}" + "".join(
        f"\n\n{name}: {why}" for name, why in setting.errors.items()
    )


def title(setting: Setting) -> str:
    shape = setting.shape
    sizes = ", ".join(f"{key} {value}" for key, value in shape.items() if value)
    return f"**{setting.work}, {setting.hosts} × {setting.ranks_per_host} ranks, link {setting.link}** ({sizes})"


def sweep_table(settings: Sequence[Setting]) -> str:
    """One row per setting: what the cost model takes of ours, our best, and the fastest peer."""
    rows = []
    for setting in settings:
        mine, others = ours(setting), peers(setting)
        if not mine or not others:
            continue
        taken, best, peer = chosen(setting), mine[0], others[0]
        rows.append(
            [
                str(setting.ranks),
                str(setting.shape["topk"]),
                setting.link,
                f"{peer} {_number(setting.found[peer].middle)}",
                f"{taken.removeprefix(OURS).strip()} {_number(setting.found[taken].middle)}"
                if taken in setting.found
                else "-",
                _number(speedup(setting, taken, peer), 2),
                f"{best.removeprefix(OURS).strip()} {_number(setting.found[best].middle)}",
                _number(speedup(setting, best, peer), 2),
                _number(speedup(setting, best, "megatron_alltoall"), 2),
            ]
        )
    header = ["ranks", "top k", "link", "fastest peer s", "chosen s", "speed", "our best s", "speed"]
    return _lines([*header, "over Megatron-Core's alltoall"], rows, 5)


def crossings(settings: Sequence[Setting]) -> Iterator[tuple[int, str, float, float]]:
    """(ranks, link, measured, predicted): the top-k from which our all-gather is the faster of the two, in the layer
    without overlap; −∞ where it is for all, ∞ where it is for none."""
    groups: dict[tuple[int, str], list[Setting]] = {}
    for setting in settings:
        if setting.work == "layer":
            groups.setdefault((setting.ranks, setting.link), []).append(setting)
    one, two = f"{OURS} alltoall", f"{OURS} allgather"
    for (ranks, link), each in groups.items():
        each = sorted(each, key=lambda setting: setting.shape["topk"])
        found = [
            (float(s.shape["topk"]), s.found[one].middle - s.found[two].middle)
            for s in each
            if one in s.found and two in s.found
        ]
        said = [
            (float(s.shape["topk"]), s.predicted[one] - s.predicted[two])
            for s in each
            if one in s.predicted and two in s.predicted
        ]
        yield ranks, link, crossing(found), crossing(said)


def crossing_table(settings: Sequence[Setting]) -> str:
    """Measured and predicted crossings."""

    def text(value: float) -> str:
        if math.isfinite(value):
            return f"{value:.1f}"
        return "-" if math.isnan(value) else "below all" if value < 0 else "above all"

    rows = [[str(ranks), link, text(found), text(said)] for ranks, link, found, said in crossings(settings)]
    return _lines(["ranks", "link", "measured crossing, top k", "predicted"], rows, 2)


@dataclass(frozen=True)
class Fit:
    """How well predictions hold over configurations."""

    ratios: dict[str, float]
    """Predicted over measured seconds, by configuration."""
    within: float
    """Share of them within 15 %."""
    picks: dict[str, float]
    """By workload: measured seconds of the configuration with the least predicted time, over the least measured."""


def fit(settings: Sequence[Setting]) -> Fit:
    """Of steps of ours."""
    ratios: dict[str, float] = {}
    works: dict[str, list[tuple[float, float]]] = {}
    for setting in settings:
        for name, said in setting.predicted.items():
            found = setting.found.get(name, Measured()).middle
            if math.isfinite(found):
                work = f"{setting.ranks} ranks, top {setting.shape['topk']}, {setting.link}"
                what = f"{setting.degrees}, micro-batch {setting.shape['micro_batch']}, {name.removeprefix(OURS)}"
                ratios[f"{work}: {what}"] = said / found
                works.setdefault(work, []).append((said, found))
    within = [abs(ratio - 1) <= 0.15 for ratio in ratios.values()]
    picks = {work: min(pairs)[1] / min(found for _, found in pairs) for work, pairs in works.items()}
    return Fit(ratios, sum(within) / len(within) if within else math.nan, picks)


def planner_table(settings: Sequence[Setting]) -> str:
    """Ratios of predictions and what the picks cost."""
    made = fit(settings)
    rows = [[name, _number(ratio, 2)] for name, ratio in made.ratios.items()]
    text = _lines(["configuration", "predicted / measured"], rows)
    text += f"\n\nWithin 15 %: {made.within:.0%} of {len(rows)}.\n\n"
    return text + _lines(
        ["workload", "its pick / the best"], [[work, _number(pick, 2)] for work, pick in made.picks.items()]
    )
