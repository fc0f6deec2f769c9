"""Micro-batches whose activations a pipeline rank holds at once, by schedule, rank and chunk.

A rank's forward and backward passes of a schedule make a window that slides over the micro-batches; each row of a
result is one position of that window: how many micro-batches of each of the rank's chunks are held.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moesaic.spec.errors import SpecError

from .workload import SCHEDULES, Ints

_DUALPIPE = SCHEDULES.index("dualpipe")
_ZERO_BUBBLE = SCHEDULES.index("zero_bubble")


@lru_cache(maxsize=8192)
def windows(schedule: int, pp: int, chunks: int, rank: int, micro_batches: int, extra: int = 0) -> Ints:
    """Distinct rows [W, chunks] of micro-batches held by `rank` of a pipeline of `pp` ranks.

    `schedule` is a place in `SCHEDULES`; `extra` is 1 where one micro-batch's forward runs under another's backward,
    so that one forward more runs ahead of the schedule's own, else 0. No chunk holds more than `micro_batches`.

    1F1B (arXiv 2104.04473 section 2.2): pp − rank; in pairs, whose forward and backward must not need each other
    (`schedule.orders.paired`), 2·(pp − rank) − 1, as a pair's forward keeps, layer by layer, what its backward frees.
    Interleaved (section 2.2.2, Megatron-Core's warm-up): 2·(pp − rank −
    1) + (chunks − 1)·pp forwards before the first backward, one more before each; they take chunks in turn, pp
    micro-batches each, and backwards take them in reverse. Zero bubble (ZB-H1, arXiv 2401.10241 table 1): inputs wait
    for their weight gradients, so every rank holds as many as rank 0. DualPipe (DeepSeek-V3, arXiv 2412.19437 table 2):
    pp + 1 in all, over the two stages that a rank has, given here as its two chunks.

    Raises:
        SpecError: DualPipe with several virtual stages.
    """
    if schedule == _DUALPIPE:
        if chunks != 2:
            raise SpecError(
                f"DualPipe gives a rank two stages, one from each end, not {chunks}: set virtual_stages = 1."
            )
        held = np.array([[(pp + 2) // 2, (pp + 1) // 2]])
    elif chunks == 1:
        held = np.array([[2 * (pp - rank) - 1 if extra else pp if schedule == _ZERO_BUBBLE else pp - rank]])
    else:
        held = _interleaved(pp, chunks, 0 if schedule == _ZERO_BUBBLE else rank, extra)
    return np.unique(np.minimum(held, micro_batches), axis=0)


def _interleaved(pp: int, chunks: int, rank: int, extra: int) -> Ints:
    """Counts after each forward of one period of pp·chunks passes in the steady state."""
    period = pp * chunks
    ahead = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1 + extra
    started = np.arange(ahead + period) % period // pp
    finished = chunks - 1 - np.arange(period) % period // pp
    forward = np.eye(chunks, dtype=np.int64)[started].cumsum(axis=0)
    backward = np.vstack([np.zeros((1, chunks), np.int64), np.eye(chunks, dtype=np.int64)[finished].cumsum(axis=0)])
    return forward[ahead - 1 : ahead - 1 + period] - backward[:period]
