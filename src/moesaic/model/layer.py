"""One decoder layer: attention and a feed-forward block, each normalised before and added to the stream after."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moesaic.mesh.mesh import Mesh
from moesaic.model.attention import Attention
from moesaic.model.mla import LatentAttention
from moesaic.model.mlp import Mlp
from moesaic.model.moe import Moe
from moesaic.model.norms import make_norm
from moesaic.model.recompute import droppable_output, recomputing, run_again
from moesaic.model.router import Routing
from moesaic.model.sequences import Sequences
from moesaic.spec.errors import SpecError
from moesaic.spec.model import LayerSpec, ModelSpec


class Layer(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)) or x + moe(norm(x)), each sum with the model's residual scale."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, *, dtype: torch.dtype, device: torch.device | str, mesh: Mesh
    ) -> None:
        super().__init__()
        if (spec.mlp is None) == (spec.moe is None):
            raise SpecError("a layer has either an mlp or a moe block; give exactly one of the two")
        hidden = model.hidden
        self.residual_scale = model.residual_scale
        self.recompute = frozenset(() if mesh.layout is None else mesh.layout.recompute)
        self.attn_norm = make_norm(model.norm, hidden, model.norm_eps, model.norm_bias, dtype=dtype, device=device)
        self.attn: Attention | LatentAttention
        if spec.attention.kind == "mla":
            self.attn = LatentAttention(spec.attention, hidden, dtype=dtype, device=device, mesh=mesh)
        else:
            self.attn = Attention(spec.attention, hidden, dtype=dtype, device=device, mesh=mesh)
        self.mlp_norm = make_norm(model.norm, hidden, model.norm_eps, model.norm_bias, dtype=dtype, device=device)
        self.mlp = None
        if spec.mlp is not None:
            self.mlp = Mlp(spec.mlp, hidden, dtype=dtype, device=device, tp=mesh.tp, by_rank=mesh.by_rank)
        self.moe = None if spec.moe is None else Moe(spec.moe, hidden, dtype=dtype, device=device, mesh=mesh)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> tuple[Tensor, Routing | None]:
        """x [T, D] of own tokens to x [T, D], and their routing if the layer has experts."""
        if "full" in self.recompute:
            x_TD, *parts = run_again(partial(self._run, sequences=sequences), x_TD)
        else:
            with recomputing(self.recompute):
                x_TD, *parts = self._run(x_TD, sequences)
        return x_TD, Routing(*parts) if parts else None

    def _run(self, x_TD: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """x [T, D], followed by the three tensors of the routing if the layer has experts."""
        normed_TD = droppable_output("layernorm", self.attn_norm, x_TD)
        x_TD = torch.add(x_TD, self.attn(normed_TD, sequences), alpha=self.residual_scale)
        normed_TD = droppable_output("layernorm", self.mlp_norm, x_TD)
        routing: tuple[Tensor, ...] = ()
        if self.moe is not None:
            y_TD, routing = self.moe(normed_TD, sequences.batch)
        else:
            assert self.mlp is not None
            y_TD = self.mlp(normed_TD, sequences.batch)
        return torch.add(x_TD, y_TD, alpha=self.residual_scale), *routing
