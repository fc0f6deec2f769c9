"""Kernels and collectives that others measured alone, beside what the rates say (`pytest -s` prints them).

Kernels timed alone run faster than in a training step, where power, heat and neighbours slow them; a rate is that of a
step. So what must hold here is the shape of each curve, and a level within some tens of percent.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.cost.compute import Machine
from moesaic.cost.correction_terms import describe, terms
from moesaic.cost.rates import Rates, Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.traffic import Bytes, Group, all_gather, all_to_all, dispatch, groups, seconds
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import gpu_named, gpu_names, load_cluster
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout, single
from moesaic.spec.tables import LayoutTable

MODEL = load_model_spec("DeepSeek-V3")
MIB = 2**20


def machine(gpu: str, precision: str = "bf16") -> Machine:
    cluster = load_cluster(gpu, 1)
    work = Workload(MODEL, 4096, 1, precision)  # type: ignore[arg-type]
    return Machine.of(work, Columns.of([single(MODEL)]), cluster, rates_for(cluster, Stack()))


# ---------------------------------------------------------------- matmuls

GROUPED = {
    (32, 1024, 4096, 7168): (45.8, 43.5, 34.7),
    (32, 1024, 7168, 2048): (40.2, 45.7, 29.5),
    (64, 512, 4096, 7168): (36.7, 40.5, 28.9),
    (128, 256, 4096, 7168): (27.4, 33.3, 21.9),
    (256, 128, 4096, 7168): (20.8, 22.6, 14.2),
    (40, 2460, 3072, 5120): (48.7, 45.2, 41.7),
    (40, 9832, 3072, 5120): (47.5, 47.6, 41.9),
    (160, 154, 3072, 5120): (20.2, 19.5, 14.9),
}
"""Experts, rows of each, N, K: percent of 2,250 TFLOP/s forward, for the input's and for the weights' gradient.
B200, bf16, SimuMax 1.2's system file (github.com/MooreThreads/SimuMax, configs/system)."""


def test_grouped_matmuls_forward_and_backward() -> None:
    b200, errors = machine("b200"), []
    for (count, rows, n, k), wanted in GROUPED.items():
        op = b200.grouped("experts", float(count), float(rows), float(n), float(k))
        passes = (op.forward, op.backward_input, op.backward_weight)
        found = [100 * 2.0 * count * rows * n * k / float(time) / 2250e12 for time in passes]
        errors += [f / w - 1 for f, w in zip(found, wanted, strict=True)]
        print(
            f"{count} x {rows} x {n} x {k}: {', '.join(f'{f:.1f} ({w})' for f, w in zip(found, wanted, strict=True))}"
        )
    mean, worst = float(np.mean(np.abs(errors))), float(np.max(np.abs(errors)))
    print(f"mean {100 * mean:.1f} %, largest {100 * worst:.1f} %")
    assert mean <= 0.12
    assert worst <= 0.25


DENSE = {
    ("h100", 4096, 7168): (28, 71, 78, 79, 76, 81, 80),
    ("h100", 7168, 2048): (26, 66, 65, 77, 77, 77, 78),
    ("h100", 1536, 7168): (21, 44, 72, 77, 79, 81, 82),
    ("h100", 768, 2048): (7, 22, 40, 55, 67, 71, 72),
    ("b200", 4096, 7168): (24, 56, 64, 65, 48, 60, 61),
    ("b200", 7168, 2048): (22, 45, 54, 65, 68, 69, 70),
}
"""Percent of the bf16 peak with 128, 512, 1,024, … 16,384 rows: AIConfigurator (aiconfigurator-core 0.12)."""
ROWS = (128, 512, 1024, 2048, 4096, 8192, 16384)


def test_matmuls_fill_the_device_as_measured() -> None:
    """Over their own largest value, kernels rise with rows as measured within 10 points on average."""
    for (gpu, n, k), wanted in DENSE.items():
        here = machine(gpu)
        peak = here.cluster.gpu.peak_flops["bf16"]
        found = np.array([2.0 * m * n * k / float(here.gemm("x", "", float(m), n, k).forward) / peak for m in ROWS])
        risen, truth = found / found.max(), np.array(wanted) / max(wanted)
        print(f"{gpu} {n} x {k}:", ", ".join(f"{f:.2f} ({t:.2f})" for f, t in zip(risen, truth, strict=True)))
        assert np.mean(np.abs(risen - truth)) <= 0.10


