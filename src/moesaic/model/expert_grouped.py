"""All experts at once through grouped products, for accelerators.

One kernel runs the products of all experts, with row offsets that stay on the device, so nothing waits for counts.
On a CPU torch's grouped product is a loop of ordinary ones; `experts` does better there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.model.activations import activate, activate_backward
from moesaic.model.deferred import Later, Leaves
from moesaic.model.expert_blocks import ExpertKind
from moesaic.model.expert_gradients import PartGradients
from moesaic.model.expert_rows import SortedRows

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def _per_row(bias_EN: Tensor, offsets_E: Tensor, rows: int) -> Tensor:
    """The bias of each row's expert, [R, N]."""
    experts_R = torch.searchsorted(offsets_E, torch.arange(rows, device=bias_EN.device), right=True)
    return bias_EN.index_select(0, experts_R)


def _sum_per_expert(values_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum of each expert's rows, [E, N]."""
    rows = torch.arange(values_RN.shape[0], device=values_RN.device)
    experts_R = torch.searchsorted(offsets_E, rows, right=True)
    wide = torch.promote_types(values_RN.dtype, torch.float32)  # thousands of rows added in bf16 would lose the last
    sums_EN = values_RN.new_zeros(offsets_E.shape[0], values_RN.shape[1], dtype=wide)
    return sums_EN.index_add_(0, experts_R, values_RN.to(wide)).to(values_RN.dtype)


def _sum_per_token(values_RN: Tensor, rows: SortedRows, tokens: int, top_k: int) -> Tensor:
    """Sum of each token's rows, at most K, in fp32, [T, N] in the type of the rows.

    Gathered, not added by index: on a GPU that adds in any order, and a resumed run would differ from its first life.
    """
    places = torch.arange(len(rows.order_R), device=values_RN.device)
    if len(places) == tokens * top_k:
        place_R = torch.empty_like(rows.order_R)
        place_R[rows.order_R] = places
    else:  # choices of experts elsewhere take a row of zeros
        place_R = torch.full((tokens * top_k,), len(places), device=values_RN.device)
        place_R[rows.order_R] = places
        values_RN = torch.cat((values_RN, values_RN.new_zeros(1, values_RN.shape[1])))
    values_TKN = values_RN.index_select(0, place_R).view(tokens, top_k, -1)
    return values_TKN.sum(1, dtype=torch.promote_types(values_RN.dtype, torch.float32)).to(values_RN.dtype)


def grouped_forward(
    kind: ExpertKind,
    x_RD: Tensor,
    weight_R: Tensor | None,
    offsets_E: Tensor,
    up_EGD: Tensor,
    down_EDF: Tensor,
    up_bias_EG: Tensor | None,
    down_bias_ED: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert through their experts, times their weights.

    offsets_E: int32, the row after each expert's last. Returns y_RD and the pre-activations h_RG to keep.
    """
    h_RG = _grouped_mm(x_RD, up_EGD.transpose(1, 2), offs=offsets_E)
    if up_bias_EG is not None:
        h_RG.add_(_per_row(up_bias_EG, offsets_E, x_RD.shape[0]))
    a_RF = h_RG.new_empty(h_RG.shape[0], down_EDF.shape[2])
    activate(kind.activation, kind.gated, h_RG, a_RF)
    if weight_R is not None:
        a_RF.mul_(weight_R[:, None])
    y_RD = _grouped_mm(a_RF, down_EDF.transpose(1, 2), offs=offsets_E)
    if down_bias_ED is not None:
        bias_RD = _per_row(down_bias_ED, offsets_E, x_RD.shape[0])
        y_RD.add_(bias_RD if weight_R is None else bias_RD * weight_R[:, None])
    return y_RD, h_RG


def grouped_backward(
    kind: ExpertKind,
    weight_R: Tensor | None,
    h_RG: Tensor,
    grad_y_RD: Tensor,
    offsets_E: Tensor,
    up_EGD: Tensor,
    down_EDF: Tensor,
    down_bias_ED: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Backward of `grouped_forward` except for parameters: grad_x_RD, grad_weight_R (None without weights), and for
    `grouped_weight_gradients` the activations a_RF times their weights and grad_h_RG."""
    grad_a_RF = _grouped_mm(grad_y_RD, down_EDF, offs=offsets_E)
    a_RF, grad_h_RG = torch.empty_like(grad_a_RF), torch.empty_like(h_RG)
    grad_weight_R = None
    if weight_R is None:
        activate_backward(kind.activation, kind.gated, h_RG, grad_a_RF, grad_h_RG, a_RF)
    else:
        activate_backward(kind.activation, kind.gated, h_RG, grad_a_RF * weight_R[:, None], grad_h_RG, a_RF)
        grad_weight_R = (grad_a_RF * a_RF).sum(1)
        a_RF.mul_(weight_R[:, None])
        if down_bias_ED is not None:
            grad_weight_R += (grad_y_RD * _per_row(down_bias_ED, offsets_E, h_RG.shape[0])).sum(1)
    return _grouped_mm(grad_h_RG, up_EGD, offs=offsets_E), grad_weight_R, a_RF, grad_h_RG


def grouped_weight_gradients(
    x_RD: Tensor,
    weight_R: Tensor | None,
    a_RF: Tensor,
    grad_h_RG: Tensor,
    grad_y_RD: Tensor,
    offsets_E: Tensor,
    wanted: Sequence[bool],
    adds_down_bias: bool,
) -> list[Tensor | None]:
    """The `wanted` of the gradients of up, down, up bias and down bias. Experts without rows get zeros, and so does a
    down bias that another rank adds."""

    def down_bias() -> Tensor:
        if not adds_down_bias:
            return grad_y_RD.new_zeros(offsets_E.shape[0], grad_y_RD.shape[1])
        return _sum_per_expert(grad_y_RD if weight_R is None else grad_y_RD * weight_R[:, None], offsets_E)

    gradients: tuple[Callable[[], Tensor], ...] = (
        lambda: _grouped_mm(grad_h_RG.t(), x_RD, offs=offsets_E),
        lambda: _grouped_mm(grad_y_RD.t(), a_RF, offs=offsets_E),
        lambda: _sum_per_expert(grad_h_RG, offsets_E),
        down_bias,
    )
    return [gradient() if want else None for gradient, want in zip(gradients, wanted, strict=True)]


class GroupedExperts(torch.autograd.Function):
    """y_TD from x_TD, ids_TK, weights_TK and the stacked weights of E experts; `module` is the `Experts`.

    With `later` the weights come detached, and backward leaves their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        up_EGD: Tensor,
        down_EDF: Tensor,
        up_bias_EG: Tensor | None,
        down_bias_ED: Tensor | None,
        keep: bool,
        later: Later | None,
        parts: PartGradients | None = None,
    ) -> Tensor:
        bias_ED = down_bias_ED if module.adds_down_bias else None
        parameters = (up_EGD, down_EDF, up_bias_EG, bias_ED)
        rows = SortedRows.sort(ids_TK, up_EGD.shape[0], module.has_all_experts)
        ends_E = rows.ends_E.to(torch.int32)
        weight_R = weights_TK.reshape(-1).index_select(0, rows.order_R).to(x_TD.dtype)
        x_RD = x_TD.index_select(0, rows.tokens_R)
        if module.weights_on_input:
            x_RD.mul_(weight_R[:, None])
        y_RD, h_RG = grouped_forward(
            module.kind, x_RD, None if module.weights_on_input else weight_R, ends_E, *parameters
        )
        if keep:
            ctx.module, ctx.rows, ctx.shape_TK, ctx.later = module, rows, ids_TK.shape, later
            ctx.parts = parts or PartGradients(1)
            ctx.save_for_backward(x_TD, weight_R, h_RG, *parameters)
        return _sum_per_token(y_RD, rows, *ids_TK.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        x_TD, weight_R, h_RG, up_EGD, down_EDF, _, down_bias_ED = ctx.saved_tensors
        ends_E = ctx.rows.ends_E.to(torch.int32)
        (grad_y_TD,) = outputs
        rows, on_input, adds_bias = ctx.rows, ctx.module.weights_on_input, ctx.module.adds_down_bias
        inner_R = None if on_input else weight_R
        plain_RD = x_TD.index_select(0, rows.tokens_R)
        x_RD = plain_RD * weight_R[:, None] if on_input else plain_RD
        grad_y_RD = grad_y_TD.index_select(0, rows.tokens_R)
        grad_x_RD, grad_weight_R, a_RF, grad_h_RG = grouped_backward(
            ctx.module.kind, inner_R, h_RG, grad_y_RD, ends_E, up_EGD, down_EDF, down_bias_ED
        )

        def left_gradients(leaves: Leaves) -> list[Tensor | None]:
            # Rows are gathered again: kept until now they would be top-k times as large as the tokens.
            x_RD = x_TD.index_select(0, rows.tokens_R)
            if on_input:
                x_RD.mul_(weight_R[:, None])
            grad_y_RD = grad_y_TD.index_select(0, rows.tokens_R)
            wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
            return grouped_weight_gradients(x_RD, inner_R, a_RF, grad_h_RG, grad_y_RD, ends_E, wanted, adds_bias)

        if ctx.later is None:
            wanted = ctx.needs_input_grad[4:8]
            grads = ctx.parts.add(
                grouped_weight_gradients(x_RD, inner_R, a_RF, grad_h_RG, grad_y_RD, ends_E, wanted, adds_bias)
            )
        else:
            grads = [None] * 4
            ctx.later.leave(left_gradients)
        if grad_weight_R is None:
            grad_weight_R = (grad_x_RD * plain_RD).sum(1)
            grad_x_RD = grad_x_RD * weight_R[:, None]
        grad_x_TD = _sum_per_token(grad_x_RD, rows, *ctx.shape_TK)
        new = torch.empty if ctx.module.has_all_experts else torch.zeros
        grad_weights_TK = new(ctx.shape_TK, dtype=torch.float32, device=x_TD.device)
        grad_weights_TK.view(-1).index_copy_(0, rows.order_R, grad_weight_R.float())
        return None, grad_x_TD, None, grad_weights_TK, *grads, None, None, None
