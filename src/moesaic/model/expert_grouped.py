"""All experts at once through grouped products, for accelerators.

One kernel runs the products of all experts, with row offsets that stay on the device, so nothing waits for counts.
On a CPU torch's grouped product is a loop of ordinary ones; `experts` does better there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.exchange import bags_of, sum_bags
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


def _sum_per_token(values_RN: Tensor, rows: SortedRows, tokens: int) -> Tensor:
    """Sum of each token's rows, in fp32, [T, N] in the type of the rows.

    A bag per token, not added by index: on a GPU that adds in any order, and a resumed run would differ from its first
    life. Nothing is made for choices of experts elsewhere.
    """
    return sum_bags(values_RN, *bags_of(rows.tokens_R, tokens))


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
    down_EDF: Tensor,
    down_bias_ED: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Backward of `grouped_forward` to the first products' results: grad_weight_R (None without weights), and for
    `grouped_weight_gradients` the activations a_RF times their weights and grad_h_RG."""
    grad_a_RF = _grouped_mm(grad_y_RD, down_EDF, offs=offsets_E)
    a_RF, grad_h_RG = torch.empty_like(grad_a_RF), torch.empty_like(h_RG)
    if weight_R is None:
        activate_backward(kind.activation, kind.gated, h_RG, grad_a_RF, grad_h_RG, a_RF)
        return None, a_RF, grad_h_RG
    activate_backward(kind.activation, kind.gated, h_RG, grad_a_RF * weight_R[:, None], grad_h_RG, a_RF)
    grad_weight_R = grad_a_RF.mul_(a_RF).sum(1)
    a_RF.mul_(weight_R[:, None])
    if down_bias_ED is not None:
        grad_weight_R += (grad_y_RD * _per_row(down_bias_ED, offsets_E, h_RG.shape[0])).sum(1)
    return grad_weight_R, a_RF, grad_h_RG


def grouped_down_gradients(
    weight_R: Tensor | None,
    a_RF: Tensor,
    grad_y_RD: Tensor,
    offsets_E: Tensor,
    wanted: Sequence[bool],
    adds_down_bias: bool,
) -> list[Tensor | None]:
    """The `wanted` of the gradients of down and down bias, which is zeros where another rank adds it."""
    down = _grouped_mm(grad_y_RD.t(), a_RF, offs=offsets_E) if wanted[0] else None
    if not wanted[1]:
        return [down, None]
    if not adds_down_bias:
        return [down, grad_y_RD.new_zeros(offsets_E.shape[0], grad_y_RD.shape[1])]
    return [down, _sum_per_expert(grad_y_RD if weight_R is None else grad_y_RD * weight_R[:, None], offsets_E)]


def grouped_up_gradients(
    x_RD: Tensor, grad_h_RG: Tensor, offsets_E: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The `wanted` of the gradients of up and up bias. Experts without rows get zeros."""
    up = _grouped_mm(grad_h_RG.t(), x_RD, offs=offsets_E) if wanted[0] else None
    return [up, _sum_per_expert(grad_h_RG, offsets_E) if wanted[1] else None]


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
        del x_RD
        return _sum_per_token(y_RD, rows, len(ids_TK))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        x_TD, weight_R, h_RG, up_EGD, down_EDF, _, down_bias_ED = ctx.saved_tensors
        ends_E = ctx.rows.ends_E.to(torch.int32)
        (grad_y_TD,) = outputs
        rows, on_input, adds_bias = ctx.rows, ctx.module.weights_on_input, ctx.module.adds_down_bias
        inner_R = None if on_input else weight_R

        def inputs() -> Tensor:
            x_RD = x_TD.index_select(0, rows.tokens_R)
            return x_RD.mul_(weight_R[:, None]) if on_input else x_RD

        # Each large tensor goes as soon as its last reader has read it, so that few stand beside each other.
        grad_y_RD = grad_y_TD.index_select(0, rows.tokens_R)
        grad_weight_R, a_RF, grad_h_RG = grouped_backward(
            ctx.module.kind, inner_R, h_RG, grad_y_RD, ends_E, down_EDF, down_bias_ED
        )
        grads: list[Tensor | None] = [None] * 4
        if ctx.later is None:
            wanted = ctx.needs_input_grad[4:8]
            grads[1::2] = grouped_down_gradients(inner_R, a_RF, grad_y_RD, ends_E, wanted[1::2], adds_bias)
            del a_RF, grad_y_RD
            grads[::2] = grouped_up_gradients(inputs(), grad_h_RG, ends_E, wanted[::2])
            grads = ctx.parts.add(grads)
        else:
            del grad_y_RD
            ctx.later.leave(partial(_left_gradients, inputs, inner_R, a_RF, grad_h_RG, grad_y_TD, ctx.rows, adds_bias))
            del a_RF
        grad_x_RD = _grouped_mm(grad_h_RG, up_EGD, offs=ends_E)
        del grad_h_RG
        if grad_weight_R is None:
            grad_weight_R = (x_TD.index_select(0, rows.tokens_R).mul_(grad_x_RD)).sum(1)
            grad_x_RD.mul_(weight_R[:, None])
        grad_x_TD = _sum_per_token(grad_x_RD, rows, ctx.shape_TK[0])
        del grad_x_RD
        new = torch.empty if ctx.module.has_all_experts else torch.zeros
        grad_weights_TK = new(ctx.shape_TK, dtype=torch.float32, device=x_TD.device)
        grad_weights_TK.view(-1).index_copy_(0, rows.order_R, grad_weight_R.float())
        return None, grad_x_TD, None, grad_weights_TK, *grads, None, None, None


def _left_gradients(
    inputs: Callable[[], Tensor],
    weight_R: Tensor | None,
    a_RF: Tensor,
    grad_h_RG: Tensor,
    grad_y_TD: Tensor,
    rows: SortedRows,
    adds_down_bias: bool,
    leaves: Leaves,
) -> list[Tensor | None]:
    """The weight gradients that a backward left. Rows are gathered again: kept until now they would be top-k times as
    large as the tokens."""
    ends_E = rows.ends_E.to(torch.int32)
    wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
    grads: list[Tensor | None] = [None] * 4
    grads[1::2] = grouped_down_gradients(
        weight_R, a_RF, grad_y_TD.index_select(0, rows.tokens_R), ends_E, wanted[1::2], adds_down_bias
    )
    grads[::2] = grouped_up_gradients(inputs(), grad_h_RG, ends_E, wanted[::2])
    return grads