def test_one_curve_of_sustained_share() -> None:
    """Share of the bf16 peak that attention and matmuls reach in MegaScale-MoE's runs (arXiv 2505.11432, Fig. 13):
    H800 54.1 %, A100 57.5 %, H20 72.8 %; the faster the units, the lower."""
    shares = [Rates().sustained(peak) for peak in (148e12, 312e12, 989e12, 2250e12)]
    print("H20, A100, H800, B200:", [f"{share:.2f}" for share in shares])
    assert shares == sorted(shares, reverse=True)
    for share, wanted in zip(shares, (0.728, 0.575, 0.541), strict=False):
        assert wanted < share < wanted + 0.25


# ---------------------------------------------------------------- links

NCCL = {
    ("h100", "all-to-all"): (99, 194, 265, 307),
    ("h100", "all-gather"): (83, 213, 282, 322),
    ("b200", "all-to-all"): (83, 293, 423, 537),
    ("b200", "all-gather"): (75, 141, 427, 598),
    ("a100", "all-to-all"): (48, 128, 169, 196),
}
"""Bus bandwidth, GB/s, of 2, 16, 64 and 256 MiB on eight GPUs: NCCL 2.27 and 2.29 by AIConfigurator."""


def test_collectives_in_one_node() -> None:
    """From 16 MiB on: within 15 % on average and 10 % in the middle (the measured all-gather of 16 MiB on B200 is an
    outlier, slower than one of 64 MiB would let expect). Smaller messages cost less than the latency of these."""
    errors = []
    for (gpu, kind), wanted in NCCL.items():
        cluster, rates = load_cluster(gpu, 8), Rates()
        for size, truth in zip((2, 16, 64, 256), wanted, strict=True):
            sent = (all_gather if kind == "all-gather" else all_to_all)(size * MIB, Group(8, 8))
            ratio = 1.0 if kind == "all-gather" else rates.alltoall_ratio
            found = sent.total / float(seconds(sent, cluster, rates, ratio)) / 1e9
            print(f"{gpu} {kind} {size} MiB: {found:.0f} GB/s ({truth})")
            if size >= 16:
                errors.append(found / truth - 1)
    assert np.mean(np.abs(errors)) <= 0.15
    assert np.median(np.abs(errors)) <= 0.10


EXCHANGES = {
    ("gb200", "hybridep"): (391, 578, 612, 675),
    ("gb200", "alltoall"): (735, 743, 769, 930),
    ("h100", "hybridep"): (661, 1485, 3064, 4626),
    ("h100", "alltoall"): (1265, 5774, 8059, 9164),
}
"""Microseconds of one dispatch of 4,096 tokens, 7,168 wide, to 8 of 256 experts in 4 of 8 groups, over 8, 16, 32 and 64
ranks: Megatron-Core's MoE report (arXiv 2603.07685), table 7."""


def test_dispatchers_by_size_of_the_group() -> None:
    errors = []
    for (gpu, name), wanted in EXCHANGES.items():
        cluster = load_cluster(gpu, 64)
        rates = Rates()
        for ep, truth in zip((8, 16, 32, 64), wanted, strict=True):
            layout = resolve_layout(LayoutTable(ep=ep), MODEL, 64, seq_len=4096, global_batch=64)
            place = Columns.of([replace(layout, dispatcher=name)])
            sent = dispatch(4096.0, 7168, 2, (256, 8, 4, 8), place, groups(place, cluster.fast_domain))
            ratio = rates.alltoall_ratio if name == "alltoall" else rates.fused_ratio
            found = 1e6 * float(seconds(sent, cluster, rates, ratio)[0])
            errors.append(found / truth - 1)
            print(f"{gpu} {name} ep{ep}: {found:.0f} us ({truth})")
    print(f"mean {100 * np.mean(np.abs(errors)):.0f} %, largest {100 * np.max(np.abs(errors)):.0f} %")
    assert np.mean(np.abs(errors)) <= 0.15
    assert np.max(np.abs(errors)) <= 0.35


