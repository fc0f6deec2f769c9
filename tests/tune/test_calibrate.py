"""Calibration: the fit against lines that are known, the file against what was measured, the processes against being
interrupted, and bytes against the traffic meter."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.mesh.group import Group
from moesaic.mesh.traffic import meter
from moesaic.spec.cluster import RATE_COLUMNS, gpu_named, load_cluster
from moesaic.spec.errors import SpecError
from moesaic.tune.bench import Bench, Measurements, Plan
from moesaic.tune.calibrate import Calibration, calibrate, calibration_of, fit_line
from moesaic.tune.ranks import CalibrationError, measure_here
from tests.ranks import ranks

SIZES = [2.0**p for p in range(12, 28, 2)]


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency, bandwidth):
    found = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    assert found == (pytest.approx(latency, rel=1e-6), pytest.approx(bandwidth, rel=1e-6))


@given(
    latency=st.floats(1e-5, 1e-3),
    bandwidth=st.floats(1e8, 1e10),
    noise=st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8),
)
def test_noise_moves_no_size_further_than_itself(latency, bandwidth, noise):
    seconds = [(latency + size / bandwidth) * n for size, n in zip(SIZES, noise, strict=True)]
    found_latency, found_bandwidth = fit_line(SIZES, seconds)
    predicted = np.array([found_latency + size / found_bandwidth for size in SIZES])
    # The true line is off by 10 % at most, so the best one is not worse in the sum of squares.
    assert np.mean((predicted / np.array(seconds) - 1) ** 2) <= 0.12**2


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-7, 10)), min_size=1, max_size=8))
def test_neither_latency_nor_bandwidth_is_below_zero(points):
    latency, bandwidth = fit_line(*zip(*points, strict=True))
    assert latency >= 0 and 0 < bandwidth < float("inf")


def test_a_line_needs_points():
    for sizes, seconds in (([], []), ([1.0], [0.0]), ([0.0], [1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="positive"):
            fit_line(sizes, seconds)


# ---------------------------------------------------------------- the file


def measured(kind: str = "cpu", name: str = "Some CPU", world: int = 4, domain: int = 2) -> Measurements:
    """A machine of 100 GFLOP/s at best, 10 GB/s of memory, links of 1 ms + 1 GB/s inside, 2 ms + 0.1 GB/s outside."""
    facts = {
        "kind": kind,
        "name": name,
        "threads": 3,
        "torch": "9.9",
        "native_bf16": False,
        "core_share": 1.0,
        "memory_bytes": 16 * 2**30,
        "world": world,
        "domain": domain,
    }
    found = Measurements(facts, launch_seconds=2e-6)
    for m, speed in ((16, 25e9), (64, 50e9), (256, 100e9)):
        for product in ("forward", "input", "weight"):
            found.products.append(("fp32", "matmul", (m, 128, 64), product, 2 * m * 128 * 64 / speed))
            found.products.append(("fp32", "grouped", (4, m, 128, 64), product, 2 * 4 * m * 128 * 64 / speed * 2))
    found.copies = [("memory", 2**20, 2**20 / 50e9), ("memory", 2**28, 2**28 / 10e9)]
    for name_ in ("all_gather", "all_to_all"):
        found.messages += [(name_, 2, 2, int(size), 1e-3 + size / 1e9) for size in SIZES]
        found.messages += [(name_, 2, 1, int(size), 2e-3 + size / 1e8) for size in SIZES]
    found.modules = [("fp32", "norm", (256, 512), way, 1e-3) for way in ("forward", "backward")]
    found.overlaps = [(2, 2, 0.02, 0.02, 0.03), (2, 1, 0.2, 0.21, 0.22)]
    return found


def test_a_calibration_is_read_back_as_it_was_written(tmp_path):
    found = calibration_of(measured())
    path = tmp_path / "cluster.toml"
    found.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.toml"]
    cluster = load_cluster(path)
    assert cluster.rates == found.rates
    assert cluster.gpus == 4 and cluster.fast_domain == 2 and cluster.node_size == 2
    assert cluster.gpu.name == "Some CPU, 3 threads"
    assert cluster.gpu.peak_flops == dict.fromkeys(("fp32", "bf16"), pytest.approx(100e9, rel=1e-3))
    # The machine's memory is shared by its two processes.
    assert cluster.gpu.memory_bytes == 8 * 2**30
    # The largest copy counts: smaller ones fit into caches.
    assert cluster.gpu.memory_bandwidth == pytest.approx(10e9, rel=1e-3)
    assert cluster.gpu.link_bandwidth == pytest.approx(1e9, rel=1e-3)
    assert cluster.network_bandwidth == pytest.approx(1e8, rel=1e-3)
    assert set(cluster.gpu.sources) == {
        f for f in type(cluster.gpu).model_fields if f not in ("name", "vendor", "sources", "architecture", "superchip")
    }


def test_rates_are_shares_of_the_peak_and_lines():
    rates = calibration_of(measured()).rates
    assert rates["matmul_fp32_forward"] == [
        [16, 128, 64, pytest.approx(0.25, rel=1e-3)],
        [64, 128, 64, pytest.approx(0.5, rel=1e-3)],
        [256, 128, 64, pytest.approx(1.0, rel=1e-3)],
    ]
    assert rates["grouped_fp32_weight"][0] == [4, 16, 128, 64, pytest.approx(0.125, rel=1e-3)]
    assert rates["all_to_all"] == [
        [2, 1, pytest.approx(2e-3, rel=1e-3), pytest.approx(1e8, rel=1e-3)],
        [2, 2, pytest.approx(1e-3, rel=1e-3), pytest.approx(1e9, rel=1e-3)],
    ]
    assert rates["launch"] == [[2e-6]]
    # Two values of 4 bytes forward, three backward, for each of 256·512 elements in a millisecond.
    assert rates["norm_fp32_forward"] == [[256, 512, pytest.approx(8 * 256 * 512 * 1e3, rel=1e-3)]]
    assert rates["norm_fp32_backward"] == [[256, 512, pytest.approx(12 * 256 * 512 * 1e3, rel=1e-3)]]
    assert rates["overlap"] == [[2, 1, 0.2, 0.21, 0.22], [2, 2, 0.02, 0.02, 0.03]]
    assert all(name in RATE_COLUMNS for name in rates)


def test_an_accelerator_of_the_catalogue_keeps_its_makers_figures(tmp_path):
    found = measured(kind="cuda", name="NVIDIA H100 80GB HBM3", world=1, domain=1)
    found.messages = []
    found.products = [("bf16", "matmul", (4096, 4096, 4096), "forward", 2 * 4096**3 / 494.7e12)]
    path = tmp_path / "cluster.toml"
    calibration_of(found).write(path)
    cluster = load_cluster(path, 64)
    assert cluster.gpu == gpu_named("h100") and cluster.fast_domain == 8
    assert cluster.rates["matmul_bf16_forward"] == [[4096, 4096, 4096, pytest.approx(0.5, rel=1e-3)]]


def test_a_crowded_machine_is_told():
    found = measured()
    assert not calibration_of(found).notes
    found.facts["core_share"] = 0.4
    (note,) = calibration_of(found).notes
    assert "60%" in note


def test_a_process_alone_has_a_file_too(tmp_path):
    found = measured(world=1, domain=1)
    found.messages = []
    calibration_of(found).write(tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml").fast_domain == 1


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    found = calibration_of(measured())
    target = tmp_path / "cluster.toml"
    target.write_text("precious")

    def full(self: Calibration) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Calibration, "to_toml", full)
    with pytest.raises(OSError, match="No space"):
        found.write(target)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.toml"]
    assert target.read_text() == "precious"


# ---------------------------------------------------------------- measuring


def tiny_plan(processes: int, **changes: Any) -> Plan:
    return Plan(**{"precisions": ("fp32",), "quick": True, "seconds": 0.5, "domain": processes, **changes})


def children() -> set[int | None]:
    """Processes that this one has started and that still run; ranks of other tests may be among them."""
    return {process.pid for process in multiprocessing.active_children()}


@pytest.fixture(scope="module")
def two_processes() -> tuple[Measurements, list[str]]:
    said: list[str] = []
    others = children()
    before = set(Path(tempfile.gettempdir()).glob("moesaic-calibrate-*"))
    found = measure_here(2, tiny_plan(2), said.append)
    assert children() <= others
    assert set(Path(tempfile.gettempdir()).glob("moesaic-calibrate-*")) <= before
    return found, said


def test_two_processes_measure_all_kinds(two_processes, tmp_path):
    found, said = two_processes
    assert found.facts["world"] == 2 and found.facts["kind"] in ("cpu", "cuda")
    assert {kind for _, kind, *_ in found.products} >= {"matmul"}
    assert {name for name, *_ in found.messages} == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
    assert all(seconds > 0 for *_, seconds in [*found.products, *found.copies, *found.messages])
    assert found.overlaps and all(min(row[2:]) > 0 for row in found.overlaps)
    assert any("products" in text for text in said) and any("collectives" in text for text in said)
    # Half a second is not enough for all of it, and the rest is named.
    assert found.skipped
    calibration = calibration_of(found)
    calibration.write(tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml").rates == calibration.rates


def test_efficiencies_are_shares_of_one(two_processes):
    found, _ = two_processes
    if found.facts["kind"] != "cpu":
        pytest.skip("the peak of a known accelerator is its maker's")
    rates = calibration_of(found).rates
    shares = [row[-1] for name, rows in rates.items() if RATE_COLUMNS[name][-1] == "efficiency" for row in rows]
    assert 0 < min(shares) and max(shares) <= 1.0005


def test_interrupting_leaves_no_process(tmp_path):
    others = children()
    before = set(Path(tempfile.gettempdir()).glob("moesaic-calibrate-*"))

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_here(1, tiny_plan(1), stop)
    assert children() <= others
    assert set(Path(tempfile.gettempdir()).glob("moesaic-calibrate-*")) <= before


def test_what_a_process_dies_of_is_said():
    others = children()
    with pytest.raises(CalibrationError, match="fp3"):
        measure_here(1, tiny_plan(1, precisions=("fp3",)), lambda _: None)
    assert children() <= others


def _metered(rank: int, sizes: list[int]) -> list[tuple[int, str, int, int]]:
    """(ranks, name, bytes as the bench counts them, bytes as the meter does)."""
    world = Group.create("metered", [tuple(range(4))], 60.0, channel="tune")
    bench = Bench(world, Plan(("fp32",), True, 1.0, domain=2), lambda _: None)
    out = []
    for group, _ in bench.groups():
        for elements in sizes:
            for name, sent, call in bench.collective_calls(group, elements, torch.float32):
                with meter() as traffic:
                    call()
                out.append((group.size, name, sent, sum(traffic.bytes.values())))
    return out


def test_bytes_are_those_of_the_traffic_meter():
    for row in ranks(4).run(_metered, [1024, 4096, 4 * 5001]):
        assert len(row) > 20
        for size, name, claimed, counted in row:
            assert claimed == counted, (size, name)


def _grouping(rank: int, domain: int) -> list[tuple[tuple[int, ...], int]]:
    world = Group.create("metered", [tuple(range(4))], 60.0, channel="tune")
    bench = Bench(world, Plan(("fp32",), True, 1.0, domain=domain), lambda _: None)
    return [(group.ranks, members) for group, members in bench.groups()]


@pytest.mark.parametrize("domain", [1, 2, 4])
def test_groups_know_their_members_in_a_domain(domain):
    for rank, groups in enumerate(ranks(4).run(_grouping, domain)):
        sizes = [len(members) for members, _ in groups]
        assert sizes[:2] == [2, 4] and (len(groups) > 2) == (domain < 4)
        for members, shared in groups:
            assert rank in members
            assert min(Counter(member // domain for member in members).values()) == shared


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precisions": ["bf15"]}, "did you mean 'bf16'"),
        ({"precisions": ["fp8"]}, "cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, said):
    with pytest.raises(SpecError) as caught:
        calibrate(**options)
    assert said in str(caught.value)


def test_processors_have_no_tf32():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SpecError, match="mode of GPUs"):
        calibrate(precisions=["tf32"])


def test_processes_of_torchrun_are_not_multiplied(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="RANK is not"):
        calibrate(processes=2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SpecError, match="torchrun has started its own"):
        calibrate(processes=2)
