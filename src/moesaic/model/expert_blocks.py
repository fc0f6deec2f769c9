"""One expert over its rows: the arithmetic that every expert back-end and dispatcher shares.

Letters: n rows of one expert, D hidden, F expert width, G = 2F (gated) or F. Router weights are applied before the down
projection, w · (a Wᵀ) = (w · a) Wᵀ, so the expert's output is not needed for the weight's gradient and need not be
kept; only the pre-activations h are. Rows are walked in pieces whose temporaries stay in cache, and temporaries live in
a workspace that is reused, because fresh memory costs a CPU more than the arithmetic on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.activations import activate, activate_backward
from moesaic.model.expert_memory import WORKSPACE
from moesaic.spec.model import Activation

ROWS_PER_PRODUCT = 2048
"""Experts with more rows are computed in several products, which bounds the workspace under skewed routing."""
BYTES_PER_ELEMENTWISE_BLOCK = 256 * 1024
"""Element-wise work walks rows in blocks of about this many bytes per operand: a few of them fit in an L2 cache."""


@dataclass(frozen=True)
class ExpertKind:
    """What an expert computes, apart from its weights."""

    activation: Activation
    gated: bool


@dataclass(frozen=True)
class ExpertWeights:
    """Views of one expert's weights: up_GD (gate rows, then up rows), down_DF, and biases or None."""

    up_GD: Tensor
    down_DF: Tensor
    up_bias_G: Tensor | None = None
    down_bias_D: Tensor | None = None


@dataclass(frozen=True)
class ExpertGrads:
    """Where one expert's weight gradients go; the same shapes as `ExpertWeights`, None where not wanted."""

    up_GD: Tensor | None
    down_DF: Tensor | None
    up_bias_G: Tensor | None = None
    down_bias_D: Tensor | None = None


@dataclass(frozen=True)
class ExpertLeft:
    """What `expert_weight_gradients` needs of a backward that left them: activations a_nF times their router weights,
    and the gradient of pre-activations, both in the compute type."""

    a_nF: Tensor
    grad_h_nG: Tensor


