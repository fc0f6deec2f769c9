"""The order: a permutation per epoch, from the seed and the position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data.order import mix, permuted, sequences_at

seeds = st.integers(0, 2**63 - 1)


def test_mix_is_the_published_splitmix64() -> None:
    # The first outputs of splitmix64 for seed 1234567 (rosettacode.org, Pseudo-random numbers/Splitmix64).
    step = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + step * (i + 1)) % 2**64 for i in range(5)], dtype=np.uint64)
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mix(states).tolist() == expected


@settings(deadline=None, max_examples=100)
@given(count=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_every_sequence_once_per_epoch(count: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 2**40), seed=seeds, data=st.data())
def test_any_position_alone_is_the_same_as_in_company(count: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    together = permuted(positions, count, seed, 3).tolist()
    assert together == [int(permuted(position, count, seed, 3)) for position in positions]
    assert all(0 <= value < count for value in together)


@settings(deadline=None, max_examples=100)
@given(
    sequences=st.integers(1, 60),
    seed=seeds,
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
def test_endless_run_is_the_epochs_in_turn_however_it_is_cut(sequences: int, seed: int, cuts: list[int]) -> None:
    total = sum(cuts)
    whole = sequences_at(0, total, sequences, seed).tolist()
    starts = np.concatenate([[0], np.cumsum(cuts)[:-1]])
    pieces = [sequences_at(int(start), cut, sequences, seed).tolist() for start, cut in zip(starts, cuts, strict=True)]
    assert [number for piece in pieces for number in piece] == whole
    for begin in range(0, total - sequences + 1, sequences):
        assert sorted(whole[begin : begin + sequences]) == list(range(sequences))


def test_each_epoch_of_an_endless_run_has_an_order_of_its_own() -> None:
    row = sequences_at(0, 5 * 50, 50, 1).reshape(5, 50)
    assert len({tuple(epoch) for epoch in row.tolist()}) == 5


def test_orders_differ_by_seed_and_epoch() -> None:
    count = 1000
    orders = {
        tuple(permuted(np.arange(count), count, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("count", [2, 5, 16, 100])
def test_places_are_spread_evenly(count: int) -> None:
    # Where sequence 0 … count − 1 stands first, over many seeds: chi-square with count − 1 degrees of freedom, whose
    # mean is count − 1 and whose variance is 2 (count − 1).
    trials = 200 * count
    first = np.array([int(permuted(0, count, seed, 0)) for seed in range(min(trials, 4000))])
    observed = np.bincount(first, minlength=count)
    expected = len(first) / count
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < (count - 1) + 5 * np.sqrt(2 * (count - 1))


def test_neighbours_are_not_kept_together() -> None:
    order = permuted(np.arange(100_000), 100_000, 1, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_position_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
        permuted([5], 5, 0, 0)
