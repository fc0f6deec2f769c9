"""Families whose routers are softmax: mixtral, phimoe, olmoe, granitemoe, gpt_oss, qwen2_moe, qwen3_moe,
ernie4_5_moe, hunyuan_v1_moe.

In all but the Qwen and ERNIE families `intermediate_size` is the width of an expert.
"""

from __future__ import annotations

from moesaic.spec.errors import SpecError
from moesaic.spec.families import parts
from moesaic.spec.families.reading import Config
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec


def _all_sparse(config: Config, attention: AttentionSpec | list[AttentionSpec], moe: MoeSpec) -> tuple[LayerSpec, ...]:
    blocks = parts.each(attention, config.integer("num_hidden_layers"))
    return tuple(LayerSpec(attention=item, moe=moe) for item in blocks)


def _experts(config: Config, key: str = "num_local_experts") -> tuple[int, int]:
    return config.integer(key), config.integer("num_experts_per_tok")


def mixtral(config: Config) -> ModelSpec:
    """Mixtral: softmax over all experts, the chosen weights normalised."""
    moe = MoeSpec(
        router=parts.router(config, *_experts(config), norm=True),
        expert=parts.mlp(config, config.integer("intermediate_size")),
    )
    attention = parts.gqa(config, window=config.optional_integer("sliding_window"))
    return parts.model(config, _all_sparse(config, attention, moe))


def phimoe(config: Config) -> ModelSpec:
    """Phi-3.5-MoE: sparsemixer routing of exactly two experts, layer norms with bias."""
    experts, top_k = _experts(config)
    if top_k != 2:
        raise SpecError(f"{config.name}: sparsemixer picks two experts; set num_experts_per_tok, now {top_k}, to 2.")
    moe = MoeSpec(
        router=parts.router(config, experts, top_k, score="sparsemixer", jitter=config.number("router_jitter_noise")),
        expert=parts.mlp(config, config.integer("intermediate_size")),
    )
    attention = parts.gqa(config, bias=config.flag("attention_bias"), window=config.optional_integer("sliding_window"))
    layers = _all_sparse(config, attention, moe)
    return parts.model(config, layers, norm="layer", norm_bias=True, head_bias=config.flag("lm_head_bias"))


def olmoe(config: Config) -> ModelSpec:
    """OLMoE: norms over whole queries and keys, optional clipping of queries, keys and values."""
    moe = MoeSpec(
        router=parts.router(config, *_experts(config, "num_experts"), norm=config.flag("norm_topk_prob")),
        expert=parts.mlp(config, config.integer("intermediate_size")),
    )
    clip = config.optional_number("clip_qkv")
    attention = parts.gqa(config, bias=config.flag("attention_bias"), qk_norm="full", clip_qkv=clip)
    return parts.model(config, _all_sparse(config, attention, moe))


def granitemoe(config: Config) -> ModelSpec:
    """Granite MoE: softmax over the chosen logits; multipliers on embeddings, attention, residuals and logits."""
    moe = MoeSpec(
        router=parts.router(config, *_experts(config), when="post"),
        expert=parts.mlp(config, config.integer("intermediate_size")),
    )
    scale = config.number("attention_multiplier")
    attention = parts.gqa(config, bias=config.flag("attention_bias"), scale=scale)
    return parts.model(
        config,
        _all_sparse(config, attention, moe),
        embedding_scale=config.number("embedding_multiplier"),
        residual_scale=config.number("residual_multiplier"),
        logits_divisor=config.number("logits_scaling"),
    )


