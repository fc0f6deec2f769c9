"""NVIDIA NeMo Automodel on several ranks: `torch_mm` experts under its ExpertParallel style."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.adapters import Layer, automodel, put
from benchmarks.peers.parallel import own_experts
from benchmarks.peers.workload import LayerShape, LayerWeights

IMPORTS = (*automodel.IMPORTS, "nemo_automodel.components.moe.parallelizer")


def layer(shape: LayerShape, variant: str) -> Layer:
    from nemo_automodel.components.moe.layers import MoE
    from nemo_automodel.components.moe.parallelizer import ExpertParallel
    from torch.distributed.tensor.parallel import parallelize_module

    rank, ranks = dist.get_rank(), dist.get_world_size()
    moe = MoE(*automodel.moe_config(shape, torch.float32)).train()
    experts = parallelize_module(
        moe.experts, init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), ExpertParallel()
    )

    def load(weights: LayerWeights) -> None:
        mine = own_experts(weights, rank, ranks)
        put(moe.gate.weight, mine.router)
        put(experts.gate_and_up_projs.to_local(), mine.gate_up.transpose(1, 2))
        put(experts.down_projs.to_local(), mine.down.transpose(1, 2))

    def call(x: torch.Tensor) -> torch.Tensor:
        y = moe(x)
        return y[0] if isinstance(y, tuple) else y

    return Layer(moe, call, load, f"{type(experts).__name__}: tokens all-gathered, outputs reduce-scattered")
