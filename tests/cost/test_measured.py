"""Constants of the closed form from measurements: what was put into a cluster file comes out as seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.compute import Machine, layer_ops
from moesaic.cost.measured import nonnegative_line
from moesaic.cost.rates import Rates, Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import ClusterSpec, gpu_named
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.tables import LayoutTable

PEAK = 100e9
FLOP_SECONDS, BYTE_SECONDS = 2e-11, 3e-10
HEADS, WIDTH, SEQ = 4, 64, 512

MODEL = load_model_spec(
    {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": 128,
        "max_position_embeddings": 65536,
    }
)


def _cluster() -> ClusterSpec:
    """A processor whose experts take FLOP_SECONDS a FLOP and BYTE_SECONDS a byte of their weights, twice that backward,
    and whose attention reaches half of the peak, as much less as 200 positions make it."""
    experts, attention = {}, {}
    for way, work in (("forward", 1), ("backward", 2)):
        rows = []
        for count, each, width, hidden in ((16, 16, 512, 512), (16, 128, 512, 512), (32, 64, 256, 512)):
            flops = 6.0 * count * each * width * hidden * work
            seconds = flops * FLOP_SECONDS + 12.0 * count * width * hidden * BYTE_SECONDS * work
            rows.append([count, each, width, hidden, flops / seconds / PEAK])
        experts[f"experts_fp32_{way}"] = rows
        attention[f"attention_fp32_{way}"] = [[s, HEADS, 128, 0.5 * s / (s + 200) / work] for s in (256, 1024)]
    gpu = gpu_named("h100").model_copy(
        update={"architecture": "cpu", "peak_flops": {"fp32": PEAK, "bf16": PEAK}, "memory_bandwidth": 10e9}
    )
    matmul = {"matmul_fp32_forward": [[256, 512, 512, 1.0]]}
    return ClusterSpec(gpu=gpu, gpus=2, rates={**experts, **attention, **matmul})


def _ops(cluster: ClusterSpec, rates: Rates) -> dict[str, tuple[float, float]]:
    layout = resolve_layout(LayoutTable(ep=2), MODEL, 2, seq_len=SEQ, global_batch=2)
    machine = Machine.of(Workload(MODEL, SEQ, 2, precision="fp32"), Columns.of([layout]), cluster, rates)
    return {
        op.name: (float(np.max(op.forward)), float(np.max(op.backward_input + op.backward_weight)))
        for op in layer_ops(MODEL.layers[0], machine).ops
    }


def test_experts_take_the_seconds_that_were_measured():
    cluster = _cluster()
    ops = _ops(cluster, rates_for(cluster, Stack("moesaic")))
    # 512 tokens of each of two ranks choose 2 of 8 experts, 4 of which are on each: 256 rows each.
    flops, weights = 6.0 * 4 * 256 * 384 * 256, 12.0 * 4 * 384 * 256
    forward = flops * FLOP_SECONDS + weights * BYTE_SECONDS
    found = [ops["experts.up"][way] + ops["experts.down"][way] for way in (0, 1)]
    assert found == [pytest.approx(forward, rel=1e-3), pytest.approx(2 * forward, rel=1e-3)]
    assert "permute.arrive" not in ops and "experts.activation" not in ops


def test_the_attention_core_takes_the_seconds_that_were_measured():
    cluster = _cluster()
    rates = rates_for(cluster, Stack("moesaic"))
    # A head of 64 has two thirds of the rate of one of 128 (`attention_half_width`).
    flops = 2.0 * HEADS * WIDTH * SEQ * (SEQ + 1)
    seconds = flops / (0.5 * PEAK * SEQ / (SEQ + 200) * 2 / 3)
    forward, backward = _ops(cluster, rates)["attention.core"]
    assert forward == pytest.approx(seconds, rel=0.01)
    assert backward == pytest.approx(2.5 * 2 * seconds, rel=0.02)


def test_work_limited_by_memory_takes_what_the_norm_took():
    """A norm at a quarter of the speed of a copy: so are residuals, which the model counts in bytes."""
    cluster = _cluster()
    slow = {"memory": [[2**26, 8e9]], **{f"norm_fp32_{way}": [[256, 512, 2e9]] for way in ("forward", "backward")}}
    cluster = cluster.model_copy(update={"rates": {**cluster.rates, **slow}})
    rates = rates_for(cluster, Stack("moesaic"))
    assert rates.other_work == pytest.approx(4.0)
    kernel, own = rates.kernel_seconds, SEQ * MODEL.hidden * 4.0
    assert _ops(cluster, rates)["norm.input"][0] == pytest.approx(2 * own / 2e9 + kernel, rel=1e-3)
    assert rates_for(cluster, Stack("megatron")).other_work == Rates().other_work


def test_messages_ahead_of_rows_cost_their_latency():
    """Counts and choices forward, the gradient of router weights backward: one and a half of it a pass."""
    cluster = _cluster()
    cluster = cluster.model_copy(update={"rates": {**cluster.rates, "all_gather": [[2, 2, 3e-3, 1e9]]}})
    rates = rates_for(cluster, Stack("moesaic"))
    with_them, without = (_ops(cluster, each)["dispatch.rows"] for each in (rates, replace(rates, small_messages=0.0)))
    assert rates.fast_latency == 3e-3
    assert [a - b for a, b in zip(with_them, without, strict=True)] == [pytest.approx(4.5e-3), pytest.approx(4.5e-3)]
    assert rates_for(cluster, Stack("megatron")).small_messages == 0


@pytest.mark.parametrize("layers", [1, 2, 40])
def test_gradients_of_the_last_layer_have_nothing_to_run_under(layers):
    spec = replace_layers(layers)
    cluster = _cluster()
    slow = cluster.gpu.model_copy(update={"link_bandwidth": 1e9, "nic_bandwidth": 1e9, "domain": 1})
    cluster = cluster.model_copy(update={"gpu": slow})
    rates, found = replace(rates_for(cluster, Stack("moesaic")), straggler=0.0), []
    for overlap in ([], ["gradients"]):
        layout = resolve_layout(LayoutTable(overlap=overlap), spec, 2, seq_len=16384, global_batch=2)
        work = Workload(spec, 16384, 2, precision="fp32")
        found.append(step_time(work, Columns.of([layout]), cluster, rates).data[0])
    plain, hidden = found
    share = min(rates.hidden_gradients, 1 - 1 / layers) * (1 - rates.slowdown_network)
    assert hidden == pytest.approx(plain * (1 - share), rel=0.02)


def replace_layers(count: int) -> ModelSpec:
    return MODEL.model_copy(update={"layers": MODEL.layers * count})


def test_other_software_does_not_get_the_trainers_figures():
    cluster = _cluster()
    assert rates_for(cluster, Stack("megatron")).expert_flop_seconds == 0
    assert rates_for(cluster, Stack("megatron")).attention_half == Rates().attention_half


@given(
    a=st.floats(1e-12, 1e-9),
    b=st.floats(1e-12, 1e-9),
    points=st.lists(st.tuples(st.floats(1e6, 1e12), st.floats(1e6, 1e12)), min_size=3, max_size=8),
)
def test_a_line_without_noise_is_found_again(a, b, points):
    x, z = np.array(points).T
    seconds = a * x + b * z
    if np.linalg.cond(np.stack([x / seconds, z / seconds], axis=1) / [1 / a, 1 / b]) > 1e6:
        return
    found = nonnegative_line(x, z, seconds)
    assert np.allclose(found[0] * x + found[1] * z, a * x + b * z, rtol=1e-6)


@given(st.lists(st.tuples(*(st.floats(1e-3, 1e3),) * 3), min_size=1, max_size=8))
def test_neither_coefficient_is_below_zero(points):
    x, z, y = np.array(points).T
    a, b = nonnegative_line(x, z, y)
    assert a >= 0 and b >= 0 and a + b > 0


def test_what_messages_cost_the_products_they_run_under():
    """Nothing where both take as long as the longer one, all where they take as long as one after the other."""
    cluster = _cluster()

    def slowdown(*rows: list[float]) -> tuple[float, float]:
        rates = rates_for(cluster.model_copy(update={"rates": {"overlap": list(rows)}}), Stack("moesaic"))
        return rates.slowdown, rates.slowdown_network

    free, all_of_it, noise = [2, 2, 0.03, 0.02, 0.03], [2, 1, 0.02, 0.03, 0.05], [2, 2, 0.02, 0.02, 0.05]
    assert slowdown() == (Rates().slowdown, Rates().slowdown_network)
    assert slowdown(free, all_of_it) == (0.0, pytest.approx(1.0))
    assert slowdown([2, 2, 0.02, 0.02, 0.025]) == (pytest.approx(0.25), pytest.approx(0.25))
    assert slowdown(noise) == (1.0, 1.0)  # never more than all of it


def test_a_message_that_takes_products_time_is_hidden_less():
    cluster = _cluster()
    slow = cluster.gpu.model_copy(update={"link_bandwidth": 1e7, "nic_bandwidth": 1e7, "domain": 1})
    cluster = cluster.model_copy(update={"gpu": slow})

    def saved(both: float) -> float:
        here = cluster.model_copy(update={"rates": {**cluster.rates, "overlap": [[2, 1, 0.1, 0.1, both]]}})
        return _step([], 4096, here) - _step(["inside"], 4096, here)

    assert saved(0.1) > saved(0.15) > saved(0.2) == 0.0


def _step(overlap: list[str], seq: int, cluster: ClusterSpec) -> float:
    layout = resolve_layout(LayoutTable(ep=2, overlap=overlap), MODEL, 2, seq_len=seq, global_batch=2)
    work = Workload(MODEL, seq, 2, precision="fp32")
    return float(step_time(work, Columns.of([layout]), cluster, rates_for(cluster, Stack("moesaic"))).total[0])


def test_cutting_pays_with_many_rows_and_not_with_few():
    # Weights are loaded once for each of four parts: 3 more times 4.7 MB at 0.3 ns per byte are 4.2 ms a pass. Rows
    # travel at 0.1 GB/s: 512 bytes for half of 16 tokens take far less, for half of 16,384 far more.
    cluster = _cluster()
    slow = cluster.gpu.model_copy(update={"link_bandwidth": 1e8, "nic_bandwidth": 1e8, "domain": 1})
    cluster = cluster.model_copy(update={"gpu": slow})
    assert _step(["inside"], 16, cluster) == _step([], 16, cluster)
    assert _step(["inside"], 16384, cluster) < 0.99 * _step([], 16384, cluster)


def test_exchanges_over_a_network_have_their_own_rate():
    cluster = _cluster()
    links = {"all_gather": [[2, 1, 1e-3, 40e6]], "all_to_all": [[2, 1, 1e-3, 30e6]]}
    rates = rates_for(cluster.model_copy(update={"rates": {**cluster.rates, **links}}), Stack("moesaic"))
    assert rates.alltoall_ratio == pytest.approx(0.75)


@pytest.mark.parametrize(("architecture", "speed"), [("cpu", 10e9), ("hopper", 30e9)])
def test_a_processors_memory_is_the_middle_of_its_copies(architecture, speed):
    cluster = _cluster()
    gpu = cluster.gpu.model_copy(update={"architecture": architecture})
    copies = {"memory": [[2**20, 30e9], [2**24, 10e9], [2**28, 8e9]]}
    cluster = cluster.model_copy(update={"gpu": gpu, "rates": {**cluster.rates, **copies}})
    assert rates_for(cluster, Stack("moesaic")).memory_share == pytest.approx(speed / gpu.memory_bandwidth)


def test_a_first_forward_and_a_last_backward_have_no_other_micro_batch_to_hide_under():
    """Of m micro-batches without a pipeline m - 1 forwards stand beside a backward: that share of what could hide."""
    cluster = _cluster()
    slow = cluster.gpu.model_copy(update={"link_bandwidth": 1e8, "nic_bandwidth": 1e8, "domain": 1})
    cluster = cluster.model_copy(update={"gpu": slow})
    rates = rates_for(cluster, Stack("moesaic"))

    def dispatch(micros: int, overlap: list[str]) -> float:
        """Exposed seconds of sending rows to experts, of one micro-batch."""
        table = LayoutTable(ep=2, micro_batch=1, overlap=overlap)
        layout = resolve_layout(table, MODEL, 2, seq_len=SEQ, global_batch=2 * micros)
        work = Workload(MODEL, SEQ, 2 * micros, precision="fp32")
        return float(step_time(work, Columns.of([layout]), cluster, rates).dispatch[0]) / micros

    plain = dispatch(2, [])
    hidden = {micros: plain - dispatch(micros, ["experts"]) for micros in (2, 4, 8)}
    assert hidden[4] / hidden[2] == pytest.approx((3 / 4) / (1 / 2))
    assert hidden[8] / hidden[2] == pytest.approx((7 / 8) / (1 / 2))
