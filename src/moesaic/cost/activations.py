"""Bytes that a layer keeps for its backward, tensor by tensor: one table per kind of block.

Every row of a table is one tensor on one rank in one micro-batch: the module it belongs to, what it is, its bytes for
each layout [N], and the recompute labels that make backward compute it again. Widths are those of the whole model
times T = b·S/(cp·tp) tokens, for between modules a rank holds its own tokens whole and inside them all tokens of its
tensor group at 1/tp of the width. All but the layer's input is dropped by `full`.

What is kept follows Megatron-Core with Transformer Engine: the inputs of norms and matmuls, of the attention core and
of the activation function. Sums, splits, permutations (but for their row numbers) and dropout of 0 keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

from .habits import MEGATRON, Habits
from .rows import layer_ep, received_tokens, routed_rows, tokens_between, tokens_per_rank
from .sar import sar_rows
from .workload import Columns, Floats, Precision, Workload

FP32, INT64 = 4, 8
QUANTIZED: dict[Precision, float] = {"fp8": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of one quantised value with its share of a scale: fp32 per 128 (DeepSeek's tiles), one byte per 32 (OCP MX),
one byte per 16 (NVFP4)."""


@dataclass(frozen=True)
class Kept:
    """One tensor kept for backward."""

    module: str
    tensor: str
    bytes: Floats
    """Of one micro-batch on the most loaded rank, [N]."""
    labels: tuple[str, ...] = ()
    """Any of these recompute labels drops it, as `full` does."""
    always: bool = False
    """Kept under `full` too."""

    def left(self, columns: Columns) -> Floats:
        """Its bytes where the layout keeps it, 0 where backward computes it again."""
        if self.always:
            return self.bytes
        dropped = columns.recomputes("full")
        for label in self.labels:
            dropped = dropped | columns.recomputes(label)
        return np.where(dropped, 0.0, self.bytes)


def value_bytes(precision: Precision) -> int:
    """Bytes of one activation outside of quantised matmul inputs."""
    return FP32 if precision == "fp32" else 2


def input_bytes(precision: Precision) -> float:
    """Bytes of one value of a matmul's kept input: quantised matmuls keep it quantised."""
    return QUANTIZED.get(precision, value_bytes(precision))


def layer_kept(
    model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns, habits: Habits = MEGATRON
) -> list[Kept]:
    """All tensors that one decoder layer keeps."""
    if habits.layer != "megatron" and layer.moe is not None and layer.attention.kind == "gqa":
        listed = sar_rows(model, layer, work, columns)
        left = [row for row in listed if row[3] or habits.layer == "megascale"]
        return [Kept(*row[:3], always=place == 0) for place, row in enumerate(left)]
    kept = attention_kept(layer.attention, model.hidden, work, columns, habits)
    if layer.mlp is not None:
        kept += mlp_kept(layer.mlp, model.hidden, work, columns, habits)
    if layer.moe is not None:
        kept += moe_kept(layer.moe, model.hidden, work, columns, habits)
    return kept


