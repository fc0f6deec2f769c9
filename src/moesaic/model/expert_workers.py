"""Whole experts on worker threads, each with one intra-op thread.

Splitting every product over all cores costs a barrier per product and shares each core's cache; giving a core whole
experts does neither. Threads add into accumulators of their own, which are summed in order at the end, and the share of
each thread follows from the row counts alone: the result depends on the number of threads, never on their timing.
"""

from __future__ import annotations

import functools
import heapq
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from moesaic.model.expert_blocks import ROWS_PER_PRODUCT
from moesaic.model.expert_memory import WORKSPACE, Scratch
from moesaic.model.expert_rows import Span

Body = Callable[[list[Span], Tensor], None]
"""Runs some experts and adds their rows' results to an accumulator [T, D]."""

MAX_IMBALANCE = 1.2
"""Above this ratio of the busiest thread's rows to the mean, splitting every product over all cores is faster."""
NEARLY_AS_EVEN = 0.05
"""A share of the mean rows: about what computing experts of few rows together is worth."""


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(workers, "experts", initializer=torch.set_num_threads, initargs=(1,))
    # What a thread sets is also the default of threads started later, so it is put right once all workers have theirs.
    started = threading.Barrier(workers + 1)
    for _ in range(workers):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(workers)
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def share_out(spans: list[Span], workers: int) -> tuple[list[list[Span]], float]:
    """Give each worker experts that follow one another, whose rows can be computed together. Where that is less even by
    more than NEARLY_AS_EVEN, or too uneven for workers, give each expert, largest first, to the worker with the fewest
    rows.

    Returns the workers' experts in ascending order, and the busiest worker's rows over the mean.
    """
    together, scattered = _neighbours(spans, workers), _largest_first(spans, workers)
    return together if together[1] <= min(scattered[1] + NEARLY_AS_EVEN, MAX_IMBALANCE) else scattered


def _neighbours(spans: list[Span], workers: int) -> tuple[list[list[Span]], float]:
    total = sum(end - start for _, start, end in spans)
    shares: list[list[Span]] = [[] for _ in range(workers)]
    rows, before = [0] * workers, 0
    for span in spans:
        count = span[2] - span[1]
        w = min(workers - 1, (2 * before + count) * workers // (2 * max(total, 1)))  # where the expert's middle lies
        shares[w].append(span)
        rows[w] += count
        before += count
    return shares, max(rows) * workers / max(total, 1)


def _largest_first(spans: list[Span], workers: int) -> tuple[list[list[Span]], float]:
    heap = [(0, w) for w in range(workers)]
    shares: list[list[Span]] = [[] for _ in range(workers)]
    for span in sorted(spans, key=lambda s: (s[1] - s[2], s[0])):
        rows, w = heapq.heappop(heap)
        shares[w].append(span)
        heapq.heappush(heap, (rows + span[2] - span[1], w))
    total = sum(end - start for _, start, end in spans)
    return [sorted(share) for share in shares], max(heap)[0] * workers / max(total, 1)


def run_experts(spans: list[Span], body: Body, like_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `body` over all experts and return the sum of what it adds, [T, D] in `dtype`.

    On a CPU with several intra-op threads whole experts go to worker threads, unless routing is too uneven for that or
    experts are large enough to fill all cores by themselves.
    """
    workers = torch.get_num_threads() if like_TD.device.type == "cpu" else 1
    total_TD = torch.zeros(like_TD.shape, dtype=dtype, device=like_TD.device)
    if workers > 1 and len(spans) >= workers and max(end - start for _, start, end in spans) <= ROWS_PER_PRODUCT:
        shares, imbalance = share_out(spans, workers)
        if imbalance <= MAX_IMBALANCE:
            parts = [total_TD, *(torch.zeros_like(total_TD) for _ in range(workers - 1))]
            mode = torch.is_inference_mode_enabled()
            jobs = [
                _pool(workers).submit(_quietly, mode, scratch, body, share, part)
                for scratch, share, part in zip(WORKSPACE.lend(workers), shares, parts, strict=True)
            ]
            wait(jobs)  # also when one fails: nobody may still write when the caller gets the error
            for job in jobs:
                job.result()
            for part in parts[1:]:
                total_TD.add_(part)
            return total_TD
    body(spans, total_TD)
    return total_TD


def _quietly(inference: bool, scratch: Scratch, body: Body, spans: list[Span], out_TD: Tensor) -> None:
    # Both modes are per thread.
    with torch.inference_mode(inference), torch.no_grad(), WORKSPACE.borrowed(scratch):
        body(spans, out_TD)
