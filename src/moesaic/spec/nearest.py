"""The refusal of an illegal layout, and the legal ones that are nearest to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import nsmallest

from .errors import SpecError
from .legal import (
    Degrees,
    Sizes,
    dense_rules,
    divisors,
    expert_rules,
    legal_degrees,
    mesh_rules,
    option_rules,
    processes,
    stage_rules,
)
from .stages import expand, parse_stages
from .tables import LayoutTable

_WISHES = ("virtual_stages", "stages", "schedule", "replicas", "dispatcher", "order", "micro_batch")
"""Keys other than degrees that rule layouts out, and whose defaults rule out none."""
_MOST_WORLDS = 100
"""Worlds to look at on each side before giving up."""


def refuse(table: LayoutTable, sizes: Sizes, world: int, seq_len: int | None, global_batch: int | None) -> None:
    """Nothing for a legal layout.

    Raises:
        SpecError: the first broken rule, with the nearest legal layouts where other degrees would help.
    """
    option = next(option_rules(table), None)
    if option is not None:
        raise SpecError(f"{option}.")
    if table.stages is not None:
        parse_stages(table.stages, sizes.layers, sizes.mtp)
    sentence = next(_broken(table, sizes, world, seq_len, global_batch), None)
    if sentence is None:
        return
    raise SpecError(f"{sentence}. {_way_out(table, sizes, world, seq_len, global_batch)}.")


def _way_out(table: LayoutTable, sizes: Sizes, world: int, seq_len: int | None, global_batch: int | None) -> str:
    """The nearest legal layouts: of this world, else of this world without the table's other wishes, else of the
    closest worlds."""
    near = nearest_legal(table, sizes, world, seq_len, global_batch)
    if near:
        return f"Nearest legal for {world} {processes(world)}: {_joined(near)}"
    none = f"No layout of {world} {processes(world)} is legal for {sizes.name}"
    plain = table.model_copy(update={name: LayoutTable.model_fields[name].default for name in _WISHES})
    wishes = [f"{name} {getattr(table, name)}" for name in _WISHES if getattr(table, name) != getattr(plain, name)]
    near = nearest_legal(plain, sizes, world, seq_len, global_batch) if wishes else []
    if near:
        return f"{none} with {' and '.join(wishes)}; nearest without: {_joined(near)}"
    others = nearest_worlds(table, sizes, world, seq_len, global_batch)
    shown = _joined(f"{degrees} ({degrees.world} {processes(degrees.world)})" for degrees in others)
    return f"{none} with this batch and sequence" + (f"; nearest are {shown}" if others else "")


def nearest_legal(
    table: LayoutTable, sizes: Sizes, world: int, seq_len: int | None, global_batch: int | None, count: int = 3
) -> list[Degrees]:
    """The legal degrees closest to those of `table`: fewest changed degrees, then the smallest sum of |log| of the
    ratios. dp counts as a degree where the table gives one; edp follows from the others. Of layouts as close, those
    with the least tensor and context parallelism come first, since they communicate least."""
    names = [name for name in ("pp", "dp", "cp", "tp", "ep", "etp") if getattr(table, name) != "auto"]

    def distance(degrees: Degrees) -> tuple[int, float, int, int, int, Degrees]:
        pairs = [(getattr(degrees, name), getattr(table, name)) for name in names]
        logs = sum(abs(math.log(mine / asked)) for mine, asked in pairs)
        changed = sum(mine != asked for mine, asked in pairs)
        return changed, round(logs, 9), degrees.etp, degrees.tp, degrees.cp, degrees

    return nsmallest(count, legal_degrees(sizes, world, table, seq_len, global_batch), key=distance)


def nearest_worlds(
    table: LayoutTable, sizes: Sizes, world: int, seq_len: int | None, global_batch: int | None
) -> list[Degrees]:
    """The nearest legal degrees at the closest smaller and the closest larger world that have any."""
    candidates = _possible_worlds(table, sizes, 2 * world + 64, seq_len, global_batch)
    found: list[Degrees] = []
    for others in (
        sorted((other for other in candidates if other < world), reverse=True),
        sorted(other for other in candidates if other > world),
    ):
        # Where so many that could be legal are not, the options rule out about all of them.
        for other in others[:_MOST_WORLDS]:
            near = nearest_legal(table, sizes, other, seq_len, global_batch, 1)
            if near:
                found += near
                break
    return found


def _possible_worlds(
    table: LayoutTable, sizes: Sizes, most: int, seq_len: int | None, global_batch: int | None
) -> set[int]:
    """Numbers of ranks up to `most` that the dense mesh could have: those with a legal layout are among them."""
    if seq_len is None or global_batch is None:
        return set(range(1, most + 1))
    plain = table.model_copy(update={"replicas": 1})
    stages = sizes.layers if table.stages is None else expand(table.stages).count("|") + 1
    # No dp makes whole micro-batches of too small a batch.
    batch = max(1, global_batch // table.micro_batch)
    outer = {
        pp * dp
        for pp in range(1, stages + 1)
        for dp in divisors(batch)
        if pp * dp <= most
        and next(stage_rules(pp, table, sizes), None) is None
        and next(dense_rules(pp, dp, 1, 1, plain, sizes, None, global_batch), None) is None
    }
    inner = {
        cp * tp
        for cp in divisors(seq_len)
        for tp in divisors(math.gcd(*sizes.heads, *sizes.kv_heads, *sizes.widths))
        if cp * tp <= most and next(dense_rules(1, 1, cp, tp, plain, sizes, seq_len, None), None) is None
    }
    return {a * b for a in outer for b in inner if a * b <= most}


def _broken(
    table: LayoutTable, sizes: Sizes, world: int, seq_len: int | None, global_batch: int | None
) -> Iterator[str]:
    wrong = list(mesh_rules(table, world))
    dp = table.dp if table.dp != "auto" else world // (table.pp * table.cp * table.tp)
    edp = 1 if wrong else world // (table.pp * table.etp * table.ep)
    degrees = Degrees(table.pp, dp, table.cp, table.tp, edp, table.ep, table.etp)
    yield from stage_rules(table.pp, table, sizes)
    # With meshes of unequal size dp and edp mean nothing yet, but what the model forbids is the better reason.
    if wrong:
        yield from _model_rules(degrees, table, sizes)
        yield from wrong
        return
    yield from dense_rules(table.pp, dp, table.cp, table.tp, table, sizes, seq_len, global_batch)
    yield from expert_rules(degrees, table, sizes)


def _model_rules(degrees: Degrees, table: LayoutTable, sizes: Sizes) -> Iterator[str]:
    neutral = table.model_copy(update={"replicas": 1, "order": "pp-outer"})
    yield from dense_rules(degrees.pp, 1, degrees.cp, degrees.tp, neutral, sizes, None, None)
    yield from expert_rules(degrees, neutral, sizes)


def _joined(items: Iterable[object]) -> str:
    return "; ".join(str(item) for item in items)
