"""Parameters on one rank, and the bytes of their weights, gradients and optimizer states by sharding level.

Arrays are float64 [N], one entry per layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

from .activations import QUANTIZED, first_width
from .counts import attention_norms, mlp_parameters, router_parameters
from .habits import MEGATRON, Habits
from .rows import layer_edp, layer_ep
from .workload import SHARDING, Columns, Floats, Workload

_LEVEL = {name: place for place, name in enumerate(SHARDING)}


@dataclass(frozen=True)
class Local:
    """Parameters of one part of a model on one rank."""

    matmul: Floats
    """Of matmuls on the dense mesh inside layers, which quantised training may store quantised."""
    other: Floats
    """Of norms, routers, embedding and head."""
    expert: Floats
    """Of routed experts, matmuls too."""
    expert_copies: Floats
    """Ranks that hold the same experts."""

    @property
    def total(self) -> Floats:
        return self.matmul + self.other + self.expert


@dataclass(frozen=True)
class States:
    """Bytes of one part on one rank."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats
    """Unsharded weights and gradients of this part, which exist while it computes if they are sharded otherwise."""


def layer_local(model: ModelSpec, layer: LayerSpec, columns: Columns) -> Local:
    """One decoder layer. Projections, shared experts and dense blocks are cut by tp; norms, routers and MLA's down
    projections are whole on every rank; routed experts are cut by ep (whole experts) and etp (their width)."""
    tp, ones = columns.tp, np.ones(len(columns))
    matmul = _attention_local(layer.attention, model.hidden, columns)
    norms = 2 * model.hidden * (2 if model.norm_bias else 1) + attention_norms(layer.attention)
    other, expert, copies = norms * ones, 0 * ones, ones
    if layer.mlp is not None:
        matmul = matmul + mlp_parameters(layer.mlp, model.hidden) / tp
    if layer.moe is not None:
        moe = layer.moe
        other = other + router_parameters(moe, model.hidden)
        if moe.shared is not None:
            matmul = matmul + mlp_parameters(moe.shared, model.hidden) / tp
        expert = moe.router.experts * mlp_parameters(moe.expert, model.hidden) / (layer_ep(moe, columns) * columns.etp)
        copies = layer_edp(moe, columns).astype(np.float64)
    return Local(matmul, other, expert, copies)


def _attention_local(attention: AttentionSpec, hidden: int, columns: Columns) -> Floats:
    tp, heads = columns.tp, attention.heads
    width, out = heads * attention.head_dim, heads * attention.v_head_dim
    bias = hidden if attention.o_bias else 0
    sinks = heads / tp if attention.sinks else 0
    if attention.kind == "gqa":
        kv = np.maximum(attention.kv_heads, tp) * (attention.head_dim + attention.v_head_dim)
        inputs = hidden + (1 if attention.qkv_bias else 0)
        return (inputs * (width + kv) + out * hidden) / tp + bias + sinks
    rank, kv_rank = attention.q_rank, attention.kv_rank or 0
    down = (rank or 0) + kv_rank + (attention.rope_dim or 0)
    query = width * (hidden if rank is None else rank)
    up = kv_rank * heads * ((attention.nope_dim or 0) + attention.v_head_dim)
    downs = down * (hidden + (1 if attention.qkv_bias else 0))
    return downs + (query + up + out * hidden) / tp + bias + sinks


def padded_vocabulary(model: ModelSpec, columns: Columns, habits: Habits) -> Floats:
    """Rows of the embedding and columns of the head: the vocabulary rounded up to a multiple."""
    multiple = habits.vocabulary_multiple * columns.tp
    return np.ceil(model.vocab / multiple) * multiple


def part_local(model: ModelSpec, part: str, columns: Columns, habits: Habits) -> Local:
    """Parts beside layers: `embedding` (with learned positions), `head` (its matrix), `loss` (the final norm) and `mtp`
    (a prediction block's projection and norms; its layer is a layer)."""
    ones, tp = np.ones(len(columns)), columns.tp
    norm = model.hidden * (2 if model.norm_bias else 1)
    table = padded_vocabulary(model, columns, habits) * model.hidden / tp
    matmul, other = 0 * ones, 0 * ones
    if part == "embedding":
        other = table + (model.max_positions * model.hidden if model.learned_positions else 0)
    elif part == "head":
        other = table + (model.vocab / tp if model.head_bias else 0)
    elif part == "loss":
        other = norm * ones
    else:
        cut = tp if habits.cut_block_projection else ones
        matmul, other = 2 * model.hidden**2 / cut * ones, 3.0 * norm * ones
    return Local(matmul, other, 0 * ones, ones)


