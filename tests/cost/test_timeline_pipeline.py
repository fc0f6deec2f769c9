"""A step over pipeline ranks: published bubbles, brute force, conservation laws, and what surrounds the pipeline."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.pipeline_orders import Action, Work, pipeline_works, stages_of
from moesaic.cost.pipeline_timeline import pipeline_seconds, simulate_step
from moesaic.cost.timeline import Contention, Timeline
from moesaic.schedule.orders import pipeline_orders
from moesaic.spec.errors import SpecError


def equal(schedule: str, pp: int, v: int, micros: int, f: float, i: float, w: float, **more: object) -> Timeline:
    """Equal stages, transfers that take no time."""
    n = pp * v
    return simulate_step([f] * n, [i] * n, [w] * n, 0.0, schedule, micros, virtual_stages=v, **more)  # type: ignore[arg-type]


def bubble(timeline: Timeline) -> float:
    idle = [timeline.idle(rank) for rank in range(timeline.ranks)]
    assert max(idle) == pytest.approx(min(idle))
    return idle[0]


@pytest.mark.parametrize("pp,micros", [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (8, 20)])
@pytest.mark.parametrize("f,i,w", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.5)])
def test_1f1b_bubble(pp: int, micros: int, f: float, i: float, w: float) -> None:
    """(P − 1)(F + B); Narayanan et al., arXiv 2104.04473, section 2.2."""
    assert bubble(equal("1f1b", pp, 1, micros, f, i, w)) == pytest.approx((pp - 1) * (f + i + w))


@pytest.mark.parametrize("pp,v,micros", [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16), (3, 4, 6), (16, 4, 32)])
@pytest.mark.parametrize("f,i,w", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.5)])
def test_interleaved_bubble(pp: int, v: int, micros: int, f: float, i: float, w: float) -> None:
    """(P − 1)(F + B) / v, of whole ranks' times; here F and B are a chunk's, 1/v of those."""
    assert bubble(equal("interleaved", pp, v, micros, f, i, w)) == pytest.approx((pp - 1) * (f + i + w))


@pytest.mark.parametrize("pp,micros", [(2, 2), (2, 4), (4, 8), (8, 20)])
@pytest.mark.parametrize("f,i,w", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 1.0)])
def test_zero_bubble_bubble(pp: int, micros: int, f: float, i: float, w: float) -> None:
    """(P − 1)(F + B − 2W) with B all of backward; Qi et al., arXiv 2401.10241, table 1 (ZB-H1)."""
    timeline = equal("zero_bubble", pp, 1, micros, f, i, w)
    assert timeline.idle(0) == pytest.approx((pp - 1) * (f + i + w - 2 * w))


@pytest.mark.parametrize("pp,micros", [(2, 4), (4, 8), (4, 12), (8, 16), (8, 20), (16, 32)])
def test_dualpipe_bubble(pp: int, micros: int) -> None:
    """(P/2 − 1)(F&B + B − 3W), DualPipe's README, when F, input and weight gradients take the same time; where a pair
    is shorter than its halves in turn, of the ranks at the turn, which have the most pairs."""
    for pair in (3.0, 2.5, 2.2):
        timeline = equal("dualpipe", pp, 1, micros, 1.0, 1.0, 1.0, stage_pair=[pair] * pp)
        assert max(timeline.idle(rank) for rank in range(pp)) == pytest.approx((pp / 2 - 1) * (pair + 2 - 3))
    assert bubble(equal("dualpipe", pp, 1, micros, 1.0, 1.0, 1.0, stage_pair=[3.0] * pp)) == pytest.approx(pp - 2)


@pytest.mark.parametrize("pp,micros", [(1, 2), (2, 4), (4, 8), (4, 11), (8, 16)])
def test_dualpipe_v_bubble(pp: int, micros: int) -> None:
    """The same with P chunks on P/2 ranks."""
    for pair in (3.0, 2.5):
        timeline = equal("dualpipe", pp, 2, micros, 1.0, 1.0, 1.0, stage_pair=[pair] * 2 * pp)
        assert max(timeline.idle(rank) for rank in range(pp)) == pytest.approx((pp - 1) * (pair + 2 - 3))


def test_overlapped_pairs_shorten_the_steady_state() -> None:
    """One rank: a forward, pairs, a backward."""
    timeline = equal("1f1b", 1, 1, 6, 1.0, 1.0, 1.0, stage_pair=[2.2])
    assert timeline.makespan == pytest.approx(1 + 5 * 2.2 + 2)


GRID = [
    (schedule, pp, v, micros)
    for schedule in ("1f1b", "interleaved", "zero_bubble")
    for pp, v, micros in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12))
    if (v == 1 or micros % pp == 0) and (schedule != "1f1b" or v == 1)
]


def test_orders_are_those_that_the_trainer_runs() -> None:
    for schedule, pp, v, micros in GRID:
        ours = [[single(work) for work in order] for order in pipeline_works(schedule, pp, v, micros)]
        theirs = [[tuple(action) for action in order] for order in pipeline_orders(schedule, pp, v, micros)]
        assert ours == theirs, (schedule, pp, v, micros)


def single(work: Work) -> tuple[str, int, int]:
    """An action in the trainer's words, in which B is of inputs where W follows."""
    (action,) = work
    return ("B" if action.kind == "I" else action.kind, action.micro, action.stage)


