"""Memory and time where layers or stages recompute differently, by arithmetic from what one layer keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesaic.cost.habits import MOESAIC
from moesaic.cost.memory import StageMemory, memory, stage_memory
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.recompute import idle_words
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import load_cluster
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.tables import LayoutTable
from tests.cost.kinds import KINDS

HABITS = replace(MOESAIC, workspace=0, context=0, reserved_share=0.0)
MODEL = ModelSpec(
    name="t", family="moesaic", vocab=64, hidden=64, layers=(KINDS["latent attention, shared expert"],) * 6
)
WORK = Workload(MODEL, 112, 64, precision="fp32")
INPUT = 112 * 64 * 4
"""Bytes of one layer's input: tokens times width times four."""
HEAD = 112 * (64 * 4 + 4)
"""The final norm's input and its statistic."""
BLOCK = {"recompute": ["full"], "recompute_method": "block"}


def layout_of(keys: dict[str, Any], pp: int = 2) -> Layout:
    table = LayoutTable.model_validate(keys | {"pp": pp})
    return resolve_layout(table, MODEL, pp, seq_len=112, global_batch=64)


def stages(keys: dict[str, Any]) -> list[StageMemory]:
    """Of two ranks with three layers each. The first holds two micro-batches, the second one."""
    return stage_memory(WORK, layout_of(keys), HABITS)


PLAIN = stages({})
LAYER = PLAIN[0].activations / (2 * 3)
BACKWARD = PLAIN[0].buffers
"""What a layer's backward needs beside what is kept."""


def test_the_parts_are_what_they_should_be() -> None:
    assert PLAIN[1].activations == 3 * LAYER + HEAD
    full = stages({"recompute": ["full"]})
    assert [each.activations for each in full] == [2 * 3 * INPUT, 3 * INPUT + HEAD]
    assert full[0].buffers == BACKWARD + LAYER - INPUT


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_block_keeps_the_inputs_of_the_first_layers_and_all_of_the_others(count: int) -> None:
    whole = min(count, 3)
    first, second = stages(BLOCK | {"recompute_layers": count})
    one = whole * INPUT + (3 - whole) * LAYER
    assert [first.activations, second.activations] == [2 * one, one + HEAD]
    # A recomputed layer's backward begins when a later layer that kept all is over.
    assert first.buffers == (BACKWARD if whole < 3 else BACKWARD + LAYER - INPUT)


def test_layers_recomputed_together_keep_one_input_and_are_all_there_in_backward() -> None:
    for count, chunks in ((2, 2), (3, 1), (5, 1)):
        first, second = stages({"recompute": ["full"], "recompute_layers": count})
        assert [first.activations, second.activations] == [2 * chunks * INPUT, chunks * INPUT + HEAD]
        # The first chunk's backward is the fullest, when the input of the one after it is gone.
        assert first.buffers == BACKWARD + min(count, 3) * LAYER - chunks * INPUT


def test_other_words_hold_for_the_layers_that_block_leaves() -> None:
    first, _ = stages(BLOCK | {"recompute": ["full", "layernorm"], "recompute_layers": 1})
    assert first.activations == 2 * (INPUT + 2 * (LAYER - 2 * INPUT))  # two norms' outputs, as large as an input


def test_stages_keep_by_their_own_sets() -> None:
    first, second = stages({"recompute_stages": [["full"], ["layernorm"]]})
    assert first.activations == 2 * 3 * INPUT and second.activations == 3 * (LAYER - 2 * INPUT) + HEAD
    assert sum(second.kept.values()) == second.activations
    same = [stages({"recompute_stages": [["full"]] * 2}), stages({"recompute": ["full"]})]
    assert same[0] == same[1]


def test_columns_of_many_layouts_price_each_as_alone() -> None:
    keys: list[dict[str, Any]] = [
        {},
        {"recompute": ["full"]},
        BLOCK | {"recompute_layers": 2},
        {"recompute": ["full"], "recompute_layers": 2},
        {"recompute_stages": [["layernorm"], []]},
        {"recompute_stages": [["full"], ["moe", "layernorm"]]},
    ]
    layouts = [layout_of(each) for each in keys]
    cluster = load_cluster("h100", 8)
    work, rates = replace(WORK, precision="bf16"), rates_for(cluster, Stack("moesaic"))
    many, times = memory(WORK, Columns.of(layouts), HABITS).total, step_time(work, Columns.of(layouts), cluster, rates)
    for row, layout in enumerate(layouts):
        assert many[row] == max(each.total for each in stage_memory(WORK, layout, HABITS))
        assert times.total[row] == pytest.approx(
            float(step_time(work, Columns.of([layout]), cluster, rates).total[0]), rel=1e-12
        )


def test_a_step_takes_as_long_as_what_is_computed_again() -> None:
    cluster = load_cluster("h100", 8)
    work, rates = replace(WORK, precision="bf16"), rates_for(cluster, Stack("moesaic"))

    def seconds(keys: dict[str, Any], pp: int = 1) -> float:
        return float(step_time(work, Columns.of([layout_of(keys, pp)]), cluster, rates).total[0])

    plain, *blocks = seconds({}), *(seconds(BLOCK | {"recompute_layers": count}) for count in range(1, 7))
    each = blocks[0] - plain
    assert each > 0
    for count, found in enumerate(blocks, start=1):
        assert found - plain == pytest.approx(count * each, rel=1e-6)
    assert seconds({"recompute": ["full"], "recompute_layers": 3}) == pytest.approx(blocks[-1])
    # The slowest rank is the one that recomputes.
    one, both = (seconds({"recompute_stages": sets}, 2) for sets in ([["full"], []], [["full"], ["full"]]))
    assert seconds({}, 2) < one < both


def test_a_word_is_idle_where_it_frees_nothing_on_any_stage() -> None:
    said = list(idle_words(layout_of({"recompute_stages": [["full", "layernorm"], ["layernorm", "mlp"]]}), MODEL, 112))
    assert len(said) == 1 and "'mlp'" in said[0]
    said = list(idle_words(layout_of({"recompute_stages": [["full", "layernorm"], []]}), MODEL, 112))
    assert len(said) == 1 and "full drops everything" in said[0]
