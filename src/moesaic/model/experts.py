"""The routed experts of one layer, or this rank's share of them, as one autograd function over the tokens it was sent.

Forward: sort the T·K choices by expert once; for each expert, or some experts of few rows, gather the rows, multiply,
and add the weighted results to the tokens' sums. Backward does the same with gradients. No [T·K, D] tensor exists in
either direction: rows are gathered into, and sums taken from, a workspace for as many rows. Kept for backward: x, the
pre-activations h [R, 2F], and the routing; activations are rebuilt from h, outputs are not needed (see
`expert_blocks`).

How tokens come here and results go back is the dispatcher's business (`moesaic.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.mesh.cut import Cut, Piece, new_parameter
from moesaic.mesh.mesh import ExpertGroups
from moesaic.model.deferred import Later, hide_from_autograd
from moesaic.model.expert_blocks import (
    ExpertGrads,
    ExpertKind,
    ExpertLeft,
    ExpertWeights,
    bundles,
    experts_backward,
    experts_forward,
    gather_rows,
    new_left,
    rows_together,
)
from moesaic.model.expert_gradients import LeftRows, PartGradients, add_left
from moesaic.model.expert_grouped import GroupedExperts
from moesaic.model.expert_memory import POOL, WORKSPACE
from moesaic.model.expert_rows import SortedRows, Span
from moesaic.model.expert_workers import run_experts
from moesaic.model.kernels import compute_dtype
from moesaic.spec.model import MoeSpec


class _ExpertByExpert(torch.autograd.Function):
    """y_TD from x_TD, ids_TK, weights_TK and the stacked weights of E experts. Without `keep` there is no backward.

    With `later` the weights come detached, and backward leaves their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        module: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        up_EGD: Tensor,
        down_EDF: Tensor,
        up_bias_EG: Tensor | None,
        down_bias_ED: Tensor | None,
        keep: bool,
        later: Later | None,
        parts: PartGradients | None,
    ) -> Tensor:
        dtype = compute_dtype(x_TD)
        rows_by_expert = SortedRows.sort(ids_TK, up_EGD.shape[0], module.has_all_experts)
        bias_ED = down_bias_ED if module.adds_down_bias else None
        weights_R = weights_TK.reshape(-1).index_select(0, rows_by_expert.order_R).to(dtype)
        h_RG = POOL.take((len(rows_by_expert.order_R) if keep else 0, up_EGD.shape[1]), x_TD)

        weights = ExpertWeights.of(up_EGD, down_EDF, up_bias_EG, bias_ED)
        most = rows_together(x_TD, down_EDF.shape[2])

        def run(spans: list[Span], y_TD: Tensor) -> None:
            for bundle in bundles(spans, most):
                rows = bundle.rows
                tokens_n, weight_n = rows_by_expert.tokens_R[rows], weights_R[rows]
                x_nD = gather_rows("x", x_TD, tokens_n, dtype)
                if module.weights_on_input:
                    x_nD = x_nD.mul_(weight_n[:, None])
                h_nG = h_RG[rows] if keep else None
                if h_nG is None and dtype != x_TD.dtype:  # rounded as where it is kept: a second pass keeps it
                    h_nG = WORKSPACE.get("rounded h", len(tokens_n), up_EGD.shape[1], x_TD, x_TD.dtype)
                on_output_n = None if module.weights_on_input else weight_n
                y_TD.index_add_(0, tokens_n, experts_forward(module.kind, weights, bundle, x_nD, on_output_n, h_nG))

        y_TD = run_experts(rows_by_expert.busy, run, x_TD, dtype)
        if keep:
            ctx.module, ctx.rows_by_expert, ctx.shape_TK, ctx.later = module, rows_by_expert, ids_TK.shape, later
            ctx.parts = parts or PartGradients(1)
            ctx.save_for_backward(x_TD, weights_R, h_RG, up_EGD, down_EDF, up_bias_EG, down_bias_ED)
        return y_TD.to(x_TD.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        (grad_y_TD,) = outputs
        x_TD, weights_R, h_RG, *parameters = ctx.saved_tensors
        module, rows_by_expert, later = ctx.module, ctx.rows_by_expert, ctx.later
        dtype = compute_dtype(x_TD)
        parts: PartGradients = ctx.parts
        _, _, _, wants_weights, *wanted, _, _, _ = ctx.needs_input_grad
        into: list[Tensor | None] = [None] * len(parameters)
        in_place, left = False, None
        if later is None and parts.count == 1:
            into, in_place = _gradients(module, module.own_parameters(), wanted)
        else:
            rows, up_width, width = h_RG.shape[0], h_RG.shape[1], parameters[1].shape[2]
            like = x_TD.new_empty(0, dtype=dtype)
            left = new_left(rows, width, up_width, like)
        filled = _filled(module, into)
        if not module.adds_down_bias:
            parameters[-1] = None
        grad_weights_R = torch.zeros_like(weights_R)
        grad_y_TD = grad_y_TD.contiguous()

        weights = ExpertWeights.of(*parameters)
        grads = ExpertGrads.of(*filled)
        most = rows_together(x_TD, parameters[1].shape[2])

        def run(spans: list[Span], grad_x_TD: Tensor) -> None:
            for bundle in bundles(spans, most):
                rows = bundle.rows
                tokens_n, weight_n = rows_by_expert.tokens_R[rows], weights_R[rows]
                x_nD = gather_rows("x", x_TD, tokens_n, dtype)
                if module.weights_on_input:
                    plain_nD, x_nD = x_nD, x_nD * weight_n[:, None]
                grad_x_nD = experts_backward(
                    module.kind,
                    weights,
                    grads,
                    bundle,
                    x_nD,
                    None if module.weights_on_input else weight_n,
                    h_RG[rows],
                    gather_rows("grad_y", grad_y_TD, tokens_n, dtype),
                    grad_weights_R[rows] if wants_weights else None,
                    accumulate=bundle.again or in_place,
                    left=None if left is None else ExpertLeft(left.a_nF[rows], left.grad_h_nG[rows]),
                )
                if module.weights_on_input:
                    torch.sum(grad_x_nD * plain_nD, 1, out=grad_weights_R[rows])
                    grad_x_nD = grad_x_nD.mul_(weight_n[:, None])
                grad_x_TD.index_add_(0, tokens_n, grad_x_nD)

        grad_x_TD = run_experts(rows_by_expert.busy, run, x_TD, dtype)
        returned: list[Tensor | None] = [None] * len(parameters)
        if left is None:
            returned = _finished(module, into, in_place, {e for e, _, _ in rows_by_expert.busy})
        else:
            every = parts.leave(LeftRows(rows_by_expert, left, x_TD, weights_R, grad_y_TD))
            compute = partial(_left_gradients, module, every)
            if later is not None:
                later.leave(compute)
            elif every:
                wants = [p if want else None for p, want in zip(module.own_parameters(), wanted, strict=True)]
                returned = compute(wants)
        new = torch.empty if module.has_all_experts else torch.zeros
        grad_weights_TK = new(ctx.shape_TK, dtype=weights_R.dtype, device=x_TD.device)
        grad_weights_TK.view(-1).index_copy_(0, rows_by_expert.order_R, grad_weights_R)
        return None, grad_x_TD.to(x_TD.dtype), None, grad_weights_TK.float(), *returned, None, None, None


def _left_gradients(module: Experts, parts: list[LeftRows], parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of `parameters` that the backward of all `parts` left; none of no parts."""
    if not parts:
        return [None] * len(parameters)
    into, in_place = _gradients(module, parameters, [p is not None and p.requires_grad for p in parameters])
    with_rows = add_left(parts, _filled(module, into), module.weights_on_input, in_place)
    return _finished(module, into, in_place, with_rows)


def _filled(module: Experts, into: list[Tensor | None]) -> list[Tensor | None]:
    """Those gradients that rows add to: without that of a bias that another rank adds."""
    return into if module.adds_down_bias else [*into[:-1], None]


def _finished(module: Experts, into: list[Tensor | None], in_place: bool, with_rows: set[int]) -> list[Tensor | None]:
    """What autograd gets: zero for experts that are not `with_rows`; None where `.grad` has been added to."""
    if in_place:
        if module.after_accumulation is not None:
            module.after_accumulation()
        return [None] * len(into)
    if not module.adds_down_bias and into[-1] is not None:
        into[-1].zero_()
    for g in (g for g in into if g is not None):
        for e in range(len(g)):
            if e not in with_rows:
                g[e].zero_()
    return into


def _gradients(
    module: Experts, parameters: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[list[Tensor | None], bool]:
    """Where the parameters' gradients go, and whether that is their `.grad` (then autograd gets None)."""
    pairs = list(zip(parameters, wanted, strict=True))
    if module.accumulate_in_place and all(p.grad is not None for p, want in pairs if p is not None and want):
        return [p.grad if p is not None and want else None for p, want in pairs], True
    return [POOL.take(tuple(p.shape), p) if p is not None and want else None for p, want in pairs], False


class Experts(nn.Module):
    """E feed-forward experts with stacked weights, or the part of them that a rank of `groups` holds.

    Parameters: `gate_up` [E, 2F, D] (gate rows, then up rows) and `down` [E, D, F]; for ungated experts `up` [E, F, D]
    in place of `gate_up`; with biases also `gate_up_bias` [E, 2F] (`up_bias` [E, F]) and `down_bias` [E, D]. Expert
    parallelism splits E, expert tensor parallelism F: then outputs are partial sums over the ranks of both.

    `accumulate_in_place`: backward adds weight gradients straight to an existing `.grad` instead of handing autograd a
    tensor to add. Off by default, because hooks on the parameters then see no gradient.
    """

    down_bias: nn.Parameter | None

    def __init__(
        self,
        moe: MoeSpec,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        groups: ExpertGroups | None = None,
    ) -> None:
        super().__init__()
        expert, experts = moe.expert, moe.router.experts
        rows = expert.width * (2 if expert.gated else 1)
        self.kind = ExpertKind(expert.activation, expert.gated)
        self.weights_on_input = moe.router.apply == "input"
        self.accumulate_in_place = False
        self.after_accumulation: Callable[[], None] | None = None
        """Called after gradients were added in place, where hooks of parameters are not."""
        self.up_name = "gate_up" if expert.gated else "up"
        ep, ep_rank = (1, 0) if groups is None else (groups.ep.size, groups.ep.rank)
        etp, etp_rank = (1, 0) if groups is None else (groups.etp.size, groups.etp.rank)
        self.has_all_experts = ep == 1
        self.adds_down_bias = etp_rank == 0  # once, where the width is cut

        def new(shape: tuple[int, ...], width_dim: int | None, segments: int = 1) -> nn.Parameter:
            width = () if width_dim is None else (Piece(width_dim, etp, etp_rank, segments),)
            cut = Cut(shape, (Piece(0, ep, ep_rank), *width), expert=True)
            return new_parameter(cut, dtype=dtype, device=device)

        halves = 2 if expert.gated else 1
        self.register_parameter(self.up_name, new((experts, rows, hidden), 1, halves))
        self.down = new((experts, hidden, expert.width), 2)
        self.register_parameter(self.up_name + "_bias", new((experts, rows), 1, halves) if expert.bias else None)
        self.register_parameter("down_bias", new((experts, hidden), None) if expert.bias else None)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parts: PartGradients | None = None) -> Tensor:
        """x_TD through the experts `ids_TK` (int64) that each token chose, summed with `weights_TK`. Returns y_TD.

        Ids count the experts that are here. With expert parallelism, numbers outside their range stand for experts
        elsewhere: they add nothing, and the gradient of their weights is zero. No gradient flows to `ids_TK`. Experts
        without tokens get a zero gradient. Calls with the same `parts` add their weight gradients to one tensor.
        """
        function = GroupedExperts if self.uses_grouped_products(x_TD) else _ExpertByExpert
        later, parameters = hide_from_autograd(x_TD, *self.own_parameters())
        return function.apply(  # type: ignore[no-any-return]
            self, x_TD, ids_TK, weights_TK, *parameters, torch.is_grad_enabled(), later, parts
        )

    def own_parameters(self) -> tuple[Tensor | None, ...]:
        """Up, down and their biases, as they are now: not copies, so that they have their `.grad`."""
        up_bias = getattr(self, self.up_name + "_bias")
        return self.get_parameter(self.up_name), self.down, up_bias, self.down_bias

    def uses_grouped_products(self, x_TD: Tensor) -> bool:
        """Grouped products run on GPUs in bf16, with rows of whole 16 bytes; elsewhere each expert has its own.

        A dry run has no rows of single experts."""
        _, hidden, width = self.down.shape
        if x_TD.is_meta:
            return True
        return x_TD.device.type == "cuda" and x_TD.dtype == torch.bfloat16 and hidden % 8 == width % 8 == 0

    def extra_repr(self) -> str:
        experts, hidden, width = self.down.shape
        return f"experts={experts}, hidden={hidden}, width={width}, {self.kind.activation}"
