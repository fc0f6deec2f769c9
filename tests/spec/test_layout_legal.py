"""Which layouts are legal: the enumeration against brute force, and the sentence about each one that is not."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import legal_layouts, parse_degrees, resolve_layout
from moesaic.spec.legal import fewest_ranks
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import refuse_cut_experts_with_libraries
from moesaic.spec.run import parse_run
from moesaic.spec.tables import LayoutTable

Build = Callable[..., ModelSpec]
NAMES = ("pp", "dp", "cp", "tp", "ep", "etp")
PLAIN = {"micro_batch": 1, "virtual_stages": 1, "replicas": 1, "order": "pp-outer", "dispatcher": "auto"}
WRITTEN = re.compile(r"pp\d+ dp\d+ cp\d+ tp\d+ / edp\d+ ep\d+ etp\d+")


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A model, a batch and the options of a layout."""
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    virtual = draw(st.sampled_from([1, 1, 2]))
    replicas = draw(st.sampled_from([1, 1, 2]))
    return {
        "model": {
            "experts": draw(st.sampled_from([(8,) * 4, (6, 6), (0, 8, 8), (4, 8), (0,) * 3, (6, 8, 8, 6), (4,)])),
            "heads": kv * draw(st.sampled_from([1, 2, 3, 4])),
            "kv_heads": kv,
            "width": draw(st.sampled_from([6, 8])),
            "expert_width": draw(st.sampled_from([4, 6])),
            "shared": draw(st.sampled_from([None, 12, 4])),
            "latent": draw(st.booleans()),
        },
        "seq_len": draw(st.sampled_from([8, 12, 15, 16, 24])),
        "global_batch": draw(st.integers(1, 12)),
        "table": {
            "cp_kind": draw(st.sampled_from(["ulysses", "ring"])),
            "micro_batch": draw(st.sampled_from([1, 2])),
            "virtual_stages": virtual,
            "replicas": replicas,
            "sharding": "optimizer" if replicas > 1 else "none",
            "order": draw(st.sampled_from(["pp-outer", "dp-outer"])),
            "dispatcher": draw(st.sampled_from(["auto", "auto", "local", "alltoall"])),
        },
    }


def brute_force(case: dict[str, Any], world: int) -> set[tuple[int, ...]]:
    """Every (pp, dp, cp, tp, ep, etp) of `world` ranks that the rules allow, one condition after the other."""
    model, table, seq, batch = case["model"], case["table"], case["seq_len"], case["global_batch"]
    experts = [count for count in model["experts"] if count]
    counts = range(1, world + 1)
    found = set()
    for pp, dp, cp, tp in itertools.product(counts, repeat=4):
        if pp * dp * cp * tp != world:
            continue
        for ep, etp in itertools.product(counts, repeat=2):
            edp, rest = divmod(dp * cp * tp, ep * etp)
            heads, kv = model["heads"], model["heads"] if model["latent"] else model["kv_heads"]
            micro, rest_of_batch = divmod(batch, table["micro_batch"] * dp)
            virtual = table["virtual_stages"]
            ok = rest == 0 and heads % tp == 0 and kv % tp == 0 and rest_of_batch == 0
            ok &= not (0 in model["experts"] and model["width"] % tp)
            ok &= not (experts and (model["expert_width"] % etp or all(count % ep for count in experts)))
            ok &= not (experts and model["shared"] and model["shared"] % tp)
            ok &= bool(experts) or ep * etp == 1
            if ok and cp > 1 and table["cp_kind"] == "ulysses":
                ok &= heads // tp % cp == 0 and (kv // tp % cp == 0 or cp % (kv // tp) == 0)
            if cp > 1 and table["cp_kind"] == "ring":
                ok &= seq % (2 * cp) == 0 and seq // cp % tp == 0
            ok &= seq % (cp * tp) == 0
            ok &= pp * virtual <= len(model["experts"]) and not (virtual > 1 and pp == 1)
            ok &= pp == 1 or (micro >= pp and (virtual == 1 or micro % pp == 0))
            ok &= dp * cp % table["replicas"] == 0 and edp % table["replicas"] == 0
            ok &= not (table["order"] == "dp-outer" and pp > 1 and edp != dp)
            ok &= {"auto": True, "local": ep * etp == 1, "alltoall": ep * etp > 1}[table["dispatcher"]]
            if ok:
                found.add((pp, dp, cp, tp, ep, etp))
    return found


def degrees_of(layout: Any) -> tuple[int, ...]:
    return tuple(getattr(layout, name) for name in NAMES)


