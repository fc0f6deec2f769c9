"""Random initial weights, the same for a given seed whatever the order or place of creation.

Each parameter draws from its own generator, seeded by the run's seed and the parameter's name.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

_RESIDUAL_OUTPUTS = ("attn.o.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


def init_weights(model: nn.Module, seed: int, std: float, residual_layers: int = 0) -> None:
    """Fill all parameters of `model` in place.

    Matrices and sinks: normal with `std`. Norm weights: 1. Biases: 0. With `residual_layers` = L > 0 the projections
    that write into the residual stream get `std` / sqrt(2 L) (GPT-2). Buffers: zero.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, seed, std, residual_layers)
        for buffer in model.buffers():
            buffer.zero_()


def _fill(name: str, parameter: Tensor, seed: int, std: float, residual_layers: int) -> None:
    if name.endswith("bias"):
        parameter.zero_()
        return
    if "norm" in name.split(".")[-2]:
        parameter.fill_(1.0)
        return
    if residual_layers and name.endswith(_RESIDUAL_OUTPUTS):
        std = std / math.sqrt(2 * residual_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
        parameter.normal_(0.0, std, generator=generator)
    else:
        parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
