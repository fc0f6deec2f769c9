"""A model as arguments of Megatron-LM.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`
at the commit that `data/megatron-flags.json` names.
"""

from __future__ import annotations

import math

from moesaic.spec.model import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec

from .parts import Draft, Shape, Value, pattern

Args = dict[str, Value]


def model_args(draft: Draft, shape: Shape, mtp: int, seq_len: int) -> Args:
    """Every argument that says what the model is. `mtp` prediction blocks are trained, `seq_len` is in tokens.

    Raises:
        SpecError: the model has a part for which Megatron-LM has no argument.
    """
    model = shape.model
    _refuse_scales(draft, model)
    if model.learned_positions and seq_len > model.max_positions:
        raise draft.refuse(f"seq_len {seq_len}, but {model.name} has learned only {model.max_positions} positions")
    args: Args = {
        "--num-layers": len(model.layers),
        "--hidden-size": model.hidden,
        "--vocab-size": model.vocab,
        "--max-position-embeddings": max(model.max_positions, seq_len),
        "--init-method-std": model.init_std,
        **_norm(draft, model),
    }
    if not model.tied_embeddings:
        args["--untie-embeddings-and-output-weights"] = True
    args |= _biases(draft, shape)
    args |= _attention(draft, shape)
    args |= _positions(draft, shape)
    args |= _mlp(draft, shape)
    if shape.moe is not None:
        args |= _moe(draft, shape, shape.moe)
    if mtp:
        args |= {"--mtp-num-layers": mtp, "--mtp-loss-scaling-factor": 0.1}
        draft.remark(
            "--mtp-loss-scaling-factor 0.1 is Megatron's own; DeepSeek-V3 used 0.3 for its first 10T tokens and 0.1 "
            "then (arXiv 2412.19437, section 4.2)"
        )
    return args | {"--hidden-dropout": 0.0, "--attention-dropout": 0.0}


def _refuse_scales(draft: Draft, model: ModelSpec) -> None:
    for what, value in (
        ("embedding_scale", model.embedding_scale),
        ("residual_scale", model.residual_scale),
        ("logits_divisor", model.logits_divisor),
    ):
        if value != 1.0:
            raise draft.refuse(f"{model.name} has {what} {value:g}, for which it has no argument")
    if model.head_bias:
        raise draft.refuse(f"{model.name} has a bias on its head, for which it has no argument")
    if model.norm == "rms" and model.norm_bias:
        raise draft.refuse(f"{model.name} has RMS norms with a bias, which it does not have")


def _norm(draft: Draft, model: ModelSpec) -> Args:
    if model.norm == "layer" and not model.norm_bias:
        raise draft.refuse(f"{model.name} has layer norms without a bias, which it does not have")
    return {"--normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm", "--norm-epsilon": model.norm_eps}


def _biases(draft: Draft, shape: Shape) -> Args:
    """One switch is for all linear layers, routers included; one more for queries, keys and values alone."""
    attention, moe = shape.attention, shape.moe
    rest = {attention.o_bias}
    rest |= {shape.mlp.bias} if shape.mlp is not None else set()
    rest |= {moe.expert.bias} if moe is not None else set()
    rest |= {moe.shared.bias} if moe is not None and moe.shared is not None else set()
    if rest == {False}:
        args: Args = {"--disable-bias-linear": True}
        return args | {"--add-qkv-bias": True} if attention.qkv_bias else args
    if rest == {True} and attention.qkv_bias:
        if moe is not None and not moe.router.logit_bias:
            draft.remark("Megatron gives the router a bias too where linear layers have one; this model has none there")
        return {}
    raise draft.refuse(f"{shape.model.name} has biases on some linear layers and not on others")