def distance(degrees: tuple[int, ...], asked: tuple[int, ...]) -> tuple[int, float]:
    logs = sum(abs(math.log(a / b)) for a, b in zip(degrees, asked, strict=True))
    return sum(a != b for a, b in zip(degrees, asked, strict=True)), round(logs, 9)


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(1, 9))
def test_enumeration_is_what_brute_force_finds(tiny: Build, case: dict[str, Any], world: int) -> None:
    model, table = tiny(**case["model"]), LayoutTable(**case["table"])
    layouts = list(legal_layouts(model, world, seq_len=case["seq_len"], global_batch=case["global_batch"], table=table))
    assert len(layouts) == len({degrees_of(layout) for layout in layouts})
    assert {degrees_of(layout) for layout in layouts} == brute_force(case, world)
    for layout in layouts:
        assert layout.world == world == layout.pp * layout.edp * layout.ep * layout.etp
        assert sum((stage.layers for stage in layout.stages), ()) == tuple(range(len(model.layers)))


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(1, 9), st.data())
def test_a_refusal_names_the_nearest(tiny: Build, case: dict[str, Any], world: int, data: st.DataObject) -> None:
    model, legal = tiny(**case["model"]), brute_force(case, world)
    asked = tuple(data.draw(st.sampled_from([1, 1, 2, 3, 4]), label=name) for name in NAMES)
    table = LayoutTable(**case["table"], **dict(zip(NAMES, asked, strict=True)))
    sizes = {"seq_len": case["seq_len"], "global_batch": case["global_batch"]}
    if asked in legal:
        assert degrees_of(resolve_layout(table, model, world, **sizes)) == asked
        return
    with pytest.raises(SpecError) as caught:
        resolve_layout(table, model, world, **sizes)
    parsed = [parse_degrees(text) for text in WRITTEN.findall(str(caught.value))]
    named = [tuple(found[name] for name in NAMES) for found in parsed]
    if legal:
        assert len(named) == min(3, len(legal)) and set(named) <= legal
        best = sorted(distance(other, asked) for other in legal)[: len(named)]
        assert [distance(other, asked) for other in named] == best
        return
    assert f"No layout of {world} process" in str(caught.value)
    plain = case | {"table": {"cp_kind": case["table"]["cp_kind"]} | PLAIN}
    without = brute_force(plain, world)
    if without:
        assert "nearest without" in str(caught.value) and named and set(named) <= without
    else:
        for degrees in named:
            other = math.prod(degrees[:4])
            assert degrees in brute_force(case, other)
            assert not any(brute_force(case, n) for n in range(min(other, world) + 1, max(other, world)))
        fewer = [n for n in range(1, world) if brute_force(case, n)]
        assert fewer[-1:] == [n for n in (math.prod(degrees[:4]) for degrees in named) if n < world]


@pytest.mark.parametrize("power", [3, 6, 12])
def test_number_of_layouts_when_the_model_allows_all(tiny: Build, power: int) -> None:
    """2^n ranks are shared between k axes in C(n + k - 1, k - 1) ways; both meshes share those of a stage."""
    model = tiny([2**power] * 64, heads=2**power, kv_heads=2**power, width=2**power, expert_width=2**power)
    count = sum(1 for _ in legal_layouts(model, 2**power, table=LayoutTable(cp_kind="ring")))
    assert count == sum(math.comb(power - pp + 2, 2) ** 2 for pp in range(min(power, 6) + 1))


def test_enumeration_is_lazy_and_bounded(tiny: Build) -> None:
    model = tiny([64] * 16, heads=16, kv_heads=16, expert_width=64)
    first = next(legal_layouts(model, 4096))
    assert str(first).startswith("pp1 dp4096 cp1 tp1 / edp4096")
    bounded = list(legal_layouts(model, 256, tp=2, cp=1, etp=1, dp=64, edp=32))
    assert bounded and max(layout.dp for layout in bounded) == 64 and max(layout.tp for layout in bounded) == 2
    assert max(layout.edp for layout in bounded) <= 32 and {layout.etp for layout in bounded} == {1}
    whole = {str(layout) for layout in legal_layouts(model, 256)}
    assert {str(layout) for layout in bounded} < whole
    with pytest.raises(SpecError, match=r"'et' is not a degree.*'etp'"):
        next(legal_layouts(model, 4, et=1))


