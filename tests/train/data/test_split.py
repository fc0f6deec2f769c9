"""Held-out documents: whole where possible, about as many tokens as asked for, the same for every run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data import DataError
from moesaic.train.data.packing import Stream
from moesaic.train.data.split import split
from moesaic.train.data.store import TokenStore


def store_of(sizes: list[int]) -> TokenStore:
    length = np.array(sizes, dtype=np.int64)
    return TokenStore(np.arange(length.sum()), np.concatenate([[0], np.cumsum(length)[:-1]]), length)


def tokens(stream: Stream) -> list[int]:
    return [token for index in range(stream.documents) for token in stream.document_ids(index).tolist()]


@settings(deadline=None, max_examples=200)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=60), fraction=st.floats(0.001, 0.6))
def test_both_sides_together_are_the_data(sizes: list[int], fraction: float) -> None:
    store = store_of([*sizes, 10])
    train, validation, _ = split(store, fraction)
    assert validation is not None
    assert sorted(tokens(train) + tokens(validation)) == list(range(store.tokens))
    assert train.tokens >= 2 and validation.tokens >= 1
    assert (train.length > 0).all() and (validation.length > 0).all()
    target = fraction * store.tokens
    assert validation.tokens <= max(2, round(1.5 * target))
    assert validation.tokens >= min(2, 0.5 * target)


def test_many_documents_are_held_out_whole_and_at_random() -> None:
    store = store_of([10] * 1000)
    train, validation, how = split(store, 0.05)
    assert validation is not None
    assert (train.documents, validation.documents, how) == (950, 50, "50 of 1,000 documents held out")
    held = validation.begin // 10
    # Spread over the whole: about as many in each half (binomial, 50 draws, standard deviation 3.5).
    assert 12 < int((held < 500).sum()) < 38
    again = split(store, 0.05)[1]
    assert again is not None and again.begin.tolist() == validation.begin.tolist()


def test_one_long_document_gives_its_end() -> None:
    train, validation, how = split(store_of([1000]), 0.1)
    assert validation is not None
    assert tokens(validation) == list(range(900, 1000)) and how == "the last 100 tokens held out"
    train, validation, _ = split(store_of([1000, 3, 50]), 0.1)
    assert validation is not None and 53 <= validation.tokens <= 158 and train.tokens + validation.tokens == 1053


def test_nothing_held_out() -> None:
    train, validation, _ = split(store_of([5, 6]), 0)
    assert validation is None and train.tokens == 11


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0])
def test_fractions_outside_are_refused(fraction: float) -> None:
    with pytest.raises(DataError, match=r"validation_fraction is .*at least 0 and below 1"):
        split(store_of([10]), fraction)


def test_too_little_to_share() -> None:
    with pytest.raises(DataError, match=r"has 3 tokens; holding out 0\.5 of it leaves 1"):
        split(store_of([3]), 0.5)
