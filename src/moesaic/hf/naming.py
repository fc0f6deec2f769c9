"""What each Hugging Face family calls its tensors on disk.

Verified against what transformers 5.24 writes with `save_pretrained`, which restores the published names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ExpertLayout = Literal["gate_up_down", "w1_w3_w2", "granite", "fused_halves", "fused_interleaved"]
"""`gate_up_down`, `w1_w3_w2`: one tensor per expert and projection, gate, up and down in this order.
`granite`: stacked [E, 2F, D] and [E, D, F] under their own names. `fused_halves`: stacked and transposed, gate then
up. `fused_interleaved`: stacked and transposed, gate and up alternating, with biases."""


@dataclass(frozen=True)
class Naming:
    """Names of one family, relative to `model.layers.{i}`."""

    architecture: str
    """The class that `config.json` names."""
    experts: ExpertLayout = "gate_up_down"
    block: str = "mlp"
    """The MoE block."""
    dense: str = "mlp"
    """The dense feed-forward block."""
    router: str = "gate.weight"
    router_bias: str | None = None
    select_bias: str | None = None
    select_bias_leading: bool = False
    """The selection bias has shape [1, E]."""
    shared: str | None = None
    shared_gate: str | None = None
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    memory_block: str = "mlp"
    """The MoE block in the names of transformers' modules, which a checkpoint saved without conversion has."""
    memory_router: str | None = None
    mtp: bool = False
    """The family publishes multi-token prediction blocks as layers after the last."""
    ignored: tuple[str, ...] = ()
    """Patterns of further keys that the family's checkpoints may hold and that mean nothing to us."""


_QWEN = Naming("Qwen3MoeForCausalLM")
_DEEPSEEK = Naming(
    "DeepseekV3ForCausalLM", select_bias="gate.e_score_correction_bias", shared="shared_experts", mtp=True
)
_MIXTRAL = Naming("MixtralForCausalLM", experts="w1_w3_w2", block="block_sparse_moe")

NAMINGS: dict[str, Naming] = {
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, architecture="MiniMaxM2ForCausalLM", select_bias="e_score_correction_bias"),
    "phimoe": replace(_MIXTRAL, architecture="PhimoeForCausalLM", memory_router="router.weight"),
    "qwen2_moe": replace(
        _QWEN, architecture="Qwen2MoeForCausalLM", shared="shared_expert", shared_gate="shared_expert_gate.weight"
    ),
    "qwen3_moe": _QWEN,
    "olmoe": replace(_QWEN, architecture="OlmoeForCausalLM"),
    "deepseek_v2": Naming("DeepseekV2ForCausalLM", shared="shared_experts"),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": replace(_DEEPSEEK, architecture="Glm4MoeForCausalLM"),
    "dots1": replace(_DEEPSEEK, architecture="Dots1ForCausalLM", mtp=False),
    "ernie4_5_moe": Naming(
        "Ernie4_5_MoeForCausalLM",
        select_bias="moe_statics.e_score_correction_bias",
        select_bias_leading=True,
        shared="shared_experts",
        ignored=(r"\.mtp_", r"^model\.mtp", r"^mtp"),
    ),
    "hunyuan_v1_moe": Naming(
        "HunYuanMoEV1ForCausalLM",
        router="gate.wg.weight",
        shared="shared_mlp",
        q_norm="query_layernorm",
        k_norm="key_layernorm",
    ),
    "granitemoe": Naming(
        "GraniteMoeForCausalLM",
        experts="granite",
        block="block_sparse_moe",
        router="router.layer.weight",
        memory_block="block_sparse_moe",
        memory_router="router.weight",
    ),
    "gpt_oss": Naming(
        "GptOssForCausalLM", experts="fused_interleaved", router="router.weight", router_bias="router.bias"
    ),
    "llama4_text": Naming(
        "Llama4ForCausalLM",
        experts="fused_halves",
        block="feed_forward",
        dense="feed_forward",
        router="router.weight",
        shared="shared_expert",
        memory_block="feed_forward",
    ),
    "llama": Naming("LlamaForCausalLM"),
    "qwen3": Naming("Qwen3ForCausalLM"),
    "mistral": Naming("MistralForCausalLM"),
}
