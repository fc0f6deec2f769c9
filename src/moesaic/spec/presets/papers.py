"""Models that papers describe and nobody released as a Hugging Face config: DeepSpeed's and MegaScale's."""

from __future__ import annotations

from typing import Any

_GPT = {
    "model_type": "moesaic",
    "vocab_size": 50304,
    "num_attention_heads": 16,
    "position_embedding": "learned",
    "max_position_embeddings": 2048,
    "norm": "layer",
    "norm_bias": True,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "hidden_act": "gelu_pytorch_tanh",
    "gated_mlp": False,
    "mlp_bias": True,
    "num_experts_per_tok": 1,
    "initializer_range": 0.014,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}


def _deepspeed(hidden: int, experts: list[int], source: str, *, layers: int, residual: bool = False) -> dict[str, Any]:
    """A GPT of DeepSpeed-MoE: the second, fourth, … layer holds `experts` in turn; residual ones keep a dense MLP."""
    per_layer = [experts[i // 2] if i % 2 and experts else 0 for i in range(layers)]
    return {
        **_GPT,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * hidden,
        "num_experts": per_layer,
        "shared_intermediate_size": 4 * hidden if residual else 0,
        "notes": ["the vocabulary of GPT-2 is padded from 50257 to 50304"],
        "source": source,
    }


_STANDARD = "DeepSpeed-MoE, arXiv 2201.05596 table 1; Megatron-DeepSpeed examples_deepspeed/MoE"
_RESIDUAL = "DeepSpeed-MoE, arXiv 2201.05596 section 4.1 (pyramid and residual experts, outputs summed)"
_STUDENT = "DeepSpeed-MoE, arXiv 2201.05596 section 4.2 (mixture of students with 21 layers)"

PAPERS: dict[str, dict[str, Any]] = {
    "DeepSpeed-350M": _deepspeed(1024, [], _STANDARD, layers=24),
    "DeepSpeed-1.3B": _deepspeed(2048, [], _STANDARD, layers=24),
    "DeepSpeed-350M+MoE-128": _deepspeed(1024, [128] * 12, _STANDARD, layers=24),
    "DeepSpeed-350M+PR-MoE-32/64": _deepspeed(1024, [32] * 10 + [64] * 2, _RESIDUAL, layers=24, residual=True),
    "DeepSpeed-350M+PR-MoE+L21+MoS": _deepspeed(1024, [32] * 8 + [64] * 2, _STUDENT, layers=21, residual=True),
    "DeepSpeed-1.3B+MoE-128": _deepspeed(2048, [128] * 12, _STANDARD, layers=24),
    "DeepSpeed-1.3B+PR-MoE-64/128": _deepspeed(2048, [64] * 10 + [128] * 2, _RESIDUAL, layers=24, residual=True),
    "DeepSpeed-1.3B+PR-MoE+L21+MoS": _deepspeed(2048, [64] * 8 + [128] * 2, _STUDENT, layers=21, residual=True),
    "MegaScale-MoE-352B": {
        "model_type": "moesaic",
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "shared_intermediate_size": 14336,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "notes": [
            "the shared expert is inferred, not printed: only with it do 352 B parameters and the paper's MFU come out",
            "normalised softmax weights and the untied head are assumed",
        ],
        "source": "MegaScale-MoE, arXiv 2505.11432 table 2 and section 6 (vocabulary)",
    },
}