DUAL = [
    ("dualpipe", pp, v, micros) for pp, v in ((2, 1), (4, 1), (6, 1), (1, 2), (3, 2)) for micros in (2 * pp, 2 * pp + 4)
]


@pytest.mark.parametrize("paired", [False, True])
def test_every_micro_batch_passes_every_stage_once(paired: bool) -> None:
    for schedule, pp, v, micros in GRID + DUAL:
        works = pipeline_works(schedule, pp, v, micros, paired)
        seen: Counter[Action] = Counter()
        for rank, order in enumerate(works):
            for action in itertools.chain(*order):
                assert action.stage in stages_of(schedule, pp, v, rank)
                seen[action] += 1
            for work in order:
                assert len(work) == 1 or (paired and work[0].kind == "F" and work[1].kind in "BI")
                assert len({action[1:] for action in work}) == len(work)
        assert max(seen.values()) == 1
        everything = {(micro, stage) for micro in range(micros) for stage in range(pp * v)}
        kinds = {kind: {a[1:] for a in seen if a.kind == kind} for kind in "FBIW"}
        assert kinds["F"] == kinds["B"] | kinds["I"] == everything
        assert kinds["W"] == kinds["I"] and not kinds["B"] & kinds["I"]
        pair = [2.0] * (pp * v) if paired else None
        equal(schedule, pp, v, micros, 1.0, 1.0, 1.0, stage_pair=pair)  # refuses orders that wait for each other


SECONDS = st.floats(0.1, 5.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, int, int, list[list[float]], float]:
    """Schedule, pp, virtual stages, micro-batches, seconds by kind and stage, seconds of a transfer."""
    schedule, pp, v, micros = draw(st.sampled_from(GRID + DUAL))
    lists = [draw(st.lists(SECONDS, min_size=pp * v, max_size=pp * v)) for _ in range(3)]
    return schedule, pp, v, micros, lists, draw(st.sampled_from([0.0, 0.05, 1.0]))


