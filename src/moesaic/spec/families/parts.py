"""Pieces that several families share: attention, routers, sparse layers, and the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from moesaic.spec.errors import SpecError
from moesaic.spec.families.reading import Config
from moesaic.spec.families.rope import rope, rope_numbers, yarn_magnitude
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec

QkNorm = Literal["none", "head", "full", "l2"]
SLIDING = ("full_attention", "sliding_attention")
TRAINING_NOISE = ("attention_dropout", "hidden_dropout", "router_jitter_noise", "input_jitter_noise")
"""Noise that some configs ask for in training; a model that leaves it out says so."""


def head_dim_of(config: Config) -> int:
    """`head_dim`, or hidden size over heads where the config has none."""
    stated = config.optional_integer("head_dim")
    if stated is not None:
        return stated
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        near = [n for n in range(max(1, heads - 8), heads + 9) if hidden % n == 0]
        near.sort(key=lambda n: abs(n - heads))
        raise SpecError(
            f"{config.name}: hidden_size {hidden} does not divide by num_attention_heads {heads}; give head_dim, or "
            f"take {' or '.join(str(n) for n in near[:2]) or 'a divisor of the hidden size as the number of'} heads."
        )
    return hidden // heads


def head_norm(config: Config) -> QkNorm:
    """Norms per query and key head where `use_qk_norm` asks for them."""
    return "head" if config.flag("use_qk_norm") else "none"


def gqa(
    config: Config,
    *,
    bias: bool = False,
    o_bias: bool | None = None,
    qk_norm: QkNorm = "none",
    interleaved: bool = False,
    partial: bool = False,
    **more: Any,
) -> AttentionSpec:
    """Grouped-query attention; `o_bias` follows `bias` unless given. `more` are fields of AttentionSpec."""
    heads, head_dim = config.integer("num_attention_heads"), head_dim_of(config)
    kv_heads = config.value("num_key_value_heads")
    kv_heads = heads if kv_heads is None else config.integer("num_key_value_heads")
    if heads % kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise SpecError(
            f"{config.name}: num_attention_heads {heads} does not divide by num_key_value_heads {kv_heads}; take one "
            f"of {', '.join(divisors)} key/value heads."
        )
    fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "qkv_bias": bias,
        "o_bias": bias if o_bias is None else o_bias,
        "qk_norm": qk_norm,
        "norm_eps": config.number("rms_norm_eps"),
        "rope": rope(config, head_dim, interleaved=interleaved, partial=partial),
        "scale": head_dim**-0.5,
    }
    fields.update(more)
    return AttentionSpec(**fields)


def mla(config: Config, *, interleaved: bool) -> AttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

    With a stretched rotary embedding the softmax scale grows by the square of YaRN's magnitude at `mscale_all_dim`.
    The latent norms use 1e-6 whatever `rms_norm_eps` says, as the released code does.
    """
    heads = config.integer("num_attention_heads")
    nope, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    scale = (nope + rope_dim) ** -0.5
    rotary = rope(config, rope_dim, interleaved=interleaved)
    weight = rope_numbers(config).get("mscale_all_dim")
    if rotary.kind != "default" and weight:
        scale *= yarn_magnitude(float(rotary.params["factor"]), float(weight)) ** 2
    return AttentionSpec(
        kind="mla",
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope_dim,
        v_head_dim=config.integer("v_head_dim"),
        q_rank=config.optional_integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        qkv_bias=config.flag("attention_bias"),
        o_bias=config.flag("attention_bias"),
        norm_eps=1e-6,
        rope=rotary,
        scale=scale,
    )


