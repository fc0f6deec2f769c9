"""Streams: order, contention, and figures of a timeline, against brute force and conservation laws."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.timeline import ALONE, GALVATRON, Contention, Event, Stream, Task, Timeline, moments, run
from moesaic.spec.errors import SpecError

CHOICES: tuple[Stream, ...] = ("compute", "fast", "network", "host")


@st.composite
def task_lists(draw: st.DrawFn, seconds: st.SearchStrategy[float]) -> list[Task]:
    """Tasks of two ranks that wait for earlier ones; in half of the lists some hold a second stream."""
    tasks: list[Task] = []
    holding = draw(st.booleans())
    for index in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        stream = draw(st.sampled_from(CHOICES))
        tasks.append(
            Task(
                draw(st.integers(0, 1)),
                stream,
                f"{index}",
                draw(seconds),
                tuple(sorted(after)),
                draw(st.integers(0, 2)),
                draw(st.sampled_from([None, None, *CHOICES])) if holding else None,
            )
        )
    return tasks


MANY = settings(deadline=None, max_examples=80)
WHOLE = st.integers(0, 5).map(float)
SOME = st.floats(0.01, 10.0)
FACTORS = st.floats(1.0, 3.0)


def lanes_of(task: Task) -> set[tuple[int, Stream]]:
    """What a task keeps others from."""
    return {(task.rank, task.stream), (task.rank, task.holds or task.stream)}


def tick_by_tick(tasks: list[Task]) -> list[int]:
    """Starts of tasks of whole seconds, by looking at every second in turn."""
    start: dict[int, int] = {}
    for now in itertools.count():
        while True:  # tasks of no time may let others start in the same second
            over = {i for i, at in start.items() if at + tasks[i].seconds <= now}
            free = [i for i, task in enumerate(tasks) if i not in start and set(task.after) <= over]
            moments_only = [i for i in free if not tasks[i].seconds]
            if not moments_only:
                break
            start |= dict.fromkeys(moments_only, now)
        busy = {lane for i, at in start.items() if at + tasks[i].seconds > now for lane in lanes_of(tasks[i])}
        for i in sorted(free, key=lambda i: (tasks[i].priority, i)):
            if not busy & lanes_of(tasks[i]):
                busy |= lanes_of(tasks[i])
                start[i] = now
        if len(start) == len(tasks):
            return [start[i] for i in range(len(tasks))]
    raise AssertionError


@MANY
@given(task_lists(WHOLE))
def test_starts_are_those_of_looking_at_every_second(tasks: list[Task]) -> None:
    assert moments(tasks)[0] == tick_by_tick(tasks)


@MANY
@given(task_lists(SOME), FACTORS, FACTORS)
def test_streams_do_one_thing_at_a_time_and_wait_for_what_they_need(
    tasks: list[Task], compute: float, communication: float
) -> None:
    starts, stops = moments(tasks, Contention(compute, communication))
    for index, task in enumerate(tasks):
        assert all(stops[before] <= starts[index] + 1e-9 for before in task.after)
        for other in range(index):
            if lanes_of(tasks[other]) & lanes_of(task):
                assert stops[other] <= starts[index] + 1e-9 or stops[index] <= starts[other] + 1e-9


@MANY
@given(task_lists(SOME), FACTORS, FACTORS)
def test_time_lost_to_contention_is_the_time_spent_together(
    tasks: list[Task], compute: float, communication: float
) -> None:
    """Work done is time alone plus time together over the slow-down, on either side."""
    timeline = run(tasks, Contention(compute, communication))
    for rank in range(timeline.ranks):
        kernels = [event for event in timeline.events if event[:2] == (rank, "compute")]
        for streams, factor in ((("compute",), compute), (("fast",), communication), (("network",), communication)):
            mine = [event for event in timeline.events if event.rank == rank and event.stream in streams]
            work = sum(task.seconds for task in tasks if task.rank == rank and task.stream in streams)
            others = kernels if streams != ("compute",) else None
            together = timeline.overlapped(rank) if others is None else both(mine, kernels)
            busy = sum(event.seconds for event in mine)
            assert work == pytest.approx(busy - together + together / factor)
        host = sum(task.seconds for task in tasks if task[:2] == (rank, "host"))
        assert timeline.busy("host", rank=rank) == pytest.approx(host)


def both(left: list[Event], right: list[Event]) -> float:
    """Seconds in which two streams are busy, pair by pair."""
    return sum(max(0.0, min(a.stop, b.stop) - max(a.start, b.start)) for a in left for b in right)


@MANY
@given(task_lists(SOME))
def test_makespan_lies_between_the_bounds(tasks: list[Task]) -> None:
    way = [0.0] * len(tasks)
    for index, task in enumerate(tasks):
        way[index] = task.seconds + max((way[before] for before in task.after), default=0.0)
    lanes = {task[:2] for task in tasks}
    loads = [sum(task.seconds for task in tasks if task[:2] == lane) for lane in lanes]
    makespan = run(tasks).makespan
    assert max(*way, *loads, 0.0) <= makespan + 1e-9
    assert makespan <= sum(task.seconds for task in tasks) + 1e-9


@MANY
@given(st.floats(0.1, 10), st.floats(0.1, 10), FACTORS, FACTORS)
def test_two_at_a_time_follow_the_closed_form(kernel: float, transfer: float, slow: float, slower: float) -> None:
    """While both run, each is longer by its factor; what is left of one then runs alone (Galvatron's overlap term)."""
    tasks = [Task(0, "compute", "a", kernel), Task(0, "network", "b", transfer)]
    if kernel * slow <= transfer * slower:
        wanted = kernel * slow + transfer - kernel * slow / slower
    else:
        wanted = transfer * slower + kernel - transfer * slower / slow
    assert run(tasks, Contention(slow, slower)).makespan == pytest.approx(wanted)


def test_ranks_hosts_and_sends_do_not_slow_each_other() -> None:
    tasks = [
        Task(0, "compute", "a", 1.0),
        Task(1, "network", "b", 1.0),
        Task(0, "host", "c", 1.0),
        Task(0, "send", "d", 1.0),
    ]
    assert run(tasks, Contention(2.0, 2.0)).makespan == 1.0


def test_deepep_leaves_compute_the_other_processors() -> None:
    """20 of 132 processors (DeepSeek-V3, section 3.2.2)."""
    assert Contention.of_processors(20, 132).compute == pytest.approx(132 / 112)
    assert GALVATRON.compute == GALVATRON.communication == 1.126


def test_figures_come_from_unions() -> None:
    events = [
        Event(0, "compute", "a", 0, 4),
        Event(0, "compute", "b", 4, 6),
        Event(0, "fast", "c", 1, 3),
        Event(0, "network", "d", 2, 8),
        Event(1, "compute", "e", 0, 10),
        Event(1, "send", "f", 9, 12),
    ]
    timeline = Timeline(tuple(events), 2)
    assert timeline.makespan == 12
    assert timeline.busy("fast", "network", rank=0) == 7  # 1 to 8, although durations add up to 8
    assert timeline.overlapped(rank=0) == 5
    assert timeline.hidden(rank=0) == 5 / 7
    assert timeline.exposed(rank=0) == 2
    assert timeline.hidden() == 6 / 10
    assert [timeline.idle(rank) for rank in (0, 1)] == [6, 2]
    assert timeline.streams == ((0, "compute"), (0, "fast"), (0, "network"), (1, "compute"), (1, "send"))


def test_nothing_to_do_takes_no_time() -> None:
    empty = run([])
    assert (empty.makespan, empty.busy("compute"), empty.hidden(), empty.ranks) == (0.0, 0.0, 1.0, 0)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(SpecError, match="2 of 3 tasks never start, among them b on rank 0"):
        run([Task(0, "compute", "a", 1), Task(0, "compute", "b", 1, (2,)), Task(0, "fast", "c", 1, (1,))])
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="a takes"):
            run([Task(0, "compute", "a", seconds)], ALONE)
    with pytest.raises(SpecError, match="at least 1"):
        Contention(0.9)
    with pytest.raises(SpecError, match="132 of 132"):
        Contention.of_processors(132, 132)
