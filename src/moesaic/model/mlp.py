"""The dense feed-forward block: also the shared expert of a mixture."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.mesh.autograd import gather_tokens
from moesaic.mesh.group import Group
from moesaic.model.activations import activate, activate_backward
from moesaic.model.by_rank import GatheredProducts, Reads
from moesaic.model.linear import ALONE, Linear, LinearToTokens
from moesaic.model.recompute import droppable, made_again
from moesaic.spec.model import Activation, MlpSpec


class _Activate(torch.autograd.Function):
    """a_TF from pre-activations h_TG, of which alone it keeps a copy."""

    @staticmethod
    def forward(ctx: Any, h_TG: Tensor, kind: Activation, gated: bool) -> Tensor:
        ctx.save_for_backward(h_TG)
        ctx.kind, ctx.gated = kind, gated
        out = h_TG.new_empty(h_TG.shape[0], h_TG.shape[1] // 2 if gated else h_TG.shape[1])
        activate(kind, gated, h_TG, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (h_TG,) = ctx.saved_tensors
        grad_h_TG = torch.empty_like(h_TG)
        activate_backward(ctx.kind, ctx.gated, h_TG, grads[0], grad_h_TG, torch.empty_like(grads[0]))
        return grad_h_TG, None, None


class Mlp(nn.Module):
    """down(f(gate) · up) with `gate_up.weight` [2F, D] (gate rows, then up rows), or down(f(up)) when not gated.

    Tensor parallelism splits F: each rank gathers its group's tokens, computes its part for all of them, and gets back
    the sums for its own. `by_rank`: some ranks' tokens travel under the products of others'.
    """

    def __init__(
        self,
        spec: MlpSpec,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: Group = ALONE,
        by_rank: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tp = tp
        self.recompute_word = "mlp"
        if spec.gated:
            self.gate_up = Linear(hidden, 2 * spec.width, spec.bias, dtype=dtype, device=device, split=tp, segments=2)
        else:
            self.up = Linear(hidden, spec.width, spec.bias, dtype=dtype, device=device, split=tp)
        self.down = LinearToTokens(spec.width, hidden, spec.bias, dtype=dtype, device=device, split=tp, by_rank=by_rank)
        self.gathered = GatheredProducts(tp) if by_rank else None

    def forward(self, x_TD: Tensor, batch: int = 1) -> Tensor:
        """x [T, D], `batch` rows of own tokens, to [T, D]."""
        word = self.recompute_word
        if self.gathered is not None:
            reads = [Reads(self.gate_up if self.spec.gated else self.up)]
            x_nTD, h_TG = self.gathered(x_TD, batch, reads)
            made_again(word, partial(GatheredProducts.again, batch=batch, reads=reads), (h_TG,), x_nTD)
            return self.down(droppable(word, self._activated, h_TG), batch)
        x_TD = gather_tokens(x_TD, self.tp, batch)
        return self.down(droppable(word, self._activation, x_TD), batch)

    def _activation(self, x_TD: Tensor) -> Tensor:
        """The second product's input [T, F]."""
        return self._activated(self.gate_up(x_TD) if self.spec.gated else self.up(x_TD))

    def _activated(self, h_TG: Tensor) -> Tensor:
        return _Activate.apply(h_TG, self.spec.activation, self.spec.gated)  # type: ignore[no-any-return]
