"""A mixture-of-experts block: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.model.experts import Experts
from moesaic.model.linear import Linear
from moesaic.model.mlp import Mlp
from moesaic.model.router import Router, Routing
from moesaic.spec.model import MoeSpec


class Moe(nn.Module):
    """y = Σ over chosen experts of weight · expert(x), combined with the shared expert if there is one."""

    def __init__(self, spec: MoeSpec, hidden: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec.router, hidden, dtype=dtype, device=device)
        self.experts = Experts(spec, hidden, dtype, device)
        self.shared = None if spec.shared is None else Mlp(spec.shared, hidden, dtype=dtype, device=device)
        self.shared_gate = None
        if self.shared is not None and spec.shared_combine != "sum":
            learned = spec.shared_combine == "learned"
            self.shared_gate = Linear(hidden, 2 if learned else 1, learned, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        """x [T, D] to y [T, D] and the routing that led there."""
        routing = self.router(x_TD)
        y_TD = self.experts(x_TD, routing.ids_TK, routing.weights_TK)
        if self.shared is None:
            return y_TD, routing
        shared_TD = self.shared(x_TD)
        if self.shared_gate is None:
            return y_TD + shared_TD, routing
        gate = self.shared_gate(x_TD)
        if self.spec.shared_combine == "sigmoid_gate":
            return torch.addcmul(y_TD, gate.sigmoid(), shared_TD), routing
        share = gate.softmax(-1)
        return y_TD * share[:, :1] + shared_TD * share[:, 1:], routing
