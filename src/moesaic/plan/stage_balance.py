"""Layers dealt to pipeline stages by what they cost, since dense layers, the head and prediction blocks differ."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from moesaic.cost.counts import layer_flops
from moesaic.spec.model import ModelSpec
from moesaic.spec.stages import Stage


def layer_costs(model: ModelSpec, seq_len: int, mtp: bool = True) -> tuple[tuple[float, ...], float]:
    """FLOPs per token of each decoder layer, and of what stands behind them (head and prediction blocks)."""
    hidden = model.hidden
    layers = tuple(sum(layer_flops(layer, hidden, seq_len).values()) for layer in model.layers)
    head = 6.0 * model.vocab * hidden
    blocks = model.mtp if mtp else ()
    behind = head + sum(sum(layer_flops(layer, hidden, seq_len).values()) + 12.0 * hidden**2 + head for layer in blocks)
    return layers, behind


@lru_cache(maxsize=1024)
def balanced_stages(count: int, layers: tuple[float, ...], behind: float, mtp: bool) -> tuple[Stage, ...]:
    """`count` stages whose costs come as close to equal as cuts between layers allow.

    `layers` are the costs of the decoder layers and `behind` that of the head (and, with `mtp`, of the prediction
    blocks) on the last stage. Stage i ends where the running sum comes closest to (i + 1)/count of the whole; every
    stage keeps at least one layer, so `count` is at most the number of layers.
    """
    sums = np.concatenate(([0.0], np.cumsum(layers)))
    whole = sums[-1] + behind
    cuts = [0]
    for index in range(1, count):
        near = int(np.abs(sums - whole * index / count).argmin())
        cuts.append(min(max(near, cuts[-1] + 1), len(layers) - (count - index)))
    cuts.append(len(layers))
    return tuple(
        Stage(index == 0, tuple(range(start, stop)), mtp and index == count - 1, index == count - 1)
        for index, (start, stop) in enumerate(pairwise(cuts))
    )