REFUSED: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"pp": 2, "tp": 2}, 6, ["2·dp·1·2 = 6 gives no whole dp", "6 is not a multiple of 4", "pp2 dp3 cp1 tp1"]),
    ({"dp": 3, "tp": 2}, 8, ["1·3·1·2 = 6, but the world is 8"]),
    ({"ep": 8, "etp": 2}, 8, ["pp·max(tp·cp, etp·ep) = 1·max(1·1, 2·8) = 16", "8 processes", "ep4 etp2"]),
    ({"dp": 6, "ep": 4}, 6, ["tp·cp·dp = etp·ep·edp does not hold: 1·1·6 = 6", "etp·ep = 1·4 = 4"]),
    ({"ep": 3}, 6, ["experts % ep = 8 % 3 = 2, not 0", "ep may be 1, 2, 4, 8", "/ edp3 ep2 etp1"]),
    ({"etp": 3}, 3, ["expert width % etp = 8 % 3 = 2"]),
    ({"tp": 3}, 3, ["heads % tp = 8 % 3 = 2, not 0", "tp may be 1, 2, 4"]),
    ({"tp": 8}, 8, ["kv_heads % tp = 4 % 8 = 4, not 0", "dp2 cp1 tp4"]),
    ({"cp": 3}, 3, ["heads / tp % cp = 8 / 1 % 3 = 2", "ring has no such limit"]),
    ({"pp": 8}, 8, ["pp·virtual_stages = 8·1 = 8 stages, more than the 4 layers of tiny", "pp4 dp2"]),
    ({"pp": 2, "virtual_stages": 4}, 2, ["2·4 = 8 stages, more than the 4 layers", "nearest without: pp2 dp1"]),
    ({"virtual_stages": 2}, 1, ["virtual_stages is 2, but layout.pp is 1"]),
    ({"dispatcher": "local", "ep": 2}, 2, ["dispatcher is 'local', but ep·etp = 2·1 = 2"]),
    ({"dispatcher": "alltoall"}, 2, ["dispatcher is 'alltoall', but ep·etp = 1"]),
    ({"replicas": 2, "sharding": "optimizer", "ep": 2}, 2, ["edp % replicas = 1 % 2 = 1"]),
    ({"replicas": 3, "sharding": "optimizer"}, 2, ["dp·cp % replicas = 2·1 % 3 = 2"]),
    ({"order": "dp-outer", "pp": 2, "tp": 2}, 8, ["edp is 4 and dp 2", "cp·tp = ep·etp (1·2 and 1·1)"]),
    ({"schedule": "zero_bubble"}, 1, ["'zero_bubble', but layout.pp is 1"]),
    ({"pp": 2, "stages": "Ett|t|tL"}, 2, ["has 3 stages, but pp·virtual_stages = 2·1 = 2"]),
    ({"pp": 2, "stages": "Et|t|t|tL"}, 2, ["has 4 stages", "use layout.virtual_stages 2"]),
    ({"pp": 3, "stages": "Etttt||L"}, 3, ["leaves pipeline rank 1 of 3 with nothing"]),
]


