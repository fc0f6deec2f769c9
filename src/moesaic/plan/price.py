"""Layouts priced: memory, time, and both as candidates with intervals."""

from __future__ import annotations

import numpy as np

from moesaic.cost.counts import flops_per_token
from moesaic.cost.memory import Memory, memory
from moesaic.cost.rates import Rates, Stack, rates_for
from moesaic.cost.step import StepTime, step_time
from moesaic.cost.workload import Bools, Columns, Floats, Workload
from moesaic.spec.cluster import ClusterSpec

from .result import MEMORY_PARTS, TIME_PARTS, Candidate
from .space import layouts_of

_CHUNK = 65536
"""Layouts priced at once: more only falls out of the processor's caches."""


class Pricer:
    """Prices layouts of one workload on one cluster with one stack."""

    def __init__(self, work: Workload, cluster: ClusterSpec, stack: Stack) -> None:
        self.work, self.cluster, self.stack = work, cluster, stack
        self.rates: Rates = rates_for(cluster, stack)
        self.flops = flops_per_token(work.model, work.seq_len, mtp=work.mtp).total
        self.priced = 0
        """Layouts priced so far, for memory or for time."""

    def memory_bytes(self, columns: Columns) -> Floats:
        """Bytes on the fullest accelerator of each layout, [N]."""
        self.priced += len(columns)
        parts = [memory(self.work, columns.take(rows)).total for rows in _chunks(len(columns))]
        return np.concatenate(parts) if parts else np.zeros(0)

    def timed(self, columns: Columns) -> Floats:
        """Seconds of a step of each layout, [N]."""
        self.priced += len(columns)
        parts = [
            step_time(self.work, columns.take(rows), self.cluster, self.rates).total for rows in _chunks(len(columns))
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def fits(self, columns: Columns, limit_bytes: float) -> Bools:
        """Which layouts need no more than `limit_bytes`."""
        return self.memory_bytes(columns) <= limit_bytes

    def candidates(self, columns: Columns) -> list[Candidate]:
        """Every row in full."""
        if len(columns) == 0:
            return []
        held = memory(self.work, columns)
        time = step_time(self.work, columns, self.cluster, self.rates)
        return [
            self._candidate(row, layout, held, time) for row, layout in enumerate(layouts_of(columns, self.work.model))
        ]

    def _candidate(self, row: int, layout: object, held: Memory, time: StepTime) -> Candidate:
        from moesaic.spec.layout import Layout

        assert isinstance(layout, Layout)
        total = float(time.total[row])
        tokens = self.work.tokens / total / layout.world
        return Candidate(
            layout=layout,
            step_seconds=total,
            interval_seconds=(0.8 * total, 1.25 * total),
            tokens_per_second_per_gpu=tokens,
            model_tflops_per_gpu=tokens * self.flops / 1e12,
            memory={name: float(getattr(held, name)[row]) for name in MEMORY_PARTS},
            time={name: float(getattr(time, name)[row]) for name in TIME_PARTS},
            hidden_seconds=float(time.hidden[row]),
            available_bytes=self.cluster.gpu.memory_bytes,
        )


def _chunks(number: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, number)) for start in range(0, number, _CHUNK)]
