"""Memory of one rank: which pipeline rank needs most, and what for.

The peak of a training step falls in a backward pass. Then these exist at once: weights, gradients and optimizer states
(`states`); what forward passes kept for the micro-batches in flight (`activations`, `inflight`); logits; and what the
backward at that point needs for itself. A rank's peak is the larger of two moments: backward of the head, on the rank
that has it, and backward of its most demanding layer.

Formulas run over arrays [N] of layouts; loops run over kinds of layers, stage lists and pipeline ranks. Bytes are
plain bytes. Nothing is fitted: every term is a tensor that exists, or a constant of `habits` with its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moesaic.spec.layout import Layout
from moesaic.spec.model import LayerSpec, ModelSpec
from moesaic.spec.stages import Stage

from .activations import backward_extra, head_kept, layer_kept, logits_bytes, mtp_kept, value_bytes
from .habits import MEGATRON, Habits
from .inflight import windows
from .moments import beside, block_moments, embedding_moments, head_moments, layer_moments, pending, root, standing
from .offload import offloaded
from .rows import tokens_per_rank
from .states import has_experts, layer_local, padded_vocabulary, part_local, states, weight_shapes
from .workload import SCHEDULES, Bools, Columns, Floats, Ints, Workload

PARTS = ("embedding", "head", "loss", "mtp")
_DUALPIPE = SCHEDULES.index("dualpipe")
_NAMES = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


@dataclass(frozen=True)
class Memory:
    """Bytes on the pipeline rank that needs most, [N] each."""

    weights: Floats
    gradients: Floats
    """Accumulated gradients."""
    optimizer: Floats
    """fp32 weights and moments."""
    activations: Floats
    """Kept for backward, of all micro-batches in flight."""
    logits: Floats
    """Of one micro-batch, where the rank with the head peaks at its backward."""
    buffers: Floats
    """Gradients of activations at the peak, gathered weights, placeholders, workspaces, dispatch copies."""
    overhead: Floats
    """What the caching allocator reserves beyond its peak of allocated bytes, and the device context."""
    total: Floats
    """All of them: what the device must have."""
    stage: Ints
    """The pipeline rank."""

    @property
    def allocated(self) -> Floats:
        """Peak of allocated bytes, as `torch.cuda.max_memory_allocated` tells it: the total without `overhead`."""
        return self.total - self.overhead


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one pipeline rank of one layout. The parts are those of `Memory`."""

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: float
    total: float
    in_flight: float
    """Micro-batches held at the peak: `activations` over what one micro-batch keeps on all layers of the rank."""
    kept: dict[str, float]
    """What one micro-batch keeps, by module."""

    @property
    def allocated(self) -> float:
        """Peak of allocated bytes."""
        return self.total - self.overhead


def memory(work: Workload, columns: Columns, habits: Habits = MEGATRON) -> Memory:
    """Memory of every layout, on its pipeline rank that needs most."""
    kinds = _Kinds(work, columns, habits)
    out = {name: np.zeros(len(columns)) for name in (*_NAMES, "total")}
    stage = np.zeros(len(columns), np.int64)
    for rows, ranks in _groups(work, columns, kinds):
        parts = kinds.ranks(rows, ranks)
        most = parts["total"].argmax(axis=1)
        stage[rows] = most
        for name, values in parts.items():
            out[name][rows] = values[np.arange(len(most)), most]
    return Memory(**out, stage=stage)


def stage_memory(work: Workload, layout: Layout, habits: Habits = MEGATRON) -> list[StageMemory]:
    """Memory of every pipeline rank of one layout, with what a micro-batch keeps by module."""
    columns = Columns.of([layout])
    kinds = _Kinds(work, columns, habits)
    ((rows, ranks),) = _groups(work, columns, kinds)
    parts = kinds.ranks(rows, ranks)
    result = []
    for rank in range(layout.pp):
        values = {name: float(parts[name][0, rank]) for name in (*_NAMES, "total")}
        kept = kinds.by_module(ranks.once[rank])
        one = sum(kept.values())
        result.append(StageMemory(rank, **values, in_flight=values["activations"] / one if one else 0.0, kept=kept))
    return result


@dataclass(frozen=True)
class _Ranks:
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
    links: Floats
    """[ranks, 3]: whether a rank has a stage before one of its own, has one after, and 1."""


