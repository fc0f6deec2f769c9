"""A step on explicit streams: its picture holds all of the work, and agrees with the closed form that ranked it."""

from __future__ import annotations

from functools import cache

import pytest

from moesaic.cost.rates import rates_for
from moesaic.cost.step import layer_pieces
from moesaic.cost.workload import Columns
from moesaic.plan.choice import legal_choice, parse_choice
from moesaic.plan.price import Pricer
from moesaic.plan.result import Candidate, PlanResult
from moesaic.plan.search import Question, search
from moesaic.plan.steps import StepPicture, step_picture
from moesaic.spec.families import load_model_spec
from tests.plan.models import model, question

FRAMEWORKS = ("megatron", "moesaic", "torchtitan", "megascale")


@cache
def asked(name: str, framework: str) -> Question:
    gpus, batch = {"mixtral-8x7b": (16, 64), "deepseek-v3": (512, 2048)}[name]
    return question(load_model_spec(name), gpus, 79.6, framework, 4096, batch)


@cache
def answer(name: str, framework: str) -> PlanResult:
    return search(asked(name, framework))


def picture(one: Question, candidate: Candidate) -> StepPicture:
    return step_picture(one.work, one.cluster, one.stack, candidate)


def candidate_of(one: Question, text: str) -> Candidate:
    layout = legal_choice(one, *parse_choice(text))
    return Pricer(one.work, one.cluster, one.stack).candidates(Columns.of([layout]))[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_rank_works_through_every_micro_batch(framework: str) -> None:
    one, result = asked("mixtral-8x7b", framework), answer("mixtral-8x7b", framework)
    for each in (*result.layouts[:5], *result.front[:5]):
        layout, found = each.layout, picture(one, each)
        assert 1 <= found.shown <= found.micro_batches == layout.micro_batches(one.work.global_batch)
        ranks = {event.rank for event in found.timeline.events}
        assert ranks == set(range(layout.pp))
        for event in (*found.timeline.events, *found.layer.events):
            assert 0 <= event.start <= event.stop
        assert max(event.stop for event in found.timeline.events) <= found.timeline.makespan * (1 + 1e-9)
        assert found.step_seconds >= found.timeline.makespan


@pytest.mark.parametrize(
    ("name", "framework"), [*(("mixtral-8x7b", each) for each in FRAMEWORKS), ("deepseek-v3", "megatron")]
)
def test_the_closed_form_agrees(name: str, framework: str) -> None:
    """Two ways to the same seconds: the closed form that ranks, and a simulation of every rank and stream. The closed
    form knows the seconds of whole ranks, so that uneven virtual stages, which wait for each other, come out short."""
    one, result = asked(name, framework), answer(name, framework)
    for each in result.layouts[:4]:
        ratio = picture(one, each).step_seconds / (each.step_seconds / each.correction)
        stages = each.layout.stages
        uneven = each.layout.virtual_stages > 1 and len({len(stage.layers) for stage in stages}) > 1
        print(f"{name} {framework} {each.layout} uneven {uneven}: simulation / closed form = {ratio:.3f}")
        assert 0.9 < ratio < (1.25 if uneven else 1.1), each.layout


@pytest.mark.parametrize("text", ["dp1 mb1", "pp2 mb1", "pp2 mb1, vpp2", "tp2 mb1", "ep2 mb1, alltoall"])
def test_small_and_dense_models_have_pictures(text: str) -> None:
    gpus = 1 if text.startswith("dp1") else 2
    for spec in (model((4, 4, 4, 4), heads=4, kv_heads=2, mtp=1), model((0, 0, 0, 0), heads=4, kv_heads=2)):
        if "ep2" in text and spec.layers[0].moe is None:
            continue
        one = question(spec, gpus, 80.0)
        found = picture(one, candidate_of(one, text))
        assert found.timeline.events and found.layer.events


def test_what_is_simulated_is_the_work_of_the_layers() -> None:
    """Without pipeline, overlap and communication, a step is its layers' seconds one after the other."""
    one = question(model((4, 4), heads=4, kv_heads=2), 1, 80.0)
    each = candidate_of(one, "dp1 mb1")
    pieces = layer_pieces(one.work, each.layout, one.cluster, rates_for(one.cluster, one.stack))
    passes = ["embedding", "moe", "moe", "head"]
    once = sum(
        piece.forward + piece.backward_input + piece.backward_weight for kind in passes for piece in pieces[kind]
    )
    found = picture(one, each)
    work = found.step_seconds - (each.time["optimizer"] + each.time["host"]) / each.correction
    assert work == pytest.approx(found.micro_batches * once, rel=1e-6)
