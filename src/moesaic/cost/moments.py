"""The fullest moments of this project's trainer, tensor by tensor: what exists beside state and kept activations.

Each function walks through one backward pass as the trainer's code runs it: `Tape.make` is a tensor that comes into
being, `Tape.drop` one that goes, also one that forward had kept. The most that was there at once, beside everything
that was kept when the pass began, is what that part adds to a rank's peak. Autograd holds a node's incoming gradient
and what it saved until the node is done; a weight's gradient goes when it has been added to the sum.

Sizes are arrays [N], one entry per layout. Letters: T own tokens, P those of the tensor group, R rows of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

from .activations import (
    FP32,
    INT64,
    Kept,
    arrived_tokens,
    attention_kept,
    first_width,
    layer_kept,
    value_bytes,
)
from .counts import mlp_parameters
from .habits import Habits
from .rows import layer_ep, received_tokens, routed_rows, tokens_per_rank
from .states import Local, layer_local
from .traffic import distinct_places
from .workload import SHARDING, Bools, Columns, Floats, Workload

NORM_BLOCK = 2**17
"""Numbers of a block in which the backward of an RMS norm walks through its input."""
SCORES = 64 * 2**20
"""Bytes of the largest matrix of scores in a ring."""


class Tape:
    """Bytes that are there, and the most there have been."""

    def __init__(self, columns: Columns) -> None:
        self.now = np.zeros(len(columns))
        self.most = np.zeros(len(columns))

    def make(self, *sizes: Floats | float) -> None:
        """These come into being, one after the other."""
        for size in sizes:
            self.now = self.now + size
        self.most = np.maximum(self.most, self.now)

    def drop(self, *sizes: Floats | float) -> None:
        """These go."""
        for size in sizes:
            self.now = self.now - size

    def passing(self, *sizes: Floats | float) -> None:
        """These come into being beside each other and go."""
        self.make(*sizes)
        self.drop(*sizes)


@dataclass(frozen=True)
class Spread:
    """What sharding spreads in each layout, and whether over several ranks."""

    optimizer: Bools
    gradients: Bools
    parameters: Bools
    dense: Floats
    """1 where dense parameters are spread, else 0."""
    expert: Floats
    """The same for a layer's experts."""
    ways: tuple[Floats, Floats]
    """Ranks that dense parameters and experts are spread over."""

    def waits(self, value: int) -> Floats:
        """See `_Sizes.waits`; `value`: bytes of a weight."""
        return self.dense * (self.gradients | (self.optimizer & (value < FP32)))

    @classmethod
    def of(cls, columns: Columns, copies: Floats | float = 1.0) -> Spread:
        """`copies`: ranks that hold the same experts."""
        optimizer, gradients, parameters = (
            columns.sharding >= SHARDING.index(word) for word in ("optimizer", "gradients", "parameters")
        )
        ways = [np.maximum(each / columns.replicas, 1.0) for each in (columns.dp * columns.cp, copies)]
        dense, expert = ((each > 1).astype(np.float64) for each in ways)
        return cls(optimizer, gradients, parameters, dense, expert, (ways[0], ways[1]))


@dataclass(frozen=True)
class _Sizes:
    """What all parts of a layer share."""

    work: Workload
    columns: Columns
    habits: Habits
    hidden: int
    """Width of the model."""
    spread: Spread

    @property
    def a(self) -> int:
        return value_bytes(self.work.precision)

    @property
    def waits(self) -> Floats:
        """1 where gradients of dense weights wait for the end of their layer: to be spread, or to be added up in fp32
        for a sum that comes later."""
        return self.spread.waits(self.a)

    @property
    def own(self) -> Floats:
        return tokens_per_rank(self.work, self.columns)

    @property
    def part(self) -> Floats:
        return self.own * self.columns.tp

    @property
    def between(self) -> Floats:
        """Bytes of the hidden states of own tokens."""
        return self.a * self.hidden * self.own

    @property
    def gathered(self) -> Floats:
        """Of the hidden states of the tensor group's tokens, where it has several ranks."""
        return np.where(self.columns.tp > 1, self.a * self.hidden * self.part, 0.0)


