"""What is as long as the vocabulary: embedding, head, and the cross entropy, whole or split over tensor-parallel ranks.

Split, each rank holds ⌈V / n⌉ rows (the last fewer), and no rank ever sees a whole row of logits: maxima, sums and the
label's logit are agreed on per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.mesh import collectives
from moesaic.mesh.autograd import scatter_tokens
from moesaic.mesh.cut import Cut, Piece, new_parameter
from moesaic.mesh.group import Group
from moesaic.model.kernels import compute_dtype
from moesaic.model.linear import ALONE
from moesaic.model.losses import IGNORED, LOGIT_BYTES, cross_entropy
from moesaic.spec.model import ModelSpec


class Embedding(nn.Module):
    """A table [rows, D] looked up by integers. With `split`, this rank holds a piece of the rows."""

    def __init__(
        self, rows: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str, split: Group = ALONE
    ) -> None:
        super().__init__()
        self.split = split
        cut = Cut((rows, hidden), (Piece(0, split.size, split.rank),))
        self.weight = new_parameter(cut, dtype=dtype, device=device)
        self.first_row = cut.start(0)

    def forward(self, ids: Tensor, batch: int = 1) -> Tensor:
        """ids [...] to rows [..., D]; where the table is split, the ids [n · T] of all the group's tokens, `batch` rows
        of them, to [T, D] for this rank's."""
        if self.split.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.first_row
        here = (local >= 0) & (local < rows)
        if rows == 0:
            found = self.weight.new_zeros(len(ids), self.weight.shape[1]) + self.weight.sum()
        else:
            found = F.embedding(local.clamp(0, rows - 1), self.weight) * here[:, None].to(self.weight.dtype)
        return scatter_tokens(found, self.split, batch)


class Head(nn.Module):
    """Holds `weight` [V, D] unless it is tied to the embedding, and `bias` [V] if the model has one."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str, split: Group = ALONE
    ) -> None:
        super().__init__()
        rows = (Piece(0, split.size, split.rank),)
        self.first_row = Cut((spec.vocab,), rows).start(0)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if not spec.tied_embeddings:
            self.weight = new_parameter(Cut((spec.vocab, spec.hidden), rows), dtype=dtype, device=device)
        if spec.head_bias:
            self.bias = new_parameter(Cut((spec.vocab,), rows), dtype=dtype, device=device)


def head_loss(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    vocab: int,
    first_row: int,
    tp: Group,
    bias_V: Tensor | None,
    scale: float,
    logits_divisor: float,
) -> tuple[Tensor, Tensor]:
    """As `losses.cross_entropy` for this rank's own tokens, whether the head is split over `tp` or not.

    `weight_VD`, `bias_V`: this rank's rows, of which the first is number `first_row` of the `vocab` of all ranks.
    """
    if tp.size == 1:
        return cross_entropy(x_TD, weight_VD, labels_T, bias_V=bias_V, scale=scale, logits_divisor=logits_divisor)
    with_grad = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return _SplitCrossEntropy.apply(  # type: ignore[no-any-return]
        x_TD, weight_VD, bias_V, labels_T, vocab, first_row, tp, scale, logits_divisor, with_grad
    )


class _SplitCrossEntropy(torch.autograd.Function):
    """Sum over own tokens of −log softmax(x Wᵀ + b)[label], with gradients computed together with the loss.

    All ranks of the group work on all their tokens, a chunk at a time, each for its rows of the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        vocab: int,
        first_row: int,
        tp: Group,
        scale: float,
        divisor: float,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        own = x_TD.shape[0]
        everyone_TD = collectives.all_gather(x_TD, tp).flatten(0, 1)
        everyone_T = collectives.all_gather(labels_T, tp).flatten(0, 1)
        kept_N = (everyone_T != IGNORED).nonzero().flatten()
        rows_ND, labels_N = everyone_TD.index_select(0, kept_N), everyone_T.index_select(0, kept_N)
        mine_N = (kept_N >= own * tp.rank) & (kept_N < own * (tp.rank + 1))
        product = compute_dtype(weight_VD)
        wide = torch.promote_types(product, torch.float32)
        weight = weight_VD.to(product)
        loss = torch.zeros((), dtype=wide, device=x_TD.device)
        grad_x_ND = torch.zeros_like(rows_ND) if with_grad else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=x_TD.device) if with_grad else None
        grad_bias = torch.zeros(len(weight), dtype=wide, device=x_TD.device) if with_grad else None
        # From the most rows that any rank has: ranks agree on maxima and sums chunk by chunk.
        chunk = max(16, LOGIT_BYTES // (-(-vocab // tp.size) * wide.itemsize))
        for start in range(0, len(rows_ND), chunk):
            x, labels = rows_ND[start : start + chunk].to(product), labels_N[start : start + chunk] - first_row
            logits = torch.mm(x, weight.t()).to(wide)
            if bias_V is not None:
                logits.add_(bias_V)
            if divisor != 1.0:
                logits.div_(divisor)
            here = (labels >= 0) & (labels < len(weight))
            at = labels.clamp(0, max(0, len(weight) - 1))[:, None]
            log_softmax_of_label = _normalise(logits, at, here, tp)
            loss -= (log_softmax_of_label * mine_N[start : start + chunk]).sum()
            if grad_x_ND is None or grad_weight is None or grad_bias is None:
                continue
            grad_logits = logits.exp_()
            if len(weight):
                there = grad_logits.gather(1, at)
                corrected = torch.where(here[:, None], log_softmax_of_label[:, None].expm1(), there)
                grad_logits.scatter_(1, at, corrected)
            if bias_V is not None:
                grad_bias.add_(grad_logits.sum(0), alpha=scale / divisor)
            grad_logits = grad_logits.to(product)
            grad_x_ND[start : start + chunk] = (grad_logits @ weight).mul_(scale / divisor)
            grad_weight.add_((grad_logits.t() @ x).to(wide), alpha=scale / divisor)
            del logits, grad_logits  # before the next ones are made
        if grad_x_ND is not None and grad_weight is not None and grad_bias is not None:
            grad_everyone_TD = torch.zeros_like(everyone_TD).index_copy_(0, kept_N, grad_x_ND)
            grad_x_TD = collectives.reduce_scatter(grad_everyone_TD.unflatten(0, (tp.size, own)), tp)
            grad_bias = None if bias_V is None else grad_bias.to(bias_V.dtype)
            ctx.save_for_backward(grad_x_TD, grad_weight.to(weight_VD.dtype), grad_bias)
        scaled = loss * scale
        ctx.mark_non_differentiable(loss)
        return scaled, loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients = [None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors]
        wanted = [g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
        return *wanted, None, None, None, None, None, None, None


def _normalise(logits_NV: Tensor, at_N1: Tensor, here_N: Tensor, tp: Group) -> Tensor:
    """Turn this rank's columns of logits into log softmax over all columns, in place; returns the label's [N]."""
    columns = logits_NV.shape[1]
    largest_N = logits_NV.amax(1) if columns else logits_NV.new_full((len(logits_NV),), float("-inf"))
    collectives.all_reduce(largest_N, tp, "max")
    logits_NV.sub_(largest_N[:, None])
    label_N = logits_NV.gather(1, at_N1).squeeze(1) * here_N if columns else torch.zeros_like(largest_N)
    both = torch.stack((logits_NV.exp().sum(1), label_N))
    collectives.all_reduce(both, tp)
    log_sum_N = both[0].log()
    logits_NV.sub_(log_sum_N[:, None])
    return both[1] - log_sum_N
