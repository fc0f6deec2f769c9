"""Dense models used as controls."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

_LLAMA3 = {
    **_LLAMA,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

_LLAMA2 = {
    **_LLAMA,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sizes(hidden: int, width: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_META3 = "Llama 3, arXiv 2407.21783 table 3; huggingface.co/meta-llama/Meta-Llama-3.1-8B config.json"
_META2 = "Llama 2, arXiv 2307.09288; huggingface.co/meta-llama"

DENSE: dict[str, dict[str, Any]] = {
    "Llama3-8B": {**_LLAMA3, **_sizes(4096, 14336, 32, 32, 8), "source": _META3},
    "Llama3-70B": {**_LLAMA3, **_sizes(8192, 28672, 80, 64, 8), "source": _META3},
    "Llama3.1-405B": {**_LLAMA3, **_sizes(16384, 53248, 126, 128, 8), "source": _META3},
    "Llama2-7B": {**_LLAMA2, **_sizes(4096, 11008, 32, 32, 32), "source": _META2},
    "Llama2-13B": {**_LLAMA2, **_sizes(5120, 13824, 40, 40, 40), "source": _META2},
    "Llama2-70B": {**_LLAMA2, **_sizes(8192, 28672, 80, 64, 8), "source": _META2},
    "Qwen3-8B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **_sizes(4096, 12288, 36, 32, 8),
        "vocab_size": 151936,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "source": "huggingface.co/Qwen/Qwen3-8B config.json",
    },
    "Mistral-7B": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        **_sizes(4096, 14336, 32, 32, 8),
        "vocab_size": 32000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "source": "arXiv 2310.06825 table 1; huggingface.co/mistralai/Mistral-7B-v0.1",
    },
}
