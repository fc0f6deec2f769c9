"""Tokens travel by DeepEP's kernels, once to each rank that has an expert of theirs.

DeepEP (github.com/deepseek-ai/DeepEP, `deep_ep.Buffer`) sends a token to another node once and fans it out there over
NVLink. Its `dispatch` returns a handle; with the handle `dispatch` is the same linear map again and `combine` its
transpose, so backward of one is the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moesaic.dispatch.library import First, LibraryDispatcher, Sent
from moesaic.dispatch.route import Arrival
from moesaic.spec.errors import SpecError

SMS = 20
"""Streaming multiprocessors that the kernels take: the default of `deep_ep.Buffer` and of Megatron-Core."""

_buffers: dict[dist.ProcessGroup, Any] = {}


class DeepEPDispatcher(LibraryDispatcher):
    """Sends rows by `deep_ep.Buffer`, in its high-throughput mode."""

    name = "deepep"
    package = "deep_ep"
    attribute = "Buffer"
    source = "github.com/deepseek-ai/DeepEP"
    multiple = 8
    """Rows are copied 16 bytes at a time."""

    def buffer(self, x_TD: Tensor) -> Any:
        """The library's buffers for rows like x, made once for a group.

        Raises:
            SpecError: the library has no configuration for that many ranks.
        """
        made, group, size = self.library.Buffer, self.ep.handle, self.ep.size
        assert group is not None
        made.set_num_sms(SMS)
        row_bytes = x_TD.shape[1] * x_TD.itemsize
        try:
            configs = made.get_dispatch_config(size), made.get_combine_config(size)
        except AssertionError as error:
            raise SpecError(
                f"layout.dispatcher 'deepep' has no configuration for ep {size} ({error}): use another ep or the "
                "dispatcher hierarchical."
            ) from error
        nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        have = _buffers.get(group)
        if have is None or have.num_nvl_bytes < nvlink or have.num_rdma_bytes < rdma:
            have = _buffers[group] = made(group, nvlink, rdma)
        return have

    def first(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> First:
        """Plan, and begin to dispatch by the plan."""
        buffer = self.buffer(x_TD)
        per_rank, per_node, per_expert, goes_Tn, planned = buffer.get_dispatch_layout(
            ids_TK, self.experts_here * self.ep.size, **_started(buffer)
        )
        rows_RD, ids_RK, weights_RK, _, handle, event = buffer.dispatch(
            x_TD,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_Tn,
            num_tokens_per_expert=per_expert,
            **_started(buffer) | {"previous_event": planned},
        )
        return First(
            Sent(event, rows_RD, (x_TD, ids_TK, weights_TK)), ids_RK, weights_RK, DeepEPRoute(self.buffer, handle)
        )


def _started(buffer: Any) -> dict[str, Any]:
    """Kernels begin when work queued so far is done, and run beside what is queued next."""
    # The library takes its results' memory from its own stream only if it also is told what to wait for.
    return {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}


@dataclass(frozen=True)
class DeepEPRoute:
    """The way of tokens that were dispatched once. `handle` is the library's; `buffer` finds buffers for rows."""

    buffer: Callable[[Tensor], Any]
    handle: tuple[Any, ...]

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin a dispatch over the known layout."""
        x_TW, buffer = x_TW.contiguous(), self.buffer(x_TW)
        rows_RW, _, _, _, _, event = buffer.dispatch(x_TW, handle=self.handle, **_started(buffer))
        return Sent(event, rows_RW, (x_TW,))

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin a combine."""
        return self.collect(y_RW, None)[0]

    def collect(self, y_RW: Tensor, weights_RK: Tensor | None) -> tuple[Sent, Tensor | None]:
        """Begin a combine, of router weights (or their gradients) too; these are there when the rows are."""
        y_RW, buffer = y_RW.contiguous(), self.buffer(y_RW)
        weights_RK = None if weights_RK is None else weights_RK.contiguous()
        y_TW, weights_TK, event = buffer.combine(y_RW, self.handle, topk_weights=weights_RK, **_started(buffer))
        return Sent(event, y_TW, (y_RW,) if weights_RK is None else (y_RW, weights_RK)), weights_TK
