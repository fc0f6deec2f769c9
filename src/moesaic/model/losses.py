"""Losses as sums over tokens, divided once by the number of trained tokens of the whole step.

Because every term of a micro-batch is weighted by its share of the step's trained tokens, micro-batches and ranks just
add up: a rank's loss is what its own tokens contribute. How rows are put into micro-batches changes none of them but
the two that are defined over a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.mesh.collectives import all_reduce
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.kernels import compute_dtype
from moesaic.model.router import Router, Routing
from moesaic.model.sequences import Sequences

IGNORED = -100
"""The label of a token that is not trained."""

LOGIT_BYTES = 128 * 2**20
"""The cross entropy holds logits for as many tokens at once as fit in this many bytes."""


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the terms beside the cross entropy; zero means the term is not computed.

    Auxiliary terms are means over the mixture layers of a per-layer loss that is 1 at perfect balance. A coefficient c
    of Hugging Face's pooled loss at top-k k is c · k here; a coefficient of Megatron-LM or DeepSpeed, which add up
    layers, is c · (number of mixture layers) here.
    """

    z: float = 0.0
    batch_aux: float = 0.0
    sequence_aux: float = 0.0
    global_aux: float = 0.0
    mtp: float = 0.0


NO_WEIGHTS = LossWeights()
"""Cross entropy alone."""


@dataclass
class LossParts:
    """Loss of one micro-batch, this rank's part.

    `total`: the scalar to call backward on, already divided by the step's trained tokens.
    `cross_entropy_sum`: nats summed over this micro-batch's `tokens` trained tokens, detached.
    `parts`: each auxiliary term without its coefficient, times this micro-batch's share of the step, detached: summed
    over the micro-batches of a step, 1 is balance for the auxiliary losses.
    """

    total: Tensor
    cross_entropy_sum: Tensor
    tokens: int
    parts: dict[str, Tensor] = field(default_factory=dict)


