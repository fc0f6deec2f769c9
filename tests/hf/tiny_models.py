"""Tiny models of every supported family, as Hugging Face config keys.

Sizes are small, unequal and often odd, so that a swapped axis or a wrong width cannot pass unnoticed: layers of both
kinds where the family has both, windows and chunks shorter than the test's sequence, every rope scaling in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tiny:
    """One tiny model: its name in test ids, its Hugging Face `model_type`, and its config keys."""

    name: str
    model_type: str
    config: dict[str, Any]


BASE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
DEEPSEEK_YARN_ROPE = {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707, "factor": 40.0}
DEEPSEEK_UNEQUAL_YARN_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.6, "factor": 40.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0],
    "short_mscale": 1.1,
    "long_mscale": 1.25,
}

MIXTRAL = {
    "head_dim": 12,
    "intermediate_size": 28,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_parameters": DEFAULT_ROPE,
}
QWEN_MOE = {
    "num_hidden_layers": 4,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "rope_parameters": DEFAULT_ROPE,
}
DEEPSEEK = {
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 11,
    "rope_parameters": DEFAULT_ROPE,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
GLM4_MOE = {
    "head_dim": 12,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
}
GPT_OSS = {
    "head_dim": 12,
    "intermediate_size": 28,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
OLMOE = {
    "intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": DEFAULT_ROPE,
}
GRANITE = {
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.21,
    "rope_parameters": DEFAULT_ROPE,
}
MINIMAX_M2 = {
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
}
ERNIE = {
    "num_hidden_layers": 4,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 2,
    "rope_parameters": DEFAULT_ROPE,
}
HUNYUAN = {
    "head_dim": 12,
    "intermediate_size": 20,
    "num_experts": 6,
    "moe_topk": 2,
    "rope_parameters": DEFAULT_ROPE,
}
DOTS1 = {
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": 7,
    "max_window_layers": 2,
    "rope_parameters": DEFAULT_ROPE,
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 52,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.1,
    "rope_parameters": DEFAULT_ROPE,
}
PHIMOE = {
    "intermediate_size": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_parameters": DEFAULT_ROPE,
}
DENSE = {"intermediate_size": 52, "rope_parameters": DEFAULT_ROPE}


def _tiny(name: str, model_type: str, *parts: dict[str, Any], **changes: Any) -> Tiny:
    merged: dict[str, Any] = dict(BASE)
    for part in parts:
        merged.update(part)
    merged.update(changes)
    return Tiny(name, model_type, merged)


TINY_MODELS: tuple[Tiny, ...] = (
    _tiny("mixtral", "mixtral", MIXTRAL),
    _tiny("mixtral-window-tied", "mixtral", MIXTRAL, sliding_window=6, tie_word_embeddings=True),
    _tiny("qwen2_moe", "qwen2_moe", QWEN_MOE, shared_expert_intermediate_size=44),
    _tiny(
        "qwen2_moe-window-norm",
        "qwen2_moe",
        QWEN_MOE,
        shared_expert_intermediate_size=44,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=3,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    _tiny("qwen3_moe", "qwen3_moe", QWEN_MOE, head_dim=12, norm_topk_prob=True),
    _tiny("qwen3_moe-bias-yarn", "qwen3_moe", QWEN_MOE, head_dim=12, attention_bias=True, rope_parameters=YARN_ROPE),
    _tiny("deepseek_v2", "deepseek_v2", DEEPSEEK),
    _tiny(
        "deepseek_v2-groups-yarn",
        "deepseek_v2",
        DEEPSEEK,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        q_lora_rank=None,
        routed_scaling_factor=3.0,
        rope_parameters=DEEPSEEK_YARN_ROPE,
    ),
    _tiny("deepseek_v3", "deepseek_v3", DEEPSEEK_V3),
    _tiny(
        "deepseek_v3-yarn-bias",
        "deepseek_v3",
        DEEPSEEK_V3,
        attention_bias=True,
        rope_parameters=DEEPSEEK_UNEQUAL_YARN_ROPE,
    ),
    _tiny(
        "deepseek_v3-kimi-style",
        "deepseek_v3",
        DEEPSEEK_V3,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=None,
        rope_interleave=False,
        routed_scaling_factor=2.827,
    ),
    _tiny("glm4_moe", "glm4_moe", GLM4_MOE),
    _tiny(
        "glm4_moe-qk-norm-groups", "glm4_moe", GLM4_MOE, use_qk_norm=True, attention_bias=False, n_group=3, topk_group=2
    ),
    _tiny("gpt_oss", "gpt_oss", GPT_OSS),
    _tiny("olmoe", "olmoe", OLMOE),
    _tiny("olmoe-clip-norm", "olmoe", OLMOE, clip_qkv=0.5, norm_topk_prob=True, attention_bias=True),
    _tiny("granitemoe", "granitemoe", GRANITE, tie_word_embeddings=True),
    _tiny("granitemoe-bias-linear", "granitemoe", GRANITE, attention_bias=True, rope_parameters=LINEAR_ROPE),
    _tiny("minimax_m2", "minimax_m2", MINIMAX_M2),
    _tiny("ernie4_5_moe", "ernie4_5_moe", ERNIE),
    _tiny("ernie4_5_moe-bias-untied", "ernie4_5_moe", ERNIE, use_bias=True, tie_word_embeddings=False),
    _tiny("hunyuan_v1_moe", "hunyuan_v1_moe", HUNYUAN),
    _tiny(
        "hunyuan_v1_moe-alpha-tied",
        "hunyuan_v1_moe",
        HUNYUAN,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    _tiny("hunyuan_v1_moe-top-k-per-layer", "hunyuan_v1_moe", HUNYUAN, moe_topk=[1, 3, 2]),
    _tiny("dots1", "dots1", DOTS1),
    _tiny("llama4_text", "llama4_text", LLAMA4),
    _tiny(
        "llama4_text-bias-llama3",
        "llama4_text",
        LLAMA4,
        use_qk_norm=False,
        attention_bias=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    _tiny("phimoe", "phimoe", PHIMOE),
    _tiny("phimoe-window", "phimoe", PHIMOE, attention_bias=False, lm_head_bias=False, sliding_window=6),
    _tiny(
        "phimoe-longrope-beyond", "phimoe", PHIMOE, rope_parameters={**LONGROPE, "original_max_position_embeddings": 16}
    ),
    _tiny(
        "phimoe-longrope-within", "phimoe", PHIMOE, rope_parameters={**LONGROPE, "original_max_position_embeddings": 64}
    ),
    _tiny("qwen3_moe-window", "qwen3_moe", QWEN_MOE, head_dim=12, use_sliding_window=True, sliding_window=6),
    _tiny(
        "mistral-yarn", "mistral", DENSE, sliding_window=None, rope_parameters={**YARN_ROPE, "attention_factor": 1.3}
    ),
    _tiny("llama", "llama", DENSE, head_dim=12),
    _tiny(
        "llama-bias-llama3-tied",
        "llama",
        DENSE,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    _tiny("qwen3", "qwen3", DENSE, head_dim=12, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    _tiny("mistral", "mistral", DENSE, head_dim=12, sliding_window=6),
)