def longest_way(works: list[list[Work]], lists: list[list[float]], transfer: float) -> float:
    """When the last action ends, by relaxing all waits until nothing changes; transfers never wait for each other."""
    forward, inputs, weights = lists
    stages = len(forward)
    cost = {"F": forward, "I": inputs, "W": weights, "B": [a + b for a, b in zip(inputs, weights, strict=True)]}
    where = {action: rank for rank, order in enumerate(works) for work in order for action in work}
    ends = dict.fromkeys(where, math.inf)
    by_output = {(action.kind == "F", action.micro, action.stage): action for action in where if action.kind != "W"}
    while True:
        changed = False
        for rank, order in enumerate(works):
            now = 0.0
            for (action,) in order:
                kind, micro, stage = action
                other = by_output.get((kind == "F", micro, stage + (-1 if kind == "F" else 1))) if kind != "W" else None
                if other is not None and 0 <= other.stage < stages:
                    now = max(now, ends[other] + transfer * (where[other] != rank))
                now += cost[kind][stage]
                changed |= ends[action] != now
                ends[action] = now
        if not changed:
            return max(ends.values())


@settings(deadline=None, max_examples=30)
@given(steps())
def test_ends_are_those_of_the_longest_way(step: tuple[str, int, int, int, list[list[float]], float]) -> None:
    schedule, pp, v, micros, lists, transfer = step
    timeline = simulate_step(*lists, transfer, schedule, micros, virtual_stages=v)
    wanted = longest_way(pipeline_works(schedule, pp, v, micros), lists, transfer)
    assert pipeline_seconds(*lists, transfer, schedule, micros, virtual_stages=v) == pytest.approx(wanted)
    if transfer:  # a rank sends one thing at a time
        assert timeline.makespan >= wanted * (1 - 1e-9)
    else:
        assert timeline.makespan == pytest.approx(wanted)


@settings(deadline=None, max_examples=30)
@given(steps(), st.floats(0.5, 1.0))
def test_ranking_and_simulation_agree_on_pairs(
    step: tuple[str, int, int, int, list[list[float]], float], share: float
) -> None:
    schedule, _pp, v, micros, lists, _transfer = step
    pairs = [share * sum(parts) for parts in zip(*lists, strict=True)]
    step_of = simulate_step(*lists, 0.0, schedule, micros, virtual_stages=v, stage_pair=pairs)
    alone = pipeline_seconds(*lists, 0.0, schedule, micros, virtual_stages=v, stage_pair=pairs)
    assert step_of.makespan == pytest.approx(alone)


@settings(deadline=None, max_examples=30)
@given(steps(), st.booleans())
def test_steps_conserve_work(step: tuple[str, int, int, int, list[list[float]], float], blocks: bool) -> None:
    schedule, pp, v, micros, lists, transfer = step
    timeline = simulate_step(*lists, transfer, schedule, micros, virtual_stages=v, p2p_blocks=blocks)
    whole = [sum(parts) for parts in zip(*lists, strict=True)]
    assert timeline.busy("compute") == pytest.approx(micros * sum(whole))
    crossings = sum(schedule != "dualpipe" or v == 1 or stage != pp - 1 for stage in range(pp * v - 1)) if pp > 1 else 0
    sends = [event for event in timeline.events if event.stream == "send"]
    assert len(sends) == (2 * micros * crossings if transfer else 0)
    assert sum(event.seconds for event in sends) == pytest.approx(transfer * len(sends))
    first_way = sum(lists[0]) + sum(lists[1]) + 2 * crossings * transfer
    assert timeline.makespan >= first_way * (1 - 1e-9)
    assert all(timeline.idle(rank) >= -1e-6 for rank in range(pp))


def test_1f1b_is_the_shortest_order_that_fits_its_memory() -> None:
    """Brute force over all orders in which rank i keeps at most pp − i micro-batches."""
    for pp, micros in ((2, 2), (2, 3), (2, 4), (3, 3)):
        lists = [[1.0] * pp, [1.0] * pp, [1.0] * pp]
        choices = [list(orders_within(rank, micros, pp - rank)) for rank in range(pp)]
        best = min(longest(works, lists) for works in itertools.product(*choices))
        assert equal("1f1b", pp, 1, micros, 1.0, 1.0, 1.0).makespan == best


def longest(works: tuple[list[Work], ...], lists: list[list[float]]) -> float:
    return longest_way(list(works), lists, 0.0)