class _CrossEntropy(torch.autograd.Function):
    """Sum of −log softmax(x Wᵀ + b)[label], with gradients computed together with the loss.

    Logits exist for one chunk of tokens at a time and are computed once: the chunk that gives the loss gives its
    gradients at once, so nothing of size [T, V] is kept. Gradients are made for `scale` times the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        scale: float,
        divisor: float,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        trained = labels_T != IGNORED
        kept_N = None if bool(trained.all()) else trained.nonzero().flatten()
        rows_ND = x_TD if kept_N is None else x_TD.index_select(0, kept_N)
        labels_N = labels_T if kept_N is None else labels_T.index_select(0, kept_N)
        product = compute_dtype(weight_VD)
        summed = torch.promote_types(product, torch.float32)
        weight = weight_VD.to(product)
        loss = torch.zeros((), dtype=summed, device=x_TD.device)
        grad_x_ND = torch.empty_like(rows_ND) if with_grad else None
        # Products of another type come in tensors of their own, of which the first is the sum's beginning.
        begun = (0, 0) if len(labels_N) and product != summed else weight.shape
        make_weight = torch.empty if len(labels_N) else torch.zeros
        grad_weight = make_weight(begun, dtype=summed, device=x_TD.device) if with_grad else None
        grad_bias = torch.zeros(weight.shape[0], dtype=summed, device=x_TD.device) if with_grad else None
        chunk = max(16, LOGIT_BYTES // (weight.shape[0] * summed.itemsize))
        buffer = x_TD.new_empty(min(chunk, rows_ND.shape[0]), weight.shape[0], dtype=product)
        for start in range(0, rows_ND.shape[0], chunk):
            x, labels = rows_ND[start : start + chunk].to(product), labels_N[start : start + chunk, None]
            logits = _logits(x, weight, bias_V, buffer)
            if divisor != 1.0:
                logits.div_(divisor)
            torch.ops.aten._log_softmax.out(logits, -1, False, out=logits)
            picked = logits.gather(1, labels)
            loss -= picked.sum()
            if grad_x_ND is None or grad_weight is None or grad_bias is None:
                continue
            grad_logits = logits.exp_().scatter_(1, labels, picked.expm1())
            if bias_V is not None:
                grad_bias.add_(grad_logits.sum(0), alpha=scale / divisor)
            grad_logits = grad_logits.to(product)
            grad_x_ND[start : start + chunk] = (grad_logits @ weight).mul_(scale / divisor)
            keep = 1 if start else 0
            if product == summed:
                torch.addmm(grad_weight, grad_logits.t(), x, beta=keep, alpha=scale / divisor, out=grad_weight)
            else:
                part = (grad_logits.t() @ x).to(summed).mul_(scale / divisor)
                grad_weight = part if start == 0 else grad_weight.add_(part)
                del part
            del logits, grad_logits  # before the next ones are made
        if grad_x_ND is not None and grad_weight is not None and grad_bias is not None:
            if kept_N is not None:
                grad_x_ND = torch.zeros_like(x_TD).index_copy_(0, kept_N, grad_x_ND)
            grad_weight = grad_weight.to(weight_VD.dtype)
            ctx.save_for_backward(grad_x_ND, grad_weight, None if bias_V is None else grad_bias.to(bias_V.dtype))
        scaled = loss * scale
        ctx.mark_non_differentiable(loss)
        return scaled, loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if grads[0].device.type != "cpu" or float(grads[0]) != 1.0:
            gradients = [None if g is None else g * grads[0].to(g.dtype) for g in gradients]
        wanted = [g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
        return *wanted, None, None, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """x Wᵀ + b in at least fp32, written into `buffer` where that is of this type: fresh memory costs page faults."""
    out = torch.mm(x, weight.t(), out=buffer[: x.shape[0]])
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return out if bias is None else out.add_(bias)


def cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    logits_divisor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of logits (x Wᵀ + b) / `logits_divisor` against labels, in nats, logits in fp32.

    Labels of −100 are skipped. Returns `scale` times the sum over tokens, differentiable, and the sum itself, detached.
    Never holds more than `LOGIT_BYTES` of logits (16 tokens' at least).
    """
    with_grad = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return _CrossEntropy.apply(  # type: ignore[no-any-return]
        x_TD, weight_VD, bias_V, labels_T, scale, logits_divisor, with_grad
    )


