"""The element-wise part of a feed-forward block: forward, and backward from the kept pre-activations.

h_nG holds the pre-activations of n rows: gate then up (G = 2F) for gated blocks, or the F values themselves.
All functions are pure and work on any row block, so that callers can walk through rows in pieces that stay in cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.spec.model import Activation

CLAMP_LIMIT = 7.0
"""gpt-oss clamps the gate from above and the up projection from both sides at this value."""
CLAMP_ALPHA = 1.702
"""gpt-oss: gate · sigmoid(alpha · gate)."""


def apply_function(kind: Activation, g: Tensor) -> Tensor:
    """f(g), element-wise."""
    if kind == "silu":
        return F.silu(g)
    if kind == "gelu":
        return F.gelu(g)
    if kind == "gelu_tanh":
        return F.gelu(g, approximate="tanh")
    if kind == "relu":
        return F.relu(g)
    if kind == "relu2":
        return F.relu(g).square_()
    gate = g.clamp(max=CLAMP_LIMIT)
    return gate * torch.sigmoid(CLAMP_ALPHA * gate)


def function_backward(kind: Activation, grad: Tensor, g: Tensor, out: Tensor) -> None:
    """Write grad · f′(g), element-wise, into `out`."""
    if kind == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, g, grad_input=out)
    elif kind == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, g, grad_input=out)
    elif kind == "gelu_tanh":
        torch.ops.aten.gelu_backward.grad_input(grad, g, approximate="tanh", grad_input=out)
    elif kind == "relu":
        torch.mul(grad, g > 0, out=out)
    elif kind == "relu2":
        torch.mul(grad, F.relu(g).mul_(2), out=out)
    else:
        gate = g.clamp(max=CLAMP_LIMIT)
        sigmoid = torch.sigmoid(CLAMP_ALPHA * gate)
        slope = sigmoid * (1 + CLAMP_ALPHA * gate * (1 - sigmoid))
        torch.mul(grad, slope.mul_(g <= CLAMP_LIMIT), out=out)


def activate(kind: Activation, gated: bool, h_nG: Tensor, out_nF: Tensor) -> None:
    """Write f(gate) · up (gated) or f(h) into `out_nF`; for gpt-oss's clamped SwiGLU, f(gate) · (clamp(up) + 1)."""
    if not gated:
        out_nF.copy_(apply_function(kind, h_nG))
        return
    gate, up = h_nG.chunk(2, dim=-1)
    if kind == "swiglu_clamped":
        up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1)
    torch.mul(apply_function(kind, gate), up, out=out_nF)


def activate_backward(
    kind: Activation, gated: bool, h_nG: Tensor, grad_a_nF: Tensor, out_grad_h_nG: Tensor, out_a_nF: Tensor
) -> None:
    """Write the gradient of h into `out_grad_h_nG` and, again, the activation itself into `out_a_nF`.

    `out_a_nF` must not overlap `grad_a_nF`.
    """
    if not gated:
        out_a_nF.copy_(apply_function(kind, h_nG))
        function_backward(kind, grad_a_nF, h_nG, out_grad_h_nG)
        return
    gate, up = h_nG.chunk(2, dim=-1)
    grad_gate, grad_up = out_grad_h_nG.chunk(2, dim=-1)
    f = apply_function(kind, gate)
    if kind == "swiglu_clamped":
        clamped = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1)
        torch.mul(f, clamped, out=out_a_nF)
        torch.mul(grad_a_nF, f, out=grad_up)
        grad_up.mul_(up.abs() <= CLAMP_LIMIT)
        up = clamped
    else:
        torch.mul(f, up, out=out_a_nF)
        torch.mul(grad_a_nF, f, out=grad_up)
    torch.mul(grad_a_nF, up, out=f)
    function_backward(kind, f, gate, grad_gate)