def router(config: Config, experts: int, top_k: int, **switches: Any) -> RouterSpec:
    """A router, with the checks that hold for every family. Raises SpecError with the numbers that do not fit."""
    name = config.name
    if top_k < 1 or top_k > experts:
        raise SpecError(
            f"{name}: top-k is {top_k}, but a layer has {experts} experts; lower num_experts_per_tok to at most "
            f"{experts}, or raise the number of experts to at least {top_k}."
        )
    spec = RouterSpec(experts=experts, top_k=top_k, **switches)
    if experts % spec.groups:
        raise SpecError(
            f"{name}: {experts} experts do not divide into n_group {spec.groups} groups; take one of "
            f"{', '.join(str(n) for n in range(1, experts + 1) if experts % n == 0)} groups."
        )
    size = experts // spec.groups
    if not 1 <= spec.groups_kept <= spec.groups:
        raise SpecError(f"{name}: topk_group keeps {spec.groups_kept} of {spec.groups} groups; keep 1 to all.")
    if spec.groups > 1 and spec.group_score == "best2" and size < 2:
        raise SpecError(
            f"{name}: groups are ranked by their two best experts, but {experts} experts in {spec.groups} groups leave "
            f"{size} each; take at most {experts // 2} groups."
        )
    if top_k > spec.groups_kept * size:
        raise SpecError(
            f"{name}: top-k is {top_k}, but topk_group {spec.groups_kept} keeps only {spec.groups_kept * size} of "
            f"{experts} experts ({size} per group); raise topk_group or lower num_experts_per_tok."
        )
    return spec


def mlp(config: Config, width: int, *, bias: bool = False) -> MlpSpec:
    """A gated feed-forward block with the config's activation."""
    return MlpSpec(width=width, activation=config.activation(), bias=bias)


def each(item: AttentionSpec | Sequence[AttentionSpec], layers: int) -> list[AttentionSpec]:
    """One attention block per layer."""
    return [item] * layers if isinstance(item, AttentionSpec) else list(item)


def mixed(
    attention: AttentionSpec | Sequence[AttentionSpec], dense: MlpSpec, moe: MoeSpec | None, sparse: Sequence[bool]
) -> tuple[LayerSpec, ...]:
    """Layers with `moe` where `sparse` says so, and `dense` elsewhere."""
    blocks = zip(each(attention, len(sparse)), sparse, strict=True)
    return tuple(LayerSpec(attention=a, moe=moe) if s else LayerSpec(attention=a, mlp=dense) for a, s in blocks)


def windows(config: Config, layers: int, default: Sequence[bool]) -> list[int | None]:
    """The window of each layer: by `layer_types` if the config has them, else where `default` says so."""
    window = config.value("sliding_window") or None
    words = config.words_per_layer("layer_types", layers, SLIDING)
    sliding = [word == "sliding_attention" for word in words] if words is not None else list(default)
    if any(sliding) and window is None:
        raise SpecError(f"{config.name}: layer_types names sliding_attention, but sliding_window is not set. Set it.")
    if window is not None:
        window = config.integer("sliding_window")
    return [window if slides else None for slides in sliding]


def windowed(attention: AttentionSpec, spans: Sequence[int | None]) -> list[AttentionSpec]:
    """`attention` with each of the windows `spans`."""
    return [attention.model_copy(update={"window": span}) for span in spans]


def first_dense(config: Config, layers: int) -> list[bool]:
    """Sparse layers of the DeepSeek style: after `first_k_dense_replace`, every `moe_layer_freq`-th."""
    first = config.integer("first_k_dense_replace", least=0)
    every = config.integer("moe_layer_freq") if "moe_layer_freq" in config.defaults else 1
    return [i >= first and i % every == 0 for i in range(layers)]


def model(config: Config, layers: tuple[LayerSpec, ...], **more: Any) -> ModelSpec:
    """The whole model from its layers and the keys that all families spell alike. `more` are fields of ModelSpec."""
    notes = list(more.pop("notes", ()))
    stated = config.raw.get("notes") or ()
    notes.extend(str(note) for note in (stated if isinstance(stated, (list, tuple)) else [stated]))
    if config.filled:
        filled = ", ".join(f"{key} = {value}" for key, value in sorted(config.filled.items()))
        notes.append(f"not in the config, so {config.family}'s defaults: {filled}")
    noise = [key for key in TRAINING_NOISE if config.raw.get(key) and key not in config.defaults]
    if noise:
        asked = ", ".join(f"{key} = {config.raw[key]}" for key in noise)
        notes.append(f"{asked} is not done: training here draws no such noise")
    coefficient = config.optional_number("router_aux_loss_coef") or 0.0
    top_k = max((layer.moe.router.top_k for layer in layers if layer.moe), default=0)
    return ModelSpec(
        name=config.name,
        family=config.family,
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=layers,
        max_positions=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        init_std=config.number("initializer_range"),
        document_end=config.document_end(),
        balance_coefficient=coefficient * top_k,
        notes=tuple(notes),
        hf_config={key: value for key, value in config.original.items() if key not in ("notes", "source")},
        **more,
    )
