"""DeepSpeed: `deepspeed.moe.layer.MoE`, no token dropped, around the plain gated expert that it asks its user for.

It has a layer and no model, so its whole step runs in the plain decoder of `skeleton.py`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.adapters.skeleton import Decoder, one_process_group
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
IMPORTS = ("deepspeed.moe.layer",)


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def start() -> None:
    """Lets DeepSpeed take over the process group, one of this process alone if there is none yet."""
    one_process_group()
    import deepspeed

    # An extension compiled at start for minutes, for reductions of inference only.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def build(shape: LayerShape | StepShape, ep: int = 1, grouped: bool = True) -> Any:
    """Its MoE layer over `ep` ranks; with `grouped=False` its groups are left for its engine to make."""
    from deepspeed.moe.layer import MoE

    moe = MoE(
        shape.hidden,
        Expert(shape.hidden, shape.ffn),
        num_experts=shape.experts,
        ep_size=ep,
        k=shape.topk,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,  # otherwise the second expert is drawn at random
    )
    if grouped:
        moe.set_deepspeed_parallelism()
    return moe


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    start()
    moe = build(shape).to(dtype).train()
    return Layer(moe, lambda x: moe(x)[0], partial(load, moe), "drop_tokens=False: every expert padded to the busiest")


def load(moe: Any, weights: LayerWeights) -> None:
    put(moe.deepspeed_moe.gate.wg.weight, weights.router)
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    for expert, gate_up, down in zip(experts, weights.gate_up, weights.down, strict=True):
        gate, up = gate_up.chunk(2)
        put(expert.gate.weight, gate)
        put(expert.up.weight, up)
        put(expert.down.weight, down)


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    start()
    decoder = initialise(Decoder(shape, lambda: First(build(shape))), dtype)
    return Model(decoder, decoder, "its layer in the benchmark's plain decoder")


class First(nn.Module):
    """DeepSpeed's layer returns (output, auxiliary loss, counts); the decoder wants the output."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]