@dataclass(frozen=True)
class _Anatomy:
    """Which kind each part of a model is: all that what stands on the ranks depends on, besides the stages."""

    of_layer: tuple[int, ...]
    """Kind of each decoder layer."""
    blocks: tuple[int, ...]
    """Kind of each prediction block."""
    count: int
    """Kinds in all, PARTS among them as the last."""
    tied: bool

    @property
    def parts(self) -> dict[str, int]:
        return {name: self.count - len(PARTS) + place for place, name in enumerate(PARTS)}


class _Kinds:
    """Arrays of every distinct kind of layer, then of the parts: the columns of all matrices here."""

    def __init__(self, work: Workload, columns: Columns, habits: Habits) -> None:
        model, self.work, self.columns, self.habits = work.model, work, columns, habits
        blocks = model.mtp if work.mtp else ()
        self.layers, places = distinct_layers((*model.layers, *blocks))
        self.blocks = places[len(model.layers) :]
        self.parts = {name: len(self.layers) + place for place, name in enumerate(PARTS)}
        self.count = len(self.layers) + len(PARTS)
        self.anatomy = _Anatomy(
            tuple(places[: len(model.layers)]), tuple(self.blocks), self.count, model.tied_embeddings
        )
        self.tables = [layer_kept(model, layer, work, columns, habits) for layer in self.layers]
        self.tables += [
            [],
            [],
            head_kept(model, work, columns, habits),
            mtp_kept(model, work, columns, habits) if blocks else [],
        ]
        local = [layer_local(model, layer, columns) for layer in self.layers]
        local += [part_local(model, part, columns, habits) for part in PARTS]
        held = [states(one, work, columns, habits) for one in local]
        zeros = np.zeros(len(columns))
        self.weights = np.stack([one.weights for one in held], axis=1)
        self.gradients = np.stack([one.gradients for one in held], axis=1)
        self.optimizer = np.stack([one.optimizer for one in held], axis=1)
        self.kept = np.stack([sum((row.left(columns) for row in table), zeros) for table in self.tables], axis=1)
        has = [has_experts(layer) for layer in self.layers] + [False] * len(PARTS)
        parts_of_layers = [table if place < len(self.layers) else [] for place, table in enumerate(self.tables)]
        self.away = np.stack(
            [offloaded(table, each, columns) for table, each in zip(parts_of_layers, has, strict=True)], axis=1
        )
        whole = np.stack([sum((row.bytes for row in table), zeros) for table in self.tables], axis=1)
        self.exact = habits.exact and habits.loss == "chunks"
        extra_of = layer_moments if self.exact else backward_extra
        extra = [extra_of(model, layer, work, columns, habits) for layer in self.layers] + [zeros] * len(PARTS)
        # Dropped tensors are there again while their layer's backward runs.
        self.extra = whole - self.kept + np.stack(extra, axis=1)
        self.gathered = np.stack([one.gathered for one in held], axis=1)
        self.neighbours = [beside(one, work, columns) for one in local[: len(self.layers)]]
        self.root, self.root_joined = root(local[len(self.layers) :], work, columns)
        self._vocabulary(model, work, columns, habits)
        self._dispatch_buffers(model, work, columns, habits)
        self._shapes(model, columns, habits)

    def _vocabulary(self, model: ModelSpec, work: Workload, columns: Columns, habits: Habits) -> None:
        """Two moments: the loss's backward, with all copies of the logits there are; and the head's, with the gradient
        of one set in bf16, the gathered input, its gradient, and the weight gradient's stand-in, freed afterwards. A
        loss in chunks has one moment, with gradients of inputs and of the matrix for every loss."""
        rows = padded_vocabulary(model, columns, habits)
        a, tokens = value_bytes(work.precision), tokens_per_rank(work, columns)
        one, losses = logits_bytes(rows, work, columns, habits), 1 + len(self.blocks)
        weights, inputs = a * rows * model.hidden / columns.tp, a * model.hidden * tokens
        if self.exact:
            self.logits = one
            parts = [
                embedding_moments(model, rows, work, columns, habits),
                np.zeros(len(columns)),
                head_moments(model, rows, work, columns, habits),
                block_moments(model, work, columns, habits),
            ]
            self.extra[:, len(self.layers) :] = np.stack(parts, axis=1)
            self.standing = standing(model, work, columns)
            self.pending = pending(rows, model, work, columns)
            self.main = inputs  # the gradient of the main loss waits for those of the prediction blocks
            return
        if habits.loss == "chunks":
            self.logits = one
            self.head_extra = losses * (weights + inputs) + 2 * inputs * columns.tp
            return
        waiting = np.where(columns.recomputes("loss"), 0, losses - 1) * one
        self.logits = waiting + one
        stand_in = weights if habits.placeholders else 0.0
        head = waiting + a * rows * tokens + 2 * inputs * columns.tp + stand_in
        self.head_extra = np.maximum(head - self.logits, 0.0)

    def _dispatch_buffers(self, model: ModelSpec, work: Workload, columns: Columns, habits: Habits) -> None:
        """Buffers that a dispatcher's library registers outside the allocator. HybridEP has room for all tokens of the
        expert group, in dispatch and in combine."""
        tokens = tokens_per_rank(work, columns) * columns.ep * columns.etp
        hybrid = 2 * value_bytes(work.precision) * model.hidden * tokens
        flex = [columns.dispatches("hybridep"), columns.dispatches("deepep")]
        self.outside = np.select(flex, [hybrid, habits.deepep_buffer], 0.0)

    def _shapes(self, model: ModelSpec, columns: Columns, habits: Habits) -> None:
        shapes: dict[tuple[object, ...], tuple[int, str]] = {}
        found = [weight_shapes(model, layer) for layer in self.layers]
        for one in found:
            shapes.update(one)
        cuts = {"tp": columns.tp, "etp": columns.etp, "": np.ones(len(columns), np.int64)}
        sizes = [values * value_bytes(self.work.precision) / cuts[cut] for values, cut in shapes.values()]
        self.placeholders = np.stack(sizes, axis=1) if habits.placeholders else np.zeros((len(columns), len(shapes)))
        self.has_shape = np.array([[shape in one for shape in shapes] for one in found] + [[False] * len(shapes)] * 4)
        self.grouped = np.array([has_experts(layer) for layer in self.layers] + [False] * len(PARTS))

    def by_module(self, once: Ints) -> dict[str, float]:
        """Bytes by module of the first layout that one micro-batch keeps on the kinds counted in `once`."""
        modules: dict[str, float] = {}
        for kind, table in enumerate(self.tables):
            if once[kind]:
                for row in table:
                    size = float(row.left(self.columns)[0]) * int(once[kind])
                    modules[row.module] = modules.get(row.module, 0.0) + size
        return {module: size for module, size in modules.items() if size}

    def ranks(self, rows: Ints, ranks: _Ranks) -> dict[str, Floats]:
        """Parts [n, ranks] of the layouts `rows`, which share stages and windows."""
        holds, present = ranks.holds.T.astype(np.float64), ranks.holds > 0
        head = ranks.once[:, self.parts["loss"]] > 0
        weights, gradients = self.weights[rows] @ holds, self.gradients[rows] @ holds
        optimizer, activations = self.optimizer[rows] @ holds, self._activations(rows, ranks)
        shapes = (present.astype(np.int64) @ self.has_shape.astype(np.int64)) > 0
        spaces = self.habits.workspaces + self.habits.grouped_workspaces * (present & self.grouped).any(axis=1)
        buffers = self.placeholders[rows] @ shapes.T.astype(np.float64) + self.habits.workspace * spaces
        if self.exact:
            logits, extra = self._exact(rows, ranks, head)
            buffers = buffers + extra
        else:
            # Two parts are gathered at a time: the one that computes and the one after it.
            buffers = buffers + _largest(self.gathered[rows], present) * 2
            layer_peak = _largest(self.extra[rows], present)
            logits = self.logits[rows, None] * head
            head_peak = logits + self.head_extra[rows, None] * head
            at_head = head_peak > layer_peak
            logits = np.where(at_head, logits, 0.0)
            buffers = buffers + np.where(at_head, head_peak - logits, layer_peak)
        allocated = weights + gradients + optimizer + activations + logits + buffers
        outside = self.outside[rows, None] * (present & self.grouped).any(axis=1)
        overhead = self.habits.reserved_share * allocated + self.habits.context + outside
        values = (weights, gradients, optimizer, activations, logits, buffers, overhead, allocated + overhead)
        return dict(zip((*_NAMES, "total"), values, strict=True))

    def _exact(self, rows: Ints, ranks: _Ranks, head: Bools) -> tuple[Floats, Floats]:
        """Logits, and what else exists beside states and all kept activations, [n, ranks], at the fullest moment."""
        kinds, behind, ahead = ranks.moments[:, :3].T
        after = ranks.moments[:, 3:].astype(np.float64)
        at = self.extra[rows][:, kinds] - (self.kept - self.away)[rows] @ after.T
        none = np.zeros((len(rows), 1 + len(PARTS)))
        gathered, joined = (
            np.concatenate([np.stack(each, axis=1)[rows], none], axis=1) for each in zip(*self.neighbours, strict=True)
        )
        joined[:, self.parts["mtp"]] = self.main[rows]
        at = at + gathered[:, behind] + joined[:, ahead]
        sizes = np.diff([*ranks.first_moment, len(kinds)])
        with_head = np.repeat(head, sizes) & (kinds != self.parts["loss"])
        at = at + self.pending[rows, None] * with_head
        parts = (ranks.holds[:, len(self.layers) :] > 0).T.astype(np.float64)
        at_end = np.isin(kinds, [self.parts["embedding"], self.parts["head"]])
        at = at + np.repeat(self.root_joined[rows] @ parts, sizes, axis=1) * at_end
        most = np.maximum.reduceat(at, ranks.first_moment, axis=1)
        loss = self.extra[rows, None, self.parts["loss"]] * head
        logits = np.where(head & (loss >= most), self.logits[rows, None], 0.0)
        return logits, most - logits + self.standing[rows] @ ranks.links.T + self.root[rows] @ parts

    def _activations(self, rows: Ints, ranks: _Ranks) -> Floats:
        """Kept bytes [n, ranks] at the worst position of each rank's window. Of what is offloaded two layers' worth
        is on the device: that of the layer that computes and that of the one on its way."""
        flight = ranks.flight.T.astype(np.float64)
        if not self.columns.offloads("activations")[rows].any():
            return np.maximum.reduceat(self.kept[rows] @ flight, ranks.first, axis=1)
        staying = np.maximum.reduceat((self.kept - self.away)[rows] @ flight, ranks.first, axis=1)
        passing = np.maximum.reduceat(self.away[rows] @ flight, ranks.first, axis=1)
        return staying + np.minimum(passing, 2 * _largest(self.away[rows], ranks.once > 0))


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


