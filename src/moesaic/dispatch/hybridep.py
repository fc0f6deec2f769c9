"""Tokens travel by HybridEP's kernels, and arrive as one row for each expert that they chose, sorted by expert.

HybridEP (github.com/deepseek-ai/DeepEP, branch hybrid-ep, `deep_ep.HybridEPBuffer`) sends a token to another NVLink
domain once and fans it out there. Its `dispatch_with_permute` returns a handle; with the handle it is the same linear
map again and `combine_with_unpermute` its transpose. All ranks must give it equally many tokens, so each gives as many
as the one with most has, those beyond its own without any expert.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moesaic.dispatch.library import First, LibraryDispatcher, Sent
from moesaic.dispatch.route import Arrival
from moesaic.mesh import collectives
from moesaic.mesh.device import device
from moesaic.mesh.group import Group
from moesaic.spec.errors import SpecError

SMS = 16
"""Streaming multiprocessors that the kernels take each way: the default of Megatron-Core."""
CHUNK = 128
"""Tokens that the kernels send at once. Their buffers, and the tokens of a rank, are a multiple."""
DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
"""Of the environment: what the library takes for the ranks that share NVLink instead of finding out."""

_buffers: dict[dist.ProcessGroup, Any] = {}


class HybridEPDispatcher(LibraryDispatcher):
    """Sends rows by `deep_ep.HybridEPBuffer`."""

    name = "hybridep"
    package = "deep_ep"
    attribute = "HybridEPBuffer"
    source = "the branch hybrid-ep of github.com/deepseek-ai/DeepEP"
    multiple = 16
    """What the tensor memory accelerator moves at once."""

    def __init__(self, experts_here: int, first_expert: int, ep: Group, etp: Group) -> None:
        """
        Raises:
            SpecError: the package does not import, experts are cut, or the environment names a domain that cannot be.
        """
        super().__init__(experts_here, first_expert, ep, etp)
        _check_domain(ep.size, experts_here)

    def buffer(self, hidden: int, tokens: int) -> Any:
        """The library's buffers, made once for a group; they grow when a message needs more."""
        group = self.ep.handle
        assert group is not None
        if group not in _buffers:
            _buffers[group] = self.library.HybridEPBuffer(
                group=group,
                hidden_dim=hidden,
                max_num_of_tokens_per_rank=tokens,
                num_local_experts=self.experts_here,
                use_fp8=False,
                num_sms_dispatch_api=SMS,
                num_sms_combine_api=SMS,
            )
        return _buffers[group]

    def first(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> First:
        """Agree on a number P of tokens, and begin to dispatch."""
        tokens, hidden = x_TD.shape
        padded = _padded(max(collectives.gather_counts(tokens, self.ep)))
        buffer = self.buffer(hidden, padded)
        goes_PE = torch.zeros(padded, self.experts_here * self.ep.size, dtype=torch.bool, device=x_TD.device)
        weights_PE = torch.zeros(goes_PE.shape, dtype=torch.float32, device=x_TD.device)
        goes_PE[:tokens].scatter_(1, ids_TK, True)
        weights_PE[:tokens].scatter_(1, ids_TK, weights_TK)
        x_PD = _more_rows(x_TD, padded)
        with device().beside() as sent:
            rows_RD, weights_R, _, counts_e, handle = buffer.dispatch_with_permute(
                hidden=x_PD,
                routing_map=goes_PE,
                probs=weights_PE,
                num_of_experts_per_rank=self.experts_here,
            )
            ids_R = torch.arange(self.experts_here, device=x_TD.device).repeat_interleave(
                counts_e.to(x_TD.device), output_size=len(rows_RD)
            )
        return First(
            Sent(sent, rows_RD, (x_PD, goes_PE, weights_PE)),
            ids_R[:, None],
            weights_R[:, None],
            HybridEPRoute(lambda: self.buffer(hidden, padded), handle, ids_TK, padded, len(rows_RD)),
        )


def _padded(tokens: int) -> int:
    return max(1, -(-tokens // CHUNK)) * CHUNK


def _more_rows(x_TW: Tensor, rows: int) -> Tensor:
    """x with rows of zeros below."""
    return F.pad(x_TW, (0, 0, 0, rows - len(x_TW))) if len(x_TW) < rows else x_TW.contiguous()


def _check_domain(ep: int, experts_here: int) -> None:
    """Raises SpecError for a domain from the environment with which the library would fail or hang."""
    given = os.environ.get(DOMAIN)
    if given is None:
        return
    if not given.isdecimal() or not 1 <= int(given) <= ep or ep % int(given):
        raise SpecError(
            f"the environment's {DOMAIN} is {given!r}, not a divisor of ep = {ep}: set it to how many ranks of an "
            "expert-parallel group share NVLink, or leave it out for the library to find."
        )
    if experts_here * int(given) % 4:
        raise SpecError(
            f"layout.dispatcher 'hybridep' needs a multiple of 4 experts in an NVLink domain, and {DOMAIN} · experts "
            f"of a rank = {given} · {experts_here} = {experts_here * int(given)}: use another ep or the dispatcher "
            "hierarchical."
        )


@dataclass(frozen=True)
class HybridEPRoute:
    """The way of tokens that were dispatched once, `padded` of them to `rows` rows. `handle` is the library's."""

    buffer: Callable[[], Any]
    handle: tuple[Any, ...]
    ids_TK: Tensor
    padded: int
    rows: int

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin a dispatch over the known layout."""
        x_PW = _more_rows(x_TW, self.padded)
        with device().beside() as sent:
            # Told how many rows there will be, the library need not wait for the device to know.
            rows_RW, *_ = self.buffer().dispatch_with_permute(
                hidden=x_PW, handle=self.handle, num_permuted_tokens=self.rows
            )
        return Sent(sent, rows_RW, (x_PW,))

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin a combine."""
        return self.collect(y_RW, None)[0]

    def collect(self, y_RW: Tensor, weights_RK: Tensor | None) -> tuple[Sent, Tensor | None]:
        """Begin a combine, of router weights (or their gradients) too; these are there when the rows are."""
        y_RW = y_RW.contiguous()
        weights_R = None if weights_RK is None else weights_RK.squeeze(1).contiguous()
        weights_TK = None
        with device().beside() as sent:
            y_PW, weights_PE = self.buffer().combine_with_unpermute(hidden=y_RW, probs=weights_R, handle=self.handle)
            if weights_R is not None:
                weights_TK = weights_PE[: len(self.ids_TK)].gather(1, self.ids_TK)
        sources = (y_RW, self.ids_TK) if weights_R is None else (y_RW, self.ids_TK, weights_R)
        return Sent(sent, y_PW[: len(self.ids_TK)], sources), weights_TK
