"""What each family's config class assumes for absent keys, as data.

The values are the class defaults of `transformers` 5.24 (configuration_*.py of each family), restricted to the keys
that decide the architecture. Released models often differ from them, so a file's own keys always win. The number of
multi-token prediction blocks is the exception: absent means none.
"""

from __future__ import annotations

from typing import Any

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

SIZES = frozenset(
    {
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "intermediate_size_mlp",
        "shared_expert_intermediate_size",
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_experts_per_tok",
        "moe_k",
        "moe_topk",
        "n_shared_experts",
        "moe_num_shared_experts",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    }
)
"""Keys whose default changes the size of the model: using one is worth a note."""

_ROPE: dict[str, Any] = {
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
    "default_theta": 10000.0,
}

_SHARED: dict[str, Any] = {
    **_ROPE,
    "intermediate_size": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_SPARSE_STEP: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}

_MLA: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "topk_method": None,
    "scoring_func": None,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_SHARED, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
              "mlp_bias": False},
    "mistral": {**_SHARED, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                "sliding_window": 4096},
    "qwen3": {**_SHARED, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
              "max_position_embeddings": 32768, "attention_bias": False, "use_sliding_window": False,
              "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    "mixtral": {**_SHARED, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "default_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
                "num_experts_per_tok": 2},
    "phimoe": {**_SHARED, "intermediate_size": 6400, "num_key_value_heads": 8, "max_position_embeddings": 131072,
               "rms_norm_eps": 1e-5, "default_theta": 1e6, "sliding_window": None, "num_local_experts": 16,
               "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "attention_bias": False, "lm_head_bias": False},
    "olmoe": {**_SHARED, "intermediate_size": 2048, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
              "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
    "granitemoe": {**_SHARED, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_local_experts": 8,
                   "num_experts_per_tok": 2, "attention_bias": False, "embedding_multiplier": 1.0,
                   "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    "gpt_oss": {**_SHARED, "intermediate_size": 2880, "num_key_value_heads": 8, "head_dim": 64,
                "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "default_theta": 150000.0,
                "sliding_window": 128, "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4,
                "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "qwen2_moe": {**_SHARED, **_SPARSE_STEP, "intermediate_size": 5632, "num_key_value_heads": 16,
                  "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
                  "max_window_layers": 28, "layer_types": None, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
                  "norm_topk_prob": False, "qkv_bias": True},
    "qwen3_moe": {**_SHARED, **_SPARSE_STEP, "intermediate_size": 6144, "num_key_value_heads": 4,
                  "max_position_embeddings": 32768, "attention_bias": False, "use_sliding_window": False,
                  "sliding_window": 4096, "max_window_layers": None, "moe_intermediate_size": 768, "num_experts": 128,
                  "num_experts_per_tok": 8, "norm_topk_prob": False},
    "deepseek_v2": {**_SHARED, **_MLA, "intermediate_size": 11008, "moe_intermediate_size": 1407,
                    "max_position_embeddings": 2048, "mlp_bias": False, "first_k_dense_replace": 0, "n_group": None,
                    "topk_group": None, "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
                    "num_experts_per_tok": None, "norm_topk_prob": False, "topk_method": "greedy"},
    "deepseek_v3": {**_SHARED, **_MLA, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
                    "norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 0},
    "glm4_moe": {**_SHARED, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_key_value_heads": 8,
                 "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False,
                 "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
                 "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
                 "use_qk_norm": False, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
    "dots1": {**_SHARED, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_key_value_heads": 32,
              "max_position_embeddings": 2048, "attention_bias": False, "n_routed_experts": None,
              "n_shared_experts": None, "num_experts_per_tok": None, "first_k_dense_replace": 0, "n_group": 1,
              "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "sliding_window": 4096,
              "max_window_layers": 62, "layer_types": None, "moe_layer_freq": 1, "scoring_func": None,
              "topk_method": None},
    "minimax_m2": {**_SHARED, "intermediate_size": 1536, "num_key_value_heads": 8, "head_dim": 128,
                   "max_position_embeddings": 196608, "default_theta": 5e6, "num_local_experts": 256,
                   "num_experts_per_tok": 8, "rotary_dim": None, "partial_rotary_factor": None, "use_qk_norm": True,
                   "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid",
                   "num_mtp_modules": 0, "use_mtp": False, "mtp_transformer_layers": 0,
                   "shared_intermediate_size": 0},
    "ernie4_5_moe": {**_SHARED, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_key_value_heads": 4,
                     "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "default_theta": 500000.0,
                     "tie_word_embeddings": True, "use_bias": False, "moe_k": 6, "moe_num_experts": 64,
                     "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                     "moe_layer_interval": 1, "moe_norm_min": 1e-12},
    "hunyuan_v1_moe": {**_SHARED, "intermediate_size": 11008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
                       "attention_bias": False, "num_experts": 1, "moe_topk": 1, "use_qk_norm": True,
                       "use_cla": False, "cla_share_factor": 2},
    "llama4_text": {**_SHARED, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_key_value_heads": 8,
                    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                    "default_theta": 500000.0, "num_experts_per_tok": 1, "num_local_experts": 16, "moe_layers": None,
                    "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": None,
                    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
                    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False},
    "moesaic": {**_SHARED, "partial_rotary_factor": 1.0, "rope_interleave": False, "position_embedding": "rope",
                "norm": "rms", "norm_bias": False, "attention_bias": False, "o_bias": False, "qk_norm": "none",
                "sliding_window": None, "layer_types": None, "mlp_bias": False, "gated_mlp": True,
                "moe_intermediate_size": None, "num_experts": 0, "num_experts_per_tok": 1,
                "shared_intermediate_size": 0, "shared_combine": "sum", "scoring_func": "softmax",
                "norm_topk_prob": False, "routed_scaling_factor": 1.0, "select_bias": False, "n_group": 1,
                "topk_group": 1, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
                "num_nextn_predict_layers": 0, "q_lora_rank": None, "kv_lora_rank": None, "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip

SPELLINGS: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "phimoe": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    "granitemoe": {"num_experts": "num_local_experts"},
    "minimax_m2": {"num_experts": "num_local_experts"},
    "llama4_text": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen2_moe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "hunyuan_v1_moe": {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "deepseek_v2": {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
                    "num_mtp_layers": "num_nextn_predict_layers"},
    "glm4_moe": {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
                 "num_mtp_layers": "num_nextn_predict_layers"},
    "dots1": {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    "moesaic": {"num_local_experts": "num_experts", "n_routed_experts": "num_experts",
                "num_mtp_layers": "num_nextn_predict_layers"},
}  # fmt: skip
"""Other names of the same key, per family: {other: key}."""

IGNORED = frozenset(
    {
        "model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id", "attention_dropout",
        "hidden_dropout", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "quantization_config",
        "_name_or_path", "return_dict", "initializer_range", "name", "notes", "source", "aux_loss_alpha", "seq_aux",
        "ep_size", "initial_context_length",
    }
)  # fmt: skip
"""Keys that any config may carry and that do not change the architecture."""
