"""The learning rate by the formulas of the papers it comes from."""

import math

import pytest

from moesaic.spec.tables import TrainTable
from moesaic.train.schedule import learning_rate


def keys(**changes):
    return TrainTable(**{"steps": 100, "lr": 0.4, "min_lr_ratio": 0.25, "warmup_steps": 10, "seed": 0, **changes})


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule):
    rates = [learning_rate(step, keys(schedule=schedule)) for step in range(1, 11)]
    assert rates == pytest.approx([0.04 * i for i in range(1, 11)])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor():
    table = keys(schedule="cosine")
    assert learning_rate(55, table) == pytest.approx((0.4 + 0.1) / 2)
    assert learning_rate(100, table) == pytest.approx(0.1)
    assert learning_rate(40, table) == pytest.approx(0.1 + 0.3 * (1 + math.cos(math.pi / 3)) / 2)


def test_wsd_stays_flat_then_falls_as_one_minus_the_root():
    table = keys(schedule="wsd", decay_fraction=0.2)
    assert [learning_rate(step, table) for step in (11, 50, 80)] == pytest.approx([0.4] * 3)
    assert learning_rate(85, table) == pytest.approx(0.1 + 0.3 * (1 - math.sqrt(0.25)))
    assert learning_rate(100, table) == pytest.approx(0.1)


def test_constant_stays():
    assert learning_rate(100, keys(schedule="constant")) == 0.4


def test_no_warm_up_starts_at_full_rate():
    assert learning_rate(1, keys(schedule="constant", warmup_steps=0)) == 0.4
