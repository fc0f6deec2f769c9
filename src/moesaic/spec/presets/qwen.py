"""Qwen's mixtures of experts."""

from __future__ import annotations

from typing import Any

_QWEN = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "sliding_window": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
}

_QWEN2 = {
    **_QWEN,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "norm_topk_prob": False,
    "eos_token_id": 151643,
}

_QWEN3 = {
    **_QWEN,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}

QWEN: dict[str, dict[str, Any]] = {
    "Qwen1.5-MoE-A2.7B": {
        **_QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "source": "class defaults of transformers' Qwen2MoeConfig, which are this model's",
    },
    "Qwen2-57B-A14B": {
        **_QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "max_position_embeddings": 131072,
        "source": "Megatron-MoE-ModelZoo Qwen2-57B-A14B.yaml; Pai-Megatron-Patch",
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "source": "huggingface.co/Qwen/Qwen3-30B-A3B config.json",
    },
    "Qwen3-235B-A22B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "source": "huggingface.co/Qwen/Qwen3-235B-A22B config.json",
    },
    "Qwen3-Coder-480B-A35B": {
        **_QWEN3,
        "hidden_size": 6144,
        "intermediate_size": 8192,
        "num_hidden_layers": 62,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "num_experts": 160,
        "moe_intermediate_size": 2560,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "source": "config.json of Qwen3-Coder-480B-A35B-Instruct, as kept by ai-dynamo/aiconfigurator",
    },
}