def _attention(draft: Draft, shape: Shape) -> Args:
    attention, model = shape.attention, shape.model
    args: Args = {"--num-attention-heads": attention.heads}
    if attention.clip_qkv is not None:
        raise draft.refuse(f"{model.name} clips queries, keys and values, for which it has no argument")
    if attention.qk_norm == "full":
        raise draft.refuse(
            f"{model.name} norms queries and keys over the whole projection; --qk-layernorm norms each head, which has "
            f"other weights"
        )
    if attention.kind == "mla":
        return args | _latent(draft, attention, model)
    args["--kv-channels"] = attention.head_dim
    if attention.v_head_dim != attention.head_dim:
        raise draft.refuse(
            f"{model.name} has values of {attention.v_head_dim} and keys of {attention.head_dim} dimensions"
        )
    if not math.isclose(attention.scale, attention.head_dim**-0.5, rel_tol=1e-6):
        raise draft.refuse(
            f"{model.name} scales attention by {attention.scale:g} instead of 1/√{attention.head_dim}, for which it "
            f"has no argument"
        )
    if attention.kv_heads != attention.heads:
        args |= {"--group-query-attention": True, "--num-query-groups": attention.kv_heads}
    if attention.qk_norm == "head":
        args["--qk-layernorm"] = True
        if attention.qk_norm_after_rope:
            draft.lost("query and key norms after the rotary embedding; --qk-layernorm norms before it")
    if attention.qk_norm == "l2":
        args["--qk-l2-norm"] = True
        if attention.qk_norm_after_rope:
            draft.lost("query and key norms after the rotary embedding; --qk-l2-norm norms before it")
    if attention.sinks:
        args["--softmax-type"] = "learnable"
    widths = {width for width in shape.windows if width is not None}
    if len(widths) > 1:
        raise draft.refuse(f"{model.name} has windows of {', '.join(map(str, sorted(widths)))} tokens, it takes one")
    if widths:
        # Transformer Engine counts the tokens before a token, not the token itself.
        args["--window-size"] = f"{widths.pop() - 1},0"
        if None in shape.windows:
            args["--window-attn-skip-freq"] = pattern([width is not None for width in shape.windows])
    return args


def _latent(draft: Draft, attention: AttentionSpec, model: ModelSpec) -> Args:
    assert attention.kv_rank is not None and attention.nope_dim is not None and attention.rope_dim is not None
    if attention.qkv_bias:
        raise draft.refuse(f"{model.name} has biases on latent attention's down projections")
    args: Args = {
        "--multi-latent-attention": True,
        "--kv-lora-rank": attention.kv_rank,
        "--qk-head-dim": attention.nope_dim,
        "--qk-pos-emb-head-dim": attention.rope_dim,
        "--v-head-dim": attention.v_head_dim,
        # The norms of the two latents.
        "--qk-layernorm": True,
    }
    return args if attention.q_rank is None else args | {"--q-lora-rank": attention.q_rank}


def _positions(draft: Draft, shape: Shape) -> Args:
    model, rope, latent = shape.model, shape.rope, shape.attention.kind == "mla"
    if rope is None:
        return {"--position-embedding-type": "learned_absolute" if model.learned_positions else "none"}
    if model.learned_positions:
        raise draft.refuse(f"{model.name} has both learned and rotary positions")
    args: Args = {"--position-embedding-type": "rope", "--rotary-base": _base(draft, model, rope)}
    if not latent:
        if rope.dim != shape.attention.head_dim:
            args["--rotary-percent"] = rope.dim / shape.attention.head_dim
        if rope.interleaved:
            args["--rotary-interleaved"] = True
    if any(shape.no_rope):
        args["--no-rope-freq"] = pattern(shape.no_rope)
        if any(layer.attention.temperature is not None for layer in model.layers):
            draft.lost("the scaling of queries by position on layers without rotary embedding (Llama-4)")
    return args | _scaling(draft, model, rope, latent)


def _base(draft: Draft, model: ModelSpec, rope: RopeSpec) -> int:
    theta = rope.theta
    if rope.kind == "ntk_alpha":
        # A larger base stands for NTK-aware scaling: theta · alpha^(d / (d − 2)).
        theta *= float(rope.params["alpha"]) ** (rope.dim / (rope.dim - 2))
    if theta != round(theta):
        draft.remark(f"--rotary-base takes whole numbers: {round(theta)} for {theta:.3f}")
    return round(theta)


