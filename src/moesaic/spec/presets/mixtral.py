"""Mixtral and models of its architecture."""

from __future__ import annotations

from typing import Any

_MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "initializer_range": 0.02,
    "sliding_window": None,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_8X22B = {
    **_MIXTRAL,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "max_position_embeddings": 65536,
    "router_aux_loss_coef": 0.001,
}

MIXTRAL: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {
        **_MIXTRAL,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
        "router_aux_loss_coef": 0.02,
        "source": "huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json",
    },
    "Mixtral-8x22B": {**_8X22B, "source": "huggingface.co/mistralai/Mixtral-8x22B-v0.1 config.json"},
    "Mixtral-8x22B-G8T8": {
        **_8X22B,
        "vocab_size": 32768,
        "intermediate_size": 2048,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "notes": ["a fine-grained variant of Mixtral-8x22B that was measured, not released"],
        "source": "MoE Parallel Folding, arXiv 2504.14960",
    },
    "Llama3-8x70B": {
        **_MIXTRAL,
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "notes": ["top-k 2 is assumed: the paper does not print it"],
        "source": "MoE Parallel Folding, arXiv 2504.14960: Llama3-70B upcycled to 8 experts",
    },
}