@pytest.mark.parametrize(("table", "world", "parts"), REFUSED)
def test_what_is_wrong_is_said(tiny: Build, table: dict[str, Any], world: int, parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_layout(LayoutTable(**table), tiny(), world, seq_len=96, global_batch=96)
    for part in [*parts, "earest"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({"overlap": ["experst"]}, "layout.overlap has 'experst': did you mean 'experts'"),
        ({"overlap": ["between"], "sharding": "optimizer"}, "before these are made"),
        ({"overlap": ["experts"], "sharding": "parameters"}, "drops its weights"),
        ({"overlap": ["experts"], "pp": 2, "schedule": "zero_bubble"}, "an order of its own"),
        ({"overlap": ["inside"], "dispatcher": "flex", "dispatcher_backend": "hybridep"}, "whole and not in chunks"),
        ({"recompute": ["core_attn"], "cp": 2, "cp_kind": "ring"}, "go around once more"),
        ({"offload": ["activations"], "recompute": ["full"]}, "recomputed layers keep nothing"),
        ({"offload": ["activations"], "offload_modules": []}, "offload_modules is empty"),
        ({"offload": ["activations"], "offload_modules": ["mpl"]}, "did you mean 'mlp'"),
        ({"offload": ["optimizer"], "offload_fraction": 0.0}, "offload_fraction is 0"),
        ({"replicas": 2}, 'layout.replicas is 2, but layout.sharding is "none"'),
        ({"pp": 2, "virtual_stages": 2, "schedule": "1f1b"}, 'use "interleaved"'),
        ({"pp": 2, "schedule": "interleaved"}, "virtual_stages is 1"),
        ({"stages": "EttL"}, "places 2 of 't' (decoder layers), but the model has 4"),
    ],
)
def test_options_that_no_degree_mends(tiny: Build, table: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_layout(LayoutTable(**table), tiny(), 2, seq_len=96, global_batch=96)
    assert part in str(caught.value) and "earest" not in str(caught.value)
    with pytest.raises(SpecError):
        next(legal_layouts(tiny(), 2, table=LayoutTable(**table)))


def test_what_the_planner_prices_and_the_trainer_lacks(tiny: Build) -> None:
    read = LayoutTable(dispatcher="flex", dispatcher_backend="deepep", ep=1, etp=2)
    resolve_layout(read, tiny(), 2, seq_len=96, global_batch=96)
    with pytest.raises(SpecError, match=r"whole experts, and layout\.etp is 2"):
        refuse_cut_experts_with_libraries(read)
    refuse_cut_experts_with_libraries(LayoutTable())


def test_a_world_that_no_layout_fits(tiny: Build) -> None:
    """11 ranks divide neither the batch, the heads, the layers nor the experts; 10 is five pipelines of two."""
    with pytest.raises(SpecError) as caught:
        resolve_layout(LayoutTable(), tiny(), 11, seq_len=1024, global_batch=40)
    said = str(caught.value)
    assert "train.global_batch is 40 sequences, not a multiple of layout.micro_batch 1 times layout.dp 11" in said
    assert "No layout of 11 processes is legal for tiny" in said
    assert "pp1 dp10 cp1 tp1 / edp10 ep1 etp1 (10 processes)" in said and "(12 processes)" in said
    with pytest.raises(SpecError, match="at least 1 process, not 0"):
        resolve_layout(LayoutTable(), tiny(), 0, seq_len=8, global_batch=8)


@pytest.mark.parametrize(
    ("kind", "tp", "seq_len", "parts"),
    [
        ("ulysses", 2, 1022, ["multiple of 4 (cp·tp = 2·2)", "1020 or 1024", "to 1024 would make 0.2%"]),
        ("ulysses", 1, 1021, ["multiple of 2 (cp·tp = 2·1)", "1020 or 1022"]),
        ("ring", 1, 1022, ["multiple of 4 (cp·lcm(2, tp) = 2·lcm(2, 1))", "1020 or 1024"]),
        ("ring", 4, 1028, ["multiple of 8 (cp·lcm(2, tp) = 2·lcm(2, 4))", "1024 or 1032"]),
        ("ring", 2, 3, ["such as 4;", "25.0% of the tokens padding"]),
    ],
)
def test_a_sequence_that_cannot_be_cut(tiny: Build, kind: Any, tp: int, seq_len: int, parts: list[str]) -> None:
    table = LayoutTable(cp=2, tp=tp, cp_kind=kind)
    with pytest.raises(SpecError) as caught:
        resolve_layout(table, tiny(), 2 * tp, seq_len=seq_len, global_batch=96)
    for part in [f"train.seq_len is {seq_len} tokens", f"{kind} context parallelism of degree 2", *parts, "Nearest"]:
        assert part in str(caught.value)
    padded = -(-seq_len // math.lcm(2 * tp, 4 if kind == "ring" else 1)) * math.lcm(2 * tp, 4 if kind == "ring" else 1)
    assert resolve_layout(table, tiny(), 2 * tp, seq_len=padded, global_batch=96).cp == 2


@pytest.mark.parametrize(
    ("table", "batch", "parts"),
    [
        ({"pp": 4}, 3, ["3 / (1·1) = 3 micro-batches, fewer than the pp = 4", "at least 4"]),
        ({"pp": 4, "micro_batch": 2}, 6, ["6 / (2·1) = 3 micro-batches", "at least 8"]),
        (
            {"pp": 2, "dp": 2, "micro_batch": 2},
            6,
            ["not a multiple of layout.micro_batch 2 times layout.dp 2", "4 or 8"],
        ),
        ({"pp": 2, "dp": 2, "virtual_stages": 2}, 6, ["3 micro-batches, not a multiple of pp = 2", "4 or 8"]),
    ],
)
def test_a_batch_that_does_not_fill_the_pipeline(tiny: Build, table: Any, batch: int, parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_layout(LayoutTable(**table), tiny(), 4, seq_len=96, global_batch=batch)
    for part in parts:
        assert part in str(caught.value)


def test_ulysses_copies_key_value_heads_only_where_they_come_out_even(tiny: Build) -> None:
    model = tiny(heads=24, kv_heads=6, width=48)
    for cp, legal in ((2, True), (3, True), (4, False), (6, True), (8, False), (12, True)):
        found = [layout.cp for layout in legal_layouts(model, cp) if layout.cp == cp]
        assert bool(found) is legal, cp
    with pytest.raises(SpecError, match="kv_heads / tp = 6 / 1 = 6 is neither a multiple nor a divisor of cp = 4"):
        resolve_layout(LayoutTable(cp=4), model, 4, seq_len=8, global_batch=8)


def test_a_model_without_experts_has_no_expert_mesh_to_choose(tiny: Build) -> None:
    dense = tiny([0, 0])
    assert {(layout.ep, layout.etp) for layout in legal_layouts(dense, 8)} == {(1, 1)}
    with pytest.raises(SpecError, match="tiny has no experts: use ep 1 and etp 1"):
        resolve_layout(LayoutTable(ep=2), dense, 2, seq_len=8, global_batch=8)


def test_expert_counts_that_differ(tiny: Build) -> None:
    model = tiny([32, 48])
    layout = resolve_layout(LayoutTable(ep=24), model, 48, seq_len=48, global_batch=48)
    assert layout.experts_ep == ((32, 8), (48, 24)) and layout.layer_edp(32) == 6
    with pytest.raises(SpecError, match=r"ep = 5 divides none of the expert counts 32, 48"):
        resolve_layout(LayoutTable(ep=5), model, 5, seq_len=40, global_batch=40)


@pytest.mark.parametrize(
    ("ep", "etp", "top_k", "dispatcher"),
    [(1, 1, 2, "local"), (8, 1, 1, "alltoall"), (8, 1, 5, "alltoall"), (8, 1, 6, "allgather"), (1, 2, 1, "allgather")],
)
def test_dispatcher_by_the_time_rule(tiny: Build, ep: int, etp: int, top_k: int, dispatcher: str) -> None:
    """MegaScale-MoE, Fig. 7: on 8 ranks an all-to-all is faster below k = 6, where 0.75 of the bandwidth is its own."""
    layout = resolve_layout(LayoutTable(ep=ep, etp=etp), tiny(top_k=top_k), 8, seq_len=8, global_batch=8)
    assert layout.dispatcher == dispatcher


def test_schedules_and_stages_of_a_table(tiny: Build) -> None:
    def resolved(**table: Any) -> Any:
        return resolve_layout(LayoutTable(**table), tiny(mtp=1), 2, seq_len=8, global_batch=8)

    assert resolved(pp=2).schedule == "1f1b" and resolved(pp=2, virtual_stages=2).schedule == "interleaved"
    assert resolved(pp=2, schedule="zero_bubble").schedule == "zero_bubble"
    layout = resolved(pp=2, virtual_stages=2, stages="E|tt|ttm|L")
    assert [str(stage) for stage in layout.stages_of(0)] == ["embedding", "layers 2–3, prediction blocks"]
    assert [str(stage) for stage in layout.stages_of(1)] == ["layers 0–1", "head and loss"]


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_fewest_ranks(pp: int, cp: int, tp: int, ep: int, etp: int, replicas: int) -> None:
    table = LayoutTable(pp=pp, cp=cp, tp=tp, ep=ep, etp=etp, replicas=replicas)

    def fits(world: int) -> bool:
        dp, rest = divmod(world, pp * cp * tp)
        edp, expert_rest = divmod(world, pp * ep * etp)
        return not rest and not expert_rest and dp * cp % replicas == 0 and edp % replicas == 0

    fewest = fewest_ranks(table)
    assert [world for world in range(1, fewest + 1) if fits(world)] == [fewest]


def test_a_run_file_gets_the_same_refusals() -> None:
    model = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tables: dict[str, Any] = {"model": {"preset": "Mixtral-8x7B"}, "layout": {"dp": 4, "ep": 8}}
    with pytest.raises(SpecError) as caught:
        parse_run(tables)
    assert "8 is more than the 4 processes" in str(caught.value) and "ep4 etp1" in str(caught.value)
    assert parse_run(tables, check=False).layout.ep == 8
    with pytest.raises(SpecError, match="1·1·4 = 4 is not a multiple of etp·ep = 1·3 = 3"):
        parse_run({"model": model, "layout": {"dp": 4, "ep": 3}})
    for layout, part in (
        ({"pp": 64}, "fewer than the pp = 64"),
        ({"tp": 3}, "train.seq_len is 1024 tokens, which tensor parallelism of degree 3 cuts"),
        ({"stages": "Et?L"}, "has '?'"),
        ({"pp": 3, "virtual_stages": 2}, "not a multiple of pp = 3"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_run({"layout": layout})
        assert part in str(caught.value)


def test_how_many_processes_a_run_is_for() -> None:
    assert parse_run({}).world is None
    assert parse_run({"cluster": {"nodes": 2, "gpus_per_node": 8}}).world == 16
    assert parse_run({"layout": {"dp": 2, "tp": 2}, "cluster": {"nodes": 2, "gpus_per_node": 8}}).world == 4