def _scaling(draft: Draft, model: ModelSpec, rope: RopeSpec, latent: bool) -> Args:
    """Arguments for longer contexts than the model was first trained on."""
    params = rope.params
    if rope.kind in ("default", "ntk_alpha"):
        # The fused kernel of latent attention is only for YaRN.
        return {"--rope-type": "rope", "--no-rope-fusion": True} if latent else {}
    if rope.kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in fixed.items():
            if float(params[key]) != value:
                draft.lost(f"{key} {params[key]:g} of the rotary scaling; Megatron has {value:g} built in")
        return {"--use-rope-scaling": True, "--rope-scaling-factor": float(params["factor"])}
    if rope.kind == "linear" and float(params["factor"]).is_integer():
        return {"--rotary-seq-len-interpolation-factor": int(params["factor"])}
    if rope.kind != "yarn":
        raise draft.refuse(f"{model.name} has rotary scaling {rope.kind!r}, for which it has no argument")
    args: Args = {"--rotary-scaling-factor": float(params["factor"])}
    for flag, key in (("--mscale", "mscale"), ("--mscale-all-dim", "mscale_all_dim")):
        if params.get(key) is not None:
            args[flag] = float(params[key])
    if latent:
        args["--rope-type"] = "yarn"
        fixed = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
        for key, value in fixed.items():
            if float(params.get(key, value)) != value:
                draft.lost(f"{key} {params[key]:g} of YaRN; for latent attention Megatron-LM has {value:g} built in")
        return args
    args |= {
        "--position-embedding-type": "yarn",
        "--yarn-original-max-position-embeddings": int(params["original_max_position_embeddings"]),
        "--yarn-beta-fast": float(params["beta_fast"]),
        "--yarn-beta-slow": float(params["beta_slow"]),
    }
    whole = "--yarn-correction-range-round-to-int"
    return args | {whole if params.get("truncate", True) else whole.replace("--", "--no-", 1): True}


def _activation(draft: Draft, model: ModelSpec, mlp: MlpSpec) -> Args:
    kind = (mlp.activation, mlp.gated)
    known: dict[tuple[str, bool], Args] = {
        ("silu", True): {"--swiglu": True},
        ("relu2", False): {"--squared-relu": True},
        ("gelu", False): {},
        ("gelu_tanh", False): {},
        # gpt-oss: (up + 1) · gate · sigmoid(1.702 gate), both clamped.
        ("swiglu_clamped", True): {
            "--quick-geglu": True,
            "--glu-linear-offset": 1.0,
            "--activation-func-clamp-value": 7.0,
        },
    }
    if kind not in known:
        gated = "gated " if mlp.gated else ""
        raise draft.refuse(f"{model.name} has a {gated}MLP with {mlp.activation}, for which it has no argument")
    if kind == ("gelu", False):
        draft.lost(
            "the exact GELU; Megatron's fused one is the tanh approximation unless --no-bias-gelu-fusion is given"
        )
    return dict(known[kind])


def _mlp(draft: Draft, shape: Shape) -> Args:
    blocks = [block for block in (shape.mlp, shape.moe and shape.moe.expert, shape.moe and shape.moe.shared) if block]
    kinds = [_activation(draft, shape.model, block) for block in blocks]
    if any(kind != kinds[0] for kind in kinds):
        raise draft.refuse(f"{shape.model.name} has other activations in its dense MLPs than in its experts")
    # A model of experts alone has no dense width; Megatron wants one, and builds nothing of it.
    width = shape.mlp.width if shape.mlp is not None else blocks[0].width
    return {"--ffn-hidden-size": width, **kinds[0]}


