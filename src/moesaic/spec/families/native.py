"""This project's own `model_type = "moesaic"`: decoders of many kinds, in the words of Hugging Face's configs.

It exists for architectures without a Hugging Face family (DeepSpeed's pyramid-residual models, MegaScale's 352B).
`num_experts`, `num_experts_per_tok`, `moe_intermediate_size` and `shared_intermediate_size` may be lists with one value
per layer; a layer with 0 experts is dense with `intermediate_size`.
"""

from __future__ import annotations

from moesaic.spec.errors import SpecError
from moesaic.spec.families import parts
from moesaic.spec.families.reading import Config
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec


def moesaic(config: Config) -> ModelSpec:
    """A decoder from this project's own keys."""
    count = config.integer("num_hidden_layers")
    position = config.choice("position_embedding", ("rope", "learned", "none"))
    attention = _attention(config, count, rotary=position == "rope")
    experts = config.per_layer("num_experts", count)
    layers = []
    for i in range(count):
        if experts[i] == 0:
            layers.append(LayerSpec(attention=attention[i], mlp=_mlp(config, config.integer("intermediate_size"))))
        else:
            layers.append(LayerSpec(attention=attention[i], moe=_moe(config, i, count, experts[i])))
    norm = config.choice("norm", ("rms", "layer"))
    return parts.model(
        config,
        tuple(layers),
        mtp=(layers[-1],) * config.integer("num_nextn_predict_layers", least=0),
        norm=norm,
        norm_bias=norm == "layer" and config.flag("norm_bias"),
        learned_positions=position == "learned",
        embedding_scale=config.number("embedding_multiplier"),
        residual_scale=config.number("residual_multiplier"),
        logits_divisor=config.number("logits_scaling"),
    )


def _attention(config: Config, count: int, *, rotary: bool) -> list[AttentionSpec]:
    interleaved = config.flag("rope_interleave")
    if config.value("kv_lora_rank") is not None:
        return [parts.mla(config, interleaved=interleaved)] * count
    bias = config.flag("attention_bias")
    norm = config.choice("qk_norm", ("none", "head", "full"))
    more = {} if rotary else {"rope": None}
    attention = parts.gqa(
        config,
        bias=bias,
        o_bias=bias or config.flag("o_bias"),
        qk_norm=norm,  # type: ignore[arg-type]
        interleaved=interleaved,
        partial=True,
        **more,
    )
    has_window = config.value("sliding_window") is not None
    return parts.windowed(attention, parts.windows(config, count, [has_window] * count))


def _mlp(config: Config, width: int) -> MlpSpec:
    return MlpSpec(
        width=width,
        activation=config.activation(),
        gated=config.flag("gated_mlp"),
        bias=config.flag("mlp_bias"),
    )


def _moe(config: Config, layer: int, count: int, experts: int) -> MoeSpec:
    width_key = "intermediate_size" if config.value("moe_intermediate_size") is None else "moe_intermediate_size"
    width = config.per_layer(width_key, count, 1)[layer]
    shared = config.per_layer("shared_intermediate_size", count)[layer]
    combine = config.choice("shared_combine", ("sum", "sigmoid_gate", "learned"))
    if combine != "sum" and not shared:
        raise SpecError(
            f"{config.name}: shared_combine is {combine!r}, but shared_intermediate_size is 0; give the shared "
            f"expert's width or remove shared_combine."
        )
    return MoeSpec(
        router=parts.router(
            config,
            experts,
            config.per_layer("num_experts_per_tok", count, 1)[layer],
            score=config.choice("scoring_func", ("softmax", "sigmoid")),
            select_bias=config.flag("select_bias"),
            groups=config.integer("n_group"),
            groups_kept=config.integer("topk_group"),
            norm=config.flag("norm_topk_prob"),
            norm_eps=1e-20 if config.flag("norm_topk_prob") else 0.0,
            scale=config.number("routed_scaling_factor"),
        ),
        expert=_mlp(config, width),
        shared=_mlp(config, shared) if shared else None,
        shared_combine=combine,  # type: ignore[arg-type]
    )
