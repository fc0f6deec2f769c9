"""Some experts over their rows: the arithmetic that every expert back-end and dispatcher shares.

Letters: n rows of some experts, one expert's after the other's, D hidden, F expert width, G = 2F (gated) or F. Router
weights are applied before the down projection, w · (a Wᵀ) = (w · a) Wᵀ, so the expert's output is not needed for the
weight's gradient and need not be kept; only the pre-activations h are. Products are one for each expert; what is
element-wise, and the gathering and adding up of rows, is done for experts of few rows together, since each call costs
as much as some rows. Rows are walked in pieces whose temporaries stay in cache, and temporaries live in a workspace
that is reused, because fresh memory costs a CPU more than the arithmetic on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.activations import activate, activate_backward
from moesaic.model.expert_memory import ELEMENTS_BETWEEN_ROWS, POOL, WORKSPACE
from moesaic.model.expert_rows import Span
from moesaic.model.kernels import compute_dtype
from moesaic.spec.model import Activation

ROWS_PER_PRODUCT = 2048
"""Experts with more rows are computed in several products, which bounds the workspace under skewed routing."""
BYTES_PER_ELEMENTWISE_BLOCK = 256 * 1024
"""Element-wise work walks rows in blocks of about this many bytes per operand: a few of them fit in an L2 cache."""
BYTES_PER_BUNDLE = 2048 * 1024
"""Experts are computed together up to about this many bytes of activations: a few times that fit in an L3 cache."""


@dataclass(frozen=True)
class ExpertKind:
    """What an expert computes, apart from its weights."""

    activation: Activation
    gated: bool


PerExpert = tuple[Tensor, ...]
"""A tensor of each expert, by its number."""


@dataclass(frozen=True)
class ExpertWeights:
    """All experts' weights, one view each, in the storage type: up_GD (gate rows, then up rows), down_DF; biases or
    None."""

    up_GD: PerExpert
    down_DF: PerExpert
    up_bias_G: PerExpert | None = None
    down_bias_D: PerExpert | None = None

    @classmethod
    def of(
        cls, up_EGD: Tensor, down_EDF: Tensor, up_bias_EG: Tensor | None, down_bias_ED: Tensor | None
    ) -> ExpertWeights:
        """Of stacked weights."""
        return cls(up_EGD.unbind(0), down_EDF.unbind(0), _unbind(up_bias_EG), _unbind(down_bias_ED))


@dataclass(frozen=True)
class ExpertGrads:
    """Where all experts' weight gradients go; the same shapes as `ExpertWeights`, None where not wanted."""

    up_GD: PerExpert | None
    down_DF: PerExpert | None
    up_bias_G: PerExpert | None = None
    down_bias_D: PerExpert | None = None

    @classmethod
    def of(
        cls, up_EGD: Tensor | None, down_EDF: Tensor | None, up_bias_EG: Tensor | None, down_bias_ED: Tensor | None
    ) -> ExpertGrads:
        """Into stacked gradients."""
        return cls(_unbind(up_EGD), _unbind(down_EDF), _unbind(up_bias_EG), _unbind(down_bias_ED))


def _unbind(stacked: Tensor | None) -> PerExpert | None:
    return None if stacked is None else stacked.unbind(0)


@dataclass(frozen=True)
class Bundle:
    """Rows that are computed together: one expert's, or those of several that follow one another."""

    rows: slice
    experts: list[int]
    counts: list[int]
    """Of each expert, how many of the rows."""
    again: bool = False
    """Whether an earlier bundle had rows of the same expert."""


