"""A mixture-of-experts block: router, routed experts, shared expert."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moesaic.dispatch import make_dispatcher
from moesaic.dispatch.parts import cuts_wanted
from moesaic.mesh.mesh import Mesh
from moesaic.model.expert_gradients import PartGradients
from moesaic.model.experts import Experts
from moesaic.model.linear import Linear
from moesaic.model.mlp import Mlp
from moesaic.model.recompute import again
from moesaic.model.router import Router, Routing
from moesaic.spec.model import MoeSpec


class Moe(nn.Module):
    """y = Σ over chosen experts of weight · expert(x), combined with the shared expert if there is one.

    The router sees own tokens; a dispatcher brings them to the experts, which live on the expert mesh, and back.
    """

    def __init__(
        self,
        spec: MoeSpec,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or Mesh.single()
        groups = mesh.expert(spec.router.experts)
        self.spec = spec
        self.dispatcher = make_dispatcher(
            mesh.dispatcher, groups, spec.router.experts, compressed="dispatch" in mesh.compression
        )
        self.chunks = 1 if mesh.layout is None else mesh.layout.chunks(spec.router.experts)
        """In how many chunks rows travel, one while experts compute another; 1 is all at once."""
        self.router = Router(spec.router, hidden, dtype=dtype, device=device)
        self.experts = Experts(spec, hidden, dtype, device, groups)
        self.shared = None
        if spec.shared is not None:
            self.shared = Mlp(spec.shared, hidden, dtype=dtype, device=device, tp=mesh.tp, by_rank=mesh.by_rank)
            self.shared.recompute_word = "shared_experts"
        self.shared_gate = None
        if self.shared is not None and spec.shared_combine != "sum":
            learned = spec.shared_combine == "learned"
            self.shared_gate = Linear(hidden, 2 if learned else 1, learned, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, batch: int = 1) -> tuple[Tensor, Routing]:
        """x [T, D] of own tokens, `batch` rows, to y [T, D] and the routing that led there."""
        y_TD, *parts = again("moe", partial(self._run, batch=batch), x_TD)
        return y_TD, Routing(*parts)

    def _run(self, x_TD: Tensor, batch: int) -> tuple[Tensor, ...]:
        routing = self.router(x_TD)
        if self.chunks > 1 and cuts_wanted():
            sent = self.dispatcher.start_parts(x_TD, routing.ids_TK, routing.weights_TK, self.chunks)
        else:
            sent = [self.dispatcher.start_dispatch(x_TD, routing.ids_TK, routing.weights_TK)]
        shared_TD = None if self.shared is None else self.shared(x_TD, batch)
        back = []
        gradients = None if len(sent) == 1 else PartGradients(len(sent))
        for part in sent:
            here = part.finish()
            y_RD = self.experts(here.rows_RD, here.ids_RK, here.weights_RK, gradients)
            back.append(self.dispatcher.start_combine(y_RD, here.handle))
        y_TD = self.dispatcher.finish_parts(back)
        if shared_TD is None:
            return y_TD, *routing
        if self.shared_gate is None:
            return y_TD + shared_TD, *routing
        gate = self.shared_gate(x_TD)
        if self.spec.shared_combine == "sigmoid_gate":
            return torch.addcmul(y_TD, gate.sigmoid(), shared_TD), *routing
        share = gate.softmax(-1)
        return y_TD * share[:, :1] + shared_TD * share[:, 1:], *routing
