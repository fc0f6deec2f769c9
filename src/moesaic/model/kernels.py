"""Products that are fast on the processor at hand.

A CPU without bf16 instructions multiplies bf16 matrices in a scalar loop, about a hundred times slower than fp32. There
`linear` converts the operands to fp32, multiplies, and rounds the result to bf16 once: faster, and no less accurate,
since hardware bf16 products accumulate in fp32 too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.mesh.device import bf16_is_native
from moesaic.model.deferred import Later, Leaves, hide_from_autograd


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which products of `tensor` are computed: its own, or fp32 for bf16 on a CPU that lacks it."""
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not bf16_is_native():
        return torch.float32
    return tensor.dtype


class _LinearThroughFp32(torch.autograd.Function):
    """y = x Wᵀ + b in bf16, computed in fp32. Keeps x and W, as `F.linear` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_y = grads[0].float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_y @ weight.float()).to(x.dtype)
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


class _DeferredLinear(torch.autograd.Function):
    """y = x Wᵀ + b whose backward leaves the gradients of W and b. Keeps x and W, as `F.linear` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype, grad_y = compute_dtype(x), grads[0]

        def weight_gradients(leaves: Leaves) -> list[Tensor | None]:
            rows_y, rows_x = (t.reshape(-1, t.shape[-1]).to(dtype) for t in (grad_y, x))
            products = (lambda: rows_y.t() @ rows_x, lambda: rows_y.sum(0))
            return [
                product().to(leaf.dtype) if leaf is not None and leaf.requires_grad else None
                for product, leaf in zip(products, leaves, strict=True)
            ]

        ctx.later.leave(weight_gradients)
        return (grad_y.to(dtype) @ weight.to(dtype)).to(x.dtype), None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [..., I], weight [O, I], bias [O], in the fastest way this device has.

    Inside `deferring` backward leaves the gradients of weight and bias for later.
    """
    later, leaves = hide_from_autograd(x, weight, bias)
    if later is not None:
        return _DeferredLinear.apply(x, *leaves, later)  # type: ignore[no-any-return]
    if compute_dtype(x) != x.dtype:
        return _LinearThroughFp32.apply(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