def attention_kept(
    attention: AttentionSpec, hidden: int, work: Workload, columns: Columns, habits: Habits = MEGATRON
) -> list[Kept]:
    """The first half of a layer, from its input to the output projection's input.

    The attention core is a flash kernel (arXiv 2205.14135): it keeps its inputs, its output, which is also the
    projection's input, and one fp32 log-sum per head and token. Under ulysses the core's output and the projection's
    input are two tensors, before and after the all-to-all; keys and values are repeated where heads are too few.
    A quantised output projection keeps that same bf16 output and quantises again in backward.
    """
    tokens, a, q = tokens_per_rank(work, columns), value_bytes(work.precision), input_bytes(work.precision)
    own = tokens_between(work, columns, habits)
    heads, out = attention.heads, attention.heads * attention.v_head_dim
    core = ("core_attn",) if habits.drops_core else ()
    ring, ulysses = (columns.cp > 1) & columns.ring, (columns.cp > 1) & np.logical_not(columns.ring)
    # A padded output is the core's; what goes on from it is a copy without the padding. A ring works unpadded.
    padded = habits.padded_values and attention.v_head_dim < attention.head_dim
    outputs = 1 if padded else np.where(ulysses, 2, 1)
    kept = [
        Kept("residual", "layer input, read by the first norm", a * hidden * own, always=True),
        Kept("norms", "one fp32 statistic of each norm", 2 * FP32 * own),
    ]
    if attention.kind == "mla":
        up = ("mla_up_proj",)
        rank, kv_rank = attention.q_rank or 0, attention.kv_rank or 0
        # Two down projections read the norm: one tensor in bf16, a quantised copy for each otherwise.
        copies = 1 if q == a else 2
        latents = rank + kv_rank + (attention.rope_dim or 0)
        value = np.where(ring | (not padded), attention.v_head_dim, attention.head_dim)
        joined = a * heads * (2 * attention.head_dim + value) * tokens
        arrived = np.zeros_like(joined)
        if habits.drops_core:
            # Under ulysses what arrives is kept, in one tensor, with the values' padded copy beside it.
            sent = heads * (2 * attention.head_dim + attention.v_head_dim)
            arrived = np.where(ulysses, a * sent * tokens, 0.0)
            copy = a * heads * attention.head_dim * tokens if padded else 0.0
            kept.append(Kept("qkv", "padded values after ulysses", np.where(ulysses, copy, 0.0), core))
            joined = np.where(ulysses, 0.0, joined)
        kept += [
            Kept("norms", "first norm's output", copies * q * hidden * own, ("layernorm",)),
            Kept("latents", "down projections' outputs, read by the latent norms", a * latents * own),
            Kept("latents", "statistics of the latent norms", FP32 * (1 + (rank > 0)) * own),
            Kept("qkv", "queries, keys and values of every head", joined, up),
            Kept("qkv", "queries, keys and values after ulysses", arrived),
        ]
        here, travels = q * (rank + kv_rank) * own, q * (latents + (0 if rank else hidden)) * own
        kept += _product_input("latents", "latent norms' outputs", here, travels, up, columns, habits)
    else:
        parts = np.where(columns.ring, columns.tp, columns.tp * columns.cp)
        kv = np.maximum(attention.kv_heads, parts) * (attention.head_dim + attention.v_head_dim)
        label = () if habits.fused_norms else ("layernorm",)
        kept += [
            *_product_input("norms", "first norm's output", q * hidden * own, q * hidden * own, label, columns, habits),
            Kept("qkv", "queries, keys and values, rotated", a * (heads * attention.head_dim + kv) * tokens),
        ]
        if attention.qk_norm != "none":
            normed = (heads + attention.kv_heads) * attention.head_dim
            norms = 2 if attention.qk_norm == "full" else attention.heads + attention.kv_heads
            kept.append(Kept("qkv", "queries and keys before their norms", a * normed * tokens))
            kept.append(Kept("qkv", "statistics of those norms", FP32 * norms * tokens))
    if padded:
        width = np.where(ring, 0, heads * attention.head_dim)
        kept.append(Kept("attention", "core's padded output", a * width * tokens, core))
    if habits.drops_core:
        # What travelled of it under ulysses stays, since it would have to travel again.
        once = a * out * tokens
        kept.append(Kept("attention", "core's output", np.where(ulysses & padded, 0.0, once), core))
        kept.append(Kept("attention", "output after ulysses", np.where(ulysses, once, 0.0)))
    else:
        kept.append(Kept("attention", "core's output, read by the output projection", a * out * outputs * tokens))
    kept += [
        Kept("residual", "input of the second norm", a * hidden * own),
    ]
    if habits.flash:
        kept.append(Kept("attention", "core's log-sums", FP32 * heads * tokens, ("core_attn",)))
    else:
        scores = heads * work.seq_len * (a + (a + 1 if habits.dropout else 0))
        kept.append(Kept("attention", "core's softmax, with what its dropout keeps", scores * tokens, ("core_attn",)))
    if habits.dropout:
        kept.append(Kept("residual", "masks of two dropouts, a byte per value", 2.0 * hidden * own))
    return kept


