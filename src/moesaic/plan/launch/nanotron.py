"""A plan as a configuration of nanotron (main of 2026-04, commit 2411b02): one YAML file.

Keys are those of the dataclasses in `src/nanotron/config/`. Its models with experts are Qwen2's, and its expert
parallelism does not start, so most plans for models with experts are refused.
"""

from __future__ import annotations

from typing import Any

from moesaic.spec.model import RopeSpec

from .parts import Draft, Shape, comment, heading, note_storage, refuse_uneven_recompute, shape, yaml_text
from .plan import Plan
from .wrappers import train_script, wrapped


def files(plan: Plan) -> dict[str, str]:
    """`config.yaml`, `train.sh` and its wrappers.

    Raises:
        SpecError: nanotron has no such model, or cannot start with this layout.
    """
    draft = Draft("nanotron")
    config = nanotron_config(draft, plan)
    usage = ["For nanotron of 2026-04. It trains on random tokens: name a dataset under data_stages, and a tokenizer."]
    draft.env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    text = comment(heading(plan, draft.target, draft.notes, usage)) + yaml_text(config)
    command = ['"${NANOTRON:?set NANOTRON to a checkout of nanotron}/run_train.py" --config-file config.yaml']
    texts = {"config.yaml": text, "train.sh": train_script(plan, draft, command, usage)}
    return wrapped(plan, draft, texts, checkout="NANOTRON")


def nanotron_config(draft: Draft, plan: Plan) -> dict[str, Any]:
    """The tables of the configuration file.

    Raises:
        SpecError: as `files`.
    """
    work, layout = plan.workload, plan.layout
    _refuse_layout(draft, plan)
    model = _model(draft, shape(draft, plan))
    if layout.cp > 1:
        model["_attn_implementation"] = "llama3_ring_attention"
    _losses(draft, plan)
    return {
        "general": {"project": "moesaic", "run": plan.name, "seed": 42},
        "checkpoints": {"checkpoint_interval": 1000, "checkpoints_path": "checkpoints"},
        "logging": {"iteration_step_info_interval": 1, "log_level": "info"},
        "model": {
            "ddp_bucket_cap_mb": 25,
            "dtype": "float32" if work.precision == "fp32" else "bfloat16",
            "init_method": {"std": work.model.init_std},
            "make_vocab_size_divisible_by": 1,
            "model_config": model,
        },
        "tokenizer": {"tokenizer_name_or_path": "YOUR-TOKENIZER"},
        "data_stages": [
            {
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ],
        "optimizer": {
            "accumulate_grad_in_fp32": work.gradient_bytes == 4,
            "clip_grad": 1.0,
            "weight_decay": 0.1,
            "zero_stage": {"none": 0, "optimizer": 1}[layout.sharding],
            "learning_rate_scheduler": {
                "learning_rate": 3e-4,
                "lr_warmup_steps": 10,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "min_decay_lr": 3e-5,
            },
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1e-8,
                "torch_adam_is_fused": True,
            },
        },
        "parallelism": {
            "dp": layout.dp,
            "pp": layout.pp,
            "tp": layout.tp,
            "context_parallel_size": layout.cp,
            "expert_parallel_size": 1,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER",
            "tp_linear_async_communication": layout.tp > 1,
            "recompute_layer": "full" in layout.recompute,
        },
        "tokens": {
            "batch_accumulation_per_replica": plan.micro_batches,
            "micro_batch_size": layout.micro_batch,
            "sequence_length": work.seq_len,
            "train_steps": 100,
            "val_check_interval": -1,
        },
    }


def _refuse_layout(draft: Draft, plan: Plan) -> None:
    work, layout = plan.workload, plan.layout
    experts = bool(work.model.moe_layers)
    rules = (
        (
            layout.ep > 1,
            f"ep {layout.ep}; it cannot start with ep above 1, as its check of tp·cp·dp·pp = world omits it: use ep 1",
        ),
        (layout.etp > 1, f"etp {layout.etp}; it has no tensor parallelism inside experts: use etp 1"),
        (
            experts and layout.tp > 1,
            f"tp {layout.tp} with experts; nothing keeps the copies of router and experts on its ranks equal: use tp 1",
        ),
        (layout.schedule != "1f1b", f"the {layout.schedule} schedule; it has 1F1B without virtual stages"),
        (layout.cp > 1 and layout.cp_kind != "ring", f"cp {layout.cp} by {layout.cp_kind}; it has ring attention"),
        (layout.order == "dp-outer" and layout.pp > 1, "order dp-outer; pipeline stages are its slower mesh axis"),
        (
            layout.sharding not in ("none", "optimizer"),
            f"sharding {layout.sharding}; it has ZeRO stages 0 and 1, so use none or optimizer",
        ),
        (layout.replicas > 1, f"{layout.replicas} replicas of the sharded state: use replicas 1"),
        (bool(layout.offload), f"offload of {' and '.join(layout.offload)}: use none"),
        (work.precision not in ("fp32", "bf16"), f"precision {work.precision}: use bf16"),
        (bool(work.model.mtp) and work.mtp, "prediction blocks; it has none, so plan without multi-token prediction"),
    )
    for broken, why in rules:
        if broken:
            raise draft.refuse(why)