def orders_within(rank: int, micros: int, kept: int) -> list[list[Work]]:
    """All orders of a rank's forwards and backwards, each in turn, that keep at most `kept` at a time."""
    found: list[list[Work]] = []

    def go(order: list[Work], forwards: int, backwards: int) -> None:
        if backwards == micros:
            found.append(order)
        if forwards < micros and forwards - backwards < kept:
            go([*order, (Action("F", forwards, rank),)], forwards + 1, backwards)
        if backwards < forwards:
            go([*order, (Action("B", backwards, rank),)], forwards, backwards + 1)

    go([], 0, 0)
    return found


def test_a_slow_stage_sets_the_pace() -> None:
    """The head's stage twice as long as others: the step is its work and one way there and back."""
    forward, backward = [1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0]
    timeline = simulate_step(forward, backward, [0.0] * 4, 0.0, "1f1b", 16)
    assert timeline.makespan == 3 * 1.0 + 16 * 6.0 + 3 * 2.0


def test_transfers_are_exposed_at_the_ends_only_unless_they_block() -> None:
    """Two stages: one transfer there and one back are on the way of the first and the last micro-batch."""
    free = simulate_step([1.0] * 2, [2.0] * 2, [0.0] * 2, 0.25, "1f1b", 8)
    blocked = simulate_step([1.0] * 2, [2.0] * 2, [0.0] * 2, 0.25, "1f1b", 8, p2p_blocks=True)
    assert free.makespan >= 8 * 3 + 3 + 2 * 0.25
    assert blocked.makespan > free.makespan


@pytest.mark.parametrize("reduction", [0.4, 8.0])
def test_gradients_are_reduced_under_the_last_backward(reduction: float) -> None:
    """One rank, four buckets: the first is complete after a quarter of the last backward."""
    sizes = ([1.0], [2.0], [1.0], 0.0, "1f1b", 3)
    timeline = simulate_step(*sizes, gradient_seconds=[reduction], buckets=4)  # type: ignore[arg-type]
    start = 3 * 4 - 3 + 3 / 4
    assert timeline.makespan == pytest.approx(max(12 + reduction / 4, start + reduction))
    after = simulate_step(*sizes, gradient_seconds=[reduction], overlap=())  # type: ignore[arg-type]
    assert after.makespan == pytest.approx(12 + reduction)


@pytest.mark.parametrize("gathering", [0.4, 8.0])
def test_parameters_are_gathered_under_the_first_forward(gathering: float) -> None:
    sizes = ([1.0], [2.0], [1.0], 0.0, "1f1b", 3)
    timeline = simulate_step(*sizes, parameter_seconds=[gathering], buckets=4)  # type: ignore[arg-type]
    assert timeline.makespan == pytest.approx(11 + max(gathering / 4 + 1, gathering + 1 / 4))
    before = simulate_step(*sizes, parameter_seconds=[gathering], overlap=())  # type: ignore[arg-type]
    assert before.makespan == pytest.approx(12 + gathering)


def test_early_ranks_reduce_last_and_all_wait_for_the_norm() -> None:
    timeline = equal(
        "1f1b", 4, 1, 8, 1.0, 1.0, 1.0, gradient_seconds=[2.0] * 4, optimizer_seconds=0.5, offload_seconds=0.75
    )
    reduced = max(event.stop for event in timeline.events if event.name.startswith("reduce"))
    assert reduced == pytest.approx(24 + 9 + 0.5)  # all but one of four buckets runs under rank 0's last backward
    starts = {event.start for event in timeline.events if event.name in ("optimizer", "offload")}
    assert starts == {reduced}
    assert timeline.makespan == pytest.approx(reduced + 0.75)


