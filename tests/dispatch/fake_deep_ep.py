"""A stand-in for the package `deep_ep`, which needs NVIDIA GPUs: its signatures and checks, over `torch.distributed`.

Signatures are those of `deep_ep.Buffer` in github.com/deepseek-ai/DeepEP at 04b06f7 (deep_ep/buffer.py) and, of
`deep_ep.HybridEPBuffer`, what is common to its branch hybrid-ep at 098da2a (deep_ep/hybrid_ep_buffer.py) and to later
ones, so an unknown keyword fails; types, shapes and the use of events are checked as documentation and kernels ask.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

waits: list[str] = []
"""What was waited for."""
row_dtype = torch.bfloat16
"""Of rows. The kernels have no other; tests set fp32 to compare closely."""


@dataclass
class Config:
    num_sms: int
    scale: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert type(hidden_bytes) is int and num_ranks > 1
        return self.scale * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert type(hidden_bytes) is int and num_ranks > 1
        return 0


@dataclass
class EventOverlap:
    what: str

    def current_stream_wait(self) -> None:
        waits.append(self.what)


def check(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype, (tensor, shape, dtype)
    assert tensor.is_contiguous()


def check_events(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    assert previous_event is None or isinstance(previous_event, EventOverlap)
    if allocate_on_comm_stream:
        assert previous_event is not None and async_finish


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    all_of: list[Any] = [None] * group.size()
    dist.all_gather_object(all_of, mine, group)
    return all_of


class Buffer:
    num_sms: int = 24
    made: int = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
    ) -> None:
        assert isinstance(group, dist.ProcessGroup) and num_nvl_bytes > 0 and not low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        Buffer.made += 1

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap("captured")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 24)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 10)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        check(topk_idx, (len(topk_idx), topk_idx.shape[1]), torch.int64)
        check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert num_experts % self.group_size == 0 and bool((topk_idx < num_experts).all())
        each = num_experts // self.group_size
        goes = torch.zeros(len(topk_idx), self.group_size, dtype=torch.bool)
        goes.scatter_(1, topk_idx // each, True)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return goes.sum(0).int(), None, per_expert, goes, EventOverlap("layout")

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        tokens = len(x)
        check(x, (tokens, x.shape[1]), row_dtype)
        assert x.shape[1] * 2 % 16 == 0  # rows are copied by 16 bytes
        check_events(previous_event, async_finish, allocate_on_comm_stream)
        event = EventOverlap("dispatch" if handle is None else "cached dispatch")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            goes = handle[4]
            check(goes, (tokens, self.group_size), torch.bool)
            sent = gathered((x, goes), self.group)
            return torch.cat([x[goes[:, self.rank]] for x, goes in sent]), None, None, None, None, event
        assert topk_idx is not None and num_tokens_per_rdma_rank is None and num_tokens_per_expert is not None
        check(topk_idx, (tokens, topk_idx.shape[1]), torch.int64)
        check(topk_weights, tuple(topk_idx.shape), torch.float32)
        check(num_tokens_per_rank, (self.group_size,), torch.int32)
        check(is_token_in_rank, (tokens, self.group_size), torch.bool)
        experts = len(num_tokens_per_expert)
        check(num_tokens_per_expert, (experts,), torch.int32)
        each = experts // self.group_size
        all_sent = gathered((x, topk_idx, topk_weights, is_token_in_rank), self.group)
        here = [(part[:3], part[3][:, self.rank]) for part in all_sent]
        rows, ids, weights = (torch.cat([part[i][goes] for part, goes in here]) for i in range(3))
        ids = ids - each * self.rank
        away = (ids < 0) | (ids >= each)
        ids, weights = ids.masked_fill(away, -1), weights.masked_fill(away, 0)
        counts = [int((ids == expert).sum()) for expert in range(each)]
        source_tokens = torch.cat([goes.nonzero()[:, 0] for _, goes in here])
        source_ranks = torch.cat([torch.full((int(goes.sum()),), i) for i, (_, goes) in enumerate(here)])
        new = (source_ranks, None, None, source_tokens, is_token_in_rank, None)
        return rows, ids, weights, counts, new, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        source_ranks, _, _, source_tokens, goes, _ = handle
        check(x, (len(source_tokens), x.shape[1]), row_dtype)
        check_events(previous_event, async_finish, allocate_on_comm_stream)
        if topk_weights is not None:
            check(topk_weights, (len(x), topk_weights.shape[1]), torch.float32)
        sums = torch.zeros(len(goes), x.shape[1])
        sums_of_weights = None if topk_weights is None else torch.zeros(len(goes), topk_weights.shape[1])
        for rows, weights, ranks, tokens in gathered((x, topk_weights, source_ranks, source_tokens), self.group):
            mine = ranks == self.rank
            sums.index_add_(0, tokens[mine], rows[mine].float())
            if sums_of_weights is not None:
                sums_of_weights.index_add_(0, tokens[mine], weights[mine])
        return sums.to(x.dtype), sums_of_weights, EventOverlap("combine")


@dataclass(frozen=True)
class Template:
    """What a handle keeps of a dispatch."""

    rows: int
    experts_here: int


class HybridEPBuffer:
    made: int = 0
    calls: ClassVar[list[str]] = []

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
    ) -> None:
        assert isinstance(group, dist.ProcessGroup) and group.size() > 1 and not use_fp8
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.experts_here, self.hidden, self.sms = num_local_experts, hidden_dim, num_sms_dispatch_api
        domain = int(os.environ.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", group.size()))
        assert group.size() % domain == 0
        assert hidden_dim % 16 == 0 and num_local_experts * domain % 4 == 0  # BufferConfig::is_valid
        for sms in (num_sms_dispatch_api, num_sms_combine_api, num_sms_preprocessing_api):
            assert sms is None or (type(sms) is int and sms > 0)
        self.tokens = max(max_num_of_tokens_per_rank, 512)
        assert self.tokens % 128 == 0  # whole chunks, which the kernels are compiled for
        same(gathered((hidden_dim, self.tokens, num_local_experts), group))  # buffers are mapped by all ranks
        HybridEPBuffer.made += 1

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, tuple[Any, ...]]:
        tokens = len(hidden)
        check(hidden, (tokens, self.hidden), row_dtype)
        assert scaling_factor is None and pad_multiple is None and not use_fp8 and topk_idx is None
        assert not non_blocking or num_permuted_tokens is not None
        same(gathered(tokens, self.group))  # or ranks hang
        assert tokens % 4 == 0  # or the exchange of counts aborts
        HybridEPBuffer.calls.append("dispatch" if handle is None else "cached dispatch")
        if handle is not None:
            assert routing_map is None and probs is None and len(handle) == 9 and num_permuted_tokens is not None
            goes, template = handle[4], handle[7]
            assert handle[6] == tokens and num_permuted_tokens == template.rows
            rows, _ = self._permuted(hidden, None, goes, template.experts_here)
            return rows, None, None, torch.tensor([]), handle
        assert routing_map is not None and num_of_experts_per_rank is not None
        experts = num_of_experts_per_rank * self.group_size
        check(routing_map, (tokens, experts), torch.bool)
        check(probs, (tokens, experts), torch.float32)
        assert probs is not None and not probs[~routing_map].any()
        self.tokens = max(self.tokens, tokens)
        goes = torch.stack(gathered(routing_map, self.group))
        rows, weights = self._permuted(hidden, probs, goes, num_of_experts_per_rank)
        first = self.rank * num_of_experts_per_rank
        counts = goes[:, :, first : first + num_of_experts_per_rank].sum((0, 1)).int()
        template = Template(len(rows), num_of_experts_per_rank)
        new = (None, None, None, torch.tensor([len(rows)], dtype=torch.int32), goes, None, tokens, template, None)
        return rows, weights, None, counts, new

    def _permuted(self, hidden: Tensor, probs: Tensor | None, goes: Tensor, here: int) -> tuple[Tensor, Tensor | None]:
        """Of each local expert in turn the rows, by rank and token; their weights, one number for each."""
        sent = gathered((hidden, probs), self.group)
        rows, weights = [], []
        for expert in range(here * self.rank, here * (self.rank + 1)):
            for rank, (x, p) in enumerate(sent):
                rows.append(x[goes[rank, :, expert]])
                if p is not None:
                    weights.append(p[goes[rank, :, expert], expert])
        return torch.cat(rows), torch.cat(weights) if weights else None

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert handle is not None and len(handle) == 9 and pad_multiple is None
        goes, tokens, template = handle[4], handle[6], handle[7]
        check(hidden, (template.rows, self.hidden), row_dtype)
        if probs is not None:
            check(probs, (template.rows,), torch.float32)
        HybridEPBuffer.calls.append("combine")
        sums = torch.zeros(tokens, self.hidden)
        sums_of_probs = None if probs is None else torch.zeros(tokens, goes.shape[2])
        here = template.experts_here
        for source, (rows, weights) in enumerate(gathered((hidden, probs), self.group)):
            first = 0
            for expert in range(here * source, here * (source + 1)):
                for rank in range(self.group_size):
                    places = goes[rank, :, expert].nonzero()[:, 0]
                    part = slice(first, first := first + len(places))
                    if rank == self.rank:
                        sums.index_add_(0, places, rows[part].float())
                        if sums_of_probs is not None:
                            sums_of_probs[places, expert] = weights[part]
        return sums.to(hidden.dtype), sums_of_probs


def same(values: list[Any]) -> None:
    assert all(value == values[0] for value in values), values
