"""DeepSpeed on several ranks: its MoE layer without drops, and a whole step through `deepspeed.initialize`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.adapters import Layer, deepspeed_moe, initialise
from benchmarks.peers.adapters.skeleton import Decoder
from benchmarks.peers.parallel import RankStep, held, own_experts, own_rows
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = deepspeed_moe.IMPORTS


def layer(shape: LayerShape, variant: str) -> Layer:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    deepspeed_moe.start()
    moe = deepspeed_moe.build(shape, ep=ranks).train()

    def load(weights: LayerWeights) -> None:
        deepspeed_moe.load(moe, own_experts(weights, rank, ranks))

    return Layer(moe, lambda x: moe(x)[0], load, "drop_tokens=False: every expert padded to the busiest of any rank")


def step(shape: StepShape, degrees: Degrees, variant: str) -> RankStep:
    """The benchmark's plain decoder with its MoE layers, under its engine with ZeRO-1, clipping and AdamW."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    rank = dist.get_rank()
    deepspeed_moe.start()
    torch.manual_seed(0)
    decoder = Decoder(shape, lambda: deepspeed_moe.First(deepspeed_moe.build(shape, degrees.ep, grouped=False)))
    initialise(decoder, torch.float32)
    groups: Any = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(decoder.parameters()), "name": "all"}
    )
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = shape.batch // degrees.dp
    engine, *_ = deepspeed.initialize(
        model=decoder,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def whole(ids: Tensor, labels: Tensor) -> float:
        own, own_labels = own_rows(ids, rank, degrees.dp), own_rows(labels, rank, degrees.dp)
        logits = engine(own)
        loss = F.cross_entropy(logits.reshape(-1, shape.vocab).float(), own_labels.reshape(-1))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return RankStep(whole, held(decoder.parameters()), "its engine, ZeRO-1, its layer in the benchmark's plain decoder")
