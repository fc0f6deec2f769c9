"""What a search looks at: exactly the layouts that are legal, each with stages that hold the model once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.rates import Stack
from moesaic.cost.workload import RECOMPUTE, Columns, Workload
from moesaic.plan.space import (
    Stages,
    base_columns,
    choices_of,
    degrees_of,
    joined,
    layouts_of,
    most_degrees,
    recompute_ladder,
    with_options,
)
from moesaic.plan.stage_balance import balanced_stages, layer_costs
from moesaic.spec.cluster import load_cluster
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.stages import default_stages, parse_stages, stages_text
from moesaic.spec.tables import LayoutTable
from tests.plan.models import every_degree, model

DEGREES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    spec = model(
        experts=draw(st.sampled_from([(8,) * 4, (6, 6), (0, 8, 8), (4, 8), (0,) * 3, (6, 8, 8, 6, 6), (4,)])),
        heads=kv * draw(st.sampled_from([1, 2, 3, 4])),
        kv_heads=kv,
        width=draw(st.sampled_from([6, 8])),
        expert_width=draw(st.sampled_from([4, 6])),
        shared=draw(st.sampled_from([None, 12, 4])),
        mtp=draw(st.sampled_from([0, 0, 1])),
    )
    return Workload(spec, draw(st.sampled_from([8, 12, 15, 16, 24])), draw(st.integers(1, 24)))


def key(layout: Layout) -> tuple[Any, ...]:
    kind = layout.cp_kind if layout.cp > 1 else ""
    return (*(getattr(layout, name) for name in DEGREES), layout.micro_batch, layout.virtual_stages, kind)


@settings(max_examples=60)
@given(workloads(), st.integers(1, 9), st.sampled_from([{}, {"tp": 2, "etp": 2}, {"cp": 2}, {"cp": 1, "tp": 4}]))
def test_columns_are_the_legal_layouts(work: Workload, world: int, most: dict[str, int]) -> None:
    columns = base_columns(work, degrees_of(work, world, most))
    found = [key(layout) for layout in layouts_of(columns, work.model)]
    legal = {key(layout) for layout in every_degree(work, world, **most)}
    assert set(found) == legal
    assert len(found) == len(legal), "a layout stands twice"


@settings(max_examples=30)
@given(workloads(), st.integers(1, 9))
def test_every_row_is_accepted_by_the_reader_of_run_files(work: Workload, world: int) -> None:
    for layout in layouts_of(base_columns(work, degrees_of(work, world, {})), work.model):
        table = LayoutTable(
            **{name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep", "etp")},
            cp_kind=layout.cp_kind,  # type: ignore[arg-type]
            micro_batch=layout.micro_batch,
            virtual_stages=layout.virtual_stages,
            schedule=layout.schedule,  # type: ignore[arg-type]
            stages=stages_text(layout.stages, len(work.model.mtp)),
        )
        read = resolve_layout(table, work.model, world, seq_len=work.seq_len, global_batch=work.global_batch)
        assert (str(read), read.stages, read.experts_ep) == (str(layout), layout.stages, layout.experts_ep)
        assert read.schedule == layout.schedule and read.micro_batch == layout.micro_batch


@settings(max_examples=30)
@given(workloads(), st.integers(1, 9))
def test_given_degrees_are_the_rows_that_have_them(work: Workload, world: int) -> None:
    everything = degrees_of(work, world, {})
    for name in ("pp", "tp", "ep"):
        for value in {getattr(degrees, name) for degrees, _ in everything}:
            wanted = [pair for pair in everything if getattr(pair[0], name) == value]
            assert degrees_of(work, world, {}, {name: value}) == wanted


def test_columns_and_layouts_are_inverse() -> None:
    work = Workload(model(shared=64, mtp=1), 2048, 16)
    base = base_columns(work, degrees_of(work, 8, {}))
    columns = joined(
        [
            with_options(base, sharding="optimizer", dispatcher="alltoall", recompute=("moe_act", "mlp")),
            with_options(base, sharding="parameters", overlap=("gradients", "shared_experts"), offload=("optimizer",)),
            with_options(base, schedule="zero_bubble"),
        ]
    )
    layouts = list(layouts_of(columns, work.model))
    again = Columns.of(layouts)
    for name in vars(columns):
        if name in ("stages", "stage_lists", "ring"):
            continue
        np.testing.assert_array_equal(getattr(again, name), getattr(columns, name), err_msg=name)
    np.testing.assert_array_equal(again.ring & (again.cp > 1), columns.ring)
    for row, layout in enumerate(layouts):
        assert columns.stage_lists[columns.stages[row]] == layout.stages


def test_only_spread_experts_have_a_dispatcher() -> None:
    work = Workload(model(), 2048, 16)
    columns = with_options(base_columns(work, degrees_of(work, 8, {})), dispatcher="deepep")
    for layout in layouts_of(columns, work.model):
        assert layout.dispatcher == ("deepep" if layout.ep * layout.etp > 1 else "local")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_each_rung_computes_more_again(name: str) -> None:
    spec = load_model_spec(name)
    ladder = recompute_ladder(spec)
    assert ladder[0] == () and ladder[-1] == ("full",) and len(set(ladder)) == len(ladder)
    work = Workload(spec, 4096, 8)
    base = base_columns(work, degrees_of(work, 1, {}))
    again = []
    for rung in ladder:
        columns = with_options(base.take([0]), recompute=rung)
        again.append({module for module in RECOMPUTE if module not in ("full", "moe") and columns.recomputes(module)})
    for fewer, more in itertools.pairwise(again):
        assert fewer <= more
    has = {
        "mla_up_proj": any(layer.attention.kind == "mla" for layer in spec.layers),
        "mlp": any(layer.mlp is not None for layer in spec.layers),
        "shared_experts": any(layer.moe is not None and layer.moe.shared is not None for layer in spec.layers),
    }
    for module, there in has.items():
        assert any(module in rung for rung in ladder) == there


def test_what_a_stack_can_do() -> None:
    spec, nvidia, amd = load_model_spec("deepseek-v3"), load_cluster("h100", 64), load_cluster("mi300x", 64)
    assert set(choices_of(Stack(), spec, nvidia).dispatchers) == {"allgather", "alltoall", "deepep", "hybridep"}
    assert set(choices_of(Stack(), spec, amd).dispatchers) == {"allgather", "alltoall"}
    shared_and_experts = [
        set(each) & {"shared_experts", "experts"} for each in choices_of(Stack(), spec, nvidia).overlaps
    ]
    assert {"shared_experts", "experts"} not in shared_and_experts
    assert choices_of(Stack("torchtitan"), spec, nvidia).sharding == ("parameters",)
    assert most_degrees(nvidia, 4096, Stack("torchtitan"))["etp"] == 1
    assert most_degrees(nvidia, 4096, Stack()) == {"tp": 8, "etp": 8, "cp": 4}
    assert most_degrees(load_cluster("gb200", 144), 512, Stack())["cp"] == 1
    # Megatron-Core overlaps expert communication with at most one prediction block.
    assert not any("experts" in each for each in choices_of(Stack(), model(mtp=2), nvidia).overlaps)


# ---------------------------------------------------------------- stages

COSTS = st.lists(st.sampled_from([1.0, 1.0, 2.0, 5.0, 40.0]), min_size=1, max_size=24)


def cost_of(stages: tuple[Any, ...], layers: tuple[float, ...], behind: float) -> float:
    return max(sum(layers[i] for i in stage.layers) + behind * stage.head for stage in stages)


@settings(max_examples=200)
@given(COSTS, st.data(), st.sampled_from([0.0, 0.5, 3.0, 60.0]), st.booleans())
def test_stages_hold_each_layer_once_and_no_stage_is_empty(
    costs: list[float], data: st.DataObject, behind: float, mtp: bool
) -> None:
    layers = tuple(costs)
    count = data.draw(st.integers(1, len(layers)))
    stages = balanced_stages(count, layers, behind, mtp)
    assert len(stages) == count and all(stage.layers for stage in stages)
    assert sum((stage.layers for stage in stages), ()) == tuple(range(len(layers)))
    assert [stage.embed for stage in stages] == [index == 0 for index in range(count)]
    assert [stage.head for stage in stages] == [index == count - 1 for index in range(count)]
    assert parse_stages(stages_text(stages, int(mtp)), len(layers), int(mtp)) == stages
    even = default_stages(count, len(layers), int(mtp))
    assert cost_of(stages, layers, behind) <= cost_of(even, layers, behind) + max(layers)


def test_the_head_and_prediction_blocks_count_as_layers() -> None:
    """Megatron-Core's recipe for DeepSeek-V3 in 16 stages gives the first three or four layers, all or most of them
    dense, and the last one fewer than the others, since head and prediction block stand there."""
    spec = load_model_spec("deepseek-v3")
    layers, behind = layer_costs(spec, 4096)
    stages = balanced_stages(16, layers, behind, True)
    assert 0 < len(stages[-1].layers) < min(len(stage.layers) for stage in stages[:-1])
    assert cost_of(stages, layers, behind) < cost_of(default_stages(16, 61, 1), layers, behind)
    known = Stages(Workload(spec, 4096, 64))
    place = int(known.index(np.array([16]), np.array([1]))[0])
    assert known.lists[place] == stages