def test_reduction_slows_the_backward_that_hides_it() -> None:
    more = {"gradient_seconds": [2.0], "buckets": 1000}
    alone = equal("1f1b", 1, 1, 2, 1.0, 2.0, 1.0, **more).makespan
    shared = equal("1f1b", 1, 1, 2, 1.0, 2.0, 1.0, contention=Contention(1.5, 1.0), **more).makespan
    # Two seconds of reduction take the place of 2 / 1.5 seconds of backward.
    assert (alone, shared) == (pytest.approx(8.0, rel=1e-3), pytest.approx(8 + 2 * (1 - 1 / 1.5), rel=1e-2))


@settings(deadline=None, max_examples=30)
@given(steps(), st.sampled_from([(), ("gradients",), ("parameters",), ("gradients", "parameters")]))
def test_data_parallel_traffic_is_complete(
    step: tuple[str, int, int, int, list[list[float]], float], overlap: tuple[str, ...]
) -> None:
    schedule, pp, v, micros, lists, transfer = step
    n = pp * v
    gathers, reductions = [0.1 * (i + 1) for i in range(n)], [0.2 * (i + 1) for i in range(n)]
    timeline = simulate_step(
        *lists, transfer, schedule, micros, virtual_stages=v, parameter_seconds=gathers, gradient_seconds=reductions,
        overlap=overlap, optimizer_seconds=0.3,
    )  # fmt: skip
    holders = 2 if schedule == "dualpipe" and v == 1 else 1
    assert timeline.busy("network") == pytest.approx(holders * (sum(gathers) + sum(reductions)))
    apart = simulate_step(
        *lists, transfer, schedule, micros, virtual_stages=v, parameter_seconds=gathers, gradient_seconds=reductions,
        overlap=(), optimizer_seconds=0.3,
    )  # fmt: skip
    assert timeline.makespan <= apart.makespan * (1 + 1e-9) or transfer
    plain = simulate_step(*lists, transfer, schedule, micros, virtual_stages=v)
    assert timeline.makespan >= plain.makespan + 0.3 - 1e-9
    assert timeline.makespan <= plain.makespan + 0.3 + holders * v * (max(gathers) + max(reductions)) * pp + 1e-6


def test_arrays_are_as_good_as_lists() -> None:
    ones = np.ones(4)
    timeline = simulate_step(
        ones, ones, ones, 0.0, "dualpipe", 8,  # type: ignore[arg-type]
        stage_backward=2 * ones, stage_pair=3 * ones, gradient_seconds=ones, parameter_seconds=ones,  # type: ignore[arg-type]
    )  # fmt: skip
    assert timeline.busy("compute") == pytest.approx(4 * 8 * 3)


def test_what_makes_no_sense_is_refused() -> None:
    one = [1.0]
    for wrong, words in (
        (lambda: simulate_step(one * 4, one * 3, one * 4, 0, "1f1b", 4), "3 entries, but stage_forward 4"),
        (lambda: simulate_step(one * 5, one * 5, one * 5, 0, "interleaved", 4, virtual_stages=2), "5 stages"),
        (lambda: simulate_step([], [], [], 0, "1f1b", 4), "0 stages"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "1f1", 4), "1f1b"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "1f1b", 0), "0"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "1f1b", 4, virtual_stages=2), "interleaved"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "interleaved", 3, virtual_stages=2), "multiple of 2"),
        (lambda: simulate_step(one * 3, one * 3, one * 3, 0, "dualpipe", 8), "even number"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "dualpipe", 6), "at least 8"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, -1, "1f1b", 8), "at least 0"),
        (lambda: simulate_step(one * 4, one * 4, one * 4, 0, "1f1b", 8, buckets=0), "at least 1"),
        (lambda: pipeline_seconds(one * 4, one * 4, one * 4, -1, "1f1b", 8), "at least 0"),
        (lambda: pipeline_seconds(one * 4, [1, 1, math.nan, 1], one * 4, 0, "1f1b", 8), "input of stage 2 is nan"),
    ):
        with pytest.raises(SpecError, match=words):
            wrong()
