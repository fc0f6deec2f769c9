"""Bytes of each collective against the closed forms of papers, brute force over routings, and conservation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.rows import received_tokens
from moesaic.cost.traffic import (
    Bytes,
    Group,
    all_gather,
    all_to_all,
    data_parallel,
    dispatch,
    distinct,
    groups,
    ring,
    tensor_parallel,
    ulysses,
)
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable

MODEL = load_model_spec("DeepSeek-V3")
BF16 = 2


def columns(world: int = 64, dispatcher: str = "local", **keys: Any) -> Columns:
    layout = resolve_layout(LayoutTable(**keys), MODEL, world, seq_len=4096, global_batch=4096)
    return Columns.of([replace(layout, dispatcher=dispatcher)])


# ---------------------------------------------------------------- MegaScale-MoE section 4, table of MB per layer

B, S, N = 1, 8192, 8
SIZES = {
    "352B": (4096, 4, 3, 117.4, 18.4, 44.0),
    "Mixtral-8x7B": (4096, 4, 2, 117.4, 18.4, 29.4),
    "Mixtral-8x22B": (6144, 6, 2, 176.2, 25.7, 44.0),
    "Hunyuan-Large": (6400, 10, 1, 183.5, 25.2, 22.9),
    "Phi-3.5-MoE": (4096, 4, 2, 117.4, 18.4, 29.4),
    "DeepSeekMoE": (2048, 1, 6, 58.7, 14.7, 44.0),
}
"""h, query heads per key head, k; MB per GPU, forward and layer: tensor parallel, Ulysses, all-to-all experts."""


@pytest.mark.parametrize("name", SIZES)
def test_volumes_of_megascale(name: str) -> None:
    """arXiv 2505.11432, Eqs. 1, 3 and 4, and half of Eq. 2 (which counts twice what DeepSpeed-Ulysses counts)."""
    h, m, k, tensor, heads, experts = SIZES[name]
    node = Group(N, N)
    own, bsh = B * S / N, B * S * h
    both = 2 * tensor_parallel(B * S, h, BF16, node).total
    assert both == 2 * bsh * (N - 1) / N * BF16
    exchanged = ulysses(own, h * (2 + 2 / m), BF16, node).total
    assert exchanged == pytest.approx(bsh * (N - 1) / N * (2 + 2 / m) / N * BF16, rel=1e-12)
    # Eq. 3 (all-to-all) and the all-gather dispatcher, which is Eq. 4 whatever is chosen
    place = columns(8, ep=8, dispatcher="alltoall")
    ours = groups(place, 8)
    router = (64, k, 1, 1)
    sparse = 2 * dispatch(own, h, BF16, router, place, ours).total[0]
    assert sparse == pytest.approx(2 * k / N * bsh * (N - 1) / N * BF16, rel=1e-12)
    place = columns(8, ep=8, dispatcher="allgather")
    assert 2 * dispatch(own, h, BF16, router, place, ours).total[0] == pytest.approx(both, rel=1e-12)
    print(f"{name}: {both / 1e6:.1f} ({tensor}), {exchanged / 1e6:.1f} ({heads}), {sparse / 1e6:.1f} ({experts}) MB")
    assert [round(x / 1e6, 1) for x in (both, exchanged, sparse)] == [tensor, heads, experts]


def test_ring_carries_keys_and_values_once_around() -> None:
    """b·s·h·(n − 1)/n · 2/m (arXiv 2505.11432, Fig. 4, counted once)."""
    h, m = 4096, 4
    assert ring(S / N, 2 * h / m, BF16, Group(N, N)).total == B * S * h * (N - 1) / N * 2 / m * BF16


# ---------------------------------------------------------------- de-duplicated dispatch


def brute(places: int, experts: int, top_k: int, kept: int, limits: int) -> float:
    """The mean number of places over every routing that the limits allow."""
    each, here = experts // limits, experts // places
    counts = []
    for chosen in itertools.combinations(range(limits), kept):
        pool = [expert for group in chosen for expert in range(group * each, (group + 1) * each)]
        counts += [len({expert // here for expert in ids}) for ids in itertools.combinations(pool, top_k)]
    return float(np.mean(counts))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 4), (1, 4), (3, 4), (4, 4)]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([8, 16]),
    st.integers(1, 4),
)
def test_distinct_places_are_those_of_all_routings(limit: tuple[int, int], places: int, experts: int, k: int) -> None:
    kept, limits = limit
    if k > kept * experts // limits:
        return
    wanted = brute(places, experts, k, kept, limits)
    assert distinct(places, experts, k, kept, limits) == pytest.approx(wanted, rel=1e-12)


def test_group_limits_bound_the_places() -> None:
    """DeepSeek-V3: at most 4 of 8 nodes, though 8 experts of 256 would reach 5.3 (arXiv 2412.19437, 2.1.2)."""
    free, limited = distinct(8, 256, 8), distinct(8, 256, 8, 4, 8)
    print(f"nodes of 8: {free:.2f} without limits, {limited:.2f} with")
    assert free == pytest.approx(8 * (1 - 0.341), abs=0.05)
    assert 3.5 < limited < 4


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    st.sampled_from([2, 4, 8, 16, 72]),
    st.sampled_from(["alltoall", "hierarchical", "deepep", "hybridep", "allgather"]),
)
def test_dispatch_never_sends_more_than_its_kind_allows(ep: int, domain: int, name: str) -> None:
    """One copy per choice at most to other ranks; node-wise kinds send no more over the network than the plain one, and
    nothing leaves where all ranks share a domain."""
    place = columns(64, name if ep > 1 else "local", ep=ep)
    ours = groups(place, domain)
    router = (256, 8, 4, 8)
    tokens, row = 4096.0, 7168 * BF16
    sent = dispatch(tokens, 7168, BF16, router, place, ours)
    assert np.all(sent.fast >= 0)
    assert np.all(sent.network >= 0)
    if ep == 1:
        assert sent.total[0] == 0
        return
    plain = all_to_all(tokens * 8 * row, Group(ep, ours.ep.inside[0]))
    if name == "allgather":
        assert sent.total[0] == pytest.approx(tokens * (ep - 1) * row)
    else:
        assert sent.network[0] <= plain.network * (1 + 1e-12)
    if ours.ep.inside[0] == ep:
        assert sent.network[0] == 0


def test_cut_experts_gather_what_arrived() -> None:
    """ep 8, etp 2: the rows that an all-to-all brings, over the two ranks of a cut (tests/parity/test_traffic.py)."""
    whole, cut = (columns(64, ep=8, etp=etp, dispatcher="alltoall") for etp in (1, 2))
    router, tokens, row = (256, 8, 1, 1), 512.0, 7168 * BF16
    more = dispatch(tokens, 7168, BF16, router, cut, groups(cut, 64)).total[0]
    less = dispatch(tokens, 7168, BF16, router, whole, groups(whole, 64)).total[0]
    assert more - less == pytest.approx(tokens * 8 * row)


def test_cut_experts_gather_tokens_once_per_rank_where_they_are_sent_once() -> None:
    """What arrives is a token for each rank that it needs: what memory counts as received tokens."""
    model = load_model_spec("deepseek-v3")
    moe = model.layers[-1].moe
    assert moe is not None
    r = moe.router
    cut, whole = (columns(64, ep=8, etp=etp, dispatcher="deepep") for etp in (2, 1))
    tokens, row = 512.0, 7168 * BF16
    more, less = (
        dispatch(tokens, 7168, BF16, (r.experts, r.top_k, r.groups_kept, r.groups), one, groups(one, 64)).total[0]
        for one in (cut, whole)
    )
    work = Workload(model, 512 * int(cut.cp[0] * cut.tp[0]), 64)
    received = received_tokens(moe, work, replace(cut, micro_batch=np.array([1])))[0]
    assert more - less == pytest.approx(received / 2 * row)


# ---------------------------------------------------------------- groups and conservation


@given(st.integers(0, 6), st.integers(0, 6))
def test_collectives_are_conserved_whatever_the_domains(size: int, inside: int) -> None:
    """An exchange sends (n − 1)/n wherever borders are. A gather over domains brings each domain what it lacks once."""
    n, a = 2**size, 2 ** min(size, inside)
    g = Group(n, a)
    assert all_to_all(1.0, g).total == pytest.approx((n - 1) / n)
    gathered = all_gather(1.0, g)
    assert gathered.network * a == pytest.approx((n // a - 1) / (n // a))
    if a == n:
        assert gathered.total == pytest.approx((n - 1) / n)


def test_groups_of_a_layout_on_nodes_of_eight() -> None:
    """pp2 dp8 cp2 tp2 / edp2 ep16 etp1 on nodes of 8: tp·cp and half of an ep group share a node."""
    place = columns(64, pp=2, tp=2, cp=2, ep=16, dispatcher="alltoall")
    g = groups(place, 8)
    found = {name: (int(getattr(g, name).size[0]), int(getattr(g, name).inside[0])) for name in vars(g)}
    assert found == {
        "tp": (2, 2), "cp": (2, 2), "data": (16, 4), "pp": (2, 1), "etp": (1, 1), "ep": (16, 8), "edp": (2, 1),
        "ep_etp": (16, 8),
    }  # fmt: skip


LEVELS = {"none": (2, 0), "optimizer": (1, 1), "gradients": (5, 1), "parameters": (5, 10)}
"""Shares P·(n − 1)/n of gradients and of parameters that a step of five micro-batches sends."""


@pytest.mark.parametrize("level", LEVELS)
def test_sharding_levels_send_what_they_must(level: str) -> None:
    """ZeRO (arXiv 1910.02054, section 7), and a gather for each forward and backward pass of sharded parameters."""
    place = columns(8, sharding=level)
    gradients, parameters = data_parallel(1000.0, Group(8, 8), place, 4, 2, 5)
    reduced, gathered = LEVELS[level]
    assert float(np.ravel(gradients.total)[0]) == pytest.approx(reduced * 4000 * 7 / 8)
    assert float(np.ravel(parameters.total)[0]) == pytest.approx(gathered * 2000 * 7 / 8)


def test_copies_of_sharded_state_reduce_shards_between_them() -> None:
    """Two copies of four ranks each (HSDP): a scatter over four, then an all-reduce of a quarter over two."""
    place = replace(columns(8, sharding="optimizer"), replicas=np.array([2]))
    gradients, parameters = data_parallel(1000.0, Group(8, 8), place, 4, 2, 5)
    assert gradients.total[0] == pytest.approx(4000 * 3 / 4 + 2 * 1000 * 1 / 2)
    assert parameters.total[0] == pytest.approx(2000 * 3 / 4)


def test_bytes_add_up() -> None:
    assert Bytes(3.0, 4.0).total == 7.0
