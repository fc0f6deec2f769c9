"""Families with DeepSeek-style or sigmoid routers: deepseek_v2, deepseek_v3 (Kimi-K2, Moonlight), glm4_moe, dots1,
minimax_m2, llama4_text."""

from __future__ import annotations

from moesaic.spec.errors import SpecError
from moesaic.spec.families import parts
from moesaic.spec.families.reading import Config
from moesaic.spec.model import LayerSpec, ModelSpec, MoeSpec, RouterSpec, TemperatureSpec


def _moe(config: Config, router: RouterSpec, *, bias: bool = False) -> MoeSpec:
    width = config.integer("moe_intermediate_size")
    count = 0 if config.value("n_shared_experts") is None else config.integer("n_shared_experts", least=0)
    return MoeSpec(
        router=router,
        expert=parts.mlp(config, width),
        shared=parts.mlp(config, width * count, bias=bias) if count else None,
    )


def _biased_router(config: Config) -> RouterSpec:
    """DeepSeek-V3's router (arXiv 2412.19437 section 2.1.2): sigmoid scores, a bias that only chooses, groups."""
    score = config.raw.get("scoring_func")
    if score not in (None, "sigmoid"):
        raise SpecError(f"{config.name}: {config.family} scores experts by sigmoid, but scoring_func is {score!r}.")
    return parts.router(
        config,
        config.integer("n_routed_experts"),
        config.integer("num_experts_per_tok"),
        score="sigmoid",
        select_bias=True,
        groups=config.optional_integer("n_group") or 1,
        groups_kept=config.optional_integer("topk_group") or 1,
        norm=config.flag("norm_topk_prob"),
        norm_eps=1e-20,
        scale=config.number("routed_scaling_factor"),
    )


def _mtp(config: Config, last: LayerSpec) -> tuple[LayerSpec, ...]:
    """Multi-token prediction blocks: each a layer like the last one (arXiv 2412.19437 section 2.2)."""
    return (last,) * config.integer("num_nextn_predict_layers", least=0)


def deepseek_v2(config: Config) -> ModelSpec:
    """DeepSeek-V2: latent attention, softmax scores that are never normalised, groups ranked by their best expert."""
    layers = config.integer("num_hidden_layers")
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"))
    grouped = method == "group_limited_greedy"
    router = parts.router(
        config,
        config.integer("n_routed_experts"),
        config.integer("num_experts_per_tok"),
        groups=(config.integer("n_group") if grouped else 1),
        groups_kept=(config.integer("topk_group") if grouped else 1),
        group_score="max",
        scale=config.number("routed_scaling_factor"),
    )
    bias = config.flag("mlp_bias")
    dense = parts.mlp(config, config.integer("intermediate_size"), bias=bias)
    blocks = parts.mixed(
        parts.mla(config, interleaved=True), dense, _moe(config, router, bias=bias), parts.first_dense(config, layers)
    )
    notes = []
    if config.flag("norm_topk_prob"):
        notes.append("norm_topk_prob is ignored, as the family's code does: chosen weights are only scaled")
    return parts.model(config, blocks, notes=notes)


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek-V3, Kimi-K2, Moonlight: latent attention and the biased sigmoid router, with prediction blocks."""
    layers = config.integer("num_hidden_layers")
    attention = parts.mla(config, interleaved=config.flag("rope_interleave"))
    dense, moe = parts.mlp(config, config.integer("intermediate_size")), _moe(config, _biased_router(config))
    blocks = parts.mixed(attention, dense, moe, parts.first_dense(config, layers))
    return parts.model(config, blocks, mtp=_mtp(config, LayerSpec(attention=attention, moe=moe)))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5: grouped-query attention, half of each head rotated, the biased sigmoid router."""
    layers = config.integer("num_hidden_layers")
    attention = parts.gqa(
        config, bias=config.flag("attention_bias"), o_bias=False, qk_norm=parts.head_norm(config), partial=True
    )
    dense, moe = parts.mlp(config, config.integer("intermediate_size")), _moe(config, _biased_router(config))
    blocks = parts.mixed(attention, dense, moe, parts.first_dense(config, layers))
    return parts.model(config, blocks, mtp=_mtp(config, LayerSpec(attention=attention, moe=moe)))


