"""Memory of one rank: which pipeline rank needs most, and what for.

The peak of a training step falls in a backward pass. Then these exist at once: weights, gradients and optimizer states
(`states`); what forward passes kept for the micro-batches in flight (`activations`, `inflight`); logits; and what the
backward at that point needs for itself. A rank's peak is the larger of two moments: backward of the head, on the rank
that has it, and backward of its most demanding layer.

Formulas run over arrays [N] of layouts; loops run over kinds of layers, stage lists and pipeline ranks. Bytes are
plain bytes. Nothing is fitted: every term is a tensor that exists, or a constant of `habits` with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moesaic.spec.layout import Layout
from moesaic.spec.model import LayerSpec, ModelSpec
from moesaic.spec.stages import Unit

from .activations import backward_extra, head_kept, layer_kept, logits_bytes, mtp_kept, value_bytes
from .habits import MEGATRON, Habits
from .moments import beside, block_moments, embedding_moments, head_moments, layer_moments, pending, root, standing
from .offload import offloaded
from .ranks import PARTS, Anatomy, Ranks, distinct_layers, groups
from .rows import tokens_per_rank
from .states import has_experts, layer_local, padded_vocabulary, part_local, states, weight_shapes
from .workload import Bools, Columns, Floats, Ints, Workload

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
    for rows, ranks in groups(work, columns, kinds.anatomy):
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
    ((rows, ranks),) = groups(work, columns, kinds.anatomy)
    parts = kinds.ranks(rows, ranks)
    result = []
    for rank in range(layout.pp):
        values = {name: float(parts[name][0, rank]) for name in (*_NAMES, "total")}
        kept = kinds.by_module(ranks.once[rank])
        one = sum(kept.values())
        result.append(StageMemory(rank, **values, in_flight=values["activations"] / one if one else 0.0, kept=kept))
    return result


class _Kinds:
    """Arrays of every distinct kind of layer, then of the parts: the columns of all matrices here."""

    def __init__(self, work: Workload, columns: Columns, habits: Habits) -> None:
        model, self.work, self.columns, self.habits = work.model, work, columns, habits
        blocks = model.mtp if work.mtp else ()
        layers, places = distinct_layers((*model.layers, *blocks))
        # A kind is layers that backward treats as one, most often a single one, and what it computes again of them.
        self.layers: list[tuple[LayerSpec, ...]] = [(layer,) for layer in layers]
        self.words: list[tuple[str, ...] | None] = [None] * len(layers)
        decoder, self.blocks = places[: len(model.layers)], places[len(model.layers) :]
        units: dict[Unit, int] = {}
        of_block: dict[tuple[str, ...], tuple[int, ...]] = {}
        for stage in (stage for stages in columns.stage_lists for stage in stages):
            if stage.recompute is not None:
                for unit in stage.recompute.units:
                    units[unit] = self._kind([layers[decoder[layer]] for layer in unit.layers], unit.words)
                others = stage.recompute.others
                of_block[others] = tuple(self._kind([layer], others) for layer in blocks)
        self.parts = {name: len(self.layers) + place for place, name in enumerate(PARTS)}
        self.count = len(self.layers) + len(PARTS)
        self.anatomy = Anatomy(
            tuple(decoder),
            tuple(self.blocks),
            tuple(units.items()),
            tuple(of_block.items()),
            self.count,
            model.tied_embeddings,
        )
        last = columns.of_the_last()
        self.of_kind = [columns.recomputing(words) for words in self.words] + [last] * len(PARTS)
        each = [
            [layer_kept(model, layer, work, here, habits) for layer in one]
            for one, here in zip(self.layers, self.of_kind, strict=False)
        ]
        behind = mtp_kept(model, work, last, habits) if blocks else []
        each += [[[]], [[]], [head_kept(model, work, last, habits)], [behind]]
        # Of layers that are computed again together only the first one's input is kept.
        self.tables = [tables[0] if len(tables) == 1 else [r for r in tables[0] if r.always] for tables in each]
        local = [[layer_local(model, layer, columns) for layer in one] for one in self.layers]
        local += [[part_local(model, part, columns, habits)] for part in PARTS]
        held = [[states(one, work, columns, habits) for one in several] for several in local]
        self.weights = np.stack([sum(one.weights for one in several) for several in held], axis=1)
        self.gradients = np.stack([sum(one.gradients for one in several) for several in held], axis=1)
        self.optimizer = np.stack([sum(one.optimizer for one in several) for several in held], axis=1)
        zeros = np.zeros(len(columns))
        self.kept = np.stack(
            [
                sum((row.left(here) for row in table), zeros)
                for table, here in zip(self.tables, self.of_kind, strict=True)
            ],
            axis=1,
        )
        has = [any(has_experts(layer) for layer in one) for one in self.layers] + [False] * len(PARTS)
        self.grouped = np.array(has)
        self.away = np.stack(
            [
                offloaded(table if place < len(self.layers) else [], has[place], here)
                for place, (table, here) in enumerate(zip(self.tables, self.of_kind, strict=True))
            ],
            axis=1,
        )
        self.exact = habits.exact and habits.loss == "chunks"
        extra_of = layer_moments if self.exact else backward_extra
        # Dropped tensors are there again while their layer's backward runs, and those of the layers before it that are
        # computed again with it.
        peaks = []
        for one, here, tables in zip(self.layers, self.of_kind, each, strict=False):
            there, most = zeros, []
            for layer, table in zip(one, tables, strict=True):
                there = there + sum((row.bytes for row in table), zeros)
                most.append(there + extra_of(model, layer, work, here, habits))
            peaks.append(np.maximum.reduce(most))
        peaks += [sum((row.bytes for row in tables[0]), zeros) for tables in each[len(self.layers) :]]
        self.extra = np.stack(peaks, axis=1) - self.kept
        self.gathered = np.stack([np.maximum.reduce([one.gathered for one in several]) for several in held], axis=1)
        # To the layer after it a unit is its last layer, to the one before it its first.
        self.ahead = [beside(several[-1], work, columns)[0] for several in local[: len(self.layers)]]
        self.joined = [beside(several[0], work, columns)[1] for several in local[: len(self.layers)]]
        self.root, self.root_joined = root([several[0] for several in local[len(self.layers) :]], work, columns)
        self._vocabulary(model, work, columns, habits)
        self._dispatch_buffers(model, work, columns, habits)
        self._shapes(model, columns, habits)

    def _kind(self, layers: list[LayerSpec], words: tuple[str, ...]) -> int:
        """The place of `layers` with `words` among the kinds."""
        wanted = tuple(layers)
        for place, (known, of) in enumerate(zip(self.layers, self.words, strict=True)):
            if known == wanted and of == words:
                return place
        self.layers.append(wanted)
        self.words.append(words)
        return len(self.layers) - 1

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
        waiting = np.where(columns.of_the_last().recomputes("loss"), 0, losses - 1) * one
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
        found = [{k: v for layer in one for k, v in weight_shapes(model, layer).items()} for one in self.layers]
        for one in found:
            shapes.update(one)
        cuts = {"tp": columns.tp, "etp": columns.etp, "": np.ones(len(columns), np.int64)}
        sizes = [values * value_bytes(self.work.precision) / cuts[cut] for values, cut in shapes.values()]
        self.placeholders = np.stack(sizes, axis=1) if habits.placeholders else np.zeros((len(columns), len(shapes)))
        self.has_shape = np.array([[shape in one for shape in shapes] for one in found] + [[False] * len(shapes)] * 4)

    def by_module(self, once: Ints) -> dict[str, float]:
        """Bytes by module of the first layout that one micro-batch keeps on the kinds counted in `once`."""
        modules: dict[str, float] = {}
        for kind, table in enumerate(self.tables):
            if once[kind]:
                for row in table:
                    size = float(row.left(self.of_kind[kind])[0]) * int(once[kind])
                    modules[row.module] = modules.get(row.module, 0.0) + size
        return {module: size for module, size in modules.items() if size}

    def ranks(self, rows: Ints, ranks: Ranks) -> dict[str, Floats]:
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
            layer_peak = self._layer_peak(rows, ranks)
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

    def _layer_peak(self, rows: Ints, ranks: Ranks) -> Floats:
        """Most bytes [n, ranks] that the backward of a layer needs beyond what is kept. Where layers keep alike that is
        the last one, before which nothing has gone; else what is not kept any more by then is not there."""
        at = self.extra[rows][:, ranks.moments[:, 0]]
        if ranks.differ:
            at = at - (self.kept - self.away)[rows] @ ranks.moments[:, 3:].T.astype(np.float64)
        return np.maximum(np.maximum.reduceat(at, ranks.first_moment, axis=1), 0.0)

    def _exact(self, rows: Ints, ranks: Ranks, head: Bools) -> tuple[Floats, Floats]:
        """Logits, and what else exists beside states and all kept activations, [n, ranks], at the fullest moment."""
        kinds, behind, ahead = ranks.moments[:, :3].T
        after = ranks.moments[:, 3:].astype(np.float64)
        at = self.extra[rows][:, kinds] - (self.kept - self.away)[rows] @ after.T
        none = [np.zeros(len(self.columns))] * (1 + len(PARTS))
        gathered, joined = (np.stack([*each, *none], axis=1)[rows] for each in (self.ahead, self.joined))
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

    def _activations(self, rows: Ints, ranks: Ranks) -> Floats:
        """Kept bytes [n, ranks] at the worst position of each rank's window. Of what is offloaded two layers' worth
        is on the device: that of the layer that computes and that of the one on its way."""
        flight = ranks.flight.T.astype(np.float64)
        if not self.columns.offloads("activations")[rows].any():
            return np.maximum.reduceat(self.kept[rows] @ flight, ranks.first, axis=1)
        staying = np.maximum.reduceat((self.kept - self.away)[rows] @ flight, ranks.first, axis=1)
        passing = np.maximum.reduceat(self.away[rows] @ flight, ranks.first, axis=1)
        return staying + np.minimum(passing, 2 * _largest(self.away[rows], ranks.once > 0))


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
