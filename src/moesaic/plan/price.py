"""Layouts priced: memory, time, and both as candidates with intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moesaic.cost.corrections import NINE_IN_TEN, Traits, corrections, describe
from moesaic.cost.counts import flops_per_token
from moesaic.cost.habits import habits_for
from moesaic.cost.memory import Memory, memory
from moesaic.cost.rates import Rates, Stack, rates_for
from moesaic.cost.step import StepTime, step_time
from moesaic.cost.workload import Bools, Columns, Floats, Workload
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout

from .result import MEMORY_PARTS, TIME_PARTS, Candidate, Scale
from .space import layouts_of

_CHUNK = 65536
"""Layouts priced at once: more only falls out of the processor's caches."""


class Pricer:
    """Prices layouts of one workload on one cluster with one stack."""

    def __init__(self, work: Workload, cluster: ClusterSpec, stack: Stack) -> None:
        self.work, self.cluster, self.stack = work, cluster, stack
        self.rates: Rates = rates_for(cluster, stack)
        self.habits = habits_for(stack.framework)
        self.flops = flops_per_token(work.model, work.seq_len, mtp=work.mtp).total
        self.priced = 0
        """Layouts priced so far, for memory or for time."""

    def memory_bytes(self, columns: Columns) -> Floats:
        """Bytes on the fullest accelerator of each layout, [N]."""
        self.priced += len(columns)
        parts = [memory(self.work, columns.take(rows), self.habits).total for rows in _chunks(len(columns))]
        return np.concatenate(parts) if parts else np.zeros(0)

    def timed(self, columns: Columns) -> Floats:
        """Seconds of a step of each layout, [N]."""
        self.priced += len(columns)
        parts = [
            step_time(self.work, columns.take(rows), self.cluster, self.rates).total for rows in _chunks(len(columns))
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def scale_of(self, columns: Columns) -> Scale:
        """What published runs say of the closed form for these layouts together: the median of the factors that they
        give to each, with bounds that also hold how far those differ.

        One factor for all keeps the order of the closed form. Factors of single layouts follow options that published
        runs rarely vary on their own, and rank worse: over groups of five or more published layouts the mean rank
        correlation is about 0.86 by the closed form and 0.79 by corrected times (docs/accuracy.md, "Order of layouts").
        """
        time = step_time(self.work, columns, self.cluster, self.rates)
        traits = replace(Traits.of(self.stack), network=self.cluster.network)
        if self.stack.padded:
            traits = replace(traits, routing="dropped")
        mean, spread = corrections().estimate(describe(self.work, columns, self.cluster, self.stack, time, traits))
        middle = float(np.median(mean))
        half = NINE_IN_TEN * float(np.hypot(np.median(spread), mean.std()))
        return Scale(float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half)))

    def fits(self, columns: Columns, limit_bytes: float) -> Bools:
        """Which layouts need no more than `limit_bytes`."""
        return self.memory_bytes(columns) <= limit_bytes

    def candidates(self, columns: Columns, scale: Scale | None = None) -> list[Candidate]:
        """Every row in full, its seconds scaled by `scale`, or by what published runs say of these rows."""
        if len(columns) == 0:
            return []
        held = memory(self.work, columns, self.habits)
        time = step_time(self.work, columns, self.cluster, self.rates)
        scale = scale or self.scale_of(columns)
        return [
            self._candidate(row, layout, held, time, scale)
            for row, layout in enumerate(layouts_of(columns, self.work.model))
        ]

    def _candidate(self, row: int, layout: Layout, held: Memory, time: StepTime, scale: Scale) -> Candidate:
        closed, factor = float(time.total[row]), scale.factor
        total = closed * factor
        tokens = self.work.tokens / total / layout.world
        return Candidate(
            layout=layout,
            step_seconds=total,
            interval_seconds=(closed * scale.low, closed * scale.high),
            tokens_per_second_per_gpu=tokens,
            model_tflops_per_gpu=tokens * self.flops / 1e12,
            memory={name: float(getattr(held, name)[row]) for name in MEMORY_PARTS},
            time={name: factor * float(getattr(time, name)[row]) for name in TIME_PARTS},
            hidden_seconds=factor * float(time.hidden[row]),
            correction=factor,
            available_bytes=self.cluster.gpu.memory_bytes,
        )


def _chunks(number: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, number)) for start in range(0, number, _CHUNK)]
