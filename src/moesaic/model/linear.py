"""A linear layer whose product goes through `kernels.linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.model.kernels import linear


class Linear(nn.Module):
    """y = x Wᵀ + b for x [..., I], weight [O, I], bias [O] or none. Weights are left uninitialised."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] to y [..., O]."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}"