def dots1(config: Config) -> ModelSpec:
    """dots.llm1: norms on query and key heads, the biased sigmoid router, windows from `max_window_layers` on."""
    layers = config.integer("num_hidden_layers")
    window, first = config.value("sliding_window"), config.integer("max_window_layers", least=0)
    spans = parts.windows(config, layers, [window is not None and i >= first for i in range(layers)])
    attention = parts.windowed(parts.gqa(config, bias=config.flag("attention_bias"), qk_norm="head"), spans)
    dense, moe = parts.mlp(config, config.integer("intermediate_size")), _moe(config, _biased_router(config))
    return parts.model(config, parts.mixed(attention, dense, moe, parts.first_dense(config, layers)))


def minimax_m2(config: Config) -> ModelSpec:
    """MiniMax-M2: norms over whole queries and keys, a part of each head rotated, `intermediate_size` per expert."""
    score = config.choice("scoring_func", ("sigmoid",))
    moe = MoeSpec(
        router=parts.router(
            config,
            config.integer("num_local_experts"),
            config.integer("num_experts_per_tok"),
            score=score,
            select_bias=config.flag("use_routing_bias"),
            norm=True,
        ),
        expert=parts.mlp(config, config.integer("intermediate_size")),
    )
    attention = parts.gqa(config, qk_norm="full" if config.flag("use_qk_norm") else "none", partial=True)
    notes = []
    if config.flag("use_mtp") and config.integer("num_mtp_modules", least=0):
        notes.append(f"{config.integer('num_mtp_modules')} multi-token prediction modules of the config are left out")
    layers = (LayerSpec(attention=attention, moe=moe),) * config.integer("num_hidden_layers")
    return parts.model(config, layers, notes=notes)


def llama4_text(config: Config) -> ModelSpec:
    """Llama-4: experts weighted at their input, a shared expert, chunked layers with rotary embedding and
    unlimited layers without it, whose queries grow with position."""
    count = config.integer("num_hidden_layers")
    width = config.integer("intermediate_size")
    moe = MoeSpec(
        router=parts.router(
            config,
            config.integer("num_local_experts"),
            config.integer("num_experts_per_tok"),
            score="sigmoid",
            when="post",
            apply="input",
        ),
        expert=parts.mlp(config, width),
        shared=parts.mlp(config, width),
    )
    step, listed = config.integer("interleave_moe_layer_step"), config.integers("moe_layers")
    sparse = [(i + 1) % step == 0 if listed is None else i in listed for i in range(count)]

    every = config.integer("no_rope_layer_interval")
    rotated = [bool(word) for word in config.integers("no_rope_layers") or [(i + 1) % every for i in range(count)]]
    if len(rotated) < count:
        raise SpecError(f"{config.name}: no_rope_layers has {len(rotated)} values for {count} layers; give one each.")
    chunk = config.optional_integer("attention_chunk_size")
    words = config.words_per_layer("layer_types", count, ("full_attention", "chunked_attention"))
    chunked = [r and chunk is not None for r in rotated] if words is None else [w != "full_attention" for w in words]
    tuning = config.flag("attn_temperature_tuning")
    temperature = TemperatureSpec(floor_positions=config.number("floor_scale"), scale=config.number("attn_scale"))
    base = parts.gqa(config, bias=config.flag("attention_bias"), interleaved=True, qk_norm_after_rope=True)
    with_rope = base.model_copy(update={"qk_norm": "l2" if config.flag("use_qk_norm") else "none"})
    without = base.model_copy(update={"rope": None, "temperature": temperature if tuning else None})
    attention = [
        (with_rope if rotated[i] else without).model_copy(update={"chunk": chunk if chunked[i] else None})
        for i in range(count)
    ]
    dense = parts.mlp(config, config.integer("intermediate_size_mlp"))
    return parts.model(config, parts.mixed(attention, dense, moe, sparse))
