"""The architecture of a decoder, layer by layer.

`ModelSpec` is what every other room reads: the cost model counts it, the trainer builds it, the Hugging Face
reader and writer map it. It says nothing about where it came from except in `hf_config`, the config.json it was
read from, which is what an export writes back.

Sizes use the field's letters in comments: V vocabulary, D hidden, H heads, E experts, K top-k, F expert width.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]


class Spec(BaseModel):
    """Base of all descriptions: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeSpec(Spec):
    """Rotary position embedding of one attention layer."""

    dim: int
    """Rotated dimensions per head; less than the head dimension for partial rotary embeddings."""
    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "ntk_alpha"] = "default"
    params: dict[str, Any] = Field(default_factory=dict)
    """Numbers of the scaling as in Hugging Face's `rope_parameters` (factor, beta_fast, low_freq_factor, …), with what
    is derived already filled in: `original_max_position_embeddings`, and for yarn and longrope `factor` and
    `attention_factor`, which multiplies cosine and sine."""
    interleaved: bool = False
    """Rotates pairs (0, 1), (2, 3), … instead of the two halves of the head."""


class TemperatureSpec(Spec):
    """Llama-4's scaling of queries by position on layers without rotary embedding:
    1 + scale · log(1 + floor((position + 1) / floor_positions))."""

    floor_positions: float
    scale: float


class AttentionSpec(Spec):
    """One attention block: grouped-query (`gqa`) or multi-head latent (`mla`)."""

    kind: Literal["gqa", "mla"] = "gqa"
    heads: int
    kv_heads: int
    head_dim: int
    """Width of one query/key head; for MLA, nope_dim + rope_dim."""
    v_head_dim: int
    q_rank: int | None = None
    """MLA: rank of the query bottleneck, None for a full query projection."""
    kv_rank: int | None = None
    nope_dim: int | None = None
    rope_dim: int | None = None
    qkv_bias: bool = False
    """GQA: bias on the query, key and value projections. MLA: bias on the two down projections (q_a, kv_a)."""
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    """RMS norm of queries and keys: per head with a weight, over the full projection with a weight, or per head
    without a weight (`l2`, Llama-4)."""
    qk_norm_after_rope: bool = False
    norm_eps: float = 1e-6
    """Epsilon of the query/key norms and of MLA's latent norms."""
    window: int | None = None
    """A token sees itself and the window − 1 tokens before it."""
    chunk: int | None = None
    """A token sees only earlier tokens of its own chunk of this many positions (Llama-4)."""
    sinks: bool = False
    """One learned logit per head that takes part in the softmax and carries no value (gpt-oss)."""
    rope: RopeSpec | None = None
    scale: float
    """Multiplies query·key before the softmax."""
    temperature: TemperatureSpec | None = None
    clip_qkv: float | None = None


class MlpSpec(Spec):
    """A feed-forward block of `width`: gated (gate, up, down) or plain (up, down)."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


class RouterSpec(Spec):
    """How tokens choose experts: the nine switches that cover the published families.

    Order of operations: fp32 logits (+ logit bias) → scores (`when="pre"`) → choice = scores (+ selection bias) →
    groups → top-k → weights from the scores, never from the choice → normalise → scale. With `when="post"` the
    choice is made on logits and the score function runs over the chosen ones.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    when: Literal["pre", "post"] = "pre"
    select_bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "best2"] = "best2"
    norm: bool = False
    norm_eps: float = 0.0
    """Added to the sum of the chosen scores before dividing."""
    norm_min: float = 0.0
    """The sum of the chosen scores is not taken smaller than this (ERNIE)."""
    scale: float = 1.0
    apply: Literal["output", "input"] = "output"
    jitter: float = 0.0
    """Sparsemixer's threshold (Phi-3.5-MoE)."""


class MoeSpec(Spec):
    """One mixture-of-experts block: a router, E equal experts and possibly a shared expert."""

    router: RouterSpec
    expert: MlpSpec
    shared: MlpSpec | None = None
    """Every token passes it. Several shared experts of equal width are one of their total width."""
    shared_combine: Literal["sum", "sigmoid_gate", "learned"] = "sum"
    """`sum`: added. `sigmoid_gate`: times the sigmoid of a learned D → 1 projection (Qwen2). `learned`: routed and
    shared outputs are mixed by a softmax over a learned D → 2 projection (DeepSpeed's code of residual MoE)."""


class LayerSpec(Spec):
    """One decoder layer: attention and either a dense MLP or a mixture of experts."""

    attention: AttentionSpec
    mlp: MlpSpec | None = None
    moe: MoeSpec | None = None


class ModelSpec(Spec):
    """A whole decoder."""

    name: str
    family: str
    """The Hugging Face `model_type`, or `moesaic` for architectures that have none."""
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    mtp: tuple[LayerSpec, ...] = ()
    """Multi-token prediction blocks after the last layer (DeepSeek-V3): used in training, absent in exports of
    families whose Hugging Face code has none."""
    max_positions: int = 4096
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    learned_positions: bool = False
    """A learned embedding of absolute positions (GPT-2 style), `max_positions` rows."""
    tied_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    init_std: float = 0.02
    document_end: int | None = None
    """Token id that ends a document, when the config names one."""
    balance_coefficient: float = 0.0
    """The balancing loss's coefficient named in the config, in units where a perfectly balanced layer costs 1.
    Hugging Face's loss costs k there, so this is its `router_aux_loss_coef` times top-k."""
    notes: tuple[str, ...] = ()
    """What is inferred rather than published, shown to the user."""
    hf_config: dict[str, Any] = Field(default_factory=dict)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.moe is not None)