def _moe(draft: Draft, shape: Shape, moe: MoeSpec) -> Args:
    router, model = moe.router, shape.model
    args: Args = {
        "--num-experts": router.experts,
        "--moe-ffn-hidden-size": moe.expert.width,
        "--moe-router-topk": router.top_k,
        "--moe-router-dtype": "fp32",
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
    }
    if not all(shape.is_moe):
        args["--moe-layer-freq"] = pattern(shape.is_moe)
    args |= _scores(draft, model, router)
    if router.apply == "input":
        if router.top_k > 1:
            raise draft.refuse(f"{model.name} weighs the experts' input with top-{router.top_k}; it does so for top-1")
        args["--moe-apply-probs-on-input"] = True
    if moe.shared is not None:
        if moe.shared_combine == "learned":
            raise draft.refuse(f"{model.name} mixes routed and shared experts by a learned softmax")
        args["--moe-shared-expert-intermediate-size"] = moe.shared.width
        if moe.shared_combine == "sigmoid_gate":
            args["--moe-shared-expert-gate"] = True
    if router.logit_bias and not moe.expert.bias:
        raise draft.refuse(f"{model.name} has a bias on its router alone; it has one only where linear layers have one")
    if router.select_bias:
        args |= {"--moe-router-enable-expert-bias": True, "--moe-router-bias-update-rate": 1e-3}
    balance: Args = {"--moe-router-load-balancing-type": ["none"]}
    if model.balance_coefficient > 0:
        # Both count perfect balance as 1.
        balance = {
            "--moe-router-load-balancing-type": ["aux_loss"],
            "--moe-aux-loss-coeff": [f"{model.balance_coefficient:g}"],
        }
    elif router.select_bias and model.family == "deepseek_v3":
        balance = {"--moe-router-load-balancing-type": ["seq_aux_loss"], "--moe-aux-loss-coeff": ["0.0001"]}
        draft.remark(
            "experts are balanced as DeepSeek-V3's were: the selection bias moves by 1e-3 a step, beside a loss of "
            "1e-4 per sequence (arXiv 2412.19437, section 4.2)"
        )
    elif router.select_bias:
        draft.remark("experts are balanced by the selection bias alone, which moves by 1e-3 a step, Megatron's default")
    else:
        draft.remark("the model's config names no balancing loss: set --moe-router-load-balancing-type to train it")
    return args | balance


def _scores(draft: Draft, model: ModelSpec, router: RouterSpec) -> Args:
    """How scores become weights. Megatron's softmax runs over the chosen experts' logits, or with
    --moe-router-pre-softmax over all of them and without normalising; its sigmoid always normalises more than one."""
    if router.score == "sparsemixer":
        raise draft.refuse(f"{model.name} routes by sparsemixer, for which it has no argument")
    args: Args = {"--moe-router-score-function": router.score}
    if router.score == "softmax":
        if router.select_bias:
            raise draft.refuse(
                f"{model.name} has a selection bias on softmax scores; --moe-router-enable-expert-bias takes sigmoid "
                f"scores only"
            )
        if router.when == "pre" and not router.norm:
            args["--moe-router-pre-softmax"] = True
        elif router.top_k == 1:
            raise draft.refuse(f"{model.name} normalises the one weight of top-1, so that its router learns nothing")
    elif router.top_k > 1 and not router.norm:
        raise draft.refuse(f"{model.name} does not normalise its top-{router.top_k} sigmoid weights; it always does")
    if router.groups > 1:
        args |= {"--moe-router-num-groups": router.groups, "--moe-router-group-topk": router.groups_kept}
        best = router.top_k // router.groups_kept
        if (router.group_score, best) not in (("best2", 2), ("max", 1)):
            rule = {"best2": "the sum of its two best", "max": "its best"}[router.group_score]
            draft.lost(
                f"a group's score is {rule} experts; Megatron sums its top_k / kept groups = {router.top_k} / "
                f"{router.groups_kept} = {best} best"
            )
    if router.scale != 1.0:
        args["--moe-router-topk-scaling-factor"] = router.scale
    return args
