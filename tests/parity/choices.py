"""Which layouts the suite trains: every legal choice of degrees, with the other choices spread over them.

Degrees are few and tried exhaustively. Everything else multiplies, so each choice of degrees gets one combination of
it, taken so that together they meet every value beside every degree above one and every value beside every other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from moesaic.spec.layout import Layout, legal_layouts, resolve_layout
from moesaic.spec.legal import option_rules
from moesaic.spec.tables import LayoutTable
from tests.parity import models

Keys = dict[str, Any]
"""Keys of [layout]."""
Pair = tuple[str, str]

AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")

# By number of pipeline ranks and chunks. A model without prediction blocks has no `m`.
STAGES: dict[tuple[int, int], dict[str, str]] = {
    (2, 1): {"uneven": "Et|tttmL", "embedding alone": "E|ttttmL", "prediction apart": "Ettttm|L"},
    (2, 2): {"uneven": "E|tt|t|tmL", "prediction apart": "Ett|tt|m|L", "empty": "Ett||tt|mL"},
    (2, 3): {"uneven": "E|t|t|tt|m|L", "prediction apart": "Et|t|t|t|m|L", "empty": "Et||t|t|t|mL"},
    (4, 1): {"uneven": "E|tt|t|tmL", "embedding alone": "E|t|tt|tmL", "prediction apart": "Ett|tt|m|L"},
    (4, 2): {"uneven": "E|t|t|t|t|m||L", "prediction apart": "Et|t||t|t||m|L", "empty": "Et||t||t||t|mL"},
}

SHARDING = [(level, replicas) for level in ("none", "optimizer", "gradients", "parameters") for replicas in (1, 2)]


def pipelines(pp: int, mtp: bool) -> Iterator[Keys]:
    """Choices about a pipeline of `pp` stages; `stages` is None for layers that are dealt evenly."""
    if pp == 1:
        yield {}
        return
    for virtual in (1, 2, 3):
        strings = STAGES.get((pp, virtual), {})
        for name in (None, *strings):
            if name == "prediction apart" and not mtp:
                continue
            text = None if name is None else strings[name].replace("m", "m" if mtp else "")
            for schedule in ("1f1b", "zero_bubble") if virtual == 1 else ("interleaved", "zero_bubble"):
                yield {"virtual_stages": virtual, "schedule": schedule, "stages": text, "shape": name or "even"}


@dataclass(frozen=True)
class Case:
    """Degrees in the order of AXES, the rest of [layout], and the pairs that are met."""

    degrees: tuple[int, ...]
    keys: Keys
    pairs: tuple[Pair, ...]

    @property
    def table(self) -> Keys:
        """What stands in [layout], defaults left out."""
        default = LayoutTable()
        spread = {axis: degree for axis, degree in zip(AXES, self.degrees, strict=True) if axis not in ("dp", "edp")}
        table = spread | {key: value for key, value in self.keys.items() if key != "shape"}
        return {key: value for key, value in table.items() if value != getattr(default, key)}


@functools.cache
def options(name: str, world: int) -> dict[tuple[int, ...], list[Case]]:
    """For each legal choice of degrees of the tiny model `name`, all legal choices of the rest that do something."""
    spec = models.model(name)
    found: dict[tuple[int, ...], list[Case]] = {}
    for pp in (1, 2, 4, 8):
        for cp_kind, pipeline, order, (sharding, replicas), micro_batch in product(
            ("ulysses", "ring"), pipelines(pp, bool(spec.mtp)), ("pp-outer", "dp-outer"), SHARDING, (1, 2, 4)
        ):
            keys = {"cp_kind": cp_kind, "order": order, "micro_batch": micro_batch, "sharding": sharding, **pipeline}
            if replicas > 1:
                keys["replicas"] = replicas
            table = LayoutTable.model_validate({k: v for k, v in keys.items() if k != "shape"})
            if any(option_rules(table)):
                continue
            limits = {"seq_len": models.SEQ_LEN, "global_batch": models.GLOBAL_BATCH, "table": table}
            for layout in legal_layouts(spec, world, pp=pp, **limits):
                if layout.pp == pp and _matters(layout, keys):
                    chosen = tuple(getattr(layout, axis) for axis in AXES)
                    for dispatcher in ("allgather", "alltoall") if layout.ep * layout.etp > 1 else ("auto",):
                        these = keys | {"dispatcher": dispatcher}
                        found.setdefault(chosen, []).append(Case(chosen, these, _pairs(chosen, these)))
    return found


def _matters(layout: Layout, keys: Keys) -> bool:
    """Whether every option that is not at its default makes a difference in this layout."""
    copies = max(layout.dp * layout.cp, layout.edp)
    return (
        (layout.cp > 1 or keys["cp_kind"] == "ulysses")
        and (min(layout.pp, layout.dp) > 1 or keys["order"] == "pp-outer")
        and (copies > keys.get("replicas", 1) or keys["sharding"] == "none")
    )


def values(chosen: tuple[int, ...], keys: Keys) -> list[str]:
    """What a case tries: values of options that do something under these degrees."""
    pp, dp, cp, _, edp, ep, etp = chosen
    acts = {
        "cp_kind": cp > 1,
        "order": pp > 1 and dp > 1,
        "virtual_stages": pp > 1,
        "schedule": pp > 1,
        "shape": pp > 1,
        "sharding": max(dp * cp, edp) > 1,
        "dispatcher": ep * etp > 1,
        "micro_batch": True,
        "replicas": "replicas" in keys,
    }
    return [f"{option}={keys[option]}" for option, does in acts.items() if does]


def _pairs(chosen: tuple[int, ...], keys: Keys) -> tuple[Pair, ...]:
    """Value beside degree above one, and value beside value."""
    tried = values(chosen, keys)
    wide = [axis for axis, degree in zip(AXES, chosen, strict=True) if degree > 1]
    return (*product(tried, wide), *combinations(tried, 2))


def every(name: str, world: int) -> list[Case]:
    """All legal layouts."""
    return [case for each in options(name, world).values() for case in each]


@functools.cache
def plan(name: str, world: int) -> tuple[Case, ...]:
    """At least one layout for each choice of degrees, and more until every pair is met; the same on every call."""
    choices = options(name, world)
    legal = {pair for case in every(name, world) for pair in case.pairs}
    met: Counter[Pair] = Counter()
    found: list[Case] = []
    while not found or met.keys() != legal:
        first = not found
        # Degrees with the least freedom choose first: the others have more ways to make up for it.
        for chosen in sorted(choices, key=lambda each: (len(choices[each]), each)):
            best = max(choices[chosen], key=lambda case: _gain(case, met))
            if first or _gain(best, met)[0]:
                met.update(best.pairs)
                found.append(best)
    return tuple(found)


def cases(name: str, world: int) -> list[Keys]:
    """`plan` as keys of [layout]; of one process, everything that there is to choose."""
    return [case.table for case in (plan(name, world) if world > 1 else every(name, world))]


def few(name: str, world: int, count: int) -> list[Keys]:
    """`count` layouts with few micro-batches, in turn without and with a pipeline, that meet as many pairs as so many
    can."""
    legal: dict[bool, list[Case]] = {False: [], True: []}
    for case in every(name, world):
        if case.keys["micro_batch"] > 1:
            legal[case.degrees[0] > 1].append(case)
    met: Counter[Pair] = Counter()
    found = []
    for number in range(count):
        best = max(legal[number % 2 == 1], key=lambda case: _gain(case, met))
        met.update(best.pairs)
        found.append(best.table)
    return found


def _gain(case: Case, met: Counter[Pair]) -> tuple[int, float]:
    """How many pairs are new, then how rare the others are."""
    times = [met[pair] for pair in case.pairs]
    return times.count(0), sum(1 / (1 + n) for n in times)


def layout_of(name: str, keys: Keys, world: int) -> Layout:
    """The layout that the keys of [layout] describe."""
    table = LayoutTable.model_validate(keys)
    return resolve_layout(table, models.model(name), world, seq_len=models.SEQ_LEN, global_batch=models.GLOBAL_BATCH)


def text(name: str, keys: Keys, world: int) -> str:
    """A case as a failure shows it: the written form, then everything that is not its default."""
    rest = " ".join(f"{key}={value}" for key, value in keys.items() if key not in AXES)
    return f"{name} {layout_of(name, keys, world)} {rest}"