def layer_moments(model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns, habits: Habits) -> Floats:
    """The most that backward of one layer needs beside what was kept when it began."""
    local = layer_local(model, layer, columns)
    spread = Spread.of(columns, local.expert_copies)
    sizes, tape = _Sizes(work, columns, habits, model.hidden, spread), Tape(columns)
    table = layer_kept(model, layer, work, columns, habits)
    kept = _bytes(table)
    attention = attention_kept(layer.attention, model.hidden, work, columns, habits)
    norm = sizes.between + FP32 * sizes.own  # a norm's input and statistic
    # What was dropped is there again when its module's backward begins; of a whole block or layer, from the start.
    later = _dropped(attention, "full", columns)
    shared = _dropped([row for row in table if row.module == "shared_experts"], "moe", columns)
    tape.now = tape.most = -(later + shared)
    tape.make(sizes.between)  # the gradient of the layer's output, there until that of its input is
    if layer.mlp is not None:
        _mlp(tape, layer.mlp, sizes)
    if layer.moe is not None:
        _moe(tape, layer.moe, sizes, shared)
    block = layer.mlp if layer.moe is None else layer.moe.shared
    half = 0.0 * sizes.own if block is None else mlp_parameters(block, model.hidden) / columns.tp
    # The numbers of the experts' rows stay until the whole pass is over.
    numbers = 2 * INT64 * routed_rows(layer.moe, work, columns) if layer.moe else 0.0
    tape.now = sizes.between * 2 - (kept - _bytes(attention) - numbers) + sizes.a * half * sizes.waits
    tape.drop(later)
    _norm(tape, sizes.own, model.hidden, sizes)
    tape.drop(norm, sizes.between)
    tape.make(later)
    _attention(tape, layer.attention, attention, sizes)
    dense = spread.dense * (local.matmul + local.other)
    tape.now = sizes.between * 2 - kept + norm + sizes.a * dense * sizes.waits
    _norm(tape, sizes.own, model.hidden, sizes)
    # Gradients of all but the experts are joined for their sum when the layer is through.
    tape.make(np.where(spread.gradients, FP32 * dense * (1 + 1 / spread.ways[0]), 0.0))
    gathered = sizes.a * (dense + spread.expert * local.expert)
    return tape.most + np.where(spread.parameters, gathered, 0.0)


def beside(local: Local, work: Workload, columns: Columns) -> tuple[Floats, Floats]:
    """Bytes of a layer's dense parameters while a neighbour's backward runs: gathered ahead for the next one, joined
    gradients of the one before, whose sum may be under way."""
    spread = Spread.of(columns)
    dense = spread.dense * (local.matmul + local.other)
    ahead = np.where(spread.parameters, value_bytes(work.precision) * dense, 0.0)
    return ahead, np.where(spread.gradients, FP32 * dense, 0.0)


def root(local: list[Local], work: Workload, columns: Columns) -> tuple[Floats, Floats]:
    """[N, parts]: gathered parameters of the parts beside layers, which stay for the whole pass, and their joined
    gradients at its end."""
    spread = Spread.of(columns)
    gathered = np.where(spread.parameters, value_bytes(work.precision) * spread.dense, 0.0)
    joined = np.where(spread.gradients, FP32 * spread.dense, 0.0)
    return np.stack([gathered * one.total for one in local], 1), np.stack([joined * one.total for one in local], 1)


def pending(rows: Floats, model: ModelSpec, work: Workload, columns: Columns) -> Floats:
    """The gradient of the head's matrix, which waits for the end of backward to be spread or added to its sum."""
    spread, a = Spread.of(columns), value_bytes(work.precision)
    return spread.waits(a) * a * rows * model.hidden / columns.tp


def _bytes(table: list[Kept], module: str = "") -> Floats:
    return sum((row.bytes for row in table if module in ("", row.module)), np.zeros(1))


def _dropped(table: list[Kept], word: str, columns: Columns) -> Floats:
    """Bytes of a table that recompute drops, where it does not go by `word`, or `full`, as a whole."""
    gone = sum((row.bytes - row.left(columns) for row in table), np.zeros(len(columns)))
    return np.where(columns.recomputes(word), 0.0, gone)


