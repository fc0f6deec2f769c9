"""What the hierarchical dispatcher sends to other nodes, counted, against the least that is possible."""

from __future__ import annotations

from math import comb, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.traffic import distinct
from moesaic.dispatch import make_dispatcher
from moesaic.dispatch.alltoall import AllToAllDispatcher
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups
from moesaic.mesh.nodes import split_by_node
from moesaic.model.router import Router
from moesaic.spec.errors import SpecError
from moesaic.spec.model import RouterSpec
from tests.dispatch.test_dispatchers import Case, compare, on_a_rank, random_ids
from tests.ranks import ranks

NODES, EACH = 2, 2
"""Nodes, and ranks on each."""
Ids = tuple[tuple[tuple[int, ...], ...], ...]


def hiddens(each: dict[str, Any], what: str, case: Case, group: str = "ep_across") -> float:
    """How many hidden states of a token a rank sent."""
    return each["both"].bytes[what, group] / case.dtype.itemsize / case.hidden


def nodes_needed(case: Case, rank: int, token: int) -> set[int]:
    """Those of a token's experts."""
    return {expert * NODES // case.experts for expert in case.ids[rank][token]}


def crossings(case: Case) -> list[list[int]]:
    """For each rank and node the tokens of this rank that have an expert there, 0 for its own node."""
    return [
        [
            sum(node in nodes_needed(case, rank, t) for t in range(len(case.ids[rank]))) * (node != rank // EACH)
            for node in range(NODES)
        ]
        for rank in range(NODES * EACH)
    ]


@settings(max_examples=10)
@given(data=st.data())
def test_a_token_crosses_to_a_node_once(data: st.DataObject) -> None:
    n = NODES * EACH
    experts, top_k = n * 3, data.draw(st.integers(1, 8))
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    case = Case(n, 1, experts, random_ids(tokens, experts, top_k, data.draw(st.integers(0, 99))), top_k)
    found = compare(case, "hierarchical")
    out = crossings(case)
    for rank, each in enumerate(found):
        node, place = divmod(rank, EACH)
        into = sum(out[other][node] for other in range(n) if other % EACH == place)
        assert hiddens(each, "dispatch", case) == hiddens(each, "combine gradient", case) == sum(out[rank])
        assert hiddens(each, "combine", case) == hiddens(each, "dispatch gradient", case) == into
        # Ahead of the rows: a number for each rank across, and a byte for each rank of a copy's node.
        assert each["both"].bytes["ranks asked", "ep_across"] == EACH * sum(out[rank])
        assert each["both"].bytes["counts", "ep_across"] == 8 * (NODES - 1)
        assert not {group for _, group in each["both"].bytes} - {"ep_across", "ep_inside"}


def test_nothing_less_can_cross() -> None:
    """Any node that has an expert of a token must get its hidden state, and must send back at least one sum."""
    n, experts = NODES * EACH, 8
    case = Case(n, 1, experts, random_ids([9, 4, 7, 1], experts, 3, 5), 3)
    least = sum(
        len(nodes_needed(case, rank, token) - {rank // EACH})
        for rank in range(n)
        for token in range(len(case.ids[rank]))
    )
    found = ranks(n).run(on_a_rank, case, "hierarchical", True)
    for what in ("dispatch", "combine", "dispatch gradient", "combine gradient"):
        assert sum(hiddens(each, what, case) for each in found) == least


def test_inside_a_node_a_token_goes_to_each_rank_that_it_needs_once() -> None:
    """A copy is passed on by the rank of the sender's place, without bytes if it is needed there."""
    n, experts = NODES * EACH, 8
    case = Case(n, 1, experts, random_ids([9, 4, 7, 1], experts, 3, 6), 3)
    found = ranks(n).run(on_a_rank, case, "hierarchical", False)
    needed = [[{e * n // experts for e in choice} for choice in of_rank] for of_rank in case.ids]
    for rank, each in enumerate(found):
        node, place = divmod(rank, EACH)
        passed = sum(
            len({r for r in to if r // EACH == node} - {rank})
            for other in range(place, n, EACH)
            for to in needed[other]
        )
        assert hiddens(each, "dispatch", case, "ep_inside") == passed
        assert each["rows"] == sum(rank in to for of_rank in needed for to in of_rank)


def test_groups_of_experts_cap_the_copies() -> None:
    """A router that keeps 1 of 2 groups, a group a node, lets a token need one node; without groups it needs both."""
    n, experts, top_k, tokens = NODES * EACH, 16, 6, 24
    sent = {}
    for kept in (1, 2):
        spec = RouterSpec(experts=experts, top_k=top_k, groups=NODES, groups_kept=kept)
        router = Router(spec, 5, dtype=torch.float32, device="cpu")
        torch.manual_seed(3)
        torch.nn.init.normal_(router.weight)
        ids: Ids = tuple(
            tuple(
                map(
                    tuple, router(torch.randn(tokens, 5, generator=torch.Generator().manual_seed(rank))).ids_TK.tolist()
                )
            )
            for rank in range(n)
        )
        case = Case(n, 1, experts, ids, top_k)
        assert all(len(nodes_needed(case, r, t)) <= kept for r in range(n) for t in range(tokens))
        found = ranks(n).run(on_a_rank, case, "hierarchical", False)
        sent[kept] = sum(hiddens(each, "dispatch", case) + hiddens(each, "combine", case) for each in found)
    assert sent[1] <= 2 * n * tokens * 1 and sent[1] < sent[2] <= 2 * n * tokens


def test_top_8_of_64_sends_a_quarter_of_a_flat_exchange_between_nodes() -> None:
    """Uniform choices. Flat: a copy per choice, K·(nodes − 1)/nodes a token between nodes (MegaScale-MoE, Eq. 3)."""
    n, experts, top_k, tokens = NODES * EACH, 64, 8, 500
    case = Case(n, 1, experts, random_ids([tokens] * n, experts, top_k, 1), top_k, hidden=2, width=2)
    found = ranks(n).run(on_a_rank, case, "hierarchical", False)
    copies = sum(hiddens(each, "dispatch", case) for each in found)
    # The planner's form, and its deviation: a token misses a given node with chance p, tokens independently.
    p = comb(experts // NODES, top_k) / comb(experts, top_k)
    all_tokens = n * tokens
    expected = all_tokens * distinct(NODES, experts, top_k) * (NODES - 1) / NODES
    assert abs(copies - expected) <= 4 * sqrt(all_tokens * p * (1 - p))
    choices = [(rank // EACH, rank, e) for rank in range(n) for token in case.ids[rank] for e in token]
    flat = sum(e * NODES // experts != node for node, _, e in choices)
    ranks_needed = sum(
        len({e * n // experts for e in token if e * NODES // experts != rank // EACH})
        for rank in range(n)
        for token in case.ids[rank]
    )
    print(
        f"top-{top_k} of {experts}, {NODES} nodes of {EACH} ranks, copies between nodes per token: "
        f"{copies / all_tokens:.3f} hierarchical, {ranks_needed / all_tokens:.3f} one per rank "
        f"({ranks_needed / copies:.2f}x), {flat / all_tokens:.3f} one per choice ({flat / copies:.2f}x)"
    )
    # By what the two volumes are: 4 choices of 8 are elsewhere, and hardly any token needs one node only.
    closed = top_k / distinct(NODES, experts, top_k)
    assert closed > 4
    assert flat / copies == pytest.approx(closed, rel=0.03)
    assert ranks_needed / copies == pytest.approx(
        distinct(n, experts, top_k) / distinct(NODES, experts, top_k), rel=0.03
    )


@pytest.mark.parametrize("experts", [16, 64])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_planners_form_is_what_ranks_send(experts: int, top_k: int) -> None:
    n, tokens = NODES * EACH, 300
    case = Case(n, 1, experts, random_ids([tokens] * n, experts, top_k, 2), top_k, hidden=2, width=2)
    found = ranks(n).run(on_a_rank, case, "hierarchical", False)
    p = comb(experts // NODES, top_k) / comb(experts, top_k)
    expected = n * tokens * distinct(NODES, experts, top_k) / NODES
    got = sum(hiddens(each, "dispatch", case) for each in found)
    assert abs(got - expected) <= 4 * sqrt(n * tokens * p * (1 - p))


def test_sums_have_the_same_bits_every_time() -> None:
    case = Case(4, 1, 8, random_ids([9, 4, 7, 1], 8, 4, 7), 4, hidden=8, dtype=torch.bfloat16)
    first, again = (ranks(4).run(on_a_rank, case, "hierarchical", False) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a["y"], b["y"]) and torch.equal(a["x"], b["x"])


def test_bf16_with_cut_experts_and_empty_ranks() -> None:
    compare(
        Case(2, 2, 4, random_ids([9, 0, 4, 3], 4, 2), 2, hidden=8, dtype=torch.bfloat16), "hierarchical", tolerance=5e-2
    )
    compare(
        Case(4, 1, 8, random_ids([0, 9, 0, 3], 8, 4), 4, hidden=8, dtype=torch.bfloat16), "hierarchical", tolerance=5e-2
    )


def test_groups_split_by_node() -> None:
    inside, across = split_by_node([tuple(range(8))], 4)
    assert inside == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert across == [(0, 4), (1, 5), (2, 6), (3, 7)]
    inside, across = split_by_node([(0, 2, 4, 6), (1, 3, 5, 7)], 4)  # etp 2
    assert inside == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert across == [(0, 4), (2, 6), (1, 5), (3, 7)]
    inside, across = split_by_node([(0, 1), (2, 3)], 4)
    assert inside == [(0, 1), (2, 3)] and all(len(group) == 1 for group in across)


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"0 to 3 lie unevenly on nodes of 3 ranks, 3 on node 0 and 1 on node 1"):
        split_by_node([(0, 1, 2, 3)], 3)


def test_one_node_is_alltoall() -> None:
    pair = Group("ep", (0, 1), 0)
    alone = Group.single("alone")
    for groups in (ExpertGroups(pair, alone, alone, pair), ExpertGroups(pair, alone, alone, pair, pair, alone)):
        assert isinstance(make_dispatcher("hierarchical", groups, 4), AllToAllDispatcher)
