"""NVIDIA NeMo Automodel: its MoE with `torch_mm` experts (grouped products) and its Qwen3-MoE model, without CUDA."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("nemo_automodel.components.moe.layers", "nemo_automodel.components.models.qwen3_moe.model")


def moe_config(shape: LayerShape | StepShape, dtype: torch.dtype) -> tuple[Any, Any]:
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.moe.config import MoEConfig

    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", experts="torch_mm", dispatcher="torch", rope_fusion=False
    )
    moe = MoEConfig(
        n_routed_experts=shape.experts,
        n_shared_experts=0,
        n_activated_experts=shape.topk,
        n_expert_groups=0,
        n_limited_groups=0,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        route_scale=1.0,
        dim=shape.hidden,
        inter_dim=shape.ffn,
        moe_inter_dim=shape.ffn,
        norm_topk_prob=True,
        softmax_before_topk=True,
        dtype=dtype,
    )
    return moe, backend


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    from nemo_automodel.components.moe.layers import MoE

    moe = MoE(*moe_config(shape, dtype)).to(dtype).train()

    def load(weights: LayerWeights) -> None:
        put(moe.gate.weight, weights.router)
        put(moe.experts.gate_and_up_projs, weights.gate_up.transpose(1, 2))
        put(moe.experts.down_projs, weights.down.transpose(1, 2))

    def call(x: torch.Tensor) -> torch.Tensor:
        y = moe(x)
        return y[0] if isinstance(y, tuple) else y

    return Layer(moe, call, load, type(moe.experts).__name__)


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    import nemo_automodel.components.models.qwen3_moe.model as qwen3_moe
    from transformers import Qwen3MoeConfig

    moe, backend = moe_config(shape, dtype)
    if not torch.cuda.is_available():  # it names a CUDA device for its rotary cache
        torch.cuda.current_device = lambda: 0
        rotary = qwen3_moe.RotaryEmbedding
        qwen3_moe.RotaryEmbedding = lambda *args, **kwargs: rotary(*args, **{**kwargs, "device": torch.device("cpu")})
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=8192,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=dtype,
    )
    qwen = qwen3_moe.Qwen3MoeForCausalLM(config, moe_config=moe, backend=backend)
    initialise(qwen, dtype)

    def call(ids: torch.Tensor) -> torch.Tensor:
        y = qwen(ids)
        return getattr(y, "logits", y)

    return Model(qwen, call, "its Qwen3-MoE, SDPA, torch_mm experts")