def gpt_oss(config: Config) -> ModelSpec:
    """gpt-oss: sinks, a window on every other layer, biases, clamped SwiGLU, softmax over the chosen logits."""
    alpha, limit = config.number("swiglu_alpha"), config.number("swiglu_limit")
    if (alpha, limit) != (1.702, 7.0):
        raise SpecError(
            f"{config.name}: the clamped SwiGLU has gain 1.702 and limit 7.0, but the config asks for {alpha} and "
            f"{limit}; remove swiglu_alpha and swiglu_limit."
        )
    layers = config.integer("num_hidden_layers")
    moe = MoeSpec(
        router=parts.router(config, *_experts(config), when="post", logit_bias=True),
        expert=MlpSpec(width=config.integer("intermediate_size"), activation="swiglu_clamped", bias=True),
    )
    has_window = config.value("sliding_window") is not None
    spans = parts.windows(config, layers, [has_window and i % 2 == 0 for i in range(layers)])
    if not config.raw.get("rope_scaling") and not config.raw.get("rope_parameters"):
        config.raw["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    attention = parts.gqa(config, bias=config.flag("attention_bias"), sinks=True)
    return parts.model(config, _all_sparse(config, parts.windowed(attention, spans), moe))


def _sparse_step(config: Config, layers: int, experts: int) -> list[bool]:
    step, dense = config.integer("decoder_sparse_step"), config.integers("mlp_only_layers") or []
    return [experts > 0 and (i + 1) % step == 0 and i not in dense for i in range(layers)]


def _qwen_router(config: Config, experts: int) -> RouterSpec:
    return parts.router(config, experts, config.integer("num_experts_per_tok"), norm=config.flag("norm_topk_prob"))


def qwen2_moe(config: Config) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert behind a sigmoid gate, biases on query, key and value."""
    layers, experts = config.integer("num_hidden_layers"), config.integer("num_experts", least=0)
    moe = None
    if experts:
        moe = MoeSpec(
            router=_qwen_router(config, experts),
            expert=parts.mlp(config, config.integer("moe_intermediate_size")),
            shared=parts.mlp(config, config.integer("shared_expert_intermediate_size")),
            shared_combine="sigmoid_gate",
        )
    used, last = config.flag("use_sliding_window"), config.integer("max_window_layers", least=0)
    spans = parts.windows(config, layers, [used and i % 2 == 0 and i < last for i in range(layers)])
    attention = parts.windowed(parts.gqa(config, bias=config.flag("qkv_bias"), o_bias=False), spans)
    dense = parts.mlp(config, config.integer("intermediate_size"))
    return parts.model(config, parts.mixed(attention, dense, moe, _sparse_step(config, layers, experts)))


def qwen3_moe(config: Config) -> ModelSpec:
    """Qwen3-MoE: norms on query and key heads; if windows are used at all, on every layer."""
    layers, experts = config.integer("num_hidden_layers"), config.integer("num_experts", least=0)
    moe = None
    if experts:
        moe = MoeSpec(
            router=_qwen_router(config, experts), expert=parts.mlp(config, config.integer("moe_intermediate_size"))
        )
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    attention = parts.gqa(config, bias=config.flag("attention_bias"), qk_norm="head", window=window)
    dense = parts.mlp(config, config.integer("intermediate_size"))
    return parts.model(config, parts.mixed(attention, dense, moe, _sparse_step(config, layers, experts)))


def ernie4_5_moe(config: Config) -> ModelSpec:
    """ERNIE 4.5: sparse layers by start, end and interval; a selection bias; pairs (0, 1), (2, 3), … are rotated.

    `use_bias` puts biases on attention, dense and shared blocks and the output head, never on routed experts.
    """
    layers, bias = config.integer("num_hidden_layers"), config.flag("use_bias")
    expert_width, shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", least=0)
    moe = MoeSpec(
        router=parts.router(
            config,
            config.integer("moe_num_experts"),
            config.integer("moe_k"),
            select_bias=True,
            norm=True,
            norm_min=config.number("moe_norm_min"),
        ),
        expert=parts.mlp(config, expert_width),
        shared=parts.mlp(config, expert_width * shared, bias=bias) if shared else None,
    )
    start, every = config.integer("moe_layer_start_index", least=0), config.integer("moe_layer_interval")
    end = config.integer("moe_layer_end_index", least=-1)
    end = layers - 1 if end == -1 else end
    sparse = [start <= i <= end and (i + 1) % every == 0 for i in range(layers)]
    dense = parts.mlp(config, config.integer("intermediate_size"), bias=bias)
    mixed = parts.mixed(parts.gqa(config, bias=bias, interleaved=True), dense, moe, sparse)
    return parts.model(config, mixed, head_bias=bias)


def hunyuan_v1_moe(config: Config) -> ModelSpec:
    """Hunyuan: a shared expert of the experts' width, norms on query and key heads after the rotary embedding.

    Experts and top-k may be lists with one value per layer.
    """
    count = config.integer("num_hidden_layers")
    experts, top_k = config.per_layer("num_experts", count, 1), config.per_layer("moe_topk", count, 1)
    expert = parts.mlp(config, config.integer("intermediate_size"))
    attention = parts.gqa(
        config, bias=config.flag("attention_bias"), qk_norm=parts.head_norm(config), qk_norm_after_rope=True
    )
    layers = tuple(
        LayerSpec(
            attention=attention,
            moe=MoeSpec(router=parts.router(config, e, k, norm=True), expert=expert, shared=expert),
        )
        for e, k in zip(experts, top_k, strict=True)
    )
    notes = []
    if config.flag("use_cla"):
        notes.append(
            f"the released model shares keys and values between every {config.integer('cla_share_factor')} layers "
            f"(cross-layer attention); here every layer has its own"
        )
    return parts.model(config, layers, notes=notes)
