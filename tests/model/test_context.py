import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.model.context import all_context_places, context_places, own_places, zigzag
from moesaic.spec.errors import SpecError


def test_a_rank_of_a_zigzag_holds_a_chunk_and_its_mirror_image() -> None:
    assert [zigzag(12, 3, rank).tolist() for rank in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_a_zigzag_over_one_rank_is_the_row() -> None:
    assert zigzag(5, 1, 0).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["ring", "ulysses"]))
def test_every_place_has_one_owner(cp: int, tp: int, times: int, kind: str) -> None:
    length = 2 * cp * tp * times
    own = [[own_places(length, cp, c, tp, t, kind) for t in range(tp)] for c in range(cp)]
    for rank, parts in enumerate(own):
        assert {len(part) for part in parts} == {length // (cp * tp)}
        assert torch.equal(torch.cat(parts), context_places(length, cp, rank, kind))
    everything = torch.cat([part for parts in own for part in parts])
    assert torch.equal(everything.sort().values, torch.arange(length))
    assert all((places.diff() > 0).all() for places in all_context_places(length, cp, kind))


@given(st.integers(1, 8), st.integers(1, 5))
def test_a_zigzag_shares_a_triangle_evenly(cp: int, times: int) -> None:
    costs = {int((context_places(2 * cp * times, cp, rank, "ring") + 1).sum()) for rank in range(cp)}
    assert len(costs) == 1


def test_lengths_that_do_not_divide_are_refused_with_the_next_one() -> None:
    with pytest.raises(SpecError, match=r"10 tokens do not divide by 4, .* use 12 \(rows padded by 2\) or 8"):
        zigzag(10, 2, 0)
    with pytest.raises(SpecError, match="6 tokens do not divide by 4"):
        own_places(12, 2, 0, 4, 0, "ulysses")
    with pytest.raises(SpecError, match=r"layout\.cp_kind is 'stripes'"):
        context_places(8, 2, 0, "stripes")
