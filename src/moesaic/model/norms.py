"""Normalisations, with statistics in fp32 (fp64 for fp64 inputs).

RMS norm (arXiv 1910.07467): y = w · x / sqrt(mean(x²) + eps). Written as one autograd function, because as separate
operations it writes five times the memory and keeps three tensors of x's size for backward instead of x alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.to(_statistics_dtype(x))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        y = (wide * scale).to(x.dtype)
        if weight is None:
            return y
        return y.mul_(weight) if y.dtype == weight.dtype else y * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        width = x.shape[-1]
        grad_y = grads[0].to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        grad_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (grad_y * normed).reshape(-1, width).sum(0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_normed = grad_y if weight is None else grad_y * weight
            along = (grad_normed * normed).sum(-1, keepdim=True).div_(-width)
            grad_x = torch.addcmul(grad_normed, normed, along).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dimension of x [..., D] with weight [D] or none."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, with a weight [D]."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to the same shape."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with a weight [D] and possibly a bias [D]."""

    def __init__(self, width: int, eps: float, bias: bool, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to the same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def make_norm(
    kind: str, width: int, eps: float, bias: bool, *, dtype: torch.dtype, device: torch.device | str
) -> RMSNorm | LayerNorm:
    """The norm that a `ModelSpec` names: `rms` or `layer`."""
    if kind == "layer":
        return LayerNorm(width, eps, bias, dtype=dtype, device=device)
    return RMSNorm(width, eps, dtype=dtype, device=device)
