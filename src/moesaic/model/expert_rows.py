"""The choices of a rank's tokens, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moesaic.mesh.dry import expected

Span = tuple[int, int, int]
"""An expert and its rows: (expert, first row, row after the last)."""


@dataclass(frozen=True)
class SortedRows:
    """Those of the T·K choices of T tokens that are on experts here, sorted by expert.

    order_R: position of each sorted row in the flat [T·K] choices; tokens_R: the token it belongs to;
    ends_E: the row after each expert's last, on the device of the choices.
    """

    order_R: Tensor
    tokens_R: Tensor
    ends_E: Tensor

    @classmethod
    def sort(cls, ids_TK: Tensor, experts: int, all_here: bool = True) -> SortedRows:
        """Stable sort, so rows of an expert keep the order of their tokens.

        Unless `all_here`, ids outside 0 … E − 1 are choices of experts elsewhere and left out, for which their number
        is awaited; otherwise the device is not waited for.
        """
        if all_here:
            sorted_R, order_R = ids_TK.reshape(-1).sort(stable=True)
        else:
            flat = ids_TK.reshape(-1)
            if (counts := expected()) is None:
                here_R = ((flat >= 0) & (flat < experts)).nonzero()[:, 0]
            else:
                here_R = flat.new_empty(counts.rows(len(ids_TK)))
            sorted_R, order_R = flat.index_select(0, here_R).sort(stable=True)
            order_R = here_R.index_select(0, order_R)
        ends_E = torch.searchsorted(sorted_R, torch.arange(experts, device=ids_TK.device), right=True)
        return cls(order_R, order_R // ids_TK.shape[1], ends_E)

    @cached_property
    def spans(self) -> list[Span]:
        """Every expert's rows, as Python numbers (waits for the device)."""
        ends = self.ends_E.tolist()
        return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]

    @property
    def busy(self) -> list[Span]:
        """The experts that have rows."""
        return [span for span in self.spans if span[2] > span[1]]
