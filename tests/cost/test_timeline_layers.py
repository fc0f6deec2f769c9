"""Layers on streams: overlap against closed forms, bounds, and DeepSeek's published trace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.layer_timeline import simulate_layers, stage_seconds
from moesaic.cost.timeline import GALVATRON, Contention, Piece
from moesaic.cost.workload import OVERLAP
from moesaic.spec.errors import SpecError

SECONDS = st.floats(0.05, 5.0)
FEW = settings(deadline=None, max_examples=40)
OPTIONAL = st.one_of(st.just(0.0), SECONDS)


@st.composite
def layers(draw: st.DrawFn) -> list[list[Piece]]:
    """One to three layers, dense or with experts, with all sorts of pieces."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        pieces = [compute(draw, "attention.qkv"), talk(draw, "context"), compute(draw, "attention.core")]
        pieces += [talk(draw, "tensor.gather"), compute(draw, "attention.out"), talk(draw, "tensor.scatter")]
        if draw(st.booleans()):
            pieces += [compute(draw, "router")]
            pieces += [compute(draw, "shared_experts")] if draw(st.booleans()) else []
            pieces += [talk(draw, "dispatch.network", "network"), talk(draw, "dispatch.fast")]
            pieces += [compute(draw, "experts"), talk(draw, "combine", "network")]
        else:
            pieces += [compute(draw, "mlp")]
        result.append(pieces)
    return result


def compute(draw: st.DrawFn, name: str) -> Piece:
    return Piece(name, "compute", draw(SECONDS), draw(SECONDS), draw(OPTIONAL), draw(OPTIONAL))


def talk(draw: st.DrawFn, name: str, stream: str = "fast") -> Piece:
    return Piece(name, "network" if stream == "network" else "fast", draw(SECONDS), draw(SECONDS), 0.0, draw(OPTIONAL))


OVERLAPS = st.sets(st.sampled_from(OVERLAP))


def of_stream(model: list[list[Piece]], stream: str) -> float:
    return sum(
        sum((p.forward, p.backward_input, p.backward_weight, p.recompute))
        for p in itertools.chain(*model)
        if p.stream == stream
    )


@FEW
@given(layers())
def test_without_overlap_everything_comes_in_turn(model: list[list[Piece]]) -> None:
    total = sum(of_stream(model, stream) for stream in ("compute", "fast", "network"))
    timeline = simulate_layers(model, (), contention=GALVATRON)
    assert timeline.makespan == pytest.approx(total)
    assert timeline.hidden() == pytest.approx(0.0, abs=1e-9)


@FEW
@given(layers(), OVERLAPS, st.integers(1, 5))
def test_overlap_keeps_the_work_and_never_takes_longer(
    model: list[list[Piece]], overlap: set[str], chunks: int
) -> None:
    timeline = simulate_layers(model, overlap, chunks=chunks)
    loads = [of_stream(model, stream) for stream in ("compute", "fast", "network")]
    assert timeline.busy("compute") == pytest.approx(loads[0])
    assert timeline.busy("fast") == pytest.approx(loads[1])
    assert timeline.busy("network") == pytest.approx(loads[2])
    assert max(loads) <= timeline.makespan * (1 + 1e-9)
    assert timeline.makespan <= sum(loads) * (1 + 1e-9)


@FEW
@given(layers(), OVERLAPS)
def test_a_stage_is_no_longer_than_its_parts_in_turn(model: list[list[Piece]], overlap: set[str]) -> None:
    stage = stage_seconds(model, overlap)
    assert stage.backward <= (stage.backward_input + stage.backward_weight) * (1 + 1e-9)
    assert stage.pair <= (stage.forward + stage.backward) * (1 + 1e-9)


def moe(dispatch: float, experts: float, combine: float, shared: float = 0.0, **more: float) -> list[Piece]:
    """A layer whose backward is its forward in reverse."""
    pieces = [Piece("attention", "compute", 1.0, 1.0)]
    pieces += [Piece("shared_experts", "compute", shared, shared)] if shared else []
    return [
        *pieces,
        Piece("dispatch", "network", dispatch, dispatch),
        Piece("experts", "compute", experts, experts, more.get("weights", 0.0), more.get("recompute", 0.0)),
        Piece("combine", "fast", combine, combine),
    ]


@FEW
@given(SECONDS, SECONDS, SECONDS, st.integers(1, 8))
def test_chunks_flow_like_a_pipeline(dispatch: float, experts: float, combine: float, chunks: int) -> None:
    """Three stations on streams of their own: a first chunk passes all, others follow at the slowest one's pace."""
    parts = (dispatch / chunks, experts / chunks, combine / chunks)
    wanted = 1.0 + sum(parts) + (chunks - 1) * max(parts)
    for what in ("forward", "backward"):
        timeline = simulate_layers([moe(dispatch, experts, combine)], ["inside"], what=what, chunks=chunks)  # type: ignore[arg-type]
        assert timeline.makespan == pytest.approx(wanted)


