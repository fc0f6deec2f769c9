"""A whole step on streams: the pipeline of all ranks, then gradients, optimizer and host copies.

One task is one micro-batch in one virtual stage, as long as `layer_timeline.stage_seconds` says. Ranks wait for each
other's transfers, so that uneven stages, exposed first and last micro-batches and bubbles come out of the order alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moesaic.spec.errors import SpecError

from .pipeline_orders import Action, Work, pipeline_works
from .timeline import ALONE, Contention, Stream, Task, Timeline, run

WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
"""How the events of actions begin."""


def simulate_step(
    stage_forward: Sequence[float],
    stage_backward_input: Sequence[float],
    stage_backward_weight: Sequence[float],
    p2p_seconds: float,
    schedule: str,
    micro_batches: int,
    *,
    virtual_stages: int = 1,
    stage_backward: Sequence[float] | None = None,
    stage_pair: Sequence[float] | None = None,
    p2p_blocks: bool = False,
    parameter_seconds: Sequence[float] | None = None,
    gradient_seconds: Sequence[float] | None = None,
    overlap: Collection[str] = ("gradients", "parameters"),
    buckets: int = 4,
    data_stream: Stream = "network",
    optimizer_seconds: float = 0.0,
    offload_seconds: float = 0.0,
    contention: Contention = ALONE,
) -> Timeline:
    """One optimizer step of every pipeline rank of one replica, in seconds.

    Args:
        stage_forward: of one micro-batch in each virtual stage, [pp · virtual_stages]; stage i lives on rank
            i % pp, under dualpipe as `pipeline_orders.stages_of` says.
        stage_backward_input: backward without gradients of weights, where the schedule splits it off.
        stage_backward_weight: gradients of weights, where the schedule splits them off.
        p2p_seconds: to hand one micro-batch on to another rank, either way.
        schedule: of workload.SCHEDULES.
        micro_batches: of the step, per replica.
        virtual_stages: per rank; 2 under dualpipe is DualPipeV.
        stage_backward: all of backward at once; by default the sum of its two parts.
        stage_pair: forward of one micro-batch and backward of another together, in the same stage (`experts` overlap);
            two stages together save what the one that saves less does. None runs them one after the other.
        p2p_blocks: a rank waits until what it sends has arrived, as 1F1B without overlapped transfers does.
        parameter_seconds: to gather the parameters of each virtual stage before its first forward.
        gradient_seconds: to reduce the gradients of each virtual stage after its last backward.
        overlap: with `parameters` and `gradients` of workload.OVERLAP, gathering and reduction go in `buckets` under
            the first forward and the last backward of each stage and all that is left to do; without, they come first
            and last.
        buckets: per virtual stage.
        data_stream: that gathers parameters and reduces gradients.
        optimizer_seconds: of a rank's optimizer, after all ranks have reduced: clipping needs the norm of all.
        offload_seconds: of copies to and from host memory and of work there, beside the optimizer.
        contention: between compute and the data stream. What slows down inside a layer is in the stages' seconds.

    Raises:
        SpecError: lists of unequal length, or that virtual stages do not divide; times below zero; and as
            `pipeline_orders.pipeline_works`.
    """
    pipeline = _Pipeline.of(
        stage_forward, stage_backward_input, stage_backward_weight, schedule, micro_batches, virtual_stages,
        stage_backward, stage_pair,
    )  # fmt: skip
    stages = len(stage_forward)
    parameters = [0.0] * stages if parameter_seconds is None else parameter_seconds
    gradients = [0.0] * stages if gradient_seconds is None else gradient_seconds
    _check(stages, parameter_seconds=parameters, gradient_seconds=gradients)
    if buckets < 1:
        raise SpecError(f"gradients go in {buckets} buckets: it needs at least 1")
    step = _Step(pipeline)
    ahead = step.gather(parameters, buckets if "parameters" in overlap else 0, data_stream)
    behind = step.compute(p2p_seconds, p2p_blocks, ahead, gradients, buckets if "gradients" in overlap else 0)
    step.reduce(behind, gradients, data_stream)
    step.update(optimizer_seconds, offload_seconds)
    return run(step.tasks(), contention)


def pipeline_seconds(
    stage_forward: Sequence[float],
    stage_backward_input: Sequence[float],
    stage_backward_weight: Sequence[float],
    p2p_seconds: float,
    schedule: str,
    micro_batches: int,
    *,
    virtual_stages: int = 1,
    stage_backward: Sequence[float] | None = None,
    stage_pair: Sequence[float] | None = None,
) -> float:
    """Seconds until all ranks have worked off a step's micro-batches: the makespan of `simulate_step` without what
    surrounds the pipeline, much faster, for ranking. Sends never wait for each other here. Arguments and errors as
    there."""
    pipeline = _Pipeline.of(
        stage_forward, stage_backward_input, stage_backward_weight, schedule, micro_batches, virtual_stages,
        stage_backward, stage_pair,
    )  # fmt: skip
    if not 0 <= p2p_seconds < math.inf:
        raise SpecError(f"a transfer takes {p2p_seconds} s: times are finite and at least 0")
    now, position = [0.0] * pipeline.pp, [0] * pipeline.pp
    out: dict[tuple[bool, int, int], tuple[float, int]] = {}  # (forward, micro, stage): when it was made, and where
    blocked: dict[tuple[bool, int, int], int] = {}
    todo = list(range(pipeline.pp))
    while todo:
        rank = todo.pop()
        order = pipeline.works[rank]
        while position[rank] < len(order):
            work = order[position[rank]]
            start = now[rank]
            for action in work:
                needs = pipeline.input(action)
                if needs is None:
                    continue
                if needs not in out:
                    blocked[needs] = rank
                    break
                made, where = out[needs]
                start = max(start, made + p2p_seconds * (where != rank))
            else:
                now[rank] = start + pipeline.length(work)
                position[rank] += 1
                for action in work:
                    if action.kind != "W":
                        key = (action.kind == "F", action.micro, action.stage)
                        out[key] = (now[rank], rank)
                        if key in blocked:
                            todo.append(blocked.pop(key))
                continue
            break
    return max(now)


@dataclass(frozen=True)
class _Pipeline:
    """Orders of work and how long it takes, checked."""

    schedule: str
    pp: int
    stages: int
    micros: int
    works: list[list[Work]]
    seconds: dict[str, Sequence[float]]
    """By kind of action, then stage."""
    saved: list[float]
    """By a forward and a backward together, in each stage."""

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        inputs: Sequence[float],
        weights: Sequence[float],
        schedule: str,
        micros: int,
        virtual_stages: int,
        backward: Sequence[float] | None,
        pair: Sequence[float] | None,
    ) -> _Pipeline:
        stages = len(forward)
        if virtual_stages < 1 or not stages or stages % virtual_stages:
            raise SpecError(
                f"{stages} stages are not a whole number of ranks with {virtual_stages} virtual stages each"
            )
        if backward is None:
            backward = [a + b for a, b in zip(inputs, weights, strict=False)]
        together = backward if pair is None else pair
        _check(
            stages,
            stage_forward=forward,
            stage_backward_input=inputs,
            stage_backward_weight=weights,
            stage_backward=backward,
            stage_pair=together,
        )
        return cls(
            schedule,
            stages // virtual_stages,
            stages,
            micros,
            pipeline_works(schedule, stages // virtual_stages, virtual_stages, micros, paired=pair is not None),
            {"F": forward, "B": backward, "I": inputs, "W": weights},
            [f + b - p for f, b, p in zip(forward, backward, together, strict=True)],
        )

    def length(self, work: Work) -> float:
        """Seconds of an action, or of two together, which cannot end before the longer one."""
        if len(work) == 1:
            return self.seconds[work[0].kind][work[0].stage]
        alone = [self.seconds[action.kind][action.stage] for action in work]
        return max(max(alone), sum(alone) - min(self.saved[action.stage] for action in work))

    def input(self, action: Action) -> tuple[bool, int, int] | None:
        """What an action reads from another stage, as (forward, micro-batch, stage that makes it)."""
        kind, micro, stage = action
        if kind == "W" or stage == (0 if kind == "F" else self.stages - 1):
            return None
        return (True, micro, stage - 1) if kind == "F" else (False, micro, stage + 1)

    def rank_of(self, stage: int, micro: int) -> int:
        """Where a micro-batch meets a stage."""
        if self.schedule != "dualpipe":
            return stage % self.pp
        back = micro >= self.micros // 2 if self.stages == self.pp else stage >= self.pp
        return self.stages - 1 - stage if back else stage


def _check(stages: int, **lists: Sequence[float]) -> None:
    for name, values in lists.items():
        if len(values) != stages:
            raise SpecError(f"{name} has {len(values)} entries, but stage_forward {stages}: one per virtual stage")
        for stage, seconds in enumerate(values):
            if not 0 <= seconds < math.inf:
                raise SpecError(f"{name} of stage {stage} is {seconds} s: times are finite and at least 0")


Key = tuple[object, ...]
"""Names a task before it is written down, so that others can wait for it."""


class _Step:
    """The tasks of a step under construction."""

    def __init__(self, pipeline: _Pipeline) -> None:
        self.pipeline, works = pipeline, pipeline.works
        self.first: list[dict[int, int]] = []
        """Per rank: position of each stage's first forward, in order."""
        self.last: list[dict[int, int]] = []
        """Per rank: position of what completes each stage's gradients, in order."""
        for order in works:
            first: dict[int, int] = {}
            last: dict[int, int] = {}
            for position, work in enumerate(order):
                for action in work:
                    if action.kind == "F":
                        first.setdefault(action.stage, position)
                    else:
                        last.pop(action.stage, None)
                        last[action.stage] = position
            self.first.append(first)
            self.last.append(last)
        self.written: dict[Key, tuple[int, Stream, str, float, tuple[Key, ...]]] = {}
        self.ends: list[list[Key]] = [[] for _ in works]
        """Per rank: what must be over before the optimizer."""

    def gather(self, seconds: Sequence[float], buckets: int, stream: Stream) -> dict[tuple[int, int], list[Key]]:
        """Gather parameters at the start, in `buckets` per stage or (0) before all else. For each rank and stage, what
        the parts of its first forward wait for."""
        waits: dict[tuple[int, int], list[Key]] = {}
        for rank, first in enumerate(self.first):
            all_of_rank: list[Key] = []
            for stage in first:
                if not seconds[stage]:
                    continue
                keys: list[Key] = [("gather", rank, stage, part) for part in range(buckets or 1)]
                for key in keys:
                    self._add(key, rank, stream, f"gather parameters · stage {stage}", seconds[stage] / len(keys))
                waits[rank, stage] = keys
                all_of_rank += keys
            if not buckets and all_of_rank:
                earliest = next(iter(first))
                self._add(("gathered", rank), rank, stream, "", 0.0, all_of_rank)
                waits = {at: keys for at, keys in waits.items() if at[0] != rank}
                waits[rank, earliest] = [("gathered", rank)]
        return waits

    def compute(
        self,
        p2p_seconds: float,
        p2p_blocks: bool,
        gathered: dict[tuple[int, int], list[Key]],
        gradients: Sequence[float],
        buckets: int,
    ) -> dict[tuple[int, int], list[Key]]:
        """Write down all compute and what ranks send. For each rank and stage, the parts that complete its gradients,
        or (0 `buckets`) all of the rank's work."""
        behind: dict[tuple[int, int], list[Key]] = {}
        for rank, order in enumerate(self.pipeline.works):
            firsts = {position: stage for stage, position in self.first[rank].items()}
            lasts = {position: stage for stage, position in self.last[rank].items() if gradients[stage]}
            before: list[Key] = []
            for position, work in enumerate(order):
                waits = gathered.get((rank, firsts[position]), []) if position in firsts else []
                parts = max(len(waits), buckets if position in lasts else 1, 1) if len(work) == 1 else 1
                if parts < len(waits):
                    before += waits
                    waits = []
                before += [("out", *needs) for action in work if (needs := self.pipeline.input(action))]
                name = " | ".join(f"{WORDS[action.kind]} {action.micro} · stage {action.stage}" for action in work)
                keys: list[Key] = [(rank, position, part) for part in range(parts)]
                seconds = self.pipeline.length(work) / parts
                for part, key in enumerate(keys):
                    self._add(key, rank, "compute", name, seconds, [*before, *waits[part : part + 1]])
                    before = [key]
                if position in lasts:
                    behind[rank, lasts[position]] = keys
                for action in work:
                    if action.kind == "W":
                        continue
                    sent = self._hand_on(action, rank, before[0], p2p_seconds)
                    if p2p_blocks:
                        before = [*before, sent]
            self.ends[rank] += before
            if not buckets:
                behind |= {(rank, stage): [before[0]] for stage in lasts.values()}
        return behind

    def reduce(self, behind: dict[tuple[int, int], list[Key]], seconds: Sequence[float], stream: Stream) -> None:
        """Reduce gradients, part by part as they become complete."""
        for (rank, stage), keys in behind.items():
            for part, key in enumerate(keys):
                mine: Key = ("reduce", rank, stage, part)
                name = f"reduce gradients · stage {stage}"
                self._add(mine, rank, stream, name, seconds[stage] / len(keys), [key])
                self.ends[rank].append(mine)

    def update(self, optimizer_seconds: float, offload_seconds: float) -> None:
        """The optimizer of every rank, and what happens in host memory beside it, when all ranks have reduced."""
        self._add(("norm",), 0, "compute", "", 0.0, [key for ends in self.ends for key in ends])
        for rank in range(self.pipeline.pp):
            self._add(("optimizer", rank), rank, "compute", "optimizer", optimizer_seconds, [("norm",)])
            self._add(("offload", rank), rank, "host", "offload", offload_seconds, [("norm",)])

    def tasks(self) -> list[Task]:
        """Everything, for `timeline.run`."""
        index = {key: place for place, key in enumerate(self.written)}
        return [
            Task(rank, stream, name, seconds, tuple(index[key] for key in after))
            for rank, stream, name, seconds, after in self.written.values()
        ]

    def _add(self, key: Key, rank: int, stream: Stream, name: str, seconds: float, after: Sequence[Key] = ()) -> None:
        self.written[key] = (rank, stream, name, seconds, tuple(after))

    def _hand_on(self, action: Action, rank: int, made: Key, seconds: float) -> Key:
        """Give an action's result to the next stage."""
        forward = action.kind == "F"
        stage = action.stage + (1 if forward else -1)
        key: Key = ("out", forward, action.micro, action.stage)
        away = 0 <= stage < self.pipeline.stages and self.pipeline.rank_of(stage, action.micro) != rank
        name = f"send {WORDS[action.kind]} {action.micro} · stage {action.stage}"
        self._add(key, rank, "send", name, seconds if away else 0.0, [made])
        return key
