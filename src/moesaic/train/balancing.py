"""What the routers counted in a step: the aux-loss-free bias update, and the load figures of the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.mesh.collectives import all_reduce, gather_objects
from moesaic.mesh.mesh import Mesh


@torch.no_grad()
def update_select_bias(select_bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Aux-loss-free balancing (arXiv 2408.15664, algorithm 1): b ← b + rate · sign(mean(counts) − counts).

    counts_E: tokens that each expert got over the whole step. The biases are not re-centred, as in the paper.
    """
    # E · (mean − count) in integers: an expert exactly at the mean must see sign 0, whatever the rounding.
    excess_E = counts_E.sum() - counts_E * counts_E.numel()
    select_bias_E.add_(torch.sign(excess_E).to(select_bias_E.dtype), alpha=rate)


@dataclass(frozen=True)
class Load:
    """How the experts of each layer were loaded in one step; keys are layer names."""

    shares: dict[str, list[float]]
    max_over_mean: dict[str, float]
    dead: dict[str, int]

    @classmethod
    def of(cls, counts: dict[str, Tensor]) -> Load:
        """From tokens per expert, counts_E int64, of each layer. Layers that were not run at all (prediction blocks
        without a loss) are left out."""
        shares, worst, dead = {}, {}, {}
        for layer, counts_E in counts.items():
            total = int(counts_E.sum())
            if total == 0:
                continue
            shares[layer] = [round(count / total, 6) for count in counts_E.tolist()]
            worst[layer] = round(int(counts_E.max()) * counts_E.numel() / total, 6)
            dead[layer] = int((counts_E == 0).sum())
        return cls(shares, worst, dead)


def take_counts(routers: list[tuple[Any, Any]]) -> dict[str, Tensor]:
    """Tokens per expert of each layer since the last call, and zero the counters."""
    counts = {}
    for layer, router in routers:
        counts[str(layer)] = router.step_counts.clone()
        router.step_counts.zero_()
    return counts


def sum_counts(counts: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Counts over all ranks: each layer's summed over the ranks of its stage, once, and all stages' layers together."""
    if mesh.stage.size > 1 and counts:
        flat = all_reduce(torch.cat([counts[layer] for layer in counts]), mesh.stage)
        sizes = [counts[layer].numel() for layer in counts]
        counts = dict(zip(counts, flat.split(sizes), strict=True))
    if mesh.pp.size == 1:
        return counts
    found: dict[str, Tensor] = {}
    for each in gather_objects({layer: tensor.cpu() for layer, tensor in counts.items()}, mesh.pp):
        found |= each
    found |= counts
    return {layer: found[layer] for layer in sorted(found, key=int)}
