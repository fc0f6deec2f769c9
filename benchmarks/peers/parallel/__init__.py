"""One module per peer for several ranks, run by `rank.py` under torchrun with gloo.

Every module offers `layer(shape, variant)`, whose experts are spread over all ranks, and, where the peer can train a
model, `step(shape, degrees, variant)`. `IMPORTS` names what may be imported before the process group is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerWeights, StepShape


@dataclass
class RankStep:
    """step: (ids [B, S], labels [B, S]) of the whole job → the mean loss per token, NaN on ranks that do not have it.

    Each rank takes its own part of the batch, and one call is one optimizer step. parameters: numbers that this rank
    holds.
    """

    step: Callable[[Tensor, Tensor], float]
    parameters: int
    detail: str = ""


def own_experts(weights: LayerWeights, rank: int, ranks: int) -> LayerWeights:
    """The router whole, and the experts of rank `rank` when they are dealt in equal contiguous runs."""
    count = len(weights.gate_up) // ranks
    mine = slice(rank * count, (rank + 1) * count)
    return LayerWeights(weights.router, weights.gate_up[mine], weights.down[mine])


def own_rows(tensor: Tensor, index: int, parts: int) -> Tensor:
    """Rows of the batch that belong to data-parallel rank `index` of `parts`."""
    return tensor.chunk(parts)[index].contiguous()


def held(parameters: Iterable[Tensor]) -> int:
    """Numbers that this rank itself holds of `parameters`, distributed tensors among them."""
    return sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)


def micro_batches(shape: StepShape, degrees: Degrees) -> int:
    """How many parts a data-parallel rank's rows are fed in: as the shape says, else two a stage where there are stages
    and rows enough."""
    if shape.micro_batch:
        return shape.batch // degrees.dp // shape.micro_batch
    return 1 if degrees.pp == 1 else min(shape.batch // degrees.dp, 2 * degrees.pp)


def clip_by_mesh(parameters: list[nn.Parameter], limit: float) -> None:
    """Clips the gradients' global 2-norm, for parameters that lie on different device meshes.

    torch's own function refuses gradients of more than one mesh: the norm is taken mesh by mesh.
    """
    total = torch.zeros(())
    for group in by_mesh(parameters):
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        total += getattr(norm, "full_tensor", lambda norm=norm: norm)() ** 2
    scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            getattr(parameter.grad, "_local_tensor", parameter.grad).mul_(scale)


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups of one mesh and placement, so that fused and foreach kernels accept each group."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None))
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """The same fused AdamW for every peer that has none of its own."""
    groups = [{"params": group} for group in by_mesh(parameters)]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
