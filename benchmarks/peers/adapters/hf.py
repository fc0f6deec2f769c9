"""Hugging Face transformers: Mixtral's MoE block, with the expert implementation named by `variant`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("transformers.models.mixtral.modeling_mixtral",)


def config(shape: LayerShape | StepShape, variant: str) -> Any:
    from transformers import MixtralConfig

    step = shape if isinstance(shape, StepShape) else None
    return MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        num_hidden_layers=step.layers if step else 1,
        num_attention_heads=step.heads if step else 8,
        num_key_value_heads=step.heads if step else 8,
        vocab_size=step.vocab if step else 128,
        max_position_embeddings=8192,
        sliding_window=None,
        use_cache=False,
        experts_implementation=variant,
    )


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    block = MixtralSparseMoeBlock(config(shape, variant)).to(dtype).train()

    def load(weights: LayerWeights) -> None:
        put(block.gate.weight, weights.router)
        put(block.experts.gate_up_proj, weights.gate_up)
        put(block.experts.down_proj, weights.down)

    chosen = block.experts.config._experts_implementation
    if chosen != variant:
        raise RuntimeError(f"transformers chose the expert implementation {chosen!r} instead of {variant!r}")
    return Layer(block, block, load, f"experts_implementation={chosen}")


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    from transformers import MixtralForCausalLM

    settings = config(shape, variant)
    settings._attn_implementation = "sdpa"
    mixtral = MixtralForCausalLM._from_config(settings, experts_implementation=variant)
    chosen = mixtral.config._experts_implementation
    initialise(mixtral, dtype)
    return Model(
        mixtral,
        lambda ids: mixtral(input_ids=ids).logits,
        f"experts_implementation={chosen}, {mixtral.config._attn_implementation}",
    )
