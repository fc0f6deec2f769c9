"""Random initial weights, the same for a given seed whatever the order or place of creation.

Each parameter, and each expert of a stack, draws from its own generator, seeded by the run's seed and its name. A rank
that holds a piece draws the whole and keeps the piece, so the layout does not change a model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from moesaic.mesh.cut import Cut, cut_of

_RESIDUAL_OUTPUTS = ("attn.o.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


def init_weights(
    model: nn.Module, seed: int, std: float, residual_layers: int = 0, cuts: Mapping[str, Cut] | None = None
) -> None:
    """Fill all parameters of `model` in place.

    Matrices and sinks: normal with `std`. Norm weights: 1. Biases: 0. With `residual_layers` = L > 0 the projections
    that write into the residual stream get `std` / sqrt(2 L) (GPT-2). Buffers: zero. `cuts` says by name which pieces
    of the whole model the parameters are, where they do not say it themselves.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            cut = cut_of(parameter) if cuts is None else cuts[name]
            _fill(name, parameter, cut, seed, std, residual_layers)
        for buffer in model.buffers():
            buffer.zero_()


def _fill(name: str, parameter: Tensor, cut: Cut, seed: int, std: float, residual_layers: int) -> None:
    if name.endswith("bias"):
        parameter.zero_()
        return
    if "norm" in name.split(".")[-2]:
        parameter.fill_(1.0)
        return
    if residual_layers and name.endswith(_RESIDUAL_OUTPUTS):
        std = std / math.sqrt(2 * residual_layers)
    if not cut.expert:
        _draw(parameter, cut, f"{seed}/{name}", std)
        return
    # Each expert has its own generator, so that a rank draws the experts it holds and no others.
    each = Cut(cut.shape[1:], tuple(replace(piece, dim=piece.dim - 1) for piece in cut.pieces if piece.dim > 0))
    for number, expert in enumerate(parameter, cut.start(0)):
        _draw(expert, each, f"{seed}/{name}/{number}", std)


def _draw(out: Tensor, cut: Cut, key: str, std: float) -> None:
    """Draw a whole tensor from the generator that `key` seeds, and keep this rank's piece of it."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    if out.device.type == "cpu" and out.dtype == torch.float32 and cut.is_whole:
        out.normal_(0.0, std, generator=generator)
    else:
        out.copy_(cut.take(torch.empty(cut.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)))