def _norm(tape: Tape, rows: Floats, width: int, sizes: _Sizes) -> None:
    """Makes the gradient of the input; that of the output goes."""
    out = sizes.a * rows * width
    tape.make(out)
    block = FP32 * width * np.minimum(rows, max(1, NORM_BLOCK // width))
    # Of a block in fp32: the gradient and the input, where they are copies, and two products.
    tape.passing(block * (3 if sizes.a < FP32 else 2))
    tape.drop(out)


def _mlp(tape: Tape, mlp: MlpSpec, sizes: _Sizes) -> None:
    """From the gradient of the output, which stays, to that of the input."""
    a, tp, tokens = sizes.a, sizes.columns.tp, sizes.part
    narrow, wide = a * mlp.width / tp * tokens, a * first_width(mlp) / tp * tokens
    down, up = a * sizes.hidden * mlp.width / tp, a * sizes.hidden * first_width(mlp) / tp
    tape.make(sizes.gathered)
    tape.make(down, narrow)  # gradients of the weight and of the activation
    tape.drop(sizes.gathered, down * (1 - sizes.waits), narrow)  # `narrow`: the kept activation
    tape.make(wide, narrow, narrow)  # gradient of the first product, the activation again, its function
    tape.drop(narrow, narrow, narrow, wide)  # with the activation's gradient and the kept product
    tape.make(up, a * sizes.hidden * tokens)
    tape.drop(up * (1 - sizes.waits), wide)
    tape.make(np.where(tp > 1, sizes.between, 0.0))
    tape.drop(sizes.gathered)


def _moe(tape: Tape, moe: MoeSpec, sizes: _Sizes, shared: Floats) -> None:
    """From the gradient of the output, which stays, to the end of the shared expert. `shared`: what it makes again."""
    a, c, work = sizes.a, sizes.columns, sizes.work
    hidden, rows = a * sizes.hidden, routed_rows(moe, work, c)
    travels = (c.ep * c.etp > 1).astype(np.float64)
    arrived = np.where(travels > 0, arrived_tokens(moe, work, c), sizes.own)
    if moe.shared is not None and moe.shared_combine != "sum":
        tape.make(sizes.between, sizes.between)  # gradients of the shared output and, before its sum, of the gate
        tape.drop(sizes.between, sizes.between)  # with the kept output
        tape.make(sizes.between)  # what the gate says about the block's input
    # The gradients of the sums that came back go to where the rows are: copies for each place, all of a cut expert's.
    exchanged = (c.dispatches("alltoall") & (c.ep > 1)).astype(np.float64)
    copies = exchanged * hidden * sizes.own * distinct(moe, c)
    here = exchanged * hidden * received_tokens(moe, work, c) / c.etp
    brought = hidden * arrived * travels
    tape.passing(copies, here)
    tape.make(np.where(c.etp > 1, here, 0.0), brought)
    tape.drop(np.where(c.etp > 1, here, 0.0))
    # The experts.
    experts = moe.router.experts / layer_ep(moe, c)
    width, first = a * moe.expert.width / c.etp * rows, a * first_width(moe.expert) / c.etp * rows
    up = hidden * first_width(moe.expert) / c.etp * experts
    down = hidden * moe.expert.width / c.etp * experts
    kept_by_experts, spread = first, sizes.spread
    if not sizes.habits.grouped_products:
        # What is made of rows is scratch, and so are gradients of weights, but where sums are joined.
        rows, width, first = 0.0 * rows, 0.0 * width, 0.0 * first
        up, down = (each * spread.expert * spread.optimizer for each in (up, down))
    scaled = 0.0 if moe.router.apply == "input" else width
    tape.make(hidden * rows)  # gradients of the rows' outputs
    tape.make(width, width, first, scaled, width)  # of activations; these again; of products; scaled; the function
    tape.drop(scaled, width, width)
    tape.make(down)
    tape.drop(width, hidden * rows)
    tape.make(hidden * rows, up)  # the rows again
    tape.drop(hidden * rows)
    tape.make(hidden * rows)  # gradients of the rows
    tape.drop(first)
    tape.passing(3 * INT64 * rows, 2 * INT64 * arrived, hidden * arrived)  # their sums by token, and what finds them
    tape.make(hidden * arrived)
    tape.drop(hidden * rows, brought)
    tape.drop(hidden * arrived * travels, kept_by_experts)
    # Where gradients are spread, they are joined for their sum; their weights have gone, if they had been gathered.
    joined = FP32 * (up + down) / a
    tape.drop(np.where(spread.parameters, spread.expert * (up + down), 0.0))
    tape.drop(np.where(spread.gradients, 0.0, up + down))
    tape.make(np.where(spread.optimizer, spread.expert * joined, 0.0))
    # The sum comes while FSDP2 still holds the last of the gradients that were joined.
    tape.drop(np.where(spread.gradients, up, 0.0))
    tape.passing(np.where(spread.gradients, spread.expert * joined / spread.ways[1], 0.0))
    tape.drop(np.where(spread.gradients, down, spread.expert * spread.optimizer * joined))
    # The sums go back beside the shared expert, those of a cut expert's ranks added up first.
    chained = np.where(c.etp > 1, exchanged, 0.0)
    tape.make(np.where(exchanged > 0, copies, travels * sizes.between), chained * here)
    tape.drop(chained * hidden * arrived)
    tape.make(shared)
    if moe.shared is not None:
        _mlp(tape, moe.shared, sizes)


def distinct(moe: MoeSpec, columns: Columns) -> Floats:
    """How many of the places of an expert layer a token goes to."""
    router = moe.router
    return distinct_places(layer_ep(moe, columns), router.experts, router.top_k, router.groups_kept, router.groups)


def _attention(tape: Tape, attention: AttentionSpec, kept: list[Kept], sizes: _Sizes) -> None:
    """From the gradient of the output, which stays, to the products of the norm's output."""
    a, c, tokens, part = sizes.a, sizes.columns, sizes.own, sizes.part
    heads, value = attention.heads, attention.v_head_dim
    ulysses = ((c.cp > 1) & np.logical_not(c.ring)).astype(np.float64)
    out = a * heads * value * tokens
    tape.make(sizes.gathered)
    tape.make(a * sizes.hidden * heads * value / c.tp, out)  # gradients of the weight and of what it multiplies
    tape.drop(sizes.gathered, a * sizes.hidden * heads * value / c.tp * (1 - sizes.waits), ulysses * out)
    tape.passing(ulysses * out)
    wide, before = max(attention.head_dim, value), tape.now
    if wide > value:
        tape.make(a * heads * wide * tokens)
        tape.drop(out)
        out = a * heads * wide * tokens
    tape.now = np.where(c.ring & (c.cp > 1), before, tape.now)
    keys = np.maximum(attention.kv_heads, np.where(c.ring, c.tp, c.tp * c.cp)) * tokens
    query, key = a * heads * attention.head_dim * tokens, a * keys * attention.head_dim
    _ring(tape, attention, query, key + a * keys * value, sizes)
    tape.make(query + key + a * keys * wide)
    tape.drop(out, _bytes(kept, "attention") - ulysses * a * heads * value * tokens, _bytes(kept, "qkv"))
    joined = query + key + a * keys * value
    tape.passing(ulysses * joined)
    # Rotated back, in fp32 on the way; then the products, whose results on the same input add up.
    turned = query if attention.rope is not None and attention.rope.dim == attention.head_dim else 0.0
    tape.passing(turned, turned * FP32 / a, turned if a < FP32 else 0.0)
    inputs = a * sizes.hidden * part
    if attention.kind == "gqa":
        tape.drop(key + a * keys * wide)
        tape.passing(3 * inputs + a * sizes.hidden * heads * attention.head_dim / c.tp)


def _ring(tape: Tape, attention: AttentionSpec, query: Floats, packed: Floats, sizes: _Sizes) -> None:
    """Backward of attention with one rank's keys and values, where they go around. `packed`: bytes of both together.

    Those at work and those on their way; sums in fp32 of gradients, and what the block adds to them; two matrices of
    scores in fp32, and one in the type of the queries. No such matrix is larger than `SCORES`.
    """
    a, c = sizes.a, sizes.columns
    rings = (c.ring & (c.cp > 1)).astype(np.float64)
    keys = sizes.part / c.micro_batch  # of one row
    scores = np.minimum(FP32 * attention.heads / c.tp * keys * sizes.part, SCORES)
    sums = FP32 / a * (query + packed)
    copied = 2 * query if attention.kv_heads < attention.heads else 0.0
    scores = scores * (2 if a == FP32 else 2 + a / FP32)
    hidden = keys * sizes.part / c.micro_batch  # a byte for each score says whether it counts
    tape.passing(rings * (2 * packed + 2 * sums + copied + scores + hidden))


def head_moments(model: ModelSpec, rows: Floats, work: Workload, columns: Columns, habits: Habits) -> Floats:
    """The most that losses and final norm need beside what is kept when they begin. `rows` [N]: the vocabulary.

    A loss makes its gradients, of its input and of the matrix, in forward, from a part of the tokens at a time, and
    keeps them for backward, which makes scaled copies.
    """
    sizes, tape = _Sizes(work, columns, habits, model.hidden, Spread.of(columns)), Tape(columns)
    a, tp, wide = sizes.a, columns.tp, FP32
    copied = a < FP32
    blocks = len(model.mtp) if work.mtp else 0
    mine, one = rows / tp, sizes.between
    matrix, tokens = mine * model.hidden, sizes.part
    chunk = np.minimum(tokens, np.maximum(16, habits.chunk // (mine * FP32)))
    several = chunk < tokens
    split = columns.tp > 1
    tape.make(one * max(1, blocks))  # the losses' inputs, of which the first is kept for the blocks if there are any
    tape.make(blocks * (one + a * matrix))  # gradients of the other losses
    logits = wide * chunk * mine
    narrow = a * chunk * mine if copied else 0.0 * chunk
    product = a * matrix + (wide * matrix if copied else 0.0)
    # Alone: in a buffer of the products' type. Of several chunks the first begins the sum in fp32.
    alone = Tape(columns)
    alone.make(one, a * chunk * mine, wide * matrix * (several if copied else 1))
    alone.passing(logits * copied, narrow, np.maximum(a * chunk * model.hidden, product * copied))
    # Together: the group's tokens, those that count, their gradients, and a sum in fp32.
    group = a * model.hidden * tokens
    together = Tape(columns)
    together.make(3 * group, 4.0 * INT64 * tokens, wide * matrix)
    together.passing(logits, logits)
    together.passing(logits, narrow, np.maximum(a * chunk * model.hidden, product))
    together.passing(group, one, a * matrix * copied)
    tape.passing(np.where(split, together.most, alone.most))
    # Backward: the last loss first.
    tape.drop(one * max(1, blocks))
    tape.make(one + a * matrix)
    tape.make(one + a * matrix)
    tape.now = one * (1 + blocks)
    _norm(tape, sizes.own, model.hidden, sizes)
    return tape.most


def block_moments(model: ModelSpec, work: Workload, columns: Columns, habits: Habits) -> Floats:
    """The most that a prediction block needs around its layer: its last norm, beside the gradient of the main loss."""
    sizes, tape = _Sizes(work, columns, habits, model.hidden, Spread.of(columns)), Tape(columns)
    tape.make(2 * sizes.between)
    _norm(tape, sizes.own, model.hidden, sizes)
    return tape.most


def embedding_moments(model: ModelSpec, rows: Floats, work: Workload, columns: Columns, habits: Habits) -> Floats:
    """The most that the embedding's backward needs: gradients of what was looked up, of all the tensor group's tokens,
    and of the table."""
    sizes = _Sizes(work, columns, habits, model.hidden, Spread.of(columns))
    return sizes.between + 2 * sizes.gathered + sizes.a * rows * model.hidden / columns.tp


def standing(model: ModelSpec, work: Workload, columns: Columns) -> Floats:
    """[N, 3]: what stands on a rank with a stage before it, with one after it, and on any. Two messages each way that
    the neighbour may not have read, and one on its way here; ids and labels of a step's micro-batches, and the sines
    and cosines of each rotary embedding."""
    message = value_bytes(work.precision) * model.hidden * tokens_per_rank(work, columns)
    ids = 2.0 * INT64 * columns.micro_batch * work.seq_len * np.maximum(columns.micro_batches(work.global_batch), 1)
    ropes = {
        layer.attention.rope.model_dump_json(): layer.attention.rope for layer in model.layers if layer.attention.rope
    }
    tables = sum(2 * FP32 * rope.dim for rope in ropes.values()) * work.seq_len / columns.cp
    return np.stack([3 * message, 3 * message, ids + tables], axis=1)