def balance_loss(probabilities_E: Tensor, counts_E: Tensor) -> Tensor:
    """E · Σ f_e P_e with f the share of choices and P the mean probability: 1 when either is uniform.

    Switch Transformers (arXiv 2101.03961, equation 4), with f divided by top-k as in Megatron-LM and DeepSpeed.
    Leading dimensions (one loss per sequence) are kept; without any choice the loss is 0.
    """
    experts = probabilities_E.shape[-1]
    share = counts_E.to(probabilities_E.dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    return experts * (share * probabilities_E).sum(-1)


def routing_losses(
    routers: Sequence[tuple[Router, Routing]],
    weights: LossWeights,
    trained_B: Tensor,
    step_tokens: int,
    sequences: Sequences,
    mesh: Mesh,
    layers: int | None = None,
) -> dict[str, Tensor]:
    """The router terms of a micro-batch: mean over layers, without coefficients, weighted by share of the step.

    `trained_B` [B]: trained tokens per row, over whole rows. `layers`: mixture layers of the model, where some are on
    other pipeline stages. Terms: `z`, the mean squared log-sum-exp of logits (ST-MoE, arXiv 2202.08906, equation 5),
    and `sequence_aux` (DeepSeek-V3, arXiv 2412.19437, equation 17), both over each row and weighted by the row's share,
    so that they do not depend on how rows are put into micro-batches; `global_aux` (arXiv 2501.11873), weighted in the
    same way, whose shares of choices are those of the step so far over all ranks, so that it depends only on how many
    rows there are between two looks at them; and `batch_aux` over the micro-batch, which by its definition does depend.

    Each rank has its own tokens' part of these terms: shares of choices are summed over the ranks that hold other parts
    of the rows, and what is left is a sum over tokens. Each layer has its own loss. One loss over the pooled choices of
    all layers, as in Hugging Face's code, calls layers balanced that have each collapsed onto a different expert.
    """
    share = trained_B.sum() / step_tokens
    rows = trained_B.shape[0]
    balancing = bool(weights.batch_aux or weights.sequence_aux or weights.global_aux)
    if not routers or not (weights.z or balancing):
        return {}
    own_real = sequences.own_real
    real_BS1 = torch.ones_like(routers[0][1].ids_TK[:, :1]) if own_real is None else own_real.long()
    real_BS1 = real_BS1.reshape(rows, -1, 1)
    if sequences.real is None:
        real_B1 = torch.full((rows, 1), sequences.length, device=real_BS1.device)
    else:
        real_B1 = sequences.real.sum(1, keepdim=True)
    counts = _choices(routers, real_BS1, mesh.sequence) if balancing else []
    step_counts = _step_counts(routers, mesh.stage) if weights.global_aux else []
    terms: dict[str, list[Tensor]] = {}
    for number, (router, routing) in enumerate(routers):
        if weights.z:
            squares_BS1 = routing.logits_TE.logsumexp(-1).square().view_as(real_BS1)
            mean_B = ((squares_BS1 * real_BS1).sum(1) / real_B1.clamp(min=1)).squeeze(1)
            terms.setdefault("z", []).append((mean_B * trained_B).sum() / step_tokens)
        if not balancing:
            continue
        probabilities = router.probabilities(routing).view(rows, -1, router.spec.experts)
        sum_BE, counts_BE = (probabilities * real_BS1).sum(1), counts[number]
        mean_BE, counts_E = sum_BE / real_B1.clamp(min=1), counts_BE.sum(0)
        mean_E = sum_BE.sum(0) / real_B1.sum().clamp(min=1)
        if weights.batch_aux:
            terms.setdefault("batch_aux", []).append(balance_loss(mean_E, counts_E) * share)
        if weights.sequence_aux:
            losses_B = balance_loss(mean_BE, counts_BE)
            terms.setdefault("sequence_aux", []).append((losses_B * trained_B).sum() / step_tokens)
        if weights.global_aux:
            so_far = step_counts[number] if router.training else counts_E
            losses_B = balance_loss(mean_BE, so_far)
            terms.setdefault("global_aux", []).append((losses_B * trained_B).sum() / step_tokens)
    if layers is None or layers == len(routers):
        return {name: torch.stack(each).mean() for name, each in terms.items()}
    return {name: torch.stack(each).sum() / layers for name, each in terms.items()}


def _choices(routers: Sequence[tuple[Router, Routing]], real_BS1: Tensor, group: Group) -> list[Tensor]:
    """Choices per whole row and expert, [B, E] for each layer; one sum over the ranks that share the rows."""
    rows = real_BS1.shape[0]
    found = []
    for router, routing in routers:
        ids_BSK = routing.ids_TK.view(rows, -1, router.spec.top_k)
        counts_BE = ids_BSK.new_zeros(rows, router.spec.experts)
        found.append(counts_BE.scatter_add_(1, ids_BSK.flatten(1), real_BS1.expand_as(ids_BSK).flatten(1)))
    return _sum_together(found, group)


def _step_counts(routers: Sequence[tuple[Router, Routing]], group: Group) -> list[Tensor]:
    """Choices of the step so far over all ranks, [E] for each layer."""
    return _sum_together([router.step_counts for router, _ in routers], group)


def _sum_together(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Each tensor summed over the group, by one collective."""
    if group.size == 1:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = all_reduce(flat, group).split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
