"""Normalisations, with statistics in fp32 (fp64 for fp64 inputs).

RMS norm (arXiv 1910.07467): y = w · x / sqrt(mean(x²) + eps). Written as one autograd function, because as separate
operations it writes five times the memory and keeps three tensors of x's size for backward instead of x alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.mesh.autograd import all_reduce
from moesaic.mesh.cut import Cut, Piece, new_parameter
from moesaic.mesh.group import Group

_ELEMENTS_PER_BLOCK = 2**17
"""Backward walks rows in blocks of this size, so that its five temporaries stay in cache."""


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """With n = x · scale and g = grad · w: grad_w = Σ grad · n, and grad_x = scale · (g − n · mean(g · n))."""
        x, scale, weight = ctx.saved_tensors
        width = x.shape[-1]
        x_TD, scale_T1, grad_y_TD = x.reshape(-1, width), scale.reshape(-1, 1), grads[0].reshape(-1, width)
        factor = x.new_ones(width, dtype=scale.dtype) if weight is None else weight.to(scale.dtype)
        grad_x_TD = torch.empty_like(x_TD)
        grad_weight = torch.zeros_like(factor)
        block = max(1, _ELEMENTS_PER_BLOCK // width)
        for start in range(0, min(block, x_TD.shape[0]) if x.is_meta else x_TD.shape[0], block):
            rows = slice(start, start + block)
            grad_y = grad_y_TD[rows].to(scale.dtype)
            normed = x_TD[rows].to(scale.dtype) * scale_T1[rows]
            product = grad_y * normed
            grad_weight += product.sum(0)
            along = torch.mv(product, factor)[:, None].div_(-width)
            grad_x_TD[rows] = torch.mul(grad_y, factor, out=product).addcmul_(normed, along).mul_(scale_T1[rows])
        return grad_x_TD.view_as(x), None if weight is None else grad_weight.to(weight.dtype), None


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


class SplitRMSNorm(nn.Module):
    """RMS norm over a last dimension whose pieces are on the ranks of a group: the mean square is taken over all."""

    def __init__(self, width: int, eps: float, split: Group, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps, self.width, self.split = eps, width, split
        self.weight = new_parameter(Cut((width,), (Piece(0, split.size, split.rank),)), dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's piece of x [..., D / n] to the same piece of the result."""
        if self.split.size == 1:
            return rms_norm(x, self.weight, self.eps)
        wide = x.to(_statistics_dtype(x))
        mean_square = all_reduce(wide.square().sum(-1, keepdim=True), self.split) / self.width
        return (wide * (mean_square + self.eps).rsqrt()).to(x.dtype) * self.weight


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
