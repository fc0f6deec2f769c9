"""The best layout against pricing every legal layout with every option, and what is said where none fits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.workload import Columns
from moesaic.plan.price import Pricer
from moesaic.plan.result import PlanResult
from moesaic.plan.search import Question, anything_fits, fewest_gpus, pareto, search, ways_out, works_together
from moesaic.plan.space import base_columns, degrees_of, layouts_of, with_options
from moesaic.spec.cluster import load_cluster
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.stages import stages_text
from moesaic.spec.tables import LayoutTable
from tests.plan.models import every_layout, model, question, runs

SMALL = {"experts": (4, 4), "heads": 4, "kv_heads": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "room": (SMALL, {"gpus": 4, "memory_gib": 40.0}),
    "tight": (SMALL, {"gpus": 4, "memory_gib": 3.2}),
    "shared expert": (SMALL | {"shared": 512}, {"gpus": 4, "memory_gib": 4.0}),
    "dense and latent": (SMALL | {"experts": (0, 4), "latent": True}, {"gpus": 4, "memory_gib": 4.0}),
    "no experts": (SMALL | {"experts": (0, 0, 0)}, {"gpus": 4, "memory_gib": 4.0}),
    "prediction block": (SMALL | {"mtp": 1}, {"gpus": 2, "memory_gib": 6.0}),
    "own trainer": (SMALL, {"gpus": 4, "memory_gib": 4.0, "framework": "moesaic"}),
    "torchtitan": (SMALL, {"gpus": 4, "memory_gib": 4.0, "framework": "torchtitan"}),
    "megascale": (SMALL, {"gpus": 4, "memory_gib": 4.0, "framework": "megascale"}),
    "amd": (SMALL, {"gpus": 4, "memory_gib": 4.0, "gpu": "mi300x"}),
}


@cache
def asked(case: str) -> Question:
    spec, cluster = CASES[case]
    return question(model(**spec), **cluster)


@cache
def answer(case: str) -> PlanResult:
    return search(asked(case))


@cache
def priced(case: str) -> tuple[list[Layout], Any, Any]:
    """Every layout with every option, their seconds and their bytes."""
    one = asked(case)
    layouts = list(every_layout(one))
    columns = Columns.of(layouts)
    pricer = Pricer(one.work, one.cluster, one.stack)
    return layouts, pricer.timed(columns), pricer.memory_bytes(columns)


@pytest.mark.parametrize("case", CASES)
def test_the_best_is_the_fastest_of_all_that_fit(case: str) -> None:
    layouts, seconds, held = priced(case)
    fits = held <= asked(case).limit_bytes
    assert fits.any() and answer(case).layouts
    best = answer(case).layouts[0]
    row = int(np.where(fits, seconds, np.inf).argmin())
    assert best.step_seconds / best.correction == pytest.approx(seconds[row], rel=1e-9), f"missed {layouts[row]}"


@pytest.mark.parametrize("case", CASES)
def test_what_is_returned_is_legal_and_fits(case: str) -> None:
    one, result = asked(case), answer(case)
    work = one.work
    times = [each.step_seconds for each in result.layouts]
    assert times == sorted(times) and len(times) <= one.top
    known = set(priced(case)[0])
    for each in (*result.layouts, *result.front):
        layout = each.layout
        assert layout in known and runs(layout)
        assert each.memory_bytes <= one.limit_bytes * (1 + 1e-12)
        table = LayoutTable(
            **{name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep", "etp", "micro_batch")},
            virtual_stages=layout.virtual_stages,
            cp_kind=layout.cp_kind,  # type: ignore[arg-type]
            sharding=layout.sharding,  # type: ignore[arg-type]
            schedule=layout.schedule,  # type: ignore[arg-type]
            stages=stages_text(layout.stages, len(work.model.mtp)),
        )
        read = resolve_layout(table, work.model, one.cluster.gpus, seq_len=work.seq_len, global_batch=work.global_batch)
        assert (str(read), read.stages) == (str(layout), layout.stages)


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up(case: str) -> None:
    one = asked(case)
    pricer = Pricer(one.work, one.cluster, one.stack)
    for each in (*answer(case).layouts, *answer(case).front):
        columns = Columns.of([each.layout])
        assert sum(each.time.values()) == pytest.approx(each.step_seconds, rel=1e-9)
        assert min(each.time.values()) >= 0 and min(each.memory.values()) >= 0 and each.hidden_seconds >= 0
        assert sum(each.memory.values()) == pytest.approx(float(pricer.memory_bytes(columns)[0]), rel=1e-9)
        assert each.step_seconds == pytest.approx(each.correction * float(pricer.timed(columns)[0]), rel=1e-9)
        low, high = each.interval_seconds
        assert 0 < low < each.step_seconds < high and low * high == pytest.approx(each.step_seconds**2)
        tokens = one.work.tokens / each.step_seconds / one.cluster.gpus
        assert each.tokens_per_second_per_gpu == pytest.approx(tokens)
        walls = each.walls
        assert walls["communication"] + walls["host"] + walls["compute"] == pytest.approx(1)
        assert walls["memory"] == pytest.approx(each.memory_bytes / one.cluster.gpu.memory_bytes)


@pytest.mark.parametrize("case", CASES)
def test_nothing_beats_the_front(case: str) -> None:
    """Neither another of its own, nor by more than 3 % in both any that exists: not every option of every layout is
    priced for the front."""
    front = answer(case).front
    assert front[0].step_seconds == pytest.approx(answer(case).layouts[0].step_seconds)
    for one, other in itertools.pairwise(front):
        assert one.step_seconds <= other.step_seconds and one.memory_bytes > other.memory_bytes
    layouts, seconds, held = priced(case)
    for each in front:
        beats = (seconds < each.step_seconds / each.correction * 0.97) & (held < each.memory_bytes * 0.97)
        assert not beats.any(), f"{each.layout} loses to {layouts[int(np.flatnonzero(beats)[0])]}"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40))
def test_pareto_is_what_nothing_dominates(points: list[tuple[int, int]]) -> None:
    seconds, held = (np.array(column, float) for column in zip(*points, strict=True))
    found = {points[row] for row in pareto(seconds, held)}
    wanted = {
        point
        for point in points
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    }
    assert found == wanted


@pytest.mark.parametrize("case", ["shared expert", "own trainer"])
def test_what_works_together_is_what_the_stacks_allow(case: str) -> None:
    one = asked(case)
    base = base_columns(one.work, degrees_of(one.work, one.cluster.gpus, {}))
    sets = [(), ("experts",), ("experts", "weight_gradients"), ("weight_gradients",), ("shared_experts",)]
    again = [(), ("moe_act",), ("shared_experts",), ("moe",), ("full",)]
    for dispatcher, overlap, recompute in itertools.product(("allgather", "alltoall", "deepep"), sets, again):
        columns = with_options(base, dispatcher=dispatcher, overlap=overlap, recompute=recompute)
        expected = [runs(layout) for layout in layouts_of(columns, one.work.model)]
        assert works_together(columns).tolist() == expected


def test_degrees_that_are_given_are_kept() -> None:
    one = replace(asked("room"), only={"tp": 2, "micro_batch": 2})
    result = search(one)
    assert {(each.layout.tp, each.layout.micro_batch) for each in result.layouts} == {(2, 2)}
    with pytest.raises(SpecError, match=r"with tp 3"):
        search(replace(one, only={"tp": 3}))


# ---------------------------------------------------------------- what fits, and what to do where nothing does


def least_bytes(one: Question) -> float:
    """Of everything that is legal, what the leanest needs."""
    layouts = list(every_layout(one))
    if not layouts:
        return np.inf
    return float(Pricer(one.work, one.cluster, one.stack).memory_bytes(Columns.of(layouts)).min())


def with_gpus(one: Question, gpus: int) -> Question:
    return replace(one, cluster=one.cluster.model_copy(update={"gpus": gpus}))


@pytest.mark.parametrize("framework", ["megatron", "moesaic", "torchtitan"])
@pytest.mark.parametrize("memory_gib", [1.5, 2.2, 2.6, 3.0, 8.0])
def test_fewest_is_the_smallest_that_fits(framework: str, memory_gib: float) -> None:
    one = question(model(**SMALL), 8, memory_gib, framework, seq_len=512)
    fits = [gpus for gpus in (1, 2, 4, 8) if least_bytes(with_gpus(one, gpus)) <= one.limit_bytes]
    assert fewest_gpus(one, 8) == (fits[0] if fits else None)
    for gpus in (1, 2, 4, 8):
        assert anything_fits(with_gpus(one, gpus)) == (gpus in fits)


@pytest.mark.parametrize("framework", ["megatron", "moesaic"])
@pytest.mark.parametrize("memory_gib", [1.5, 2.2])
def test_a_search_finds_something_where_something_fits(framework: str, memory_gib: float) -> None:
    for gpus in (1, 2, 4):
        one = question(model(**SMALL), gpus, memory_gib, framework, seq_len=512)
        if least_bytes(one) <= one.limit_bytes:
            assert search(one).layouts
        else:
            with pytest.raises(SpecError, match="Nothing fits"):
                search(one)


@pytest.mark.parametrize(
    ("name", "gpus", "memory_gib", "framework", "seq_len"),
    [
        ("mixtral-8x7b", 4, 70.0, "megatron", 4096),
        ("mixtral-8x7b", 4, 60.0, "torchtitan", 16384),
        ("deepseek-v3", 8, 80.0, "megatron", 4096),
    ],
)
def test_ways_out_are_ways_out(name: str, gpus: int, memory_gib: float, framework: str, seq_len: int) -> None:
    """Each one that is offered is taken, and something fits then and not before."""
    one = replace(question(load_model_spec(name), gpus, memory_gib, framework, seq_len, 64), headroom=0.3)
    assert not anything_fits(one)
    with pytest.raises(SpecError) as error:
        search(one)
    need = re.search(r"needs ([\d.]+) GiB", str(error.value))
    assert need is not None
    found = list(ways_out(one, float(need[1]) * 2**30))
    assert found and str(error.value).endswith(f"try {', or '.join(found[:3])}.")
    for way in found:
        options = dict(re.findall(r"--(\S+) ('[^']+'|\S+)", way))
        work, cluster, headroom = one.work, one.cluster, one.headroom
        if "gpu" in options:
            cluster = load_cluster(options["gpu"].strip("'"), cluster.gpus)
        if "gpus" in options:
            cluster = cluster.model_copy(update={"gpus": int(options["gpus"])})
        if "memory-headroom" in options:
            headroom = float(options["memory-headroom"])
        if "moments" in options:
            work = replace(work, moment_bytes=2)
        if "seq-len" in options:
            work = replace(work, seq_len=int(options["seq-len"]))
        assert options and anything_fits(replace(one, work=work, cluster=cluster, headroom=headroom)), way


def test_nothing_fits_says_what_is_missing_and_by_how_much() -> None:
    one = replace(question(load_model_spec("mixtral-8x7b"), 1, 80.0, "megatron", 4096, 4), headroom=0.05)
    with pytest.raises(SpecError) as error:
        search(one)
    text = str(error.value)
    numbers = re.search(r"needs ([\d.]+) GiB of the ([\d.]+) GiB .*, ([\d.]+) GiB too many, most of it (\w+) ", text)
    assert numbers is not None, text
    need, may, lack = (float(number) for number in numbers.groups()[:3])
    assert may == pytest.approx(0.95 * 80, abs=0.05) and need - may == pytest.approx(lack, abs=0.11)
    # Weights in bf16 and gradients in fp32 alone, whatever is offloaded, are 6 bytes for each of 46.7e9 parameters.
    assert need > 46.7e9 * 6 / 2**30 and numbers[4] == "gradients"
    assert re.search(r"try --gpus \d+", text)


def test_no_legal_layout_names_numbers_that_have_one() -> None:
    one = question(load_model_spec("mixtral-8x7b"), 37, 80.0, "megatron", 4096, 36)
    with pytest.raises(SpecError) as error:
        search(one)
    found = re.search(r"try --gpus (\d+) or (\d+)", str(error.value))
    assert found is not None and int(found[1]) < 37 < int(found[2])
    for gpus in found.groups():
        assert degrees_of(one.work, int(gpus), {})
    for gpus in range(int(found[1]) + 1, int(found[2])):
        assert not degrees_of(one.work, gpus, {})
