"""One module per peer. Each imports its peer inside its functions, so that it can be read without the peer installed.

Every module offers `layer(shape, dtype, variant)`, returning a `Layer`, and `model(shape, dtype, variant)`, returning a
`Model` (or, for moesaic, the step itself as a `Step`). `IMPORTS` names what may be imported before a task is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.peers.workload import LayerWeights


@dataclass
class Layer:
    """module: owner of the weights. call: x [1, T, D] → y of T·D numbers. load: sets the weights of every peer."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    load: Callable[[LayerWeights], None]
    detail: str = ""


@dataclass
class Model:
    """call: token ids [B, S] → logits [B, S, V]."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    detail: str = ""


@dataclass
class Step:
    """step: (inputs [B, S], labels [B, S]) → the loss; a whole training step, gradients cleared at its end."""

    module: nn.Module
    step: Callable[[Tensor, Tensor], float]
    detail: str = ""


def layer_pass(layer: Layer, x: Tensor, grad: Tensor) -> Callable[[], float]:
    """One timed iteration of a layer: forward and backward on x [1, T, D], all gradients there, then dropped."""

    def iteration() -> float:
        x_now = x.detach().requires_grad_()
        y = layer.call(x_now)
        y.backward(grad.view(y.shape))
        missing = [name for name, p in layer.module.named_parameters() if p.grad is None]
        if missing or x_now.grad is None:
            raise RuntimeError(f"no gradient for {missing or 'x'}")
        for parameter in layer.module.parameters():
            parameter.grad = None
        return 0.0

    return iteration


@torch.no_grad()
def initialise(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Matrices normal with standard deviation 0.02, norms 1, biases 0: the same rule for every model."""
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.02)
        elif parameter.is_floating_point():
            parameter.fill_(1.0)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return module.to(dtype).train()


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copies with a check, since `copy_` would broadcast a wrong shape."""
    if target.shape != value.shape:
        raise ValueError(f"the peer's weight has shape {tuple(target.shape)}, the benchmark's {tuple(value.shape)}")
    target.copy_(value)