def test_more_chunks_cost_launches() -> None:
    layer = [moe(4.0, 4.0, 4.0)]
    timeline = simulate_layers(layer, ["inside"], what="forward", chunks=4, chunk_seconds=0.5)
    assert timeline.makespan == pytest.approx(1 + (1 + 3 * 1.5) + 1.5 + 1.5)


@FEW
@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_shared_expert_runs_under_dispatch(dispatch: float, experts: float, combine: float, shared: float) -> None:
    """Two halves, 2 : 1. The first runs under dispatch; the second too if it still can, else under combine."""
    timeline = simulate_layers([moe(dispatch, experts, combine, shared)], ["shared_experts"], what="forward")
    first, second = shared * 2 / 3, shared / 3
    if first >= dispatch:
        wanted = first + experts + max(second, combine)
    else:
        wanted = max(shared, dispatch) + experts + combine
    assert timeline.makespan == pytest.approx(1.0 + wanted)


def test_gradients_of_weights_run_under_the_communication_that_follows() -> None:
    layer = moe(3.0, 2.0, 1.0, weights=2.0)
    alone = simulate_layers([layer], (), what="backward").makespan
    hidden = simulate_layers([layer], ["weight_gradients"], what="backward").makespan
    assert (alone, hidden) == (1 + 2 + 2 + 3 + 1, 1 + 2 + 3 + 1)


def test_recomputation_runs_under_the_first_communication_of_backward() -> None:
    """MegaScale-MoE, figure 8b: the norm and activation again under the gathering of the output's gradient; gradients
    of weights under the scattering of the input's."""
    layer = moe(3.0, 2.0, 4.0, weights=2.0, recompute=1.5)
    assert simulate_layers([layer], (), what="backward").makespan == 4 + 1.5 + 2 + 2 + 3 + 1
    assert simulate_layers([layer], ["between"], what="backward").makespan == 4 + 2 + 3 + 1


def test_between_stays_inside_a_layer_and_weight_gradients_do_not() -> None:
    """Attention's gradients of weights can only run under the communication of the layer before."""
    attention = Piece("attention", "compute", 1.0, 1.0, 1.0)
    layer = [attention, *moe(1.0, 2.0, 1.0)[1:]]
    assert simulate_layers([layer] * 2, ["between"], what="backward").makespan == 2 * (1 + 2 + 1 + 1 + 1)
    assert simulate_layers([layer] * 2, ["weight_gradients"], what="backward").makespan == 2 * (1 + 2 + 1 + 1) + 1


def test_two_micro_batches_hide_each_other() -> None:
    """Compute and communication of equal length: all but the ends is hidden."""
    layer = moe(1.0, 1.0, 1.0)
    pair = simulate_layers([layer] * 8, ["experts"])
    assert pair.busy("compute") == 32
    assert pair.makespan <= 33 + 1e-9
    assert pair.hidden() > 0.9


def test_two_micro_batches_do_not_hide_what_is_waited_for() -> None:
    """Dispatch runs under the other's compute; exchange of the attention stops both."""
    exchange = Piece("context.exchange", "fast", 2.0, 2.0)
    layer = [*moe(1.0, 1.0, 1.0)[:1], exchange, *moe(1.0, 1.0, 1.0)[1:]]
    pair = simulate_layers([layer] * 8, ["experts"])
    assert pair.makespan >= 8 * (4 + 2 * 2)
    exchanges = [event for event in pair.events if "context" in event.name]
    computes = [event for event in pair.events if event.stream == "compute"]
    assert all(a.stop <= b.start + 1e-9 or b.stop <= a.start + 1e-9 for a in exchanges for b in computes)


def test_tensor_parallel_communication_runs_under_its_matmul() -> None:
    layer = [
        Piece("tensor.gather", "fast", 1.0, 1.0),
        Piece("mlp", "compute", 4.0, 4.0, 4.0),
        Piece("tensor.scatter", "fast", 1.0, 1.0),
    ]
    for what in ("forward", "backward"):
        timeline = simulate_layers([layer], ["tensor"], what=what, chunks=4, weights=False)  # type: ignore[arg-type]
        assert timeline.makespan == pytest.approx(0.25 + 4.0 + 0.25)


def test_attention_cores_are_not_cut() -> None:
    layer = [Piece("context", "fast", 2.0, 2.0), Piece("attention.core", "compute", 4.0, 4.0)]
    assert simulate_layers([layer], ["inside"], what="forward").makespan == 6.0
    layer[1] = Piece("attention.qkv", "compute", 4.0, 4.0)
    assert simulate_layers([layer], ["inside"], what="forward", chunks=4).makespan == pytest.approx(4.5)