def mlp_kept(mlp: MlpSpec, hidden: int, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> list[Kept]:
    """A dense feed-forward block with the norm before it."""
    tokens, a, q = tokens_per_rank(work, columns), value_bytes(work.precision), input_bytes(work.precision)
    own = tokens_between(work, columns, habits)
    norm = ("mlp",) if habits.fused_norms else ("layernorm",)
    return [
        *_product_input("norms", "second norm's output", q * hidden * own, q * hidden * own, norm, columns, habits),
        Kept("mlp", "first matmul's output", a * first_width(mlp) * tokens, ("mlp",)),
        Kept("mlp", "activation, read by the second matmul", q * mlp.width * tokens, ("mlp",)),
    ]


def moe_kept(moe: MoeSpec, hidden: int, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> list[Kept]:
    """A mixture of experts with the norm before it, on the most loaded rank.

    A token's k rows are copies: they, not the token, are the experts' inputs. Rows are cut by no expert degree, as a
    rank of an expert group receives as many as it sends when loads are equal.
    """
    tokens, a, q = tokens_per_rank(work, columns), value_bytes(work.precision), input_bytes(work.precision)
    experts, rows = moe.router.experts, routed_rows(moe, work, columns)
    narrow = rows / columns.etp
    moe_only, first = ("moe",), a * first_width(moe.expert) * narrow
    read = np.ones(len(columns))
    if not habits.rows and a < FP32:
        # The router reads a copy in fp32. The norm's output itself stays for experts that are all here and for what
        # stands beside them.
        beside = moe.shared is not None and (moe.shared_combine != "sum")
        alone = (columns.tp == 1) | habits.gathers_again
        read = ((columns.ep * columns.etp == 1) | beside | (alone & (moe.shared is not None))).astype(np.float64)
    kept = [
        Kept("norms", "second norm's output, read by the router", a * hidden * tokens * read, ("layernorm",)),
        Kept("experts", "first matmul's output", first, moe_only),
    ]
    if habits.rows:
        maps, numbers = (2 * FP32 + 1) * experts * tokens, FP32 * (2 * experts + 1) * tokens
        kept += [
            Kept("router", "fp32 scores and chosen weights, one-byte map of choices", maps, moe_only),
            Kept("dispatch", "row numbers of the permutation, int32", numbers, moe_only),
            Kept("dispatch", "fp32 weight of each row", FP32 * rows, moe_only),
            Kept("experts", "rows, read by the first matmul", q * hidden * rows, moe_only),
            Kept("experts", "activation, read by the second matmul", q * moe.expert.width * narrow, ("moe_act", "moe")),
        ]
    else:
        chosen = (FP32 * experts + INT64 * moe.router.top_k) * tokens
        brought = np.where(columns.ep * columns.etp > 1, arrived_tokens(moe, work, columns), 0.0)
        sent = received_tokens(moe, work, columns) / columns.etp
        route = np.where(columns.dispatches("alltoall") & (columns.ep > 1), INT64 * (2 * sent + tokens + 1), 0.0)
        if moe.router.norm:
            summed = FP32 * (moe.router.top_k + 1 + (moe.router.norm_min > 0)) * tokens
            kept.append(Kept("router", "chosen scores and their sum, before their division", summed, moe_only))
        if a < FP32:
            copies = FP32 * hidden * (tokens + experts)
            kept.append(Kept("router", "its input and its weight in fp32", copies, moe_only))
        kept += [
            Kept("router", "fp32 scores and the choices, int64", chosen, moe_only),
            Kept("dispatch", "tokens that the dispatcher brought", a * hidden * brought, moe_only),
            Kept("dispatch", "weight of each row", a * rows, moe_only),
            Kept("dispatch", "order and token of each row, int64", 2 * INT64 * rows, moe_only),
            Kept("dispatch", "tokens sent, their order and ends, int64", route, moe_only),
            Kept("dispatch", "where each expert's rows end, int64", INT64 * experts / layer_ep(moe, columns), moe_only),
        ]
    if not habits.weight_before_down:
        kept.append(Kept("experts", "outputs, for the router's backward", a * hidden * rows, moe_only))
    if moe.shared is not None:
        shared = ("shared_experts", "moe")
        if q != a:
            copy = q * hidden * tokens
            kept.append(Kept("norms", "its quantised copy for the shared expert", copy, ("layernorm", *shared)))
        kept += [
            Kept("shared_experts", "first matmul's output", a * first_width(moe.shared) * tokens, shared),
            Kept("shared_experts", "activation, read by the second matmul", q * moe.shared.width * tokens, shared),
        ]
        if not habits.gathers_again:
            gathered = np.where(columns.tp > 1, q * hidden * tokens * columns.tp, 0.0)
            kept.append(Kept("shared_experts", "gathered input", gathered, moe_only))
        if moe.shared_combine != "sum":
            label = moe_only if habits.drops_core else shared
            kept.append(Kept("shared_experts", "output, for the gate's backward", a * hidden * tokens, label))
            if not habits.rows:
                gates = 1 if moe.shared_combine == "sigmoid_gate" else 2
                kept.append(Kept("shared_experts", "gates", a * gates * tokens, moe_only))
                if moe.shared_combine == "learned":
                    kept.append(Kept("experts", "their sum, for the gate's backward", a * hidden * tokens, moe_only))
    return kept


def _product_input(
    module: str, what: str, own: Floats, travels: Floats, label: tuple[str, ...], columns: Columns, habits: Habits
) -> list[Kept]:
    """The input of a tensor group's products: `own` bytes on one rank; where it is kept gathered, `travels` bytes of
    each of the group's ranks, and no label drops it, since nothing travels again."""
    if habits.gathers_again:
        return [Kept(module, what, own, label)]
    alone = columns.tp == 1
    return [
        Kept(module, what, np.where(alone, own, 0.0), label),
        Kept(module, f"{what}, gathered", np.where(alone, 0.0, travels * columns.tp)),
    ]


def mtp_kept(model: ModelSpec, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> list[Kept]:
    """What a multi-token prediction block keeps around its layer (arXiv 2412.19437 section 2.2)."""
    tokens, a, q = tokens_between(work, columns, habits), value_bytes(work.precision), input_bytes(work.precision)
    if habits.loss == "chunks":
        # The loss keeps gradients, not the last norm's output. The norms keep their inputs, of which one is the final
        # norm's output, and a statistic each. Only the block's layer is computed again.
        wide = a * model.hidden * tokens
        return [
            Kept("head", "final norm's output, read by the block", wide, always=True),
            Kept("mtp", "embedding of the next tokens, read by its norm", wide, always=True),
            Kept("mtp", "joined norms, read by the projection", 2 * q * model.hidden * tokens, always=True),
            Kept("mtp", "input of its last norm", wide, always=True),
            Kept("mtp", "one fp32 statistic of each norm", 3 * FP32 * tokens, always=True),
        ]
    return [
        Kept("mtp", "embedding of the next tokens, read by its norm", a * model.hidden * tokens, always=True),
        Kept("mtp", "joined norms, read by the projection", 2 * q * model.hidden * tokens),
        Kept("mtp", "input and output of its last norm", 2 * a * model.hidden * tokens, always=True),
    ]


def head_kept(model: ModelSpec, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> list[Kept]:
    """The final norm and the head's input; logits are counted apart."""
    tokens, a = tokens_between(work, columns, habits), value_bytes(work.precision)
    if habits.loss == "chunks":
        # The loss keeps gradients, not the norm's output: see `memory`.
        return [Kept("head", "input and statistic of the final norm", (a * model.hidden + FP32) * tokens, always=True)]
    return [Kept("head", "input and output of the final norm", 2 * a * model.hidden * tokens, always=True)]


def logits_bytes(vocabulary: Floats, work: Workload, columns: Columns, habits: Habits = MEGATRON) -> Floats:
    """Logits of one micro-batch and one loss on one rank: T·V values, V padded, in as many copies as the loss has."""
    a, values = value_bytes(work.precision), vocabulary * tokens_per_rank(work, columns)
    if habits.loss == "chunks":
        return np.minimum(habits.chunk, FP32 * values)
    return (a + FP32 if habits.loss == "fp32" and a < FP32 else a) * values


def first_width(mlp: MlpSpec) -> int:
    """Columns of a block's first matmul: gate and up side by side."""
    return (2 if mlp.gated else 1) * mlp.width


def backward_extra(
    model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns, habits: Habits = MEGATRON
) -> Floats:
    """Most bytes that the backward of one layer needs beyond what is kept, [N]: gradients of activations.

    Dense block: when the activation's gradient has been taken, those of the block's output, of the activation and of
    the first matmul's output exist, and the activation itself is gone; or, at the first matmul, the gathered input and
    its gradient (T·tp tokens each). Experts: the rows' gradients before and after combine's all-to-all, or the like.
    """
    tokens, a, q = tokens_per_rank(work, columns), value_bytes(work.precision), input_bytes(work.precision)
    out = a * model.hidden * tokens_between(work, columns, habits)
    peaks = [out]
    if layer.mlp is not None:
        width, first = layer.mlp.width, first_width(layer.mlp)
        peaks.append(out + (a * (width + first) - q * width) * tokens)
        peaks.append(out - q * width * tokens + 2 * a * model.hidden * tokens * columns.tp)
    if layer.moe is not None:
        moe = layer.moe
        rows = routed_rows(moe, work, columns)
        narrow, width, first = rows / columns.etp, moe.expert.width, first_width(moe.expert)
        peaks.append(out + a * model.hidden * (rows + sent_rows(moe, work, columns)))
        peaks.append(out + a * model.hidden * rows + (a * (width + first) - q * width) * narrow)
    return np.maximum.reduce(peaks)


def sent_rows(moe: MoeSpec, work: Workload, columns: Columns) -> Floats:
    """Rows of the dispatcher's other buffer: all tokens of the expert group (all-gather), k copies of each own token
    (all-to-all), tokens received once each (hierarchical, DeepEP, HybridEP), none where experts are local."""
    copies = tokens_per_rank(work, columns) * moe.router.top_k * columns.etp
    every, once = columns.dispatches("allgather"), columns.dispatches("hierarchical", "deepep", "hybridep")
    arrived = arrived_tokens(moe, work, columns)
    return np.where(columns.dispatches("local"), 0.0, np.where(every | once, arrived, copies))


def arrived_tokens(moe: MoeSpec, work: Workload, columns: Columns) -> Floats:
    """Tokens that reach a rank, each counted once: all of the expert group's after an all-gather, else those with an
    expert there."""
    group = tokens_per_rank(work, columns) * columns.ep * columns.etp
    return np.where(columns.dispatches("allgather"), group, received_tokens(moe, work, columns))