def states(local: Local, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> States:
    """Bytes of one part's weights, gradients and optimizer states.

    Mixed precision: 2 for the weight, `gradient_bytes` (4) for the accumulated gradient, 4 for the fp32 weight (2 where
    it is split) and two moments. Unsharded that is 18; with the optimizer sharded over d ranks 6 + 12/d, with bf16
    moments 6 + 8/d, with gradients sharded too 2 + 16/d, with parameters 18/d (ZeRO, arXiv 1910.02054 section 3;
    16/d with `gathers_masters`). d is dp·cp for the dense mesh and edp for experts, over `replicas`. In fp32 weight and
    master are one. An offloaded optimizer leaves what is not its fraction, and masters that weights are gathered from.
    """
    full = work.precision == "fp32"
    weight = 4.0 if full else 2.0
    quantised = weight
    if work.precision in QUANTIZED:
        # NVFP4 stores no parameters: it quantises the bf16 ones, by rows and by columns.
        stored = habits.quantized_weights and work.precision != "nvfp4"
        quantised = 2 * QUANTIZED[work.precision] + (0 if stored else weight)
    whole = 0 if full else 2 if work.master == "split" else 4
    master = whole + 2 * work.moment_bytes
    dense = np.maximum(columns.dp * columns.cp / columns.replicas, 1)
    expert = np.maximum(local.expert_copies / columns.replicas, 1)

    def shard(values: tuple[Floats, Floats], level: str) -> Floats:
        on = columns.sharding >= _LEVEL[level]
        return values[0] / np.where(on, dense, 1) + values[1] / np.where(on, expert, 1)

    weights = (local.matmul * quantised + local.other * weight, local.expert * quantised)
    gradients = ((local.matmul + local.other) * work.gradient_bytes, local.expert * work.gradient_bytes)
    counts = (local.matmul + local.other, local.expert)
    optimizer = (counts[0] * master, counts[1] * master)
    unsharded, kept_weights = sum(weights), shard(weights, "parameters")
    kept_gradients = shard(gradients, "gradients")
    staying: Floats | float = 0.0
    if habits.gathers_masters:
        # Of a spread weight its master is stored, in fp32 too, and no shard of what computes.
        spread = [(columns.sharding >= _LEVEL["optimizer"]) & (copies > 1) for copies in (dense, expert)]
        masters = [np.where(on, 4 if full else whole, whole) * count for on, count in zip(spread, counts, strict=True)]
        moments = 2 * work.moment_bytes
        optimizer = (masters[0] + counts[0] * moments, masters[1] + counts[1] * moments)
        apart = columns.sharding >= _LEVEL["parameters"]
        left = [np.where(on & apart, 0.0, one) for on, one in zip(spread, weights, strict=True)]
        kept_weights = left[0] + left[1]
        staying = np.where(columns.sharding > 0, shard((masters[0], masters[1]), "optimizer"), 0.0)
    gathered = np.where(kept_weights < unsharded, unsharded, 0) + np.where(
        kept_gradients < sum(gradients), sum(gradients), 0
    )
    held = shard(optimizer, "optimizer")
    away = np.where(columns.offloads("optimizer"), columns.offload_fraction, 0.0) * (held - staying)
    return States(kept_weights, kept_gradients, held - away, gathered)


Shape = tuple[Any, ...]


def weight_shapes(model: ModelSpec, layer: LayerSpec) -> dict[Shape, tuple[int, str]]:
    """Distinct matmul weights of a layer: key → (values, what cuts them: `tp`, `etp` or nothing)."""
    hidden, attention = model.hidden, layer.attention
    heads = attention.heads
    width, out = heads * attention.head_dim, heads * attention.v_head_dim
    found: list[tuple[int, int, str]] = [(hidden, out, "tp")]
    if attention.kind == "gqa":
        found.append((width + attention.kv_heads * (attention.head_dim + attention.v_head_dim), hidden, "tp"))
    else:
        kv_rank = attention.kv_rank or 0
        if attention.q_rank is not None:
            found += [(attention.q_rank, hidden, ""), (width, attention.q_rank, "tp")]
        else:
            found.append((width, hidden, "tp"))
        found.append((kv_rank + (attention.rope_dim or 0), hidden, ""))
        found.append((heads * ((attention.nope_dim or 0) + attention.v_head_dim), kv_rank, "tp"))
    if layer.mlp is not None:
        found += _mlp_shapes(layer.mlp, hidden, "tp")
    if layer.moe is not None:
        found += _mlp_shapes(layer.moe.expert, hidden, "etp")
        if layer.moe.shared is not None:
            found += _mlp_shapes(layer.moe.shared, hidden, "tp")
    return {shape: (shape[0] * shape[1], shape[2]) for shape in found}


def _mlp_shapes(mlp: MlpSpec, hidden: int, cut: str) -> Iterator[tuple[int, int, str]]:
    yield first_width(mlp), hidden, cut
    yield hidden, mlp.width, cut


def has_experts(layer: LayerSpec) -> bool:
    """Whether it runs grouped matmuls."""
    return isinstance(layer.moe, MoeSpec)