# ---------------------------------------------------------------- stacks and refusals


def test_rates_are_numbers_that_can_be_replaced() -> None:
    assert all(isinstance(getattr(Rates(), f.name), float) for f in fields(Rates))
    assert replace(Rates(), gemm_share=0.5).gemm_share == 0.5


def test_graphs_leave_little_of_a_launch() -> None:
    cluster = load_cluster("gb200", 8)
    eager, graphs = (rates_for(cluster, Stack(graphs=on)) for on in (False, True))
    assert graphs.launch_seconds < eager.launch_seconds / 5


def test_a_precision_that_the_accelerator_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match="no fp8 matmuls: it can do"):
        machine("a100", "fp8")


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "mi300x", "b200", "gb300", "mi355x"])
def test_scaled_blocks_need_hardware_for_them(gpu: str) -> None:
    """mxfp8: Blackwell and CDNA 4 (NVIDIA's and AMD's architecture papers); nvfp4: Blackwell."""
    can = {"mxfp8": gpu in ("b200", "gb300", "mi355x"), "nvfp4": gpu in ("b200", "gb300")}
    for precision, works in can.items():
        if works:
            machine(gpu, precision)
        else:
            with pytest.raises(SpecError, match=f"no {precision} matmuls: it can do .*bf16") as caught:
                machine(gpu, precision)
            assert precision not in str(caught.value).partition("can do")[2]


@pytest.mark.parametrize("gpu", gpu_names())
def test_a_name_for_display_changes_no_rate(gpu: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for name in ("MI-B of mine", "GB H100 B"):
        file.write_text(f'[cluster]\ngpu = "{gpu}"\ngpus = 8\n[gpu]\nname = "{name}"\n')
        mine, theirs = load_cluster(str(file)), load_cluster(gpu, 8)
        assert rates_for(mine, Stack()) == rates_for(theirs, Stack())
        found = []
        for cluster in (mine, theirs):
            work, columns = Workload(MODEL, 4096, 8), Columns.of([single(MODEL)])
            time = step_time(work, columns, cluster, rates_for(cluster, Stack()))
            found.append({k: float(v[0][0]) for k, v in terms(describe(work, columns, cluster, Stack(), time)).items()})
        assert found[0] == found[1]
        generation = gpu_named(gpu).architecture
        assert [found[0]["blackwell"], found[0]["hopper"]] == [generation == "blackwell", generation == "hopper"]


def test_nothing_sent_takes_no_time() -> None:
    cluster = load_cluster("h100", 8)
    assert float(seconds(Bytes(0.0, 0.0), cluster, Rates())) == 0.0


def test_measurements_of_the_machine_replace_published_rates() -> None:
    """`[rates]` of a cluster file: the rates give back what was measured."""
    plain = load_cluster("h100", 16)
    held = {
        "matmul_bf16_forward": [[4096, 4096, 4096, 0.70], [128, 4096, 4096, 0.20]],
        "matmul_bf16_weight": [[4096, 4096, 4096, 0.63]],
        "memory": [[1e9, 2.5e12]],
        "launch": [[5e-6]],
        "all_gather": [[8, 8, 19e-6, 340e9], [16, 8, 50e-6, 40e9]],
        "all_to_all": [[8, 8, 20e-6, 290e9]],
    }
    rates = rates_for(plain.model_copy(update={"rates": held}), Stack())
    assert rates.sustained(plain.gpu.peak_flops["bf16"]) == pytest.approx(0.70)
    assert rates.weight_gradient_share == pytest.approx(0.9)
    assert rates.memory_share * plain.gpu.memory_bandwidth == pytest.approx(2.5e12)
    assert (rates.launch_seconds, rates.fast_latency, rates.network_latency) == (5e-6, 19e-6, 50e-6)
    whole = all_gather(8e9, Group(8, 8))
    assert float(seconds(whole, plain, rates)) == pytest.approx(7e9 / 340e9 + 19e-6)
    assert rates.alltoall_ratio == pytest.approx(290 / 340)
    assert rates.network_share == pytest.approx(40e9 / plain.network_bandwidth)
