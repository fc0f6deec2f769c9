"""What a run file leaves open in its layout is chosen by the cost model, and the run says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.cost.habits import MOESAIC
from moesaic.cost.inside import choose_chunks
from moesaic.cost.memory import memory
from moesaic.cost.options import choose_options, recompute_sets
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import cluster_of
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import resolve_layout
from moesaic.spec.run import RunSpec, parse_run
from moesaic.train.options import chosen_layout, price

WORLD = 16


def run(layout: dict[str, object], cluster: dict[str, object] | None = None, top_k: int = 2) -> RunSpec:
    return parse_run(
        {
            "model": {
                "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 1024,
                "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "num_local_experts": 64,
                "num_experts_per_tok": top_k,
            },
            "data": {"path": "text.txt"},
            "layout": {"ep": WORLD, **layout},
            "train": {"seq_len": 4096, "global_batch": 64, "dtype": "bf16"},
            "cluster": cluster or {},
        }
    )  # fmt: skip


H100 = {"gpu": "h100"}


def test_without_a_cluster_nothing_is_chosen_and_overlap_auto_asks_for_one() -> None:
    plain = run({})
    assert chosen_layout(plain, plain.model_spec(), WORLD, 8)[1] == []
    asked = run({"overlap": "auto"})
    with pytest.raises(SpecError, match=r"cluster\.gpu is not set"):
        chosen_layout(asked, asked.model_spec(), WORLD, 8)


def test_a_named_dispatcher_and_named_words_are_left_alone() -> None:
    named = run({"dispatcher": "allgather", "overlap": "none"}, H100)
    layout, notes = chosen_layout(named, named.model_spec(), WORLD, 8)
    assert (layout.dispatcher, layout.overlap, notes) == ("allgather", (), [])


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_the_choice_is_the_fastest_of_all_that_were_priced_one_by_one(top_k: int) -> None:
    asked = run({"overlap": "auto"}, H100, top_k)
    model = asked.model_spec()
    layout, (note, *_) = chosen_layout(asked, model, WORLD, 8)
    plain = resolve_layout(asked.layout, model, WORLD, seq_len=4096, global_batch=64)
    choice = price(asked, model, plain, WORLD, 8)
    assert replace(layout, inside_chunks=choice.layout.inside_chunks) == choice.layout and layout.dispatcher in note
    assert {option.dispatcher for option in choice.options} >= {"alltoall", "allgather"}
    assert choice.options[0].step_seconds == min(option.step_seconds for option in choice.options)


def test_chunks_are_chosen_for_a_cluster_and_taken_where_they_are_named() -> None:
    """For each number of experts; without a cluster two chunks, and one where a layer should not be cut."""
    keys: dict[str, object] = {"overlap": ["inside"], "dispatcher": "alltoall"}
    for chunks, cluster, wanted in (("auto", {}, 2), (5, {}, 5), (1, H100, 1)):
        named = run(keys | {"inside_chunks": chunks}, cluster)
        layout, notes = chosen_layout(named, named.model_spec(), WORLD, 8)
        assert (layout.chunks(64), notes) == (wanted, [])
    asked = run(keys, H100)
    layout, (note,) = chosen_layout(asked, asked.model_spec(), WORLD, 8)
    work, cluster = Workload(asked.model_spec(), 4096, 64), cluster_of(asked.cluster, WORLD)
    (choice,) = choose_chunks(work, layout, cluster, rates_for(cluster, Stack("moesaic")))
    assert layout.chunks(64) == choice.chunks
    assert "layers of 64 experts (2048 rows each)" in note and choice.why() in note and "inside_chunks" in note
    assert replace(layout, overlap=()).chunks(64) == 1
    with pytest.raises(SpecError, match="inside_chunks is 0"):
        chosen_layout(run({"inside_chunks": 0}), asked.model_spec(), WORLD, 8)


def test_pricing_together_is_pricing_alone() -> None:
    asked = run({}, H100)
    model = asked.model_spec()
    plain = resolve_layout(asked.layout, model, WORLD, seq_len=4096, global_batch=64)
    cluster = cluster_of(asked.cluster, WORLD)
    choice = price(asked, model, plain, WORLD, 8)
    work = Workload(model, 4096, 64)
    for option in choose_options(work, plain, cluster, ["alltoall", "allgather"], [(), ("inside",)]).options:
        alone = replace(plain, dispatcher=option.dispatcher, overlap=option.overlap)
        time = step_time(work, Columns.of([alone]), cluster, rates_for(cluster, Stack("moesaic")))
        assert float(time.total[0]) == pytest.approx(option.step_seconds)
    assert choice.options


@pytest.mark.parametrize("share", [0.35, 0.6, 0.9, 1.0])
def test_the_set_to_recompute_is_the_fastest_that_fits(share: float) -> None:
    """By brute force over all sets, each priced alone; `share` lies between the leanest set and keeping everything."""
    asked = run({}, H100)
    model = asked.model_spec()
    plain = resolve_layout(asked.layout, model, WORLD, seq_len=4096, global_batch=64)
    cluster, work = cluster_of(asked.cluster, WORLD), Workload(model, 4096, 64)
    priced = {}
    for recompute in recompute_sets(model):
        columns = Columns.of([replace(plain, recompute=recompute)])
        seconds = float(step_time(work, columns, cluster, rates_for(cluster, Stack("moesaic"))).total[0])
        priced[recompute] = (seconds, float(memory(work, columns, MOESAIC).total[0]))
    sizes = [size for _, size in priced.values()]
    limit = min(sizes) + share * (max(sizes) - min(sizes))
    best = min(time for time, size in priced.values() if size <= limit)
    choice = choose_options(work, plain, cluster, [plain.dispatcher], [()], list(priced), limit)
    assert priced[choice.layout.recompute][1] <= limit
    assert priced[choice.layout.recompute][0] == pytest.approx(best)
    lines = choice.recomputes()
    assert sum("chosen" in line for line in lines) == 1 and len(lines) <= 9
    with pytest.raises(SpecError, match="full, the leanest, a rank needs"):
        choose_options(work, plain, cluster, [plain.dispatcher], [()], list(priced), min(sizes) - 1)


def test_every_set_to_recompute_is_listed_once() -> None:
    """A mixture has norms, attention, activations and mixtures to recompute: 8 sets of the first three, 4 with whole
    mixtures in their place, and whole layers."""
    sets = recompute_sets(run({}).model_spec())
    assert len(sets) == len(set(sets)) == 8 + 4 + 1
    assert sets[0] == () and sets[-1] == ("full",)
