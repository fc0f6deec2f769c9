"""litgpt: `LLaMAMoE`, a module list of experts, and its GPT around it."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("litgpt.model",)


def _config(shape: LayerShape | StepShape) -> Any:
    from litgpt.config import Config

    step = shape if isinstance(shape, StepShape) else None
    vocab = step.vocab if step else 128
    return Config(
        name="benchmark",
        block_size=step.seq if step else 8192,
        n_layer=step.layers if step else 1,
        n_head=step.heads if step else 8,
        n_embd=shape.hidden,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMoE",
        intermediate_size=shape.ffn,
        moe_intermediate_size=shape.ffn,
        n_expert=shape.experts,
        n_expert_per_token=shape.topk,
    )


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    from litgpt.model import LLaMAMoE

    moe = LLaMAMoE(_config(shape)).to(dtype).train()

    def load(weights: LayerWeights) -> None:
        put(moe.gate.weight, weights.router)
        for expert, gate_up, down in zip(moe.experts, weights.gate_up, weights.down, strict=True):
            gate, up = gate_up.chunk(2)
            put(expert.fc_1.weight, gate)
            put(expert.fc_2.weight, up)
            put(expert.proj.weight, down)

    return Layer(moe, moe, load)


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    from litgpt.model import GPT

    gpt = initialise(GPT(_config(shape)), dtype)
    return Model(gpt, gpt)
