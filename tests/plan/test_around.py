"""One layout explained: read back from what is printed, illegal, too large or best, and its single changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.workload import DISPATCHERS, OFFLOAD, OVERLAP, RECOMPUTE, SHARDING, Columns
from moesaic.plan.around import changes, lacking_gib, why
from moesaic.plan.choice import legal_choice, parse_choice
from moesaic.plan.price import Pricer
from moesaic.plan.result import PlanResult, layout_text, options_text, why_slower
from moesaic.plan.search import Question, search
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, parse_layout
from moesaic.spec.legal import Degrees
from tests.plan.models import every_layout, model, question, runs

FRAMEWORKS = ("megatron", "moesaic", "torchtitan", "megascale")
SMALL = model((4, 4), heads=4, kv_heads=2, shared=512)


@cache
def mixtral(framework: str = "megatron", memory_gib: float = 79.6) -> Question:
    return question(load_model_spec("mixtral-8x7b"), 16, memory_gib, framework, 4096, 64)


@cache
def answer(framework: str = "megatron") -> PlanResult:
    return search(mixtral(framework))


def row_of(layout: Layout) -> str:
    """What the planner prints."""
    return f"{layout_text(layout)} {options_text(layout)}"


# ---------------------------------------------------------------- written and read back

powers = st.sampled_from([1, 1, 2, 4, 8])


@given(st.tuples(powers, powers, powers, powers, powers, powers, powers))
def test_degrees_of_1_are_left_out_and_read_back(degrees: tuple[int, ...]) -> None:
    pp, dp, cp, tp, edp, ep, etp = degrees
    if dp * cp * tp != edp * ep * etp:
        return
    base = next(every_layout(question(SMALL, 1, 80.0)))
    text = layout_text(replace(base, **Degrees(*degrees)._asdict()))
    table = parse_layout(text)
    assert (table.pp, table.dp, table.cp, table.tp, table.ep, table.etp) == (pp, dp, cp, tp, ep, etp)
    assert not any(word.lstrip("abcdefghijklmnopqrstuvwxyz") == "1" for word in text.split() if text != "dp1")


@given(st.data())
def test_options_are_read_back(data: st.DataObject) -> None:
    base = next(every_layout(question(SMALL, 1, 80.0)))
    several = {
        name: tuple(word for word in words if word in data.draw(st.sets(st.sampled_from(words))))
        for name, words in (("recompute", RECOMPUTE), ("overlap", OVERLAP[3:]), ("offload", OFFLOAD))
    }
    one = {
        "micro_batch": data.draw(st.integers(1, 64)),
        "virtual_stages": data.draw(st.integers(2, 16)),
        "dispatcher": data.draw(st.sampled_from(DISPATCHERS[1:])),
        "sharding": data.draw(st.sampled_from([word for word in SHARDING if word != "optimizer"])),
        "cp_kind": data.draw(st.sampled_from(["ulysses", "ring"])),
        "schedule": "zero_bubble",
    }
    _, options = parse_choice(row_of(replace(base, cp=2, **several, **one)))
    assert options == one | {name: value for name, value in several.items() if value}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_printed_row_is_the_same_layout(framework: str) -> None:
    one, result = mixtral(framework), answer(framework)
    for each in (*result.layouts[:8], *result.front):
        assert legal_choice(one, *parse_choice(row_of(each.layout))) == each.layout


def test_every_legal_layout_of_a_small_model_is_read_back() -> None:
    one = question(SMALL, 2, 80.0)
    layouts = list(every_layout(one))
    for layout in layouts[:: len(layouts) // 40]:
        assert legal_choice(one, *parse_choice(row_of(layout))) == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp2 ep8 deepp", r"'deepp'.*did you mean 'deepep'"),
        ("ep8 mb1, recompute moe_ac", r"'moe_ac' after recompute.*did you mean 'moe_act'"),
        ("ep8 mb1, overlap expert", r"'expert' after overlap.*did you mean 'experts'"),
        ("ep8 mb1, shard parameter", r"'shard parameter'.*did you mean 'parameters'"),
        ("ep8 mb1, rong", r"'rong'.*did you mean 'ring'"),
        ("ep8 mb1 mb2", r"gives micro_batch twice, as 1 and as 2"),
        ("ep8 alltoall deepep", r"gives dispatcher twice"),
        ("ep8 mb0", r"micro_batch is at least 1"),
        ("ep8 ep4", r"gives ep twice"),
        ("pp0", r"at least 1"),
        ("pq4", r"'pq4'.*did you mean .*'pp'"),
        ("pp2 / tp2", r"'tp2'"),
        ("", r"empty"),
    ],
)
def test_words_that_mean_nothing_get_the_nearest(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_choice(text)


# ---------------------------------------------------------------- why


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ep3", r"experts % ep = 8 % 3 = 2"),
        ("ep16", r"experts % ep = 8 % 16"),
        ("tp3", r"heads % tp = 32 % 3 = 2"),
        ("pp64", r"pp·virtual_stages = 64·1 = 64 stages, more than the 32 layers"),
        ("pp16 vpp4", r"16·4 = 64 stages, more than the 32 layers"),
        ("vpp2", r"there is no pipeline"),
        ("tp2 dp3", r"pp·dp·cp·tp = world does not hold: 1·3·1·2 = 6, but the world is 16"),
        ("edp3 ep8", r"edp3 is given, but .* makes it edp2"),
        ("pp4 mb64", r"micro"),
        ("ep8 local", r"'local', but ep·etp = 8·1 = 8"),
        ("tp2 mb1, deepep", r"ep·etp = 1, so that no token travels"),
        ("ep8 mb1, hierarchical", r"no dispatcher 'hierarchical', but allgather, alltoall, deepep, hybridep"),
        ("pp2 mb1, zero_bubble", r"no zero_bubble"),
        ("pp2 ep8 mb1, deepep, overlap experts", r"without virtual stages"),
        ("ep8 mb1, allgather, overlap experts", r"wants a dispatcher that sends to single ranks"),
        ("ep8 mb1, alltoall, overlap experts, recompute moe", r"moe is recomputed"),
        ("tp2 mb1, overlap experts", r"ep is 1"),
        ("ep8 mb1, alltoall, overlap weight_gradients", r"only overlap experts leaves"),
    ],
)
def test_what_is_not_legal(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        legal_choice(mixtral(), *parse_choice(text))


def test_why_not_legal() -> None:
    found = why(mixtral(), "pp2 ep3")
    assert found.candidate is None and not found.fits and not found.changes
    assert "experts % ep = 8 % 3 = 2" in found.illegal and "Nearest legal" in found.illegal
    assert found.best is not None and found.best.layout == answer().layouts[0].layout


def test_no_tensor_parallel_experts_in_torchtitan() -> None:
    with pytest.raises(SpecError, match="no tensor parallelism inside experts"):
        legal_choice(mixtral("torchtitan"), *parse_choice("ep4 etp2"))
    assert all(each.layout.etp == 1 for each in answer("torchtitan").layouts)


def test_why_too_large_and_what_makes_it_fit() -> None:
    one = mixtral()
    found = why(one, "pp2 tp2 ep4 mb1", count=100)
    assert found.candidate is not None and not found.illegal and not found.fits
    assert lacking_gib(found.candidate, one) > 0
    assert found.changes, "twice the expert parallelism halves weights and gradients"
    for change in found.changes:
        assert change.fits and change.candidate.memory_bytes <= one.limit_bytes < found.candidate.memory_bytes
    assert any(change.what.startswith("ep 4 → 8") for change in found.changes)


def test_why_best() -> None:
    one, best = mixtral(), answer().layouts[0]
    found = why(one, row_of(best.layout))
    assert found.fits and found.candidate is not None and found.best is not None
    assert found.candidate.layout == found.best.layout == best.layout
    assert lacking_gib(found.candidate, one) == pytest.approx((best.memory_bytes - one.limit_bytes) / 2**30)
    # Degrees alone get the options that make them fastest.
    assert legal_choice(one, *parse_choice(layout_text(best.layout))) == best.layout


def test_context_parallelism_that_only_a_ring_can_do() -> None:
    one = question(model((4, 4), heads=4, kv_heads=4), 8, 80.0, seq_len=8192)
    assert legal_choice(one, *parse_choice("cp8")).cp_kind == "ring"
    with pytest.raises(SpecError, match="heads"):
        legal_choice(one, *parse_choice("cp8 mb1, ulysses"))


def test_why_slower_names_the_largest_differences() -> None:
    best, *others = answer().layouts
    for other in others:
        text = why_slower(best, other)
        lost = other.step_seconds - best.step_seconds
        assert text.startswith(f"{lost:.3g} s slower")
        gaps = sorted(((other.time[name] - best.time[name]) for name in best.time), key=abs)
        assert f"{abs(gaps[-1]):.3g} s {'more' if gaps[-1] > 0 else 'less'}" in text


# ---------------------------------------------------------------- single changes


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_changes_are_single_legal_and_priced(framework: str) -> None:
    one = mixtral(framework)
    best = answer(framework).layouts[0]
    found = changes(one, best)
    assert found and [change.gain for change in found] == sorted((change.gain for change in found), reverse=True)
    pricer = Pricer(one.work, one.cluster, one.stack)
    degrees = ("pp", "cp", "tp", "ep", "etp")
    others = ("micro_batch", "virtual_stages", "sharding", "dispatcher", "recompute", "offload", "overlap", "cp_kind")
    for change in found:
        layout = change.candidate.layout
        assert runs(layout), change.what
        moved = [name for name in degrees if getattr(layout, name) != getattr(best.layout, name)]
        options = [name for name in others if getattr(layout, name) != getattr(best.layout, name)]
        allowed = {"dispatcher", "virtual_stages", "overlap", "cp_kind"} if moved else {options[0] if options else ""}
        if "without overlap" in change.what:
            options.remove("overlap")
        assert len(moved) <= 1 and (set(options) <= allowed or options == ["micro_batch"]), change.what
        for name in moved:
            assert getattr(layout, name) / getattr(best.layout, name) in (0.5, 2)
        assert change.gain == pytest.approx(best.step_seconds / change.candidate.step_seconds - 1)
        assert change.fits == (change.candidate.memory_bytes <= one.limit_bytes)
        seconds = float(pricer.timed(Columns.of([layout]))[0])
        assert change.candidate.step_seconds == pytest.approx(best.correction * seconds, rel=1e-9)
    # What is changed can be written down and is read back as the same.
    for change in found[:: max(1, len(found) // 8)]:
        layout = change.candidate.layout
        assert legal_choice(one, *parse_choice(row_of(layout))) == layout, change.what


def test_no_single_change_that_fits_beats_the_best() -> None:
    """By more than what the search leaves out: it recomputes no more than it must."""
    for framework in FRAMEWORKS:
        for change in changes(mixtral(framework), answer(framework).layouts[0]):
            assert not change.fits or change.gain < 0.001, (framework, change.what)