def _model(draft: Draft, parts: Shape) -> dict[str, Any]:
    """Qwen2's configuration, which also serves Llama's and Mistral's architecture."""
    model, attention = parts.model, parts.attention
    blocks = [block for block in (parts.mlp, parts.moe and parts.moe.expert) if block]
    rules = (
        (attention.kind == "mla", "latent attention"),
        (attention.qk_norm != "none", "norms of queries and keys"),
        (attention.o_bias, "a bias on attention's output"),
        (attention.sinks, "attention sinks"),
        (attention.head_dim * attention.heads != model.hidden, "heads that do not add up to the hidden size"),
        (model.norm != "rms" or model.norm_bias, "layer norms"),
        (model.learned_positions or parts.rope is None or any(parts.no_rope), "layers without rotary embedding"),
        (
            any(not block.gated or block.bias or block.activation != "silu" for block in blocks),
            "MLPs other than SwiGLU",
        ),
        (len({*parts.windows}) > 1, "windows on some layers and not on others"),
        (model.embedding_scale != 1 or model.residual_scale != 1 or model.logits_divisor != 1, "scaled embeddings"),
        (model.head_bias, "a bias on the head"),
    )
    for broken, what in rules:
        if broken:
            raise draft.refuse(f"{model.name} has {what}, which its models do not have")
    assert parts.rope is not None
    config: dict[str, Any] = {
        "is_qwen2_config": True,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": blocks[0].width if parts.mlp is None else parts.mlp.width,
        "max_position_embeddings": model.max_positions,
        "vocab_size": model.vocab,
        "attention_bias": attention.qkv_bias,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": parts.rope.theta,
        "rope_interleaved": parts.rope.interleaved,
        "rope_scaling": _scaling(draft, parts.rope),
        "tie_word_embeddings": model.tied_embeddings,
        "sliding_window_size": parts.windows[0],
        "initializer_range": model.init_std,
    }
    return config if parts.moe is None else config | {"moe_config": _experts(draft, parts)}


def _scaling(draft: Draft, rope: RopeSpec) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind != "llama3":
        raise draft.refuse(f"rotary scaling {rope.kind!r}; it has Llama-3's")
    return {"rope_type": "llama3", **rope.params}


def _experts(draft: Draft, parts: Shape) -> dict[str, Any]:
    moe, model = parts.moe, parts.model
    assert moe is not None
    router = moe.router
    if router.score != "softmax" or router.when != "pre" or router.norm or router.groups > 1 or router.scale != 1:
        raise draft.refuse(
            f"{model.name}'s router; its own takes a softmax over all experts and keeps the top-k weights as they are"
        )
    if router.select_bias or router.logit_bias or router.apply != "output":
        raise draft.refuse(f"{model.name}'s router has a bias or weighs the experts' input")
    if moe.shared is not None and moe.shared_combine != "sigmoid_gate":
        raise draft.refuse(f"{model.name}'s shared expert has no sigmoid gate, and its own always has one")
    if model.balance_coefficient:
        draft.lost(
            f"the balancing loss of {model.balance_coefficient:g}; its configuration takes one, its code does not"
        )
    config: dict[str, Any] = {
        "num_experts": router.experts,
        "top_k": router.top_k,
        "layers": [index for index, moe_layer in enumerate(parts.is_moe) if moe_layer],
        "moe_intermediate_size": moe.expert.width,
        "enable_shared_expert": moe.shared is not None,
    }
    return config if moe.shared is None else config | {"shared_expert_intermediate_size": moe.shared.width}


def _losses(draft: Draft, plan: Plan) -> None:
    work, layout = plan.workload, plan.layout
    refuse_uneven_recompute(draft, layout)
    for module in layout.recompute:
        if module != "full":
            draft.lost(f"recompute of {module}; it recomputes whole layers or none")
    for word in layout.overlap:
        if word not in ("gradients", "tensor"):
            draft.lost(f"overlap of {word}")
    note_storage(draft, plan)
    if work.moment_bytes != 4:
        draft.lost(f"moments of {work.moment_bytes} bytes; they are fp32, 4 bytes")
    if layout.pp > 1:
        draft.lost("which layers stand on which stage; it deals them by its own estimate of their cost")
