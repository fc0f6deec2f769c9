"""moesaic: its MoE block, and its training step as `moesaic train` makes it."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.adapters import Layer, Step, put
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("moesaic.model.moe", "moesaic.model.decoder", "moesaic.spec.families", "moesaic.train.optimizer")


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    from moesaic.model.moe import Moe
    from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec

    spec = MoeSpec(
        router=RouterSpec(experts=shape.experts, top_k=shape.topk, score="softmax", norm=True),
        expert=MlpSpec(width=shape.ffn),
    )
    moe = Moe(spec, shape.hidden, dtype=dtype, device="cpu").train()

    def load(weights: LayerWeights) -> None:
        put(moe.router.weight, weights.router)
        put(moe.experts.gate_up, weights.gate_up)
        put(moe.experts.down, weights.down)

    def call(x_BTD: Tensor) -> Tensor:
        y_TD, _ = moe(x_BTD[0])
        return y_TD

    return Layer(moe, call, load)


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Step:
    """bf16 here means what `moesaic train` does: bf16 parameters, fp32 masters, fp32 optimizer state. The peers' bf16
    keeps parameters, gradients and optimizer state in bf16, so ours does more work and holds more memory there."""
    from moesaic.model.decoder import Decoder
    from moesaic.model.losses import LossWeights
    from moesaic.spec.families import load_model_spec
    from moesaic.train.optimizer import Optimizer

    spec = load_model_spec(
        {
            "model_type": "mixtral",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.topk,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "vocab_size": shape.vocab,
            "max_position_embeddings": 8192,
            "sliding_window": None,
        }
    )
    decoder = Decoder(spec, dtype=dtype)
    decoder.init_weights(1)
    decoder.train()
    optimizer = Optimizer(decoder)
    weights = LossWeights()

    def step(ids_BS: Tensor, labels_BS: Tensor) -> float:
        loss = decoder.loss(ids_BS, labels_BS, weights=weights, step_tokens=labels_BS.numel())
        loss.total.backward()
        optimizer.clip(1.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        return loss.total.item()

    return Step(decoder, step, "fp32 masters and moments" if dtype == torch.bfloat16 else "")
