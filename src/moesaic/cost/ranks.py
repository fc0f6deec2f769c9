"""What stands on the ranks of a pipeline, and the moments that backward passes through there.

Layers are counted by kind: those whose states and kept activations are alike. All here depends on stages and schedule
alone, so layouts that share them share it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moesaic.spec.model import LayerSpec
from moesaic.spec.stages import Stage, Unit

from .inflight import windows
from .workload import SCHEDULES, Columns, Floats, Ints, Workload

PARTS = ("embedding", "head", "loss", "mtp")
_DUALPIPE = SCHEDULES.index("dualpipe")


@dataclass(frozen=True)
class Anatomy:
    """Which kind each part of a model is: all that what stands on the ranks depends on, besides the stages."""

    of_layer: tuple[int, ...]
    """Kind of each decoder layer."""
    blocks: tuple[int, ...]
    """Kind of each prediction block."""
    of_unit: tuple[tuple[Unit, int], ...]
    """Kind of each unit of layers whose stage says what it computes again."""
    of_block: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    """Kinds of the prediction blocks on such a stage, by its words."""
    count: int
    """Kinds in all, PARTS among them as the last."""
    tied: bool

    @property
    def parts(self) -> dict[str, int]:
        return {name: self.count - len(PARTS) + place for place, name in enumerate(PARTS)}


@dataclass(frozen=True)
class Ranks:
    """What stands on the ranks of one pipeline, and how often at once."""

    holds: Ints
    """[ranks, kinds]: layers of each kind and parts whose states a rank has."""
    once: Ints
    """[ranks, kinds]: those that one micro-batch passes, on all chunks of a rank."""
    flight: Ints
    """[positions, kinds]: kinds times micro-batches held, for each position of a rank's window."""
    first: Ints
    """[ranks]: where each rank's positions start in `flight`."""
    moments: Ints
    """[moments, 3 + kinds]: the kind whose backward runs, of each of a rank's chunks the last of every kind; the kinds
    of the layers before and after it (the number of kinds: none); and how many of each kind have run backward before
    it, whose activations are gone."""
    first_moment: Ints
    """[ranks]: where each rank's moments start."""
    differ: bool
    """Whether what is kept differs between layers of one kind, by what their stages say."""
    links: Floats
    """[ranks, 3]: whether a rank has a stage before one of its own, has one after, and 1."""


def distinct_layers(layers: Sequence[LayerSpec]) -> tuple[list[LayerSpec], list[int]]:
    """The different ones of `layers`, and which of them each is."""
    found: list[LayerSpec] = []
    places = []
    for layer in layers:
        place = next((i for i, one in enumerate(found) if one is layer or one == layer), len(found))
        if place == len(found):
            found.append(layer)
        places.append(place)
    return found, places


def groups(work: Workload, columns: Columns, anatomy: Anatomy) -> Iterator[tuple[Ints, Ranks]]:
    """Layouts that share a stage list, a pipeline, a schedule and how many micro-batches limit what is in flight."""
    limit = np.minimum(np.maximum(columns.micro_batches(work.global_batch), 1), 2 * columns.pp + 2)
    extra = columns.overlaps("experts").astype(np.int64)
    key = columns.stages
    for column in (columns.pp, columns.schedule, limit, extra):
        key = key * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        one = rows[0]
        stages, pp, schedule = (
            columns.stage_lists[columns.stages[one]],
            int(columns.pp[one]),
            int(columns.schedule[one]),
        )
        yield rows, _ranks(anatomy, stages, pp, schedule, int(limit[one]), int(extra[one]))