def bundle_rows(width: int, hidden: int, itemsize: int) -> int:
    """How many rows of several experts are computed together on a processor, at most."""
    return min(ROWS_PER_PRODUCT, max(16, BYTES_PER_BUNDLE // (max(width, hidden) * itemsize)))


def rows_together(x_TD: Tensor, width: int) -> int:
    """`bundle_rows` of these tokens in the compute type; on other devices than processors experts are alone, as adding
    rows of one token in no order would give other bits each time."""
    if x_TD.device.type != "cpu":
        return 0
    return bundle_rows(width, x_TD.shape[1], compute_dtype(x_TD).itemsize)


def bundles(spans: Sequence[Span], most: int) -> Iterator[Bundle]:
    """Experts in the order of `spans`, which have rows: those of few rows together, up to `most`, those of many in
    several bundles of at most ROWS_PER_PRODUCT."""
    start = end = 0
    experts: list[int] = []
    counts: list[int] = []
    for e, a, b in spans:
        if experts and (a != end or b - start > most):
            yield Bundle(slice(start, end), experts, counts)
            experts, counts = [], []
        if not experts:
            start = a
        if b - a > ROWS_PER_PRODUCT:
            for i, (x, y) in enumerate(product_spans(b - a)):
                yield Bundle(slice(a + x, a + y), [e], [y - x], again=i > 0)
            continue
        experts.append(e)
        counts.append(b - a)
        end = b
    if experts:
        yield Bundle(slice(start, end), experts, counts)


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


def grad_h_workspace(rows: int, width: int, up_width: int, like: Tensor) -> Tensor:
    """Where gradients of pre-activations go, [rows, up_width] in `like`'s type, which is the compute type.

    Of gated experts, whose halves are walked row by row anyway, rows lie apart.
    """
    get = WORKSPACE.get_apart if up_width > width else WORKSPACE.get
    return get("grad_h", rows, up_width, like, like.dtype)


def new_left(rows: int, width: int, up_width: int, like: Tensor) -> ExpertLeft:
    """Memory for what a backward leaves, laid out as the workspace is, so that products have the same bits."""
    apart = ELEMENTS_BETWEEN_ROWS if up_width > width else 0
    return ExpertLeft(POOL.take((rows, width), like), POOL.take((rows, up_width + apart), like)[:, :up_width])


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


def experts_forward(
    kind: ExpertKind,
    weights: ExpertWeights,
    bundle: Bundle,
    x_nD: Tensor,
    weight_n: Tensor | None,
    keep_h_nG: Tensor | None,
) -> Tensor:
    """Rows through a bundle's experts, times their router weights.

    x_nD is in the compute type. The pre-activations are written to `keep_h_nG` in its own (storage) type when given.
    `weight_n` None means that router weights were applied to the input. Returns y_nD in the workspace.
    """
    experts, counts = bundle.experts, bundle.counts
    rows, (hidden, width) = x_nD.shape[0], weights.down_DF[0].shape
    dtype = x_nD.dtype
    up_width = weights.up_GD[0].shape[0]
    if keep_h_nG is not None and keep_h_nG.dtype == dtype:
        h_nG = keep_h_nG
    else:
        h_nG = WORKSPACE.get("h", rows, up_width, x_nD, dtype)
    for e, x, h in zip(experts, x_nD.split(counts), h_nG.split(counts), strict=True):
        torch.mm(x, as_compute("weight_up", weights.up_GD[e], dtype).t(), out=h)
        if weights.up_bias_G is not None:
            h.add_(weights.up_bias_G[e])
    a_nF = WORKSPACE.get("a", rows, width, x_nD, dtype)
    kept_nG = h_nG if keep_h_nG is None else keep_h_nG
    weight_n1 = None if weight_n is None else weight_n[:, None]
    for h, kept, a, w in _in_blocks(
        width, dtype.itemsize, h_nG, kept_nG, a_nF, a_nF if weight_n1 is None else weight_n1
    ):
        if kept_nG is not h_nG:
            kept.copy_(h)
            h.copy_(kept)  # backward sees the rounded value, so forward must use it too
        activate(kind.activation, kind.gated, h, a)
        if weight_n1 is not None:
            a.mul_(w)
    y_nD = WORKSPACE.get("result", rows, hidden, x_nD, dtype)
    for e, a, y in zip(experts, a_nF.split(counts), y_nD.split(counts), strict=True):
        torch.mm(a, as_compute("weight_down", weights.down_DF[e], dtype).t(), out=y)
    if weights.down_bias_D is not None:
        ones_n1 = x_nD.new_ones(rows, 1) if weight_n1 is None else weight_n1
        for e, y, w in zip(experts, y_nD.split(counts), ones_n1.split(counts), strict=True):
            y.addcmul_(w, weights.down_bias_D[e][None, :].to(dtype))
    return y_nD


def experts_backward(
    kind: ExpertKind,
    weights: ExpertWeights,
    grads: ExpertGrads,
    bundle: Bundle,
    x_nD: Tensor,
    weight_n: Tensor | None,
    h_nG: Tensor,
    grad_y_nD: Tensor,
    grad_weight_n: Tensor | None,
    accumulate: bool,
    left: ExpertLeft | None = None,
) -> Tensor:
    """Backward of `experts_forward`: fills `grads` and `grad_weight_n`, returns grad_x_nD in the workspace.

    x_nD and grad_y_nD are in the compute type, h_nG in the storage type. With `accumulate` the weight gradients are
    added to what stands there. With `left` they are not computed: `left` is filled instead.
    """
    experts, counts = bundle.experts, bundle.counts
    rows, width = x_nD.shape[0], weights.down_DF[0].shape[1]
    dtype = x_nD.dtype
    grad_a_nF = WORKSPACE.get("result", rows, width, x_nD, dtype)
    for e, grad_y, grad_a in zip(experts, grad_y_nD.split(counts), grad_a_nF.split(counts), strict=True):
        torch.mm(grad_y, as_compute("weight_down", weights.down_DF[e], dtype), out=grad_a)
    if left is None:
        a_nF = WORKSPACE.get("a", rows, width, x_nD, dtype)
        grad_h_nG = grad_h_workspace(rows, width, h_nG.shape[1], x_nD)
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
        for e, grad_w, grad_y in zip(experts, grad_weight_n.split(counts), grad_y_nD.split(counts), strict=True):
            grad_w.add_(grad_y @ weights.down_bias_D[e].to(dtype))
    if left is None:
        expert_weight_gradients(grads, bundle, ExpertLeft(a_nF, grad_h_nG), x_nD, weight_n, grad_y_nD, accumulate)
    # Where grad_a was, of which nothing is read any more.
    grad_x_nD = WORKSPACE.get("result", rows, x_nD.shape[1], x_nD, dtype)
    for e, grad_h, grad_x in zip(experts, grad_h_nG.split(counts), grad_x_nD.split(counts), strict=True):
        torch.mm(grad_h, as_compute("weight_up", weights.up_GD[e], dtype), out=grad_x)
    return grad_x_nD


def expert_weight_gradients(
    grads: ExpertGrads,
    bundle: Bundle,
    left: ExpertLeft,
    x_nD: Tensor,
    weight_n: Tensor | None,
    grad_y_nD: Tensor,
    accumulate: bool,
) -> None:
    """The part of `experts_backward` that nothing waits for: fills `grads`, or adds to them with `accumulate`."""
    counts = bundle.counts
    rows = zip(
        bundle.experts,
        left.a_nF.split(counts),
        left.grad_h_nG.split(counts),
        x_nD.split(counts),
        grad_y_nD.split(counts),
        (grad_y_nD if weight_n is None else weight_n).split(counts),
        strict=True,
    )
    for e, a, grad_h, x, grad_y, w in rows:
        if grads.down_bias_D is not None:
            total_D = grad_y.sum(0) if weight_n is None else w @ grad_y
            grads.down_bias_D[e].add_(total_D) if accumulate else grads.down_bias_D[e].copy_(total_D)
        if grads.down_DF is not None:
            _product(grad_y.t(), a, grads.down_DF[e], accumulate)
        if grads.up_GD is not None:
            _product(grad_h.t(), x, grads.up_GD[e], accumulate)
        if grads.up_bias_G is not None:
            total_G = grad_h.sum(0)
            grads.up_bias_G[e].add_(total_G) if accumulate else grads.up_bias_G[e].copy_(total_G)