def _largest(values: Floats, present: Bools) -> Floats:
    """[n, kinds] and [ranks, kinds] → [n, ranks]: the largest value among the kinds of each rank."""
    patterns, rank = _patterns(present.tobytes(), len(present))
    found = [values[:, pattern].max(axis=1) if pattern.any() else np.zeros(len(values)) for pattern in patterns]
    return np.stack(found, axis=1)[:, rank]


@lru_cache(maxsize=8192)
def _patterns(present: bytes, ranks: int) -> tuple[Bools, Ints]:
    """The different rows of a [ranks, kinds] table of truths, and which of them each rank has."""
    table = np.frombuffer(present, bool).reshape(ranks, -1)
    patterns, rank = np.unique(table, axis=0, return_inverse=True)
    return patterns, rank.reshape(-1)


def _groups(work: Workload, columns: Columns, kinds: _Kinds) -> Iterator[tuple[Ints, _Ranks]]:
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
        yield rows, _ranks(kinds.anatomy, stages, pp, schedule, int(limit[one]), int(extra[one]))


@lru_cache(maxsize=8192)
def _ranks(kinds: _Anatomy, stages: tuple[Stage, ...], pp: int, schedule: int, most: int, ahead: int) -> _Ranks:
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
    return _Ranks(
        holds, once, np.concatenate(flight), np.array(first, np.int64), np.concatenate(moments), starts, links
    )


def _moments(kinds: _Anatomy, chunks: list[Stage]) -> Ints:
    """[moments, 3 + kinds]: see `_Ranks.moments`. Chunks have their own passes."""
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


def _order(kinds: _Anatomy, stage: Stage) -> tuple[list[int], list[int]]:
    """Kinds of the layers of a virtual stage and of its prediction blocks, in the order of forward."""
    return [kinds.of_layer[layer] for layer in stage.layers], list(kinds.blocks) if stage.mtp else []


def _stage_counts(kinds: _Anatomy, stage: Stage) -> Ints:
    """[kinds] layers of each kind and parts on one virtual stage."""
    held = np.array([kinds.of_layer[layer] for layer in stage.layers], np.int64)
    counts = np.bincount(held, minlength=kinds.count)
    if stage.embed:
        counts[kinds.parts["embedding"]] += 1
    if stage.mtp and kinds.blocks:
        counts[kinds.parts["mtp"]] += len(kinds.blocks)
        for block in kinds.blocks:
            counts[block] += 1
    if stage.head:
        counts[kinds.parts["head"]] += 1
        counts[kinds.parts["loss"]] += 1
    return counts
