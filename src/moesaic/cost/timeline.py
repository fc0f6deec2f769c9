"""Work on explicit streams: what a layer is made of, and what happened when.

A layer is a sequence of pieces, a piece is work on one stream. Streams of one rank run at the same time and slow each
other down while they do; see `Contention`. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from moesaic.spec.errors import SpecError

from .workload import Floats

Stream = Literal["compute", "fast", "network", "host", "send"]
STREAMS: tuple[Stream, ...] = ("compute", "fast", "network", "host", "send")
"""`compute`: kernels. `fast`: collectives inside the domain (NVLink, xGMI). `network`: collectives that leave it.
`host`: copies to and from host memory, and work there. `send`: what pipeline ranks hand on to each other."""


@dataclass(frozen=True)
class Piece:
    """One step of a layer, and how long it takes alone.

    Pieces of a layer come in the order of forward; backward goes through them in reverse, and a collective's
    `backward_input` is that of its opposite (dispatch's is a combine). What stands before the first dot of a name is
    the `part`, by which overlap knows what a piece is: `attention`, `router`, `dispatch`, `experts`, `combine`,
    `shared_experts`, `tensor` and `context` (their communication), `mlp`, and any other word.
    """

    name: str
    """`part` or `part.detail`, such as `dispatch.network` or `experts.gate_up`."""
    stream: Stream
    forward: float
    backward_input: float
    """Of the gradient of the input; of all of backward where nothing has weights of its own."""
    backward_weight: float = 0.0
    """Of the gradients of weights."""
    recompute: float = 0.0
    """Of forward again before backward, for what recomputation does not keep."""

    @property
    def part(self) -> str:
        """What the piece belongs to: its name up to the first dot."""
        return self.name.partition(".")[0]


COMMUNICATION: tuple[Stream, ...] = ("fast", "network", "send")
_COLLECTIVES: tuple[Stream, ...] = ("fast", "network")
_SAME_TIME = 1e-12
"""Relative; sums of the same seconds in another order are one moment."""


@dataclass(frozen=True)
class Contention:
    """How many times longer work takes while compute and a collective of the same rank run together.

    Collectives take streaming multiprocessors and memory bandwidth from compute, and get fewer than alone. Copies to
    the host and sends between pipeline stages are left out: engines outside the multiprocessors move most of them.
    """

    compute: float = 1.0
    """On kernels, while `fast` or `network` is busy."""
    communication: float = 1.0
    """On `fast` and `network`, while `compute` is busy."""

    def __post_init__(self) -> None:
        if not (1 <= self.compute < math.inf and 1 <= self.communication < math.inf):
            raise SpecError(
                f"overlap lengthens compute {self.compute} times and communication {self.communication} times, but "
                "both must be finite and at least 1: work does not get faster by sharing a device"
            )

    def of(self, stream: Stream) -> float:
        """The factor of a stream, while it is met."""
        return self.compute if stream == "compute" else self.communication if stream in _COLLECTIVES else 1.0

    @classmethod
    def of_processors(cls, taken: int, processors: int, communication: float = 1.0) -> Contention:
        """Communication kernels hold `taken` of a device's `processors`, and compute gets the rest: DeepEP's 20 of the
        132 of an H800 (DeepSeek-V3, arXiv 2412.19437, section 3.2.2) make it 1.18 times longer."""
        if not 0 <= taken < processors:
            raise SpecError(
                f"communication takes {taken} of {processors} multiprocessors: some must be left to compute"
            )
        return cls(processors / (processors - taken), communication)


GALVATRON = Contention(1.126, 1.126)
"""The measured coefficient that Galvatron ships (github.com/PKU-DAIR/Hetu-Galvatron), on both sides."""
NCCL = Contention(1.3, 1.3)
"""NCCL's collectives beside matmuls, as Galvatron's overlap test measured. Compute is 1.19 times longer on average and
1.4 times at most on A100, H100 and MI250 (arXiv 2507.03114, abstract)."""
ALONE = Contention()
"""Neither side notices the other."""


class Task(NamedTuple):
    """Work on one stream of one rank, which starts when all tasks `after` (indices of the task list) are done."""

    rank: int
    stream: Stream
    name: str
    seconds: float
    """Alone, without contention."""
    after: tuple[int, ...] = ()
    priority: float = 0.0
    """Of the tasks of a stream that are ready, the one with the least priority starts, then the first in the list."""
    holds: Stream | None = None
    """Another stream that can do nothing meanwhile: a blocking collective holds compute, and neither is busy for it."""


class Event(NamedTuple):
    """What a stream of a rank did from `start` to `stop`."""

    rank: int
    stream: Stream
    name: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """What happened when, from time 0; events in order of start. Shares come from unions of intervals, so that two
    things at the same time count once."""

    events: tuple[Event, ...]
    ranks: int

    @property
    def makespan(self) -> float:
        """Until the last event stops."""
        return max((event.stop for event in self.events), default=0.0)

    @property
    def streams(self) -> tuple[tuple[int, Stream], ...]:
        """The (rank, stream) pairs that have events, by rank and then in the order of STREAMS."""
        used = {(event.rank, event.stream) for event in self.events}
        return tuple(sorted(used, key=lambda pair: (pair[0], STREAMS.index(pair[1]))))

    def busy(self, *streams: Stream, rank: int | None = None) -> float:
        """Seconds in which at least one of `streams` is busy, summed over ranks or of one `rank`."""
        return sum(float((b - a).sum()) for a, b in (self._union(each, streams) for each in self._ranks(rank)))

    def overlapped(self, rank: int | None = None) -> float:
        """Seconds in which a rank computes and communicates at the same time: |communication ∩ compute|."""
        total = 0.0
        for each in self._ranks(rank):
            both = self._union(each, ("compute", *COMMUNICATION))
            total += self.busy("compute", rank=each) + self.busy(*COMMUNICATION, rank=each)
            total -= float((both[1] - both[0]).sum())
        return max(total, 0.0)

    def hidden(self, rank: int | None = None) -> float:
        """Share of communication that runs under compute, |communication ∩ compute| / |communication|; 1 without
        communication."""
        communication = self.busy(*COMMUNICATION, rank=rank)
        return self.overlapped(rank) / communication if communication else 1.0

    def exposed(self, rank: int | None = None) -> float:
        """Seconds in which a rank communicates and does not compute."""
        return self.busy(*COMMUNICATION, rank=rank) - self.overlapped(rank)

    def idle(self, rank: int) -> float:
        """Seconds until the makespan in which `rank` does not compute."""
        return self.makespan - self.busy("compute", rank=rank)

    def _ranks(self, rank: int | None) -> Sequence[int]:
        return range(self.ranks) if rank is None else (rank,)

    @cached_property
    def _by_stream(self) -> dict[tuple[int, Stream], list[Event]]:
        grouped: dict[tuple[int, Stream], list[Event]] = {}
        for event in self.events:
            grouped.setdefault((event.rank, event.stream), []).append(event)
        return grouped

    def _union(self, rank: int, streams: Sequence[Stream]) -> tuple[Floats, Floats]:
        """Starts and stops of the disjoint intervals in which one of `streams` is busy."""
        events = [event for stream in set(streams) for event in self._by_stream.get((rank, stream), ())]
        starts = np.array([event.start for event in events])
        stops = np.array([event.stop for event in events])
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(stops[order]) if len(events) else stops
        gap = starts[1:] > reach[:-1]
        first = np.concatenate(([True], gap)) if len(events) else np.zeros(0, bool)
        last = np.concatenate((gap, [True])) if len(events) else np.zeros(0, bool)
        return starts[first], reach[last]


def run(tasks: Sequence[Task], contention: Contention = ALONE) -> Timeline:
    """Work off `tasks`: each stream does one at a time, never idles while one of its tasks is ready, and does not
    interrupt what it started.

    Raises:
        SpecError: a time below zero or not finite, or tasks that wait for each other.
    """
    starts, stops = moments(tasks, contention)
    events = [
        Event(task.rank, task.stream, task.name, start, stop)
        for task, start, stop in zip(tasks, starts, stops, strict=True)
        if stop > start
    ]
    events.sort(key=lambda event: (event.start, event.rank, STREAMS.index(event.stream)))
    return Timeline(tuple(events), 1 + max((task.rank for task in tasks), default=-1))


def moments(tasks: Sequence[Task], contention: Contention = ALONE) -> tuple[list[float], list[float]]:
    """Start and stop of every task of `run`, in the order of `tasks`; tasks of no time too."""
    work = _Run(tasks, contention)
    work.until_done()
    return work.starts, work.stops


class _Run:
    """Tasks being worked off. A lane is a stream of a rank."""

    def __init__(self, tasks: Sequence[Task], contention: Contention) -> None:
        self.tasks = tasks
        lanes: dict[tuple[int, Stream], int] = {}
        self.lanes_of: list[tuple[int, ...]] = []
        self.waiting = [len(task.after) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            if not 0 <= task.seconds < math.inf:
                raise SpecError(f"{task.name} takes {task.seconds} s: times are finite and at least 0")
            for before in task.after:
                self.followers[before].append(index)
            mine = lanes.setdefault((task.rank, task.stream), len(lanes))
            if task.holds in (None, task.stream):
                self.lanes_of.append((mine,))
            else:
                self.lanes_of.append((mine, lanes.setdefault((task.rank, task.holds), len(lanes))))
        self.sharing = _Sharing(lanes, contention)
        self.holding = any(task.holds is not None for task in tasks)
        self.starts, self.stops = [math.nan] * len(tasks), [math.nan] * len(tasks)
        self.queues: list[list[tuple[float, int]]] = [[] for _ in lanes]
        self.running = [-1] * len(lanes)
        self.now = 0.0
        self.ready = [index for index, count in enumerate(self.waiting) if not count]
        self.touched: set[int] = set()
        """Lanes on which something may start."""

    def until_done(self) -> None:
        while self.ready or self.touched:
            self._queue()
            self._begin()
            self.sharing.settle(self.touched, self.now)
            self.touched = set()
            self._finish()
        left = [index for index, stop in enumerate(self.stops) if math.isnan(stop)]
        if left:
            stuck = self.tasks[left[0]]
            raise SpecError(
                f"{len(left)} of {len(self.tasks)} tasks never start, among them {stuck.name} on rank {stuck.rank}: "
                "they wait for each other"
            )

    def _queue(self) -> None:
        """Queue what is ready. Tasks of no time are mere moments, which need no stream."""
        while self.ready:
            index = self.ready.pop()
            if self.tasks[index].seconds:
                for lane in self.lanes_of[index]:
                    heappush(self.queues[lane], (self.tasks[index].priority, index))
                    self.touched.add(lane)
            else:
                self.starts[index] = self.now
                self._done(index, self.now)

    def _begin(self) -> None:
        """Start what can start on the touched lanes."""
        if not self.holding:
            for lane in self.touched:
                if self.running[lane] < 0 and self.queues[lane]:
                    self._start(heappop(self.queues[lane])[1])
            return
        for entry in sorted({entry for lane in self.touched for entry in self.queues[lane]}):
            lanes = self.lanes_of[entry[1]]
            if all(self.running[lane] < 0 for lane in lanes):
                for lane in lanes:
                    self.queues[lane].remove(entry)
                self._start(entry[1])

    def _start(self, index: int) -> None:
        lanes = self.lanes_of[index]
        for lane in lanes:
            self.running[lane] = index
        # What waited for one lane may start on another, whose neighbours are then shared with.
        self.touched.update(lanes)
        self.starts[index] = self.now
        self.sharing.start(lanes[0], self.tasks[index].seconds, self.now)

    def _finish(self) -> None:
        """Go to when the next tasks stop, all of that moment."""
        alarms, limit = self.sharing.alarms, -1.0
        while alarms and (alarms[0][0] <= limit or limit < 0):
            stop, version, lane = heappop(alarms)
            if version != self.sharing.version[lane]:
                continue
            if limit < 0:
                limit = stop * (1 + _SAME_TIME)
            self.now = stop
            self.sharing.stop(lane)
            index = self.running[lane]
            for each in self.lanes_of[index]:
                self.running[each] = -1
                self.touched.add(each)
            self._done(index, stop)

    def _done(self, index: int, now: float) -> None:
        self.stops[index] = now
        for follower in self.followers[index]:
            self.waiting[follower] -= 1
            if not self.waiting[follower]:
                self.ready.append(follower)


class _Sharing:
    """When what runs on each lane will stop: later or earlier, as compute and collectives of its rank meet or part."""

    def __init__(self, lanes: dict[tuple[int, Stream], int], contention: Contention) -> None:
        self.alarms: list[tuple[float, int, int]] = []
        """A heap of stop, version of the estimate, lane; an alarm of an older version is void."""
        self.version = [0] * len(lanes)
        self.factor = [1.0] * len(lanes)
        self.until = [math.nan] * len(lanes)
        self.busy = [False] * len(lanes)
        self.fresh: set[int] = set()
        self.slow = {lane: contention.of(stream) for (_, stream), lane in lanes.items()}
        self.rivals: dict[int, tuple[int, list[int]]] = {}
        """For lanes that may slow each other down: the rank's compute and its collectives."""
        for (rank, stream), lane in lanes.items() if contention != ALONE else ():
            others = [lanes[rank, other] for other in _COLLECTIVES if (rank, other) in lanes]
            if stream == "compute" and others:
                self.rivals |= dict.fromkeys([lane, *others], (lane, others))

    def start(self, lane: int, seconds: float, now: float) -> None:
        if lane not in self.rivals:
            heappush(self.alarms, (now + seconds, self.version[lane], lane))
            return
        self.busy[lane], self.until[lane], self.factor[lane] = True, now + seconds, 1.0
        self.fresh.add(lane)

    def stop(self, lane: int) -> None:
        self.busy[lane] = False
        self.version[lane] += 1

    def settle(self, touched: Iterable[int], now: float) -> None:
        """After starts and stops on `touched` lanes: set the speeds of their rivals, and the alarms that change."""
        if not self.rivals:
            return
        changed, self.fresh = self.fresh, set()
        groups = dict(self.rivals[lane] for lane in touched if lane in self.rivals)
        for compute, collectives in groups.items():
            meet = self.busy[compute] and any(self.busy[other] for other in collectives)
            for lane in (compute, *collectives):
                factor = self.slow[lane] if meet else 1.0
                if self.busy[lane] and factor != self.factor[lane]:
                    self.until[lane] = now + (self.until[lane] - now) * factor / self.factor[lane]
                    self.factor[lane] = factor
                    changed.add(lane)
        for lane in changed:
            self.version[lane] += 1
            heappush(self.alarms, (self.until[lane], self.version[lane], lane))