@lru_cache(maxsize=8192)
def _ranks(kinds: Anatomy, stages: tuple[Stage, ...], pp: int, schedule: int, most: int, ahead: int) -> Ranks:
    chunks = len(stages) // pp
    here = np.stack([_stage_counts(kinds, stage) for stage in stages])
    passes = here.reshape(chunks, pp, kinds.count).transpose(1, 0, 2)
    if schedule == _DUALPIPE:
        # A rank has its own stage and the one as far from the other end.
        passes = np.concatenate([passes, passes[::-1]], axis=1)
    once = passes.sum(axis=1)
    holds = once.copy()
    embedding, head, mtp = kinds.parts["embedding"], kinds.parts["head"], kinds.parts["mtp"]
    # Prediction blocks embed tokens with a copy of the table; a tied head on the embedding's rank is the table itself.
    holds[:, embedding] = np.maximum(holds[:, embedding], holds[:, mtp] > 0)
    if kinds.tied:
        holds[holds[:, embedding] > 0, head] = 0
    flight, first, at = [], [], 0
    for rank in range(pp):
        window = windows(schedule, pp, passes.shape[1], rank, most, ahead)
        distinct = np.unique(window @ passes[rank], axis=0)
        flight.append(distinct)
        first.append(at)
        at += len(distinct)
    moments = [_moments(kinds, [stages[stage] for stage in range(rank, len(stages), pp)]) for rank in range(pp)]
    if schedule == _DUALPIPE:
        moments = [np.concatenate([one, other]) for one, other in zip(moments, reversed(moments), strict=True)]
    starts = np.cumsum([0, *(len(one) for one in moments[:-1])])
    links = np.array(
        [[pp > 1 and (chunks > 1 or rank > 0), pp > 1 and (chunks > 1 or rank + 1 < pp), 1] for rank in range(pp)]
    )
    differ = any(stage.recompute is not None for stage in stages)
    window_starts = np.array(first, np.int64)
    return Ranks(holds, once, np.concatenate(flight), window_starts, np.concatenate(moments), starts, differ, links)


def _moments(kinds: Anatomy, chunks: list[Stage]) -> Ints:
    """[moments, 3 + kinds]: see `Ranks.moments`. Chunks have their own passes."""
    rows, parts, none = [], kinds.parts, kinds.count
    for stage in chunks:
        done, seen = np.zeros(kinds.count, np.int64), set[int]()
        layers, blocks = _order(kinds, stage)
        if stage.head:
            rows.append(np.concatenate([[parts["loss"], none, none], done]))
            seen.add(parts["loss"])
        order = [*layers, *([parts["loss"]] if stage.head else [])]
        order += [each for block in blocks for each in (parts["mtp"], block)]
        if blocks:
            rows.append(np.concatenate([[parts["mtp"], none, none], done]))
            seen.add(parts["mtp"])
        last = parts["mtp"] if blocks else none
        for place in reversed(range(len(order))):
            kind = order[place]
            before = order[place - 1] if place else none
            if kind not in seen:
                rows.append(np.concatenate([[kind, before, last], done]))
                seen.add(kind)
            done[kind] += 1
            last = kind
        rows.append(np.concatenate([[parts["embedding" if stage.embed else "head"], none, none], done]))
    return np.unique(rows, axis=0)


def _order(kinds: Anatomy, stage: Stage) -> tuple[list[int], list[int]]:
    """Kinds of a virtual stage's layers, by units, and of its prediction blocks, in the order of forward."""
    if stage.recompute is None:
        return [kinds.of_layer[layer] for layer in stage.layers], list(kinds.blocks) if stage.mtp else []
    of, blocks = dict(kinds.of_unit), dict(kinds.of_block)
    return [of[unit] for unit in stage.recompute.units], list(blocks[stage.recompute.others]) if stage.mtp else []


def _stage_counts(kinds: Anatomy, stage: Stage) -> Ints:
    """[kinds] layers of each kind and parts on one virtual stage."""
    layers, blocks = _order(kinds, stage)
    counts = np.bincount(np.array([*layers, *blocks], np.int64), minlength=kinds.count)
    if stage.embed:
        counts[kinds.parts["embedding"]] += 1
    if stage.mtp:
        counts[kinds.parts["mtp"]] += len(kinds.blocks)
    if stage.head:
        counts[kinds.parts["head"]] += 1
        counts[kinds.parts["loss"]] += 1
    return counts
