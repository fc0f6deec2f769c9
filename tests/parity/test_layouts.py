"""Every legal layout trains as one process does: losses, auxiliary terms, gradients, their norm, counts and biases.

Choices beside the degrees are spread over them (`choices`). A failure shows all layouts that failed, each as a table
that can be trained alone: `runs.errors` under `ranks(world).run`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from moesaic.spec.layout import legal_layouts
from moesaic.spec.tables import LayoutTable
from tests.parity import choices, models, runs
from tests.parity.choices import Keys
from tests.ranks import RankError, ranks

TOLERANCE = 1e-5
MODELS = sorted(models.CONFIGS)


def failure(name: str, keys: Keys, world: int) -> str | None:
    """What is wrong with three steps in a layout, in one line and perhaps a traceback; None if nothing is."""
    try:
        found = ranks(world).run(runs.errors, name, keys)
    except RankError as error:
        return f"{choices.text(name, keys, world)} {keys}: {error}"
    worst = {what: max(each[what] for each in found) for what in found[0]}
    exact = ("counts", "bias", "missing")
    wrong = {what: f"{x:.1e}" for what, x in worst.items() if not x <= (0 if what in exact else TOLERANCE)}
    return f"{choices.text(name, keys, world)} {keys}: {wrong}" if wrong else None


def assert_all_agree(world: int, tried: list[tuple[str, Keys]]) -> None:
    failures = [text for name, keys in tried if (text := failure(name, keys, world)) is not None]
    assert not failures, f"{len(failures)} of {len(tried)} layouts differ from one process:\n" + "\n".join(failures)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_layouts_meet_every_pair_of_choices(name: str, world: int) -> None:
    """The suite tries what it says: all degrees, all values of options, all pairs that are legal."""
    limits = {"seq_len": models.SEQ_LEN, "global_batch": models.GLOBAL_BATCH}
    table = LayoutTable(cp_kind="ring")
    legal = {*legal_layouts(models.model(name), world, **limits)}
    legal |= {*legal_layouts(models.model(name), world, **limits, table=table)}
    made = [choices.layout_of(name, keys, world) for keys in choices.cases(name, world)]
    assert {str(layout) for layout in made} >= {str(layout) for layout in legal}
    met = {what for case in choices.plan(name, world) for what in choices.values(case.degrees, case.keys)}
    wanted = {f"sharding={level}" for level in ("none", "optimizer", "gradients", "parameters")}
    wanted |= {"cp_kind=ulysses", "cp_kind=ring", "dispatcher=allgather", "dispatcher=alltoall"}
    wanted |= {"schedule=1f1b", "schedule=interleaved", "schedule=zero_bubble"}
    wanted |= {"shape=even", "shape=uneven", "shape=empty", "micro_batch=1", "micro_batch=2", "micro_batch=4"}
    if models.model(name).mtp:
        wanted.add("shape=prediction apart")
    if world == 4:
        wanted |= {"order=pp-outer", "order=dp-outer", "replicas=2"}
    assert wanted <= met, f"never tried: {sorted(wanted - met)}"


def test_a_few_layouts_of_every_model() -> None:
    for world, counts in (
        (2, {"deepseek_v3": 2}),
        (4, {"deepseek_v3": 4, "mixtral": 1, "qwen3_moe": 2}),
    ):
        assert_all_agree(world, [(n, keys) for n, count in counts.items() for keys in choices.few(n, world, count)])


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_legal_layout(name: str, world: int) -> None:
    assert_all_agree(world, [(name, keys) for keys in choices.cases(name, world)])


@st.composite
def layouts_of_eight(draw: st.DrawFn) -> tuple[str, Keys]:
    name = draw(st.sampled_from(MODELS))
    by_degrees = choices.options(name, 8)
    chosen = draw(st.sampled_from(sorted(by_degrees)))
    return name, draw(st.sampled_from(by_degrees[chosen])).table


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],  # a smaller layout is another layout
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(layouts_of_eight())
def test_a_sample_of_layouts_of_eight_ranks(case: tuple[str, Keys]) -> None:
    name, keys = case
    note(choices.text(name, keys, 8))
    print(choices.text(name, keys, 8), keys, flush=True)  # pytest shows it with a failure, and with -s or -rP
    assert_all_agree(8, [case])
