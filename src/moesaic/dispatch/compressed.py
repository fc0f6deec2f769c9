"""Rows to experts in fp8: a byte for each element and 4 more for each row, whatever the dispatcher.

What goes from tokens to experts is compressed, hidden states forward and, in backward, the gradients of combined
outputs. What comes back is sums, which keep their precision: their rounding errors would add up. Rows that stay on
their rank are rounded like those that travel, so that an expert sees the same of a token wherever the two are.

Hidden states have a scale for each token and gradients one for each channel of 128 consecutive tokens, as in
MegaScale-MoE (arXiv 2505.11432), which reports that fp8 without these does not reach the loss of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.allgather import GatherRoute
from moesaic.dispatch.fp8 import (
    dequantize_per_channel,
    dequantize_per_token,
    group_of,
    groups_of,
    quantize_per_channel,
    quantize_per_token,
)
from moesaic.dispatch.protocol import Dispatcher
from moesaic.dispatch.route import Arrival, Route, Then
from moesaic.mesh import collectives
from moesaic.mesh.group import Group


class CompressedDispatcher(Dispatcher):
    """Sends what `inner` would send, in fewer bytes. `group`: all ranks that `inner` may send to."""

    def __init__(self, inner: Dispatcher, group: Group) -> None:
        super().__init__(inner.experts_here, inner.first_expert)
        self.name = inner.name
        self.inner = inner
        self.group = group

    def route(self, ids_TK: Tensor) -> Route:
        """The way of `inner`, and how many groups of tokens each rank has."""
        scales = collectives.gather_counts(groups_of(len(ids_TK)), self.group)
        return CompressedRoute(self.inner.route(ids_TK), GatherRoute(self.group, scales))


@dataclass(frozen=True)
class CompressedRoute:
    """`route`, with hidden states and gradients as e4m3 numbers; other messages are as they are.

    `scales` brings the scales of channels to all ranks. A row may then travel over several hops, and rows of different
    groups and ranks may mix: each has in its last 4 bytes which scales are its own.
    """

    route: Route
    scales: GatherRoute

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin to send own tokens, hidden states and gradients of their outputs compressed."""
        if what == "dispatch":
            return self._start_per_token(x_TW, what)
        if what == "combine gradient":
            return self._start_per_channel(x_TW, what)
        return self.route.start_spread(x_TW, what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin to send rows back, as they are."""
        return self.route.start_collect(y_RW, what)

    def _start_per_token(self, x_TD: Tensor, what: str) -> Arrival:
        dtype = x_TD.dtype
        codes_TD, scale_T = quantize_per_token(x_TD)

        def unpack(rows_RB: Tensor) -> Tensor:
            return dequantize_per_token(rows_RB[:, :-4], _last_4(rows_RB, torch.float32), dtype)

        return Then(self.route.start_spread(_with(codes_TD, scale_T), what), unpack)

    def _start_per_channel(self, x_TD: Tensor, what: str) -> Arrival:
        dtype = x_TD.dtype
        codes_TD, scale_GD = quantize_per_channel(x_TD)
        scales = self.scales.start_spread(scale_GD, f"{what} scales")
        before = sum(self.scales.counts[: self.scales.group.rank])
        group_T = (group_of(x_TD) + before).int()

        def unpack(rows_RB: Tensor) -> Tensor:
            groups_R = _last_4(rows_RB, torch.int32).long()
            return dequantize_per_channel(rows_RB[:, :-4], scales.wait(), groups_R, dtype)

        return Then(self.route.start_spread(_with(codes_TD, group_T), what), unpack)


def _with(codes_TD: Tensor, number_T: Tensor) -> Tensor:
    """Rows of D bytes with a number of 4 bytes behind each."""
    return torch.cat((codes_TD, number_T[:, None].view(torch.uint8)), 1)


def _last_4(rows_RB: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `_with` put there."""
    return rows_RB[:, -4:].contiguous().view(dtype).squeeze(1)