# DeepSeek's profile of training (github.com/deepseek-ai/profile-data): H800, EP64, micro-batches of 4096 tokens, one
# forward and one backward chunk of DualPipe over four MoE layers of DeepSeek-V3, balanced routing. Milliseconds of one
# kernel under overlap, the middle of what its 4 or 8 launches took.
TRACE_WALL, TRACE_COMPUTE, TRACE_COMMUNICATION, TRACE_OVERLAPPED = 129.0, 124.3, 114.5, 110.3
DISPATCH, CACHED_DISPATCH, COMBINE, NOTIFY_AND_WAIT = (4.15 + 4.60) / 2, (3.11 + 3.61) / 2, (5.85 + 6.55) / 2, 32.6
CORE, CORE_BACKWARD = (1.20 + 1.28) / 2, (3.58 + 3.86) / 2


def deepseek_layer(shift: float = 0.0) -> list[Piece]:
    """Published kernel times as pieces.

    What compute streams do besides attention cores is shared out by the matmuls' work, which needs no rate: a rank has
    4 experts with 8192 rows each, the shared expert and latent attention 4096. `shift` milliseconds per layer go from
    experts to attention, to see how much that matters. Notify and wait kernels are shared out equally.
    """
    matrix = 7168 * 2048
    weights = {
        "attention.input": 4096 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256),
        "attention.output": 4096 * 128 * 128 * 7168,
        "shared_experts.up": 4096 * 2 * matrix,
        "shared_experts.down": 4096 * matrix,
        "experts.up": 4 * 8192 * 2 * matrix,
        "experts.down": 4 * 8192 * matrix,
    }
    each = (TRACE_COMPUTE / 4 - CORE - CORE_BACKWARD) / sum(weights.values())
    attention, experts = (
        sum(work * each for name, work in weights.items() if name.startswith(part)) for part in ("attention", "experts")
    )

    def matmul(name: str) -> Piece:
        scale = {"attention": 1 + shift / attention, "experts": 1 - shift / experts}
        third = weights[name] * each / 3 * scale.get(name.partition(".")[0], 1.0)
        return Piece(name, "compute", third, third, third)

    wait = NOTIFY_AND_WAIT / 16
    return [
        matmul("attention.input"),
        Piece("attention.core", "compute", CORE, CORE_BACKWARD),
        matmul("attention.output"),
        matmul("shared_experts.up"),
        matmul("shared_experts.down"),
        Piece("dispatch", "network", DISPATCH + wait, COMBINE + wait),
        matmul("experts.up"),
        matmul("experts.down"),
        Piece("combine", "network", COMBINE + wait, CACHED_DISPATCH + wait),
    ]


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_deepseeks_trace(shift: float) -> None:
    timeline = simulate_layers([deepseek_layer(shift)] * 4, ["experts", "weight_gradients"])
    compute, communication = timeline.busy("compute"), timeline.busy("network")
    print(f"\n{shift:+.0f} ms per layer from experts to attention          predicted  published")
    for name, predicted, published in (
        ("wall time of the pair, ms", timeline.makespan, TRACE_WALL),
        ("compute busy, ms", compute, TRACE_COMPUTE),
        ("communication busy, ms", communication, TRACE_COMMUNICATION),
        ("overlapped, ms", timeline.overlapped(), TRACE_OVERLAPPED),
        ("hidden communication, %", 100 * timeline.hidden(), 100 * TRACE_OVERLAPPED / TRACE_COMMUNICATION),
        ("compute idle, %", 100 * timeline.idle(0) / timeline.makespan, 100 * (1 - TRACE_COMPUTE / TRACE_WALL)),
    ):
        print(f"{name:50}{predicted:11.1f}{published:11.1f}")
    assert communication == pytest.approx(TRACE_COMMUNICATION, rel=0.02)
    assert timeline.makespan == pytest.approx(TRACE_WALL, rel=0.035)
    assert timeline.hidden() == pytest.approx(TRACE_OVERLAPPED / TRACE_COMMUNICATION, abs=0.04)


def test_deepseeks_trace_in_turn() -> None:
    """The same kernels one after the other: what the published overlap saves."""
    layer = [deepseek_layer()] * 4
    apart = simulate_layers(layer, ()).makespan
    assert apart == pytest.approx(TRACE_COMPUTE + TRACE_COMMUNICATION, rel=0.01)
    assert simulate_layers(layer, ["inside", "shared_experts"]).makespan < apart


def test_contention_takes_back_some_of_what_overlap_saves() -> None:
    layer = [moe(2.0, 2.0, 2.0)] * 2
    free = simulate_layers(layer, ["experts"]).makespan
    slow = simulate_layers(layer, ["experts"], contention=Contention(1.2, 1.2)).makespan
    assert free < slow < 1.2 * free + 1e-9


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(SpecError, match="shared_experts"):
        simulate_layers([], ["shared_expert"])
    with pytest.raises(SpecError, match="at least 1"):
        simulate_layers([], ["inside"], chunks=0)


def test_a_stage_without_layers_takes_no_time() -> None:
    stage = stage_seconds([[], []], ["between", "inside"])
    assert (stage.forward, stage.backward, stage.backward_input, stage.backward_weight, stage.pair) == (0, 0, 0, 0, 0)
