"""Stage strings, against expansions written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.spec.errors import SpecError
from moesaic.spec.legal import Sizes, stage_rules, stages_of
from moesaic.spec.stages import Recompute, Stage, Unit, default_stages, expand, parse_stages, stages_text
from moesaic.spec.tables import LayoutTable


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Et*3|t*4|ttmL", "Ettt|tttt|ttmL"),
        ("E,t | t t L", "Et|ttL"),
        ("(t|)*2", "t|t|"),
        ("E((t)*2|)*2L", "Ett|tt|L"),
        ("(tt|)*0001", "tt|"),
    ],
)
def test_expansion(text: str, letters: str) -> None:
    assert expand(text) == letters


def test_deepseek_v3_on_32_virtual_stages() -> None:
    """Megatron-Core's recipe for 61 layers and a prediction block."""
    stages = parse_stages("Et*3|(tt|)*29m|L", 61, 1)
    assert len(stages) == 32
    assert stages[0] == Stage(embed=True, layers=(0, 1, 2))
    assert stages[1] == Stage(layers=(3, 4)) and stages[29] == Stage(layers=(59, 60))
    assert stages[30:] == (Stage(mtp=True), Stage(head=True))


def test_a_stage_may_hold_nothing() -> None:
    """The same recipe without the block: the last but one stage only passes on."""
    stages = parse_stages("Et*3|(tt|)*29|L", 61, 0)
    assert stages[30:] == (Stage(), Stage(head=True)) and str(stages[30]) == "nothing"


def test_prediction_blocks_stand_together() -> None:
    stages = parse_stages("Et|tmm|L", 2, 2)
    assert stages == (Stage(True, (0,)), Stage(layers=(1,), mtp=True), Stage(head=True))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Et|tx|L", "has 'x' at position 5"),
        ("Ettm", "places 0 of 'L' (loss)"),
        ("EEttL", "places 2 of 'E'"),
        ("Et*3|L", "places 3 of 't' (decoder layers), but the model has 2"),
        ("EttmmL", "places 2 of 'm'"),
        ("tE|tmL", "has 't' where 'E' must stand (part 1 of 5)"),
        ("Et|mtL", "has 'm' where 't' must stand"),
        ("Ett|Lm", "has 'L' where 'm' must stand"),
        ("|EttmL", "empty stage before E"),
        ("EttmL|", "after L"),
        ("(Ettm", "opens 1 more brackets"),
        ("Ettm)L", "never opened"),
        ("E*|tt", "has '*' at position 2"),
        ("*2EttmL", "repeats nothing"),
        ("Et|*2tmL", "repeats nothing"),
        ("Et*0ttmL", "repeats 0 times"),
        ("Et*999999tmL", "repeats 999999 times"),
        ("((t*1000)*1000)*1000", "repeats 1000 times"),
    ],
)
def test_what_is_wrong_is_said(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_stages(text, 2, 1)
    assert part in str(caught.value) and repr(text) in str(caught.value)


def test_blocks_on_two_stages_are_refused() -> None:
    with pytest.raises(SpecError, match="spreads m over several stages"):
        parse_stages("Et|tm|mL", 2, 2)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2))
def test_default_deals_layers_evenly(count: int, more: int, mtp: int) -> None:
    layers = count + more
    stages = default_stages(count, layers, mtp)
    sizes = [len(stage.layers) for stage in stages]
    assert sum((stage.layers for stage in stages), ()) == tuple(range(layers))
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [stage.embed for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.head for stage in stages] == [False] * (count - 1) + [True]
    assert [stage.mtp for stage in stages] == [False] * (count - 1) + [mtp > 0]
    assert parse_stages(stages_text(stages, mtp), layers, mtp) == stages


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2), st.integers(0, 3))
def test_strings_read_back(sizes: list[int], mtp: int, behind: int) -> None:
    """Any split of the layers, with the blocks on any stage after the last layer."""
    layers, counts = sum(sizes), sizes + [0] * behind
    at = len(sizes) - 1 + behind // 2
    pieces = ["t" * n + ("m" * mtp if i == at else "") for i, n in enumerate(counts)]
    text = "E" + "|".join(pieces) + "L"
    stages = parse_stages(text, layers, mtp)
    assert [len(stage.layers) for stage in stages] == counts
    assert [stage.mtp for stage in stages] == [i == at and mtp > 0 for i in range(len(counts))]
    assert parse_stages(stages_text(stages, mtp), layers, mtp) == stages


def test_which_layers_full_recomputes() -> None:
    layers, words = (4, 5, 6), ("layernorm", "full")
    each = Recompute.of(layers, words, "uniform", 1)
    assert each == Recompute((Unit((4,), words), Unit((5,), words), Unit((6,), words)), words)
    block = Recompute.of(layers, words, "block", 2)
    rest = ("layernorm",)
    assert block == Recompute((Unit((4,), words), Unit((5,), words), Unit((6,), rest)), rest)
    pairs = Recompute.of(layers, ("full",), "uniform", 2)
    assert pairs == Recompute((Unit((4, 5), ("full",)), Unit((6,), ("full",))), ())
    assert Recompute.of((), words, "block", 2) == Recompute((), rest)


def test_sets_belong_to_pipeline_ranks() -> None:
    """Four virtual stages on two ranks: the first and the third are rank 0's."""
    keys = {"pp": 2, "virtual_stages": 2, "recompute_stages": [["full"], []]}
    sizes = Sizes("t", 4, 0, (2,), (2,), (), (), (), 0)
    stages = stages_of(2, LayoutTable.model_validate(keys), sizes)
    said = [stage.recompute.units[0].words for stage in stages if stage.recompute is not None]
    assert said == [("full",), (), ("full",), ()]
    (rule,) = stage_rules(4, LayoutTable.model_validate(keys | {"pp": 4, "virtual_stages": 1}), sizes)
    assert "recompute_stages has 2 lists, but layout.pp is 4" in rule