def product_spans(rows: int) -> list[tuple[int, int]]:
    """Split `rows` evenly into spans of at most ROWS_PER_PRODUCT."""
    pieces = max(1, math.ceil(rows / ROWS_PER_PRODUCT))
    edges = [rows * i // pieces for i in range(pieces + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _in_blocks(width: int, itemsize: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk the rows of equally long tensors together, in blocks that stay in cache."""
    step = max(16, BYTES_PER_ELEMENTWISE_BLOCK // (width * itemsize))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


def as_compute(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in the compute type: itself, or a converted copy in the workspace."""
    if tensor.dtype == dtype:
        return tensor
    copy = WORKSPACE.get(name, tensor.shape[0], tensor.shape[1], tensor, dtype)
    return copy.copy_(tensor)


def gather_rows(name: str, source_TD: Tensor, tokens_n: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `tokens_n` of `source_TD` in the compute type, in the workspace."""
    rows, width = tokens_n.shape[0], source_TD.shape[1]
    out = WORKSPACE.get(name, rows, width, source_TD, source_TD.dtype)
    torch.index_select(source_TD, 0, tokens_n, out=out)
    return as_compute(name + "_compute", out, dtype)


def _product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = a b, or out += a b, rounding to `out`'s type once."""
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
        return
    wide = WORKSPACE.get("product", a.shape[0], b.shape[1], a, a.dtype)
    torch.mm(a, b, out=wide)
    if accumulate:
        out.add_(wide)
    else:
        out.copy_(wide)


def expert_forward(
    kind: ExpertKind, weights: ExpertWeights, x_nD: Tensor, weight_n: Tensor | None, keep_h_nG: Tensor | None
) -> Tensor:
    """Rows through one expert, times their router weights.

    x_nD and the weights are in the compute type. The pre-activations are written to `keep_h_nG` in its own (storage)
    type when given. `weight_n` None means that router weights were applied to the input.
    Returns y_nD in the workspace.
    """
    rows, width = x_nD.shape[0], weights.down_DF.shape[1]
    dtype = x_nD.dtype
    up_width = weights.up_GD.shape[0]
    if keep_h_nG is not None and keep_h_nG.dtype == dtype:
        h_nG = keep_h_nG
    else:
        h_nG = WORKSPACE.get("h", rows, up_width, x_nD, dtype)
    torch.mm(x_nD, weights.up_GD.t(), out=h_nG)
    a_nF = WORKSPACE.get("a", rows, width, x_nD, dtype)
    kept_nG = h_nG if keep_h_nG is None else keep_h_nG
    weight_n1 = None if weight_n is None else weight_n[:, None]
    for h, kept, a, w in _in_blocks(
        width, dtype.itemsize, h_nG, kept_nG, a_nF, a_nF if weight_n1 is None else weight_n1
    ):
        if weights.up_bias_G is not None:
            h.add_(weights.up_bias_G)
        if kept_nG is not h_nG:
            kept.copy_(h)
            h.copy_(kept)  # backward sees the rounded value, so forward must use it too
        activate(kind.activation, kind.gated, h, a)
        if weight_n1 is not None:
            a.mul_(w)
    y_nD = WORKSPACE.get("result", rows, weights.down_DF.shape[0], x_nD, dtype)
    torch.mm(a_nF, weights.down_DF.t(), out=y_nD)
    if weights.down_bias_D is not None:
        if weight_n is None:
            y_nD.add_(weights.down_bias_D)
        else:
            y_nD.addcmul_(weight_n[:, None], weights.down_bias_D[None, :])
    return y_nD


def expert_backward(
    kind: ExpertKind,
    weights: ExpertWeights,
    grads: ExpertGrads,
    x_nD: Tensor,
    weight_n: Tensor | None,
    h_nG: Tensor,
    grad_y_nD: Tensor,
    grad_weight_n: Tensor | None,
    accumulate: bool,
    left: ExpertLeft | None = None,
) -> Tensor:
    """Backward of `expert_forward`: fills `grads` and `grad_weight_n`, returns grad_x_nD in the workspace.

    x_nD, grad_y_nD and the weights are in the compute type, h_nG in the storage type. With `accumulate` the weight
    gradients are added to what stands there. With `left` they are not computed: `left` is filled instead.
    """
    rows, width = x_nD.shape[0], weights.down_DF.shape[1]
    dtype = x_nD.dtype
    grad_a_nF = WORKSPACE.get("result", rows, width, x_nD, dtype)
    torch.mm(grad_y_nD, weights.down_DF, out=grad_a_nF)
    if left is None:
        a_nF = WORKSPACE.get("a", rows, width, x_nD, dtype)
        grad_h_nG = WORKSPACE.get("grad_h", rows, h_nG.shape[1], x_nD, dtype)
    else:
        a_nF, grad_h_nG = left.a_nF, left.grad_h_nG
    weight_n1 = a_nF if weight_n is None else weight_n[:, None]
    ones_F = WORKSPACE.get("ones", 1, width, x_nD, dtype)[0].fill_(1)
    for a, grad_a, h, grad_h, w, grad_w in _in_blocks(
        width,
        dtype.itemsize,
        a_nF,
        grad_a_nF,
        h_nG,
        grad_h_nG,
        weight_n1,
        a_nF if grad_weight_n is None else grad_weight_n,
    ):
        if h.dtype != dtype:
            h = WORKSPACE.get("h_block", h.shape[0], h.shape[1], x_nD, dtype).copy_(h)
        if weight_n is None:
            activate_backward(kind.activation, kind.gated, h, grad_a, grad_h, a)
            continue
        # grad_a is the gradient of w·a here; that of a is w times it, that of w its product with a.
        weighted = WORKSPACE.get("weighted", grad_a.shape[0], width, x_nD, dtype)
        torch.mul(grad_a, w, out=weighted)
        activate_backward(kind.activation, kind.gated, h, weighted, grad_h, a)
        if grad_weight_n is not None:
            torch.mul(grad_a, a, out=weighted)
            torch.mv(weighted, ones_F, out=grad_w)
        a.mul_(w)
    if weight_n is not None and grad_weight_n is not None and weights.down_bias_D is not None:
        grad_weight_n.add_(grad_y_nD @ weights.down_bias_D)

    if left is None:
        expert_weight_gradients(grads, ExpertLeft(a_nF, grad_h_nG), x_nD, weight_n, grad_y_nD, accumulate)
    # Where grad_a was, of which nothing is read any more.
    grad_x_nD = WORKSPACE.get("result", rows, x_nD.shape[1], x_nD, dtype)
    torch.mm(grad_h_nG, weights.up_GD, out=grad_x_nD)
    return grad_x_nD


def expert_weight_gradients(
    grads: ExpertGrads,
    left: ExpertLeft,
    x_nD: Tensor,
    weight_n: Tensor | None,
    grad_y_nD: Tensor,
    accumulate: bool,
) -> None:
    """The part of `expert_backward` that nothing waits for: fills `grads`, or adds to them with `accumulate`."""
    if grads.down_bias_D is not None:
        total_D = grad_y_nD.sum(0) if weight_n is None else weight_n @ grad_y_nD
        grads.down_bias_D.add_(total_D) if accumulate else grads.down_bias_D.copy_(total_D)
    if grads.down_DF is not None:
        _product(grad_y_nD.t(), left.a_nF, grads.down_DF, accumulate)
    if grads.up_GD is not None:
        _product(left.grad_h_nG.t(), x_nD, grads.up_GD, accumulate)
    if grads.up_bias_G is not None:
        total_G = left.grad_h_nG.sum(0)
        grads.up_bias_G.add_(total_G) if accumulate else grads.up_bias_G.copy_(total_G)
