"""Weight gradients of experts, apart from the rest of backward: left for later, or of one layer's tokens in parts.

Products of few rows with a large result cost as much as the result's memory, so rows of several parts are brought
together: each expert's gradient is one product over the rows of all parts, not a sum of one product for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.expert_blocks import (
    ROWS_PER_PRODUCT,
    Bundle,
    ExpertGrads,
    ExpertLeft,
    as_compute,
    bundles,
    expert_weight_gradients,
    grad_h_workspace,
    product_spans,
    rows_together,
)
from moesaic.model.expert_memory import WORKSPACE
from moesaic.model.expert_rows import SortedRows, Span
from moesaic.model.expert_workers import run_experts

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class LeftRows:
    """The rows of one backward that left its weight gradients, in the order of their experts. Tokens in the storage
    type, weights and `left` in the compute type."""

    sorted: SortedRows
    left: ExpertLeft
    x_TD: Tensor
    weights_R: Tensor
    grad_y_TD: Tensor


class PartGradients:
    """What `count` parts of one layer's tokens leave for the gradients of the same weights. The part whose backward
    runs last hands them on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._begin()

    def _begin(self) -> None:
        self._parts: list[LeftRows] = []
        self._sums: Gradients | None = None
        self._done = 0

    def leave(self, part: LeftRows) -> list[LeftRows]:
        """Take what a part left; returns what all have if it is the last one, else nothing."""
        self._parts.append(part)
        if len(self._parts) < self.count:
            return []
        parts = self._parts
        self._begin()
        return parts

    def add(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Take a part's whole gradients; returns the sums if it is the last part, else None for each."""
        self._done += 1
        if self._sums is None:
            self._sums = list(gradients)
        else:
            for total, part in zip(self._sums, gradients, strict=True):
                if total is not None and part is not None:
                    total.add_(part)
        sums = self._sums
        if self._done < self.count:
            return [None] * len(sums)
        self._begin()
        return sums


def add_left(
    parts: Sequence[LeftRows], filled: Sequence[Tensor | None], weights_on_input: bool, accumulate: bool
) -> set[int]:
    """The gradients of up, down and their biases from the rows of all `parts`, written to `filled` (None: not wanted)
    or, with `accumulate`, added to it. Returns the experts that have rows; others are not touched."""
    experts = [
        [span for span in spans if span[2] > span[1]] for spans in zip(*(p.sorted.spans for p in parts), strict=True)
    ]
    ends = [0, *itertools.accumulate(sum(end - start for _, start, end in spans) for spans in experts)]
    dtype = parts[0].weights_R.dtype

    grads = ExpertGrads.of(*filled)

    def run(busy: list[Span], _: Tensor) -> None:
        for bundle, pieces in _products(parts, busy):
            left, x_nD, weight_n, grad_y_nD = _together(pieces, dtype)
            expert_weight_gradients(
                grads,
                bundle,
                left,
                x_nD.mul_(weight_n[:, None]) if weights_on_input else x_nD,
                None if weights_on_input else weight_n,
                grad_y_nD,
                accumulate or bundle.again,
            )

    busy = [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(ends)) if b > a]
    run_experts(busy, run, parts[0].x_TD[:0], dtype)
    return {e for e, _, _ in busy}


_Piece = tuple[LeftRows, slice]


def _products(parts: Sequence[LeftRows], busy: list[Span]) -> Iterator[tuple[Bundle, list[_Piece]]]:
    """What is computed together of these experts. Of one part that is what backward itself would have, of several the
    rows of one expert, as long as they are not too many for one product."""
    if len(parts) == 1:
        for bundle in bundles(busy, rows_together(parts[0].x_TD, parts[0].left.a_nF.shape[1])):
            yield bundle, [(parts[0], bundle.rows)]
        return
    for e, _first, _last in busy:
        products: list[list[_Piece]] = []
        room = 0
        for part in parts:
            _, start, end = part.sorted.spans[e]
            for a, b in product_spans(end - start):
                if b - a > room:
                    products.append([])
                    room = ROWS_PER_PRODUCT
                products[-1].append((part, slice(start + a, start + b)))
                room -= b - a
        for number, pieces in enumerate(products):
            rows = sum(piece.stop - piece.start for _, piece in pieces)
            yield Bundle(slice(0, rows), [e], [rows], again=number > 0), pieces


def _together(pieces: list[_Piece], dtype: torch.dtype) -> tuple[ExpertLeft, Tensor, Tensor, Tensor]:
    """Of these rows what `expert_weight_gradients` needs: what was left, inputs, weights, gradients of outputs. Inputs
    and gradients are in the workspace; so is the rest where there are several pieces."""

    def gathered(name: str, source: Callable[[LeftRows], Tensor]) -> Tensor:
        like = source(pieces[0][0])
        out = WORKSPACE.get(name, rows, like.shape[1], like, like.dtype)
        for (part, piece), (a, b) in zip(pieces, places, strict=True):
            torch.index_select(source(part), 0, part.sorted.tokens_R[piece], out=out[a:b])
        return as_compute(name + "_compute", out, dtype)

    def copied(source: Callable[[LeftRows], Tensor], out: Tensor) -> Tensor:
        for (part, piece), (a, b) in zip(pieces, places, strict=True):
            out[a:b].copy_(source(part)[piece])
        return out

    ends = [0, *itertools.accumulate(piece.stop - piece.start for _, piece in pieces)]
    places, rows = list(itertools.pairwise(ends)), ends[-1]
    like, piece = pieces[0]
    left, weight_n = ExpertLeft(like.left.a_nF[piece], like.left.grad_h_nG[piece]), like.weights_R[piece]
    if len(pieces) > 1:
        width, up_width = left.a_nF.shape[1], left.grad_h_nG.shape[1]
        left = ExpertLeft(
            copied(lambda p: p.left.a_nF, WORKSPACE.get("a", rows, width, like.x_TD, dtype)),
            copied(lambda p: p.left.grad_h_nG, grad_h_workspace(rows, width, up_width, left.a_nF)),
        )
        weight_n = copied(lambda p: p.weights_R, WORKSPACE.get("weight", 1, rows, like.x_TD, dtype)[0])
    x_nD = gathered("x", lambda p: p.x_TD)
    return left, x_nD, weight_n, gathered("grad_y", lambda p: p.grad_y_TD)
