"""Memory as a whole: conservation, order of schedules, monotony, and columns that equal single layouts."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.counts import parameters
from moesaic.cost.habits import MEGATRON, MOESAIC, habits_for
from moesaic.cost.inflight import windows
from moesaic.cost.memory import Memory, memory, stage_memory
from moesaic.cost.workload import DISPATCHERS, OVERLAP, RECOMPUTE, SCHEDULES, SHARDING, Columns, Workload
from moesaic.schedule.orders import Action, Pair, paired, pipeline_order, single_actions
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, legal_layouts, resolve_layout, single
from moesaic.spec.model import ModelSpec
from moesaic.spec.tables import LayoutTable

MODELS = ("deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen1.5-moe-a2.7b", "llama3-8b")
GIB = 2**30


@cache
def layouts(name: str, world: int, virtual: int = 1, sharding: str = "none") -> list[Layout]:
    table = LayoutTable(virtual_stages=virtual, sharding=sharding, cp_kind="ring")  # type: ignore[arg-type]
    found = list(legal_layouts(load_model_spec(name), world, seq_len=4096, global_batch=512, table=table))
    return random.Random(0).sample(found, min(len(found), 20))


def replicated(model: ModelSpec) -> int:
    """Parameters that every tensor rank has whole, beside norms and routers."""
    count = 0
    for layer in model.layers:
        attention = layer.attention
        if attention.kind == "mla":
            count += model.hidden * ((attention.q_rank or 0) + (attention.kv_rank or 0) + (attention.rope_dim or 0))
        elif attention.o_bias:
            count += model.hidden
        if layer.moe is not None and layer.moe.shared is not None and layer.moe.shared.bias:
            count += model.hidden
    return count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("virtual", [1, 2])
def test_weights_of_all_ranks_are_parameters_times_copies(name: str, virtual: int) -> None:
    model = load_model_spec(name)
    counts = parameters(model)
    work = Workload(model, 4096, 512, mtp=False)
    seen = 0
    for layout in layouts(name, 32, virtual):
        sizes = stage_memory(work, layout, MOESAIC)
        held = sum(size.weights for size in sizes) / 2 * layout.dp * layout.cp * layout.tp
        experts = counts.by_part.get("experts", 0)
        # Routed experts live edp times (in layers with fewer experts than ep, more often), the rest dp·cp times, of
        # which norms, routers and latent down projections are on every tensor rank.
        whole = counts.by_part["norms"] + counts.by_part.get("router", 0) + replicated(model)
        copies = layout.dp * layout.cp
        wanted = experts * layout.edp + (counts.total - experts + whole * (layout.tp - 1)) * copies
        assert held == pytest.approx(wanted, rel=1e-12), layout
        seen += 1
    assert seen


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b"])
def test_sharded_states_add_up_to_one_copy(name: str) -> None:
    model = load_model_spec(name)
    counts, work = parameters(model), Workload(model, 4096, 512, mtp=False)
    for layout in layouts(name, 32):
        if layout.tp > 1:
            continue
        ranks = layout.dp * layout.cp
        for place, (level, parts) in enumerate(
            {"optimizer": ("optimizer",), "gradients": ("optimizer", "gradients"),
             "parameters": ("optimizer", "gradients", "weights")}.items()
        ):  # fmt: skip
            assert SHARDING[place + 1] == level
            sizes = stage_memory(work, replace(layout, sharding=level), replace(MOESAIC, gathers_masters=False))
            for part, per_parameter in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
                if part in parts:
                    held = sum(getattr(size, part) for size in sizes) * ranks
                    assert held == pytest.approx(per_parameter * counts.total, rel=1e-12)


def test_bytes_per_parameter_by_sharding_level() -> None:
    model = load_model_spec("llama3-8b")
    count = parameters(model).total
    layout = resolve_layout(LayoutTable(), model, 8, seq_len=4096, global_batch=64)

    def per_parameter(work: Workload, **changes: object) -> float:
        size = stage_memory(work, replace(layout, **changes), MOESAIC)[0]  # type: ignore[arg-type]
        return (size.weights + size.gradients + size.optimizer) / count

    work = Workload(model, 4096, 64)
    assert per_parameter(work) == pytest.approx(18)
    assert per_parameter(work, sharding="optimizer") == pytest.approx(6 + 12 / 8)
    assert per_parameter(work, sharding="optimizer", replicas=2) == pytest.approx(6 + 12 / 4)
    assert per_parameter(work, sharding="gradients") == pytest.approx(2 + 16 / 8)
    # Our trainer stores the fp32 master of a sharded weight and no bf16 shard beside it.
    assert per_parameter(work, sharding="parameters") == pytest.approx(16 / 8)
    assert per_parameter(work, sharding="optimizer", offload=("optimizer",)) == pytest.approx(6 + 4 / 8)
    assert per_parameter(work, offload=("optimizer",)) == pytest.approx(6)
    assert per_parameter(work, offload=("optimizer",), offload_fraction=0.25) == pytest.approx(15)
    assert per_parameter(replace(work, master="split")) == pytest.approx(16)
    assert per_parameter(replace(work, master="split", moment_bytes=2)) == pytest.approx(12)
    assert per_parameter(replace(work, moment_bytes=2), sharding="optimizer") == pytest.approx(6 + 8 / 8)
    assert per_parameter(replace(work, precision="fp32")) == pytest.approx(4 + 4 + 8)
    assert per_parameter(replace(work, gradient_bytes=2)) == pytest.approx(16)


def test_fp8_weights_are_stored_by_rows_and_by_columns() -> None:
    model = load_model_spec("mixtral-8x7b")
    layout = single(model)
    parts = parameters(model).by_part
    layers = parts["attention"] + parts["experts"]
    rest = 2 * sum(size for part, size in parts.items() if part not in ("attention", "experts"))
    only = stage_memory(Workload(model, 4096, 1, precision="mxfp8"), layout, replace(MEGATRON, vocabulary_multiple=1))[
        0
    ]
    both = stage_memory(Workload(model, 4096, 1, precision="mxfp8"), layout, MOESAIC)[0]
    assert only.weights == pytest.approx(layers * 2 * 33 / 32 + rest)
    assert both.weights == pytest.approx(layers * (2 + 2 * 33 / 32) + rest)


def held_by_order(order: list[Action], pp: int, weights: list[int]) -> int:
    """The most that a rank holds while it works off its order of actions, a chunk's micro-batch weighing as given."""
    later = {(action.micro, action.stage) for action in order if action.kind == "W"}
    held = most = 0
    for action in order:
        weight = weights[action.stage // pp]
        if action.kind == "F":
            held += weight
            most = max(most, held)
        elif action.kind == "W" or (action.micro, action.stage) not in later:
            held -= weight
    return most


@given(
    schedule=st.sampled_from(["1f1b", "interleaved", "zero_bubble"]),
    pp=st.integers(1, 8),
    chunks=st.integers(1, 4),
    rounds=st.integers(1, 6),
    weights=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_windows_are_what_the_trainers_orders_hold(
    schedule: str, pp: int, chunks: int, rounds: int, weights: list[int], data: st.DataObject
) -> None:
    chunks = 1 if schedule == "1f1b" else chunks
    rank = data.draw(st.integers(0, pp - 1))
    window = windows(SCHEDULES.index(schedule), pp, chunks, rank, rounds * pp)
    most = int((window @ np.array(weights[:chunks])).max())
    order = pipeline_order(schedule, rank, pp, chunks, rounds * pp)
    assert most == held_by_order(order, pp, weights[:chunks])
    if schedule != "zero_bubble":
        window = windows(SCHEDULES.index(schedule), pp, chunks, rank, rounds * pp, 1)
        work = paired(rank, pp, chunks, rounds * pp)
        if chunks == 1:  # of a pair, the forward keeps what the backward frees
            work = [part for each in work for part in (reversed(each) if isinstance(each, Pair) else (each,))]
        pairs = single_actions(work)
        assert int((window @ np.array(weights[:chunks])).max()) == held_by_order(pairs, pp, weights[:chunks])


def test_published_counts_in_flight() -> None:
    # 1F1B: pp − rank. Interleaved, first rank: pp·(1 + (pp − 1)/(pp·v)) micro-batches (arXiv 2205.05198 section 4.2.3).
    assert [int(windows(0, 4, 1, rank, 64).sum()) for rank in range(4)] == [4, 3, 2, 1]
    assert windows(1, 4, 4, 0, 64).sum(axis=1).max() / 4 == 4 * (1 + 3 / 16)
    assert {int(windows(2, 8, 1, rank, 64).sum()) for rank in range(8)} == {8}
    assert int(windows(3, 8, 2, 3, 64).sum()) == 9
    assert int(windows(0, 8, 1, 0, 2).sum()) == 2
    with pytest.raises(SpecError, match="two stages, one from each end, not 4"):
        windows(3, 8, 4, 0, 64)


def random_layouts(count: int = 60) -> list[Layout]:
    """Layouts of DeepSeek-V3 with everything varied that costs memory."""
    chance = random.Random(1)
    found = layouts("deepseek-v3", 64, 1) + layouts("deepseek-v3", 64, 2)
    return [
        replace(
            chance.choice(found),
            micro_batch=chance.choice([1, 2, 4]),
            sharding=chance.choice(SHARDING),
            dispatcher=chance.choice(DISPATCHERS),
            recompute=tuple(chance.sample(RECOMPUTE, chance.randrange(4))),
            overlap=tuple(chance.sample(OVERLAP, chance.randrange(3))),
            offload=chance.choice([(), ("optimizer",), ("activations",), ("optimizer", "activations")]),
            cp_kind=chance.choice(["ring", "ulysses"]),
        )
        for _ in range(count)
    ]


def test_columns_equal_single_layouts_and_the_worst_stage() -> None:
    chosen = random_layouts()
    work = Workload(load_model_spec("deepseek-v3"), 4096, 2048, imbalance=1.2)
    together = memory(work, Columns.of(chosen))
    for place, layout in enumerate(chosen):
        alone = memory(work, Columns.of([layout]))
        stages = stage_memory(work, layout)
        worst = max(stages, key=lambda stage: stage.total)
        assert [stage.rank for stage in stages] == list(range(layout.pp))
        for field in fields(Memory):
            values = getattr(together, field.name)
            assert values[place] == pytest.approx(getattr(alone, field.name)[0])
            if field.name != "stage":
                assert values[place] == pytest.approx(getattr(worst, field.name))


def test_parts_add_up() -> None:
    work = Workload(load_model_spec("deepseek-v3"), 4096, 2048)
    found = memory(work, Columns.of(random_layouts()))
    names = [field.name for field in fields(Memory) if field.name not in ("total", "stage")]
    assert sum(getattr(found, name) for name in names) == pytest.approx(found.total)
    assert all((getattr(found, name) >= 0).all() for name in names)
    assert (found.allocated < found.total).all()
    assert len(memory(work, Columns.of([])).total) == 0


@given(place=st.integers(0, 59), label=st.sampled_from(RECOMPUTE))
@settings(max_examples=25, deadline=None)
def test_memory_never_falls_with_the_micro_batch_and_activations_never_rise_with_recompute(
    place: int, label: str
) -> None:
    layout = random_layouts()[place]
    work = Workload(load_model_spec("deepseek-v3"), 4096, 2048)
    sizes = [replace(layout, micro_batch=size) for size in (1, 2, 4)]
    found = memory(work, Columns.of(sizes))
    assert (np.diff(found.total) > 0).all()
    before = stage_memory(work, layout)
    after = stage_memory(work, replace(layout, recompute=tuple({*layout.recompute, label})))
    for stage, less in zip(before, after, strict=True):
        assert less.activations <= stage.activations
        assert all(size <= stage.kept[module] for module, size in less.kept.items())


def test_imbalance_costs_memory_of_expert_layers_only() -> None:
    for name, grows in (("mixtral-8x7b", True), ("llama3-8b", False)):
        model = load_model_spec(name)
        layout = resolve_layout(LayoutTable(ep=8 if grows else 1), model, 8, seq_len=4096, global_batch=64)
        even, skewed = (memory(Workload(model, 4096, 64, imbalance=x), Columns.of([layout])).total[0] for x in (1, 2))
        assert bool(skewed > even) is grows


def test_tied_embeddings_are_one_table_on_one_rank_and_two_on_two() -> None:
    model = load_model_spec("llama3-8b").model_copy(update={"tied_embeddings": True})
    table = model.vocab * model.hidden * 2
    untied = load_model_spec("llama3-8b")

    def weights(model: ModelSpec, pp: int) -> float:
        layout = resolve_layout(LayoutTable(pp=pp), model, 2, seq_len=4096, global_batch=64)
        return sum(stage.weights for stage in stage_memory(Workload(model, 4096, 64), layout, MOESAIC))

    assert weights(untied, 1) - weights(model, 1) == table
    assert weights(untied, 2) == weights(model, 2)


def test_prediction_blocks_bring_a_copy_of_the_embedding_and_logits_of_their_own() -> None:
    model = load_model_spec("deepseek-v3")
    layout = resolve_layout(LayoutTable(pp=8, ep=8), model, 64, seq_len=4096, global_batch=64)
    with_blocks, without = (
        stage_memory(Workload(model, 4096, 64, mtp=mtp), layout, replace(MOESAIC, loss="fused"))[-1]
        for mtp in (True, False)
    )
    counts = parameters(model)
    experts = 256 * 3 * model.hidden * 2048
    block = counts.mtp - experts + experts / 8
    assert with_blocks.weights - without.weights == pytest.approx(2 * (block + counts.by_part["embedding"]))
    assert with_blocks.logits > without.logits
    assert with_blocks.kept["mtp"] == 2 * 5 * model.hidden * 4096


def test_stages_hold_their_own_embedding_and_head() -> None:
    model = load_model_spec("deepseek-v3")
    table = LayoutTable(pp=4, ep=8, stages="Et*14|t*16|t*16|t*15mL")
    layout = resolve_layout(table, model, 64, seq_len=4096, global_batch=64)
    sizes = stage_memory(Workload(model, 4096, 64), layout, MOESAIC)
    assert sizes[1].weights == sizes[2].weights
    assert [size.in_flight for size in sizes] == pytest.approx([4, 3, 2, 1])
    assert [size.logits > 0 for size in sizes] == [False, False, False, True]
    assert "head" in sizes[3].kept and "head" not in sizes[0].kept


def test_offload_leaves_two_layers_of_activations() -> None:
    model = load_model_spec("qwen3-30b-a3b")
    layout = resolve_layout(LayoutTable(ep=8), model, 8, seq_len=4096, global_batch=64)
    work = Workload(model, 4096, 64)
    plain, offloaded = (stage_memory(work, replace(layout, offload=o))[0] for o in ((), ("activations",)))
    # What the final norm keeps for the head is no layer's and stays.
    layers = plain.activations - plain.kept["head"]
    assert offloaded.activations - plain.kept["head"] == pytest.approx(layers / 48 * 2)
    # Parts go apart: what stays is all there, of what goes two layers.
    parts = {}
    for part in ("norms", "attention", "moe"):
        parts[part] = (
            plain.activations
            - stage_memory(work, replace(layout, offload=("activations",), offload_modules=(part,)))[0].activations
        )
        assert parts[part] > 0
    assert sum(parts.values()) == pytest.approx(plain.activations - offloaded.activations)


def test_dispatchers_differ_in_buffers_only() -> None:
    model = load_model_spec("deepseek-v3")
    layout = resolve_layout(LayoutTable(ep=64, pp=4), model, 256, seq_len=4096, global_batch=1024)
    work = Workload(model, 4096, 1024)
    found = {name: stage_memory(work, replace(layout, dispatcher=name))[1] for name in DISPATCHERS}
    assert len({size.activations for size in found.values()}) == 1
    # All tokens of 64 ranks, k copies of one rank's, and one copy for each rank that has an expert of a token.
    assert found["allgather"].buffers > found["alltoall"].buffers > found["deepep"].buffers > 0
    assert found["hybridep"].overhead - found["alltoall"].overhead > 2 * 2 * 64 * 4096 * 7168 * 0.9


def test_embedding_and_head_stay_gathered_where_all_is_sharded() -> None:
    model = load_model_spec("llama3-8b")
    layout = resolve_layout(LayoutTable(sharding="parameters"), model, 8, seq_len=4096, global_batch=64)
    work = Workload(model, 4096, 64)
    whole = replace(layout, sharding="none")
    # The fullest moment is the loss, when no layer is gathered: embedding, head and final norm are, in bf16.
    more = stage_memory(work, layout, MOESAIC)[0].buffers - stage_memory(work, whole, MOESAIC)[0].buffers
    assert more == pytest.approx(2 * (2 * model.vocab + 1) * model.hidden)


def test_what_a_backward_has_passed_is_gone() -> None:
    """The head comes first in backward, beside everything kept; layers before it beside less and less."""
    model = load_model_spec("llama3-8b")
    found = []
    for count in (1, 2):
        small = model.model_copy(update={"vocab": 1024, "layers": (model.layers[0],) * count})
        layout = resolve_layout(LayoutTable(), small, 1, seq_len=4096, global_batch=64)
        found += stage_memory(Workload(small, 4096, 64), layout, MOESAIC)
    one, two = found
    # The last layer's backward is the fullest moment of both: it needs the same beside what both keep.
    assert one.logits == two.logits == 0
    assert one.buffers == pytest.approx(two.buffers)
    assert two.activations > 1.9 * one.activations


def test_experts_one_by_one_make_neither_rows_nor_gradients_of_weights() -> None:
    model = load_model_spec("Mixtral-8x7B")
    model = model.model_copy(update={"vocab": 1024, "layers": model.layers[:1]})
    layout = resolve_layout(LayoutTable(), model, 1, seq_len=4096, global_batch=64)
    together, alone = (
        stage_memory(Workload(model, 4096, 64), layout, replace(MOESAIC, workspace=0, grouped_products=grouped))[0]
        for grouped in (True, False)
    )
    assert together.activations == alone.activations
    assert together.buffers > 2 * 8 * 3 * 4096 * 14336
    # Gradients of hidden states, queries, keys and values, a few of each.
    assert alone.buffers < 2 * 4096 * 4096 * 12


def test_habits_by_framework() -> None:
    assert habits_for("megatron") is habits_for("something else") is MEGATRON
    assert habits_for("moesaic") is MOESAIC
