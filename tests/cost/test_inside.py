"""In how many chunks rows travel: shares of parts, what a chunk costs, and the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.inside import TRIED, choose_chunks, choose_head_groups, chunks_of, fixed_seconds, start_rows
from moesaic.cost.layer_timeline import Chunk, simulate_layers
from moesaic.cost.rates import Rates, Stack, rates_for
from moesaic.cost.step import layer_pieces
from moesaic.cost.timeline import Piece
from moesaic.cost.workload import Workload
from moesaic.spec.cluster import ClusterSpec, ClusterTable, cluster_of
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import parse_run
from moesaic.spec.tables import LayoutTable

WORLD = 8


def model(experts: int = 64) -> ModelSpec:
    return parse_run(
        {
            "model": {
                "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 1024,
                "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
                "num_local_experts": experts, "num_experts_per_tok": 2,
            },
            "data": {"path": "text.txt"},
        }
    ).model_spec()  # fmt: skip


def layout(dispatcher: str = "alltoall", world: int = WORLD, **keys: object) -> Layout:
    table = LayoutTable.model_validate({"ep": world, "overlap": ["inside"], "dispatcher": dispatcher} | keys)
    return resolve_layout(table, model(), world, seq_len=None, global_batch=None)


def cluster(nodes: int = 1) -> ClusterSpec:
    return cluster_of(ClusterTable(gpu="h100"), WORLD * nodes)


@given(
    st.sampled_from([(2, 1), (4, 1), (2, 2), (1, 4), (8, 1)]),
    st.sampled_from(["alltoall", "allgather", "hierarchical"]),
    st.integers(1, 9),
)
def test_shares_of_all_parts_are_the_whole(degrees: tuple[int, int], dispatcher: str, chunks: int) -> None:
    ep, etp = degrees
    parts = chunks_of(layout(dispatcher, ep * etp, ep=ep, etp=etp), 64, chunks)
    assert sum(part.compute for part in parts) == pytest.approx(1)
    assert sum(part.travels for part in parts) == pytest.approx(1)


def test_all_gather_has_at_most_one_part_for_each_other_rank() -> None:
    assert [len(chunks_of(layout("allgather", 4), 64, chunks)) for chunks in (1, 2, 3, 8)] == [1, 4, 5, 5]


@given(*(st.floats(0.01, 10.0) for _ in range(3)), st.floats(0.1, 0.9))
def test_own_parts_hide_the_first_and_the_last_message(sent: float, experts: float, back: float, own: float) -> None:
    """Own half, one remote chunk, own half: the remote one waits for its rows or for the own half before it."""
    layer = [
        Piece("router", "compute", 1.0, 1.0),
        Piece("dispatch", "network", sent, sent),
        Piece("experts", "compute", experts, experts),
        Piece("combine", "network", back, back),
    ]
    half, remote = own * experts / 2, (1 - own) * experts
    parts = [Chunk(own / 2, 0.0), Chunk(1 - own, 1.0), Chunk(own / 2, 0.0)]
    found = simulate_layers([layer], ["inside"], what="forward", chunks=parts).makespan
    # Streams take what is ready: where the remote rows are late, the last own half fills the wait for them.
    late = half < sent
    wanted = max(2 * half, sent) + remote + back if late else half + remote + max(half, back)
    assert found == pytest.approx(1 + wanted)


def test_two_chunks_cost_what_two_layers_of_half_the_tokens_cost() -> None:
    rates, here = rates_for(cluster(), Stack("moesaic")), layout("hierarchical")
    whole, half = Workload(model(), 4096, 64), Workload(model(), 2048, 64)

    def busy(work: Workload) -> float:
        pieces = layer_pieces(work, here, cluster(), rates)["moe"]
        parts = [piece.part for piece in pieces]
        inside = pieces[parts.index("dispatch") : len(parts) - parts[::-1].index("combine")]
        return sum(piece.forward + piece.backward_input + piece.backward_weight for piece in inside)

    # What cutting costs is what busy streams of two chunks have more than those of a layer that is not cut.
    pieces = layer_pieces(whole, here, cluster(), rates)["moe"]
    fixed = fixed_seconds(pieces, layer_pieces(half, here, cluster(), rates)["moe"], 0.5)
    cut, uncut = (
        sum(event.seconds for event in simulate_layers([pieces], words, chunks=2, chunk_seconds=fixed).events)
        for words in (["inside"], [])
    )
    assert cut - uncut == pytest.approx(2 * busy(half) - busy(whole), rel=1e-6)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_few_rows_travel_whole_and_many_in_chunks(dispatcher: str) -> None:
    rates = rates_for(cluster(), Stack("moesaic"))
    found = []
    for seq_len in (64, 1024, 65536):
        (choice,) = choose_chunks(Workload(model(), seq_len, 64), layout(dispatcher), cluster(), rates)
        assert set(choice.seconds) == set(TRIED) and choice.experts == 64
        assert choice.seconds[choice.chunks] == min(choice.seconds.values())
        assert choice.rows == seq_len * 2 * WORLD / 64
        found.append(choice.chunks)
    assert found[0] == 1 < found[2] and found == sorted(found)


def test_nothing_is_cut_that_would_hide_nothing() -> None:
    free = replace(rates_for(cluster(), Stack("moesaic")), fast_latency=0.0, fast_share=1e6)
    (choice,) = choose_chunks(Workload(model(), 8192, 64), layout(), cluster(), free)
    assert choice.chunks == 1 and "whole" in choice.why()


def test_without_inside_or_where_no_rows_travel_there_is_no_choice() -> None:
    work, rates = Workload(model(), 1024, 64), Rates()
    assert choose_chunks(work, replace(layout(), overlap=()), cluster(), rates) == []
    assert choose_chunks(work, layout("local", ep=1), cluster(), rates) == []


@given(st.floats(0.0, 500.0), st.floats(1e-6, 1.0))
def test_rows_of_a_start_are_read_off_measured_products(start: float, best: float) -> None:
    """Products that take as long as m + `start` rows at the best share."""
    points = ((4, m, 512, 256, best * m / (m + start)) for m in (16, 64, 128))
    measured = cluster().model_copy(update={"rates": {"grouped_fp32_forward": tuple(points)}})
    assert start_rows(measured, "fp32") == pytest.approx(start, abs=1e-6)
    assert start_rows(measured, "bf16") == 0.0


def test_slow_starts_of_products_make_fewer_chunks() -> None:
    work, rates = Workload(model(), 65536, 64), rates_for(cluster(), Stack("moesaic"))
    points = tuple((4, m, 512, 256, m / (m + 30000.0)) for m in (16, 128))
    slow = cluster().model_copy(update={"rates": {"grouped_bf16_forward": points}})
    (plain,) = choose_chunks(work, layout(), cluster(), rates)
    (few,) = choose_chunks(work, layout(), slow, rates)
    assert few.chunks < plain.chunks


def test_heads_are_cut_where_their_exchange_takes_long() -> None:
    """16 key heads on 4 ranks: groups of 1, 2 or 4, whatever is allowed beyond."""
    work, here, rates = Workload(model(), 8192, 64), layout(cp=4), rates_for(cluster(), Stack("moesaic"))
    slow = choose_head_groups(work, here, cluster(), replace(rates, fast_share=rates.fast_share / 20))
    assert slow[3] == slow[2] < slow[1] and slow[4] == slow[6] == slow[8]
    free = choose_head_groups(work, here, cluster(), replace(rates, fast_latency=0.0, fast_share=1e6))
    assert min(free.values()) == free[1]


@pytest.mark.parametrize("keys", [{"cp": 4, "cp_kind": "ring"}, {}, {"cp": 4, "overlap": []}])
def test_heads_that_do_not_travel_are_not_cut(keys: dict[str, object]) -> None:
    assert choose_head_groups(Workload(model(), 8192, 64), layout(**keys), cluster(), Rates()) == {}
