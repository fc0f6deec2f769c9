"""Orders are complete, never block, keep what the papers say they keep, and waste what the papers say they waste."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.schedule.orders import Action, pipeline_order, pipeline_orders, received, sent, splits_backward
from moesaic.schedule.pipeline import UNREAD
from moesaic.spec.errors import SpecError
from tests.schedule.simulate import DeadlockError, simulate

ENDLESS = 10**9


@st.composite
def pipelines(draw: st.DrawFn, schedules: tuple[str, ...] = ("1f1b", "interleaved", "zero_bubble")):
    """(schedule, ranks, virtual stages per rank, micro-batches)"""
    schedule = draw(st.sampled_from(schedules))
    pp = draw(st.integers(1, 6))
    virtual = 1 if schedule == "1f1b" else draw(st.integers(1, 4))
    micros = draw(st.integers(1, 14)) if virtual == 1 else pp * draw(st.integers(1, 4))
    return schedule, pp, virtual, micros


def most_open(order: list[Action], closed_by: str) -> int:
    """Largest number of pairs of micro-batch and stage between F and `closed_by`."""
    now = most = 0
    for action in order:
        now += (action.kind == "F") - (action.kind == closed_by)
        most = max(most, now)
    return most


def units(action: Action) -> int:
    """F, B and W take one unit each where they are apart."""
    return 1


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_stage_does_every_micro_batch_once_in_a_possible_order(pipeline) -> None:
    schedule, pp, virtual, micros = pipeline
    kinds = "FBW" if schedule == "zero_bubble" else "FB"
    for rank, order in enumerate(pipeline_orders(*pipeline)):
        assert splits_backward(order) == (schedule == "zero_bubble")
        expected = [
            Action(kind, micro, stage)
            for kind in kinds
            for micro in range(micros)
            for stage in range(rank, pp * virtual, pp)
        ]
        assert sorted(order) == sorted(expected)
        place = {action: i for i, action in enumerate(order)}
        for micro in range(micros):
            for stage in range(rank, pp * virtual, pp):
                places = [place[Action(kind, micro, stage)] for kind in kinds]
                assert places == sorted(places)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_both_ends_of_a_link_agree_on_the_order_of_messages(pipeline) -> None:
    _, pp, virtual, _ = pipeline
    orders, stages = pipeline_orders(*pipeline), pp * virtual
    for rank in range(pp):
        after = orders[(rank + 1) % pp]
        assert sent(orders[rank], "F", stages) == received(after, "F", stages)
        assert sent(after, "B", stages) == received(orders[rank], "B", stages)


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_pipeline_blocks_whatever_actions_take(pipeline, unread: int, random) -> None:
    """Not even when a message is read only by who waits for it, and few may be unread."""
    _, pp, virtual, _ = pipeline
    orders = pipeline_orders(*pipeline)
    seconds = {action: random.randint(0, 5) for order in orders for action in order}
    times = simulate(orders, pp * virtual, seconds.__getitem__, unread)
    assert len(times.ends) == len(seconds)


def test_the_simulation_finds_orders_that_block() -> None:
    orders = pipeline_orders("1f1b", 2, 1, 2)
    orders[0] = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)]
    orders[1] = [Action("F", 0, 1), Action("F", 1, 1), Action("B", 0, 1), Action("B", 1, 1)]
    with pytest.raises(DeadlockError, match="rank 0 at backward of micro-batch 0"):
        simulate(orders, 2, units, UNREAD)


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_few_unread_messages_lose_no_time(pipeline, forward: int, backward: int, weights: int) -> None:
    _, pp, virtual, _ = pipeline
    orders, seconds = pipeline_orders(*pipeline), {"F": forward, "B": backward, "W": weights}

    def total(unread: int) -> float:
        return simulate(orders, pp * virtual, lambda action: seconds[action.kind], unread).total

    assert total(UNREAD) == total(ENDLESS)


@settings(max_examples=60, deadline=None)
@given(pipelines(("1f1b",)))
def test_1f1b_keeps_no_more_micro_batches_than_ranks_follow(pipeline) -> None:
    _, pp, _, micros = pipeline
    for rank, order in enumerate(pipeline_orders(*pipeline)):
        assert most_open(order, "B") == min(micros, pp - rank)


@settings(max_examples=60, deadline=None)
@given(pipelines(("interleaved",)))
def test_interleaved_keeps_a_round_per_further_stage(pipeline) -> None:
    _, pp, virtual, micros = pipeline
    for rank, order in enumerate(pipeline_orders(*pipeline)):
        warm_up = pp - rank - 1 if virtual == 1 else 2 * (pp - rank - 1) + (virtual - 1) * pp
        assert most_open(order, "B") == min(virtual * micros, warm_up + 1)


@settings(max_examples=60, deadline=None)
@given(pipelines(("zero_bubble",)))
def test_zero_bubble_keeps_no_more_than_the_first_rank_without_it(pipeline) -> None:
    _, pp, virtual, micros = pipeline
    plain = [most_open(order, "B") for order in pipeline_orders("interleaved", pp, virtual, micros)]
    for rank, order in enumerate(pipeline_orders(*pipeline)):
        assert most_open(order, "B") == plain[rank]
        assert most_open(order, "W") <= plain[0]


@settings(max_examples=60, deadline=None)
@given(pipelines(("1f1b", "interleaved")), st.integers(1, 3))
def test_the_bubble_is_that_of_the_paper(pipeline, backward: int) -> None:
    """Narayanan et al., arXiv 2104.04473, section 2.2: (pp − 1) / (v · m) of the ideal time."""
    _, pp, virtual, micros = pipeline
    seconds = {"F": 1, "B": backward}
    times = simulate(pipeline_orders(*pipeline), pp * virtual, lambda action: seconds[action.kind], UNREAD)
    compute = virtual * micros * (1 + backward)
    assert Fraction(int(times.total) - compute, compute) == Fraction(pp - 1, virtual * micros)


@settings(max_examples=60, deadline=None)
@given(pipelines(("zero_bubble",)))
def test_zero_bubble_wastes_a_third(pipeline) -> None:
    """Qi et al., arXiv 2401.10241, section 2.3: (pp − 1)(F + B − W) instead of (pp − 1)(F + B + W)."""
    _, pp, virtual, micros = pipeline
    total = simulate(pipeline_orders(*pipeline), pp * virtual, units, UNREAD).total
    plain = simulate(
        pipeline_orders("interleaved", pp, virtual, micros),
        pp * virtual,
        lambda action: 1 if action.kind == "F" else 2,
        UNREAD,
    ).total
    compute = 3 * virtual * micros
    assert plain - compute == 3 * (pp - 1)
    if pp > 1:
        assert total < plain
    if micros >= (pp if virtual == 1 else 2 * pp):
        assert total - compute == pp - 1


def test_1f1b_by_hand() -> None:
    written = ["".join(f"{a.kind}{a.micro} " for a in order) for order in pipeline_orders("1f1b", 3, 1, 4)]
    assert written == [
        "F0 F1 F2 B0 F3 B1 B2 B3 ",
        "F0 F1 B0 F2 B1 F3 B2 B3 ",
        "F0 B0 F1 B1 F2 B2 F3 B3 ",
    ]


def test_interleaved_by_hand() -> None:
    """Figure 4 (bottom) of arXiv 2104.04473: four ranks, two stages each; the beginning of the first and last rank."""
    orders = pipeline_orders("interleaved", 4, 2, 8)
    written = [" ".join(f"{a.kind}{a.micro + 1}/{a.stage // 4}" for a in order[:14]) for order in orders]
    assert written[0] == "F1/0 F2/0 F3/0 F4/0 F1/1 F2/1 F3/1 F4/1 F5/0 F6/0 F7/0 B1/1 F8/0 B2/1"
    assert written[3] == "F1/0 F2/0 F3/0 F4/0 F1/1 B1/1 F2/1 B2/1 F3/1 B3/1 F4/1 B4/1 F5/0 B1/0"


def test_zero_bubble_by_hand() -> None:
    written = ["".join(f"{a.kind}{a.micro} " for a in order) for order in pipeline_orders("zero_bubble", 3, 1, 4)]
    assert written == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 ",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 ",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("interleaved", 0, 4, 2, 6), "rounds of pp = 4, but a step has 6; make .* a multiple of 4"),
        (("zero_bubble", 0, 4, 2, 6), "rounds of pp = 4, but a step has 6"),
        (("1f1b", 0, 4, 2, 8), "one stage per rank, not 2; set layout.schedule to interleaved or zero_bubble"),
        (("zero-bubble", 0, 4, 1, 8), "unknown schedule 'zero-bubble': did you mean 'zero_bubble'"),
        (("1f1b", 0, 4, 1, 0), "0 micro-batches"),
        (("1f1b", 4, 4, 1, 8), "pipeline rank 4 does not exist with pp = 4; ranks are 0 to 3"),
    ],
)
def test_what_cannot_be_ordered_is_refused(arguments, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        pipeline_order(*arguments)
