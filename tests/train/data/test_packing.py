"""Packing: every token trained once, no label across documents, bytes that add up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.train.data import DataError
from moesaic.train.data.packing import IGNORED, PADDING_DOCUMENT, Rows, Sequences, Stream, require_sequences
from moesaic.train.data.split import whole
from moesaic.train.data.store import TokenStore

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def store_of(sizes: list[int]) -> TokenStore:
    """Documents whose tokens are all different; token i covers i % 5 bytes."""
    length = np.array(sizes, dtype=np.int64)
    begin = np.concatenate([[0], np.cumsum(length)[:-1]])
    ids = np.arange(length.sum())
    return TokenStore(ids, begin, length, bytes_table=(ids % 5).astype(np.uint16), max_id=int(ids[-1]))


def all_rows(sequences: Sequences) -> Rows:
    return sequences.rows(np.arange(len(sequences)))


def owner(sizes: list[int]) -> NDArray[np.int64]:
    """The document of each token."""
    return np.repeat(np.arange(len(sizes)), sizes)


@settings(deadline=None, max_examples=200)
@given(sizes=lengths, seq_len=st.integers(1, 20), mask=st.booleans(), pack=st.booleans(), keep_tail=st.booleans())
def test_conservation(sizes: list[int], seq_len: int, mask: bool, pack: bool, keep_tail: bool) -> None:
    store, document = store_of(sizes), owner(sizes)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rows = all_rows(Sequences(whole(store), seq_len, pack=pack, mask=mask, keep_tail=keep_tail, pad=7))
    labels = rows.labels_BS[rows.labels_BS != IGNORED]
    # No token is trained twice, each label is the token after its input, and none crosses a document.
    assert len(set(labels.tolist())) == len(labels)
    trained = rows.labels_BS != IGNORED
    assert (rows.labels_BS[trained] == rows.ids_BS[trained] + 1).all()
    if mask or not pack:
        assert (document[rows.labels_BS[trained]] == document[rows.ids_BS[trained]]).all()
    # Every token is a label except first tokens (of the stream, or of documents) and the dropped tail.
    expected = Counter(range(sum(sizes)))
    expected.subtract({0: 1} if pack and not mask else {int(token): 1 for token in first})
    if pack and not keep_tail:
        kept = (sum(sizes) - 1) // seq_len * seq_len + 1
        expected = Counter({token: n for token, n in expected.items() if token < kept})
    assert Counter(labels.tolist()) == +expected
    assert rows.tokens == len(labels)
    assert rows.bytes == int((labels % 5).sum())


@settings(deadline=None, max_examples=200)
@given(sizes=lengths, seq_len=st.integers(1, 20), pack=st.booleans())
def test_inputs_documents_and_positions(sizes: list[int], seq_len: int, pack: bool) -> None:
    store, document = store_of(sizes), owner(sizes)
    rows = all_rows(Sequences(whole(store), seq_len, pack=pack, keep_tail=True, pad=7))
    filled = rows.documents_BS != PADDING_DOCUMENT
    inputs = rows.ids_BS[filled]
    # Each token is an input at most once.
    assert len(set(inputs.tolist())) == len(inputs)
    assert (rows.ids_BS[~filled] == 7).all() and (rows.labels_BS[~filled] == IGNORED).all()
    for ids, positions, documents, real in zip(rows.ids_BS, rows.positions_BS, rows.documents_BS, filled, strict=True):
        n = int(real.sum())
        assert real[:n].all()
        # Positions count up from 0, anew with each document, and documents are numbered from 0 in the row.
        for t in range(n):
            same = t > 0 and document[ids[t]] == document[ids[t - 1]]
            assert positions[t] == (positions[t - 1] + 1 if same else 0)
            assert documents[t] == (documents[t - 1] + (0 if same else 1) if t else 0)
            assert documents[t] == document[ids[t]] - document[ids[0]]


def test_by_hand() -> None:
    # Documents 0 1 2 | 3 4 | 5 6 7 8, sequences of 4: windows 0…4 and 4…8.
    rows = all_rows(Sequences(whole(store_of([3, 2, 4])), 4))
    assert rows.ids_BS.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows.labels_BS.tolist() == [[1, 2, -100, 4], [-100, 6, 7, 8]]
    assert rows.positions_BS.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert rows.documents_BS.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert rows.tokens == 6
    plain = all_rows(Sequences(whole(store_of([3, 2, 4])), 4, mask=False))
    assert plain.labels_BS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert plain.positions_BS.tolist() == [[0, 1, 2, 3]] * 2
    apart = all_rows(Sequences(whole(store_of([3, 1, 6])), 4, pack=False, pad=9))
    assert apart.ids_BS.tolist() == [[0, 1, 9, 9], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert apart.labels_BS.tolist() == [[1, 2, -100, -100], [5, 6, 7, 8], [9, -100, -100, -100]]
    assert apart.documents_BS.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0], [0, -1, -1, -1]]


def test_bytes_by_token_take_part_by_part() -> None:
    ids = np.array([5, 5, 5, 5, 5], dtype=np.uint16)
    store = TokenStore(ids, np.array([0, 2]), np.array([2, 3]), token_bytes=np.array([1, 2, 4, 8, 16], dtype=np.uint16))
    assert all_rows(Sequences(whole(store), 4)).bytes == 2 + 8 + 16
    assert all_rows(Sequences(whole(store), 4, mask=False)).bytes == 2 + 4 + 8 + 16


@pytest.mark.parametrize(
    ("sizes", "pack", "wanted"),
    [
        ([5, 5], True, r"has 10 tokens, but one sequence takes train\.seq_len \+ 1 = 17.*train\.seq_len to 9"),
        ([1], True, r"has 1 token\(s\); at least 2"),
        ([1, 1, 1], False, "every document .* single token"),
    ],
)
def test_too_little_data_gets_a_sentence(sizes: list[int], pack: bool, wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        require_sequences(Sequences(whole(store_of(sizes)), 16, pack=pack), "training")


def test_suggested_length_is_accepted() -> None:
    require_sequences(Sequences(whole(store_of([5, 5])), 9), "training")


def test_parts_of_a_stream_need_not_be_neighbours() -> None:
    store = store_of([4, 4, 4])
    stream = Stream(store, store.begin[[2, 0]], store.length[[2, 0]])
    assert all_rows(Sequences(stream, 7)).ids_BS.tolist() == [[8, 9, 10, 11, 0, 1, 2]]
