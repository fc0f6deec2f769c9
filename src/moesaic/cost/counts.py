"""Parameters, bytes and floating-point operations that follow from the architecture alone.

FLOPs are those of training, forward and backward, in the convention of published throughput numbers: six times every
matmul weight that a token touches, plus causal attention over the positions it can see. The embedding look-up, the
routers and the one-column gates of shared experts are left out; `excluded` says how much that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.spec.errors import SpecError
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Counts:
    """Parameters of a model."""

    total: int
    """All parameters but those of multi-token prediction, which released totals leave out too."""
    active: int
    """What one token uses: routed experts count k/E, everything else (the embedding too) in full."""
    by_part: dict[str, int] = field(default_factory=dict)
    """`total` split into embedding, positions, attention, dense_mlp, router, experts, shared_experts, norms, head."""
    mtp: int = 0
    """Parameters of the multi-token prediction blocks; they share the model's embedding and head."""
    buffers: int = 0
    """Values that are saved and never trained by gradient: the routers' selection biases."""


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token (forward and backward)."""

    total: float
    by_part: dict[str, float] = field(default_factory=dict)
    """`total` split into attention (projections), attention_core, dense_mlp, experts, shared_experts, head and,
    where asked for, mtp."""
    excluded: dict[str, float] = field(default_factory=dict)
    """What the convention leaves out: the router and shared-expert gates."""


def attention_weights(attention: AttentionSpec, hidden: int) -> int:
    """Matmul weights of one attention block's projections, without biases.

    Grouped-query: D·(H·d + Hkv·d + Hkv·dv) + H·dv·D. Multi-head latent attention (arXiv 2405.04434 section 2.1): the
    query through rank q or directly, keys and values down to the latent and the shared rotary key, and up again.
    """
    heads, width = attention.heads, attention.heads * attention.head_dim
    output = heads * attention.v_head_dim * hidden
    if attention.kind == "gqa":
        return hidden * (width + attention.kv_heads * (attention.head_dim + attention.v_head_dim)) + output
    rank, kv_rank = attention.q_rank, attention.kv_rank or 0
    query = hidden * width if rank is None else rank * (hidden + width)
    down = hidden * (kv_rank + (attention.rope_dim or 0))
    up = kv_rank * heads * ((attention.nope_dim or 0) + attention.v_head_dim)
    return query + down + up + output


def attention_parameters(attention: AttentionSpec, hidden: int) -> int:
    """Parameters of one attention block: projections, their biases and sinks; norms are counted apart."""
    count = attention_weights(attention, hidden)
    if attention.qkv_bias:
        if attention.kind == "gqa":
            count += attention.heads * attention.head_dim
            count += attention.kv_heads * (attention.head_dim + attention.v_head_dim)
        else:
            count += (attention.q_rank or 0) + (attention.kv_rank or 0) + (attention.rope_dim or 0)
    if attention.o_bias:
        count += hidden
    return count + (attention.heads if attention.sinks else 0)


def attention_norms(attention: AttentionSpec) -> int:
    """Weights of the norms inside one attention block: query and key norms, and the latent norms."""
    count = (attention.q_rank or 0) + (attention.kv_rank or 0)
    if attention.qk_norm == "head":
        count += 2 * attention.head_dim
    elif attention.qk_norm == "full":
        count += (attention.heads + attention.kv_heads) * attention.head_dim
    return count


def mlp_weights(mlp: MlpSpec, hidden: int) -> int:
    """Matmul weights of a feed-forward block: 3·D·F gated, 2·D·F plain."""
    return (3 if mlp.gated else 2) * hidden * mlp.width


def mlp_parameters(mlp: MlpSpec, hidden: int) -> int:
    """Parameters of a feed-forward block with its biases."""
    return mlp_weights(mlp, hidden) + ((2 if mlp.gated else 1) * mlp.width + hidden if mlp.bias else 0)


def router_parameters(moe: MoeSpec, hidden: int) -> int:
    """Parameters that decide on experts: the router, its logit bias, and the gate of a shared expert."""
    count = moe.router.experts * (hidden + (1 if moe.router.logit_bias else 0))
    if moe.shared_combine == "sigmoid_gate":
        count += hidden
    elif moe.shared_combine == "learned":
        count += 2 * hidden + 2
    return count


def layer_parameters(layer: LayerSpec, hidden: int, norm_width: int) -> dict[str, int]:
    """Parameters of one decoder layer by part. `norm_width` is the size of one norm, D or 2·D with a bias."""
    parts = {
        "attention": attention_parameters(layer.attention, hidden),
        "norms": 2 * norm_width + attention_norms(layer.attention),
    }
    if layer.mlp is not None:
        parts["dense_mlp"] = mlp_parameters(layer.mlp, hidden)
    if layer.moe is not None:
        parts["router"] = router_parameters(layer.moe, hidden)
        parts["experts"] = layer.moe.router.experts * mlp_parameters(layer.moe.expert, hidden)
        if layer.moe.shared is not None:
            parts["shared_experts"] = mlp_parameters(layer.moe.shared, hidden)
    return parts


def idle_expert_parameters(layer: LayerSpec, hidden: int) -> int:
    """Routed-expert parameters of a layer that one token does not use: (E − k) experts."""
    if layer.moe is None:
        return 0
    router = layer.moe.router
    return (router.experts - router.top_k) * mlp_parameters(layer.moe.expert, hidden)


def parameters(spec: ModelSpec) -> Counts:
    """Parameters of `spec`: total, used per token, and by part.

    A multi-token prediction block is a layer, a 2·D → D projection and three norms of its own (arXiv 2412.19437
    section 2.2); it shares the embedding and the head.
    """
    hidden = spec.hidden
    norm_width = hidden * (2 if spec.norm_bias else 1)
    parts = {"embedding": spec.vocab * hidden}
    if spec.learned_positions:
        parts["positions"] = spec.max_positions * hidden
    for key in ("attention", "dense_mlp", "router", "experts", "shared_experts"):
        parts[key] = 0
    parts["norms"] = norm_width
    for layer in spec.layers:
        for key, count in layer_parameters(layer, hidden, norm_width).items():
            parts[key] += count
    parts["head"] = (0 if spec.tied_embeddings else spec.vocab * hidden) + (spec.vocab if spec.head_bias else 0)
    total = sum(parts.values())
    idle = sum(idle_expert_parameters(layer, hidden) for layer in spec.layers)
    mtp = sum(
        sum(layer_parameters(layer, hidden, norm_width).values()) + 2 * hidden * hidden + 3 * norm_width
        for layer in spec.mtp
    )
    return Counts(
        total=total,
        active=total - idle,
        by_part={key: count for key, count in parts.items() if count},
        mtp=mtp,
        buffers=_buffers(spec.layers),
    )


def _buffers(layers: tuple[LayerSpec, ...]) -> int:
    return sum(layer.moe.router.experts for layer in layers if layer.moe and layer.moe.router.select_bias)


def checkpoint_bytes(spec: ModelSpec, *, mtp: bool = False) -> int:
    """Bytes of the weights in bf16, with selection biases in fp32, as released checkpoints keep them."""
    counts = parameters(spec)
    size = BF16_BYTES * counts.total + FP32_BYTES * counts.buffers
    if mtp:
        size += BF16_BYTES * counts.mtp + FP32_BYTES * _buffers(spec.mtp)
    return size


def visible_positions(attention: AttentionSpec, seq_len: int) -> float:
    """Positions that a token attends to, averaged over a sequence of `seq_len` tokens.

    S/2 for full causal attention (the convention of published numbers; the exact mean is (S+1)/2). With a window of w
    positions the ramp ends at w: w − w²/(2·S). In chunks of c positions each chunk is a short causal sequence.
    """
    if attention.chunk is not None and attention.chunk < seq_len:
        whole, rest = divmod(seq_len, attention.chunk)
        return (whole * attention.chunk**2 + rest**2) / (2 * seq_len)
    if attention.window is not None and attention.window < seq_len:
        return attention.window - attention.window**2 / (2 * seq_len)
    return seq_len / 2


def attention_core_flops(attention: AttentionSpec, seq_len: int) -> float:
    """Training FLOPs per token of scores and their sum over values: 3 passes · 2 · H·(d + dv) per visible position."""
    widths = attention.heads * (attention.head_dim + attention.v_head_dim)
    return 6 * widths * visible_positions(attention, seq_len)


def layer_flops(layer: LayerSpec, hidden: int, seq_len: int) -> dict[str, float]:
    """Training FLOPs per token of one layer by part, with `router` for what the convention leaves out."""
    flops = {
        "attention": 6.0 * attention_weights(layer.attention, hidden),
        "attention_core": attention_core_flops(layer.attention, seq_len),
    }
    if layer.mlp is not None:
        flops["dense_mlp"] = 6.0 * mlp_weights(layer.mlp, hidden)
    if layer.moe is not None:
        gate = {"sum": 0, "sigmoid_gate": hidden, "learned": 2 * hidden}[layer.moe.shared_combine]
        flops["router"] = 6.0 * (layer.moe.router.experts * hidden + gate)
        flops["experts"] = 6.0 * layer.moe.router.top_k * mlp_weights(layer.moe.expert, hidden)
        if layer.moe.shared is not None:
            flops["shared_experts"] = 6.0 * mlp_weights(layer.moe.shared, hidden)
    return flops


def flops_per_token(spec: ModelSpec, seq_len: int, *, mtp: bool = False, windows: bool = True) -> Flops:
    """Training FLOPs per token of `spec` on sequences of `seq_len` tokens.

    6 · (matmul weights touched, with the head and without the embedding) + 6 · H·(d + dv) · visible positions per
    layer. It reproduces the ratio of published TFLOP/s to tokens/s of Megatron-Core releases (DeepSeek-V3 249.7 and
    Qwen3-235B 148.0 GFLOP/token at 4096) and MegaScale-MoE's model FLOP utilisation (arXiv 2505.11432 table 3).
    `mtp` adds the multi-token prediction blocks with their projection and head. `windows=False` counts sliding and
    chunked layers as full causal ones, as some published numbers do.

    Raises:
        SpecError: `seq_len` below 1.
    """
    if seq_len < 1:
        raise SpecError(f"A sequence has at least 1 token, but seq_len is {seq_len}.")
    flops: dict[str, float] = dict.fromkeys(
        ("attention", "attention_core", "dense_mlp", "router", "experts", "shared_experts"), 0.0
    )
    for layer in spec.layers:
        for key, count in layer_flops(_open(layer, windows), spec.hidden, seq_len).items():
            flops[key] += count
    flops["head"] = 6.0 * spec.vocab * spec.hidden
    excluded = {"router": flops.pop("router")}
    if mtp and spec.mtp:
        flops["mtp"] = 0.0
        for layer in spec.mtp:
            block = layer_flops(_open(layer, windows), spec.hidden, seq_len)
            excluded["router"] += block.pop("router", 0.0)
            flops["mtp"] += sum(block.values()) + 12.0 * spec.hidden**2 + flops["head"]
    by_part = {key: count for key, count in flops.items() if count}
    return Flops(sum(by_part.values()), by_part, {key: count for key, count in excluded.items() if count})


def _open(layer: LayerSpec, windows: bool) -> LayerSpec:
    if windows or (layer.attention.window is None and layer.attention.chunk is None):
        return layer
    return layer.model_copy(update={"attention": layer.attention.model_copy(update={"window": None, "chunk": None})})
