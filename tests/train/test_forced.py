"""Forced balance, forced skew, and recorded routing: what is chosen, the same in every layout, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.model.forced import Forced, even, skew_bias, skewed
from moesaic.model.router import Router
from moesaic.model.sequences import Sequences
from moesaic.spec.errors import MoesaicError, SpecError
from moesaic.spec.model import RouterSpec
from moesaic.spec.run import check_forced, parse_run
from moesaic.spec.tables import BalanceTable
from moesaic.train import loop
from moesaic.train.routing_files import (
    Recording,
    Replay,
    RoutingFileError,
    benchmark_only,
    create,
    forced_routing,
    header_of,
)

from .conftest import MIXTRAL
from .jobs import Job, job_folder

HIDDEN = 8
PLAIN = RouterSpec(experts=8, top_k=2)
FAMILIES = {
    "softmax": PLAIN,
    "post": RouterSpec(experts=8, top_k=2, when="post"),
    "sigmoid with bias and groups": RouterSpec(
        experts=8, top_k=2, score="sigmoid", select_bias=True, groups=4, groups_kept=2, group_score="best2"
    ),
    "sparsemixer": RouterSpec(experts=8, top_k=2, score="sparsemixer", jitter=0.1),
}


def router_of(spec: RouterSpec, seed: int = 0) -> Router:
    router = Router(spec, HIDDEN, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(spec.experts, HIDDEN, generator=generator))
        if router.select_bias is not None:
            router.select_bias.copy_(0.1 * torch.randn(spec.experts, generator=generator))
    return router


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- even


@given(
    st.integers(1, 40).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    st.integers(0, 10**9),
    st.integers(0, 300),
    st.integers(0, 10**6),
)
def test_any_range_of_tokens_loads_experts_equally_and_no_token_takes_one_twice(sizes, start, count, shift):
    experts, top_k = sizes
    ids_TK = even(torch.arange(start, start + count), experts, top_k, shift)
    assert ids_TK.shape == (count, top_k)
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())
    loads = torch.bincount(ids_TK.flatten(), minlength=experts)
    assert len(loads) == experts and int(loads.max() - loads.min()) <= 1


def test_the_experts_of_a_token_lie_on_different_ranks():
    ids_TK = even(torch.arange(512), 256, 8)
    ranks = ids_TK // 32  # eight ranks of an expert-parallel group
    assert all(len(set(row)) >= 7 for row in ranks.tolist())


# ---------------------------------------------------------------- skew


@pytest.mark.parametrize("family", FAMILIES)
def test_skew_is_what_the_router_chooses_with_a_bias_on_its_logits(family):
    spec = FAMILIES[family]
    router = router_of(spec).double()
    bias_E = skew_bias(spec.experts, 1.5, seed=3, layer=2).double()
    x_TD = tokens(64).double()
    router.eval()
    router.choose = lambda choice_TE: skewed(router, bias_E, choice_TE)
    routing = router(x_TD)
    router.choose = None
    router.bias = torch.nn.Parameter(bias_E)
    biased = router(x_TD)
    assert torch.equal(routing.ids_TK.sort().values, biased.ids_TK.sort().values)
    assert not torch.equal(routing.ids_TK, router_of(spec).double().eval()(x_TD).ids_TK)
    # Weights come from the router's own scores, as if it had chosen these experts.
    router.bias = None
    assert torch.equal(routing.logits_TE, router(x_TD).logits_TE)


def test_skew_has_the_given_deviation_and_depends_on_seed_and_layer_alone():
    wide = skew_bias(200_000, 0.7, 1, 1)
    assert float(wide.std()) == pytest.approx(0.7, rel=0.01) and float(wide.mean()) == pytest.approx(0, abs=0.01)
    assert torch.equal(skew_bias(8, 1.0, 5, 2), skew_bias(8, 1.0, 5, 2))
    assert not torch.equal(skew_bias(8, 1.0, 5, 2), skew_bias(8, 1.0, 5, 3))
    assert not torch.equal(skew_bias(8, 1.0, 5, 2), skew_bias(8, 1.0, 6, 2))


# ---------------------------------------------------------------- layouts


def layouts(batch: int, length: int):
    """Ways in which ranks hold the tokens of a step: for each rank, its micro-batches (sequences, places)."""
    sequences, places = torch.arange(batch), torch.arange(length)
    chunks = places.chunk(4)
    yield "one process", [[(sequences, places)]]
    yield "micro-batches", [[(each, places) for each in sequences.split(1)]]
    yield "data parallel", [[(sequences[r::2], places)] for r in range(2)]
    yield "context parallel", [[(sequences, part)] for part in places.chunk(2)]
    yield (
        "zig-zag and tensor parallel",
        [[(sequences, piece)] for r in range(2) for piece in torch.cat([chunks[r], chunks[3 - r]]).chunk(2)],
    )


def choices_of(forced: Forced, router: Router, parts, batch: int, length: int) -> torch.Tensor:
    """The choices [batch, length, K] of a step, put together from those of all ranks."""
    whole = torch.full((batch, length, router.spec.top_k), -1)
    x_BSD = tokens(batch * length).view(batch, length, HIDDEN)
    for rank in parts:
        forced.begin_step(3)
        for sequences_B, places_S in rank:
            forced.set_tokens(sequences_B, places_S)
            x_TD = x_BSD[sequences_B][:, places_S].flatten(0, 1)
            ids_TK = router(x_TD).ids_TK
            whole[sequences_B[:, None], places_S[None]] = ids_TK.view(len(sequences_B), len(places_S), -1)
        forced.end_step()
    return whole


@pytest.mark.parametrize("mode", ["even", "skew"])
def test_forced_choices_are_the_same_in_every_layout(mode):
    found = []
    for _, parts in layouts(4, 8):
        router = router_of(PLAIN)
        forced = Forced([(1, router)], seq_len=8, mode=mode, std=2.0, seed=7)
        found.append(choices_of(forced, router, parts, 4, 8))
    assert all(torch.equal(each, found[0]) for each in found) and int(found[0].min()) >= 0
    if mode == "even":
        assert torch.bincount(found[0].flatten()).tolist() == [8] * 8


def test_nothing_is_forced_outside_of_training_steps():
    router, untouched = router_of(PLAIN), router_of(PLAIN)
    forced = Forced([(0, router)], seq_len=4, mode="even")
    x_TD = tokens(8)
    expected = untouched(x_TD).ids_TK
    assert torch.equal(router(x_TD).ids_TK, expected)
    forced.set_tokens(torch.arange(2), torch.arange(4))
    assert not torch.equal(router(x_TD).ids_TK, expected)
    forced.clear_tokens()
    assert torch.equal(router(x_TD).ids_TK, expected)


def test_rows_are_announced_by_the_number_of_their_first():
    router = router_of(PLAIN)
    forced = Forced([(0, router)], seq_len=4, mode="even")
    forced.see(5, Sequences(2, 4))
    ids_TK = router(tokens(8)).ids_TK
    assert torch.equal(ids_TK, even(torch.arange(20, 28), 8, 2))


def test_tokens_that_were_not_announced_are_an_error():
    router = router_of(PLAIN)
    forced = Forced([(0, router)], seq_len=4, mode="even")
    forced.set_tokens(torch.arange(2), torch.arange(4))
    with pytest.raises(MoesaicError, match="sees 7 tokens, but 2 sequences with 4 places"):
        router(tokens(7))


# ---------------------------------------------------------------- recordings


def a_run(tmp_path, *sets: str, **model):
    tables = {
        "model": MIXTRAL | model,
        "train": {"steps": 4, "seq_len": 8, "global_batch": 4, "warmup_steps": 0},
        "run": {"dir": str(tmp_path / "run")},
    }
    return parse_run(tables, sets, name="tiny")


def header_for(tmp_path, *sets: str, **model):
    run = a_run(tmp_path, *sets, **model)
    return header_of(run, run.model_spec())


@settings(max_examples=20)
@given(data=st.data(), experts=st.sampled_from([4, 256, 300]))
def test_a_recording_gives_back_every_choice(data, experts, tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "routes"
    steps, batch, length, k = 2, 3, 8, 2
    header = {
        "format": "moesaic routing 1",
        "model": "m",
        "steps": steps,
        "global_batch": batch,
        "seq_len": length,
        "layers": {"1": {"experts": experts, "top_k": k}},
    }
    create(path, header, resume=False)
    ids = torch.randint(experts, (steps, batch, length, k), generator=torch.Generator().manual_seed(experts))
    parts = data.draw(st.permutations(range(length))), data.draw(st.permutations(range(batch)))
    cut, row_cut = data.draw(st.integers(0, length)), data.draw(st.integers(0, batch))
    ranks = [Recording(path, is_first) for is_first in (True, False)]
    for step in range(1, steps + 1):
        for number, places in enumerate((parts[0][:cut], parts[0][cut:])):
            for sequences in (parts[1][:row_cut], parts[1][row_cut:]):
                b, s = torch.tensor(sequences, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)
                ranks[number].write(step, 1, b, s, ids[step - 1][b][:, s])
        for rank in ranks:
            rank.finish(step)
    replay = Replay(path, header)
    sequences_B, places_S = torch.tensor(parts[1]), torch.tensor(parts[0])
    for step in range(1, steps + 1):
        assert torch.equal(replay.read(step, 1, sequences_B, places_S), ids[step - 1][sequences_B][:, places_S])
    stored = np.load(path / "layer-1.npy")
    assert stored.itemsize == (1 if experts <= 256 else 2) and (stored == ids.numpy()).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_layout_recorded_another_replays(family, tmp_path):
    spec = FAMILIES[family]
    header = {
        "format": "moesaic routing 1",
        "model": "m",
        "steps": 3,
        "global_batch": 4,
        "seq_len": 8,
        "layers": {"0": {"experts": 8, "top_k": 2}},
    }
    ways = dict(layouts(4, 8))
    create(tmp_path / "routes", header, resume=False)
    router = router_of(spec)
    torch.manual_seed(0)
    forced = Forced([(0, router)], seq_len=8, sink=Recording(tmp_path / "routes", True))
    recorded = choices_of(forced, router, ways["zig-zag and tensor parallel"], 4, 8)
    for step in (1, 2):
        Recording(tmp_path / "routes", True).finish(step)
    other = router_of(spec, seed=9)
    forced = Forced([(0, other)], seq_len=8, source=Replay(tmp_path / "routes", header))
    assert torch.equal(choices_of(forced, other, ways["data parallel"], 4, 8), recorded)


def whole_recording(tmp_path, *sets: str):
    header = header_for(tmp_path, *sets)
    create(tmp_path / "routes", header, resume=False)
    for step in range(1, header["steps"] + 1):
        Recording(tmp_path / "routes", True).finish(step)
    return tmp_path / "routes"


@pytest.mark.parametrize(
    ("sets", "model", "expected"),
    [
        (("train.seq_len=4",), {}, "seq_len 8, and this run has 4"),
        (("train.global_batch=8",), {}, "global_batch 4, and this run has 8"),
        (("train.steps=5",), {}, "holds 4 whole steps, and the run has train.steps = 5"),
        ((), {"num_local_experts": 8}, "layer 0 has 2 of 4 experts, and that of tiny chooses 2 of 8"),
        ((), {"num_experts_per_tok": 1}, "layer 0 has 2 of 4 experts, and that of tiny chooses 1 of 4"),
        ((), {"num_hidden_layers": 3}, "layer 2 has no such layer"),
    ],
)
def test_a_recording_of_another_run_is_refused_with_numbers(sets, model, expected, tmp_path):
    path = whole_recording(tmp_path)
    with pytest.raises(RoutingFileError) as caught:
        Replay(path, header_for(tmp_path, *sets, **model))
    assert expected in str(caught.value)
    Replay(path, header_for(tmp_path, "train.steps=2"))


def test_what_is_no_recording_or_is_damaged_is_refused(tmp_path):
    wanted = header_for(tmp_path)
    with pytest.raises(RoutingFileError, match=r"header\.json is unreadable"):
        Replay(tmp_path / "nowhere", wanted)
    path = whole_recording(tmp_path)
    (path / "layer-0.npy").write_bytes((path / "layer-0.npy").read_bytes()[:100])
    with pytest.raises(RoutingFileError, match="cannot be read"):
        Replay(path, wanted)
    (path / "header.json").write_text(json.dumps({"format": "else"}))
    with pytest.raises(RoutingFileError, match="it is not a recording"):
        Replay(path, wanted)


def test_an_id_beyond_the_experts_is_found(tmp_path):
    path = whole_recording(tmp_path)
    ids = np.load(path / "layer-1.npy", mmap_mode="r+")
    ids[2, 1, 3, 0] = 77
    ids.flush()
    replay = Replay(path, header_for(tmp_path))
    assert replay.read(1, 1, torch.arange(4), torch.arange(8)).max() == 0
    with pytest.raises(RoutingFileError, match="layer 1, step 3 to expert 77, and there are 4"):
        replay.read(3, 1, torch.arange(4), torch.arange(8))


def test_a_recording_is_not_overwritten_but_gone_on_with(tmp_path):
    path = whole_recording(tmp_path)
    ids = np.load(path / "layer-0.npy", mmap_mode="r+")
    ids[0, 0, 0, 0] = 3
    ids.flush()
    with pytest.raises(RoutingFileError, match="exists: remove it"):
        create(path, header_for(tmp_path), resume=False)
    create(path, header_for(tmp_path), resume=True)
    assert np.load(path / "layer-0.npy")[0, 0, 0, 0] == 3
    with pytest.raises(RoutingFileError, match="another run: steps 4, and this run has 5"):
        create(path, header_for(tmp_path, "train.steps=5"), resume=True)


# ---------------------------------------------------------------- run files


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"force": "even", "replay": "x"}, "keep one of them"),
        ({"force": "skew"}, "force_std is 0"),
        ({"force_std": 1.0}, 'set it to "skew"'),
        ({"record": "x", "replay": "x"}, "record to another folder"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, expected):
    with pytest.raises(SpecError, match=expected):
        check_forced(BalanceTable(**keys))


def test_what_changes_the_routing_is_labelled():
    assert benchmark_only(BalanceTable()) == benchmark_only(BalanceTable(record="x")) == []
    assert benchmark_only(BalanceTable(force="even")) == ["experts chosen evenly (balance.force)"]
    (skew,) = benchmark_only(BalanceTable(force="skew", force_std=0.5))
    assert "0.5" in skew
    (replay,) = benchmark_only(BalanceTable(replay="routes"))
    assert "routes" in replay


def test_a_run_file_makes_what_it_asks_for(tmp_path):
    run = a_run(tmp_path, f"balance.record='{tmp_path}/routes'", "balance.force='even'")
    spec = run.model_spec()
    routers = [(i, router_of(RouterSpec(experts=4, top_k=2))) for i in range(2)]
    notes: list[str] = []
    made: list[str] = []

    def first(what, function):
        made.append(what)
        function()

    forced = forced_routing(run, spec, routers, first=first, is_first=True, resume=False, notes=notes)
    assert forced is not None and made == ["the recording of routing"]
    assert "Recording the routing of 4 steps" in notes[0] and "For benchmarks only: experts chosen evenly" in notes[1]
    for step in range(1, 5):
        forced.begin_step(step)
        for sequences_B in torch.arange(4).split(2):
            forced.set_tokens(sequences_B, torch.arange(8))
            for _, router in routers:
                router(tokens(16))
        forced.end_step()
    again = a_run(tmp_path, f"balance.replay='{tmp_path}/routes'")
    assert forced_routing(again, spec, routers, first=first, is_first=True, resume=False, notes=notes) is not None
    ids = np.load(tmp_path / "routes" / "layer-1.npy")
    assert np.bincount(ids.reshape(-1)).tolist() == [64] * 4
    nothing = forced_routing(a_run(tmp_path), spec, routers, first=first, is_first=True, resume=False, notes=notes)
    assert nothing is None


# ---------------------------------------------------------------- whole runs


def test_a_run_is_forced_labelled_recorded_and_replayed(make_run, console, tmp_path, metrics):
    routes = tmp_path / "routes"
    assert loop.train(make_run("plain", f"balance.record='{routes}'"), console=console) == 0
    assert loop.train(make_run("again", f"balance.replay='{routes}'"), console=console) == 0
    assert loop.train(make_run("even", "balance.force='even'"), console=console) == 0
    skewed_keys = ("balance.force='skew'", "balance.force_std=3.0")
    assert loop.train(make_run("skew", *skewed_keys), console=console) == 0
    plain, again, even_, skew = (metrics(tmp_path / name) for name in ("plain", "again", "even", "skew"))
    assert [row["loss"] for row in again] == [row["loss"] for row in plain], "its own routing changes nothing"
    assert all("benchmark_only" not in row for row in plain)
    assert all(str(routes) in row["benchmark_only"][0] for row in again)
    assert all(row["benchmark_only"] == ["experts chosen evenly (balance.force)"] for row in even_)
    for row in even_:
        assert set(row["load_max_over_mean"].values()) == {1.0}
    worst = max(skew[0]["load_max_over_mean"].values())
    assert worst > max(plain[0]["load_max_over_mean"].values()) and "3" in skew[0]["benchmark_only"][0]
    assert "For benchmarks only: experts chosen evenly" in console.file.getvalue()
    # Held-out losses are the routers' own: at the first evaluation the models differ, not the way of measuring.
    assert np.load(routes / "recorded.npy").tolist() == [1] * 6
    stored = np.load(routes / "layer-0.npy")
    loads = np.bincount(stored[0].reshape(-1), minlength=4) / stored[0].size
    assert loads.tolist() == pytest.approx(plain[0]["expert_load"]["0"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_any_layout_records_and_replays_the_same_routing(tmp_path):
    folder = job_folder(tmp_path)
    keys = ("train.steps=3", "train.warmup_steps=1")
    runs = [
        ("one", 1, ("balance.record='one'",)),
        ("folded", 4, ("layout.pp=2", "layout.ep=2", "balance.record='folded'")),
        # Replays what it records.
        (
            *("ring", 4),
            (
                *("layout.cp=2", "layout.cp_kind='ring'", "layout.tp=2", "layout.ep=2", "layout.micro_batch=2"),
                *("balance.record='ring'", "balance.replay='one'"),
            ),
        ),
    ]
    losses = {}
    for name, processes, sets in runs:
        job = Job(folder, f"run-{name}", processes, *keys, *sets)
        assert job.end() == 0, job.said()
        losses[name] = job.losses(3)
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5)
        for layer in (0, 1):
            ours, theirs = (np.load(folder / each / f"layer-{layer}.npy") for each in (name, "one"))
            # Near-ties may fall otherwise once weights differ in their last bits; the first step has none of that.
            first = slice(None) if name == "ring" else slice(1)
            assert (np.sort(ours[first], -1) == np.sort(theirs[first], -1)).all()
            assert np.load(folder / name / "recorded.npy").all()
