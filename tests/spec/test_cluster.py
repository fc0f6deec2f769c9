"""The catalogue against the makers' figures, cluster files, and who shares a fast domain, against lists of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.spec.cluster import (
    ClusterSpec,
    cluster_of,
    gpu_named,
    gpu_names,
    load_cluster,
    members_in_domain,
)
from moesaic.spec.errors import SpecError
from moesaic.spec.gpus import catalogue
from moesaic.spec.gpus.tables import PEAKS, RATE_COLUMNS, file_keys
from moesaic.spec.layout import EXPERT_GROUPS, GROUPS, Layout
from moesaic.spec.tables import ClusterTable
from tests.spec import hardware_tables

# name: dense bf16 and fp8 TFLOP/s, GB of memory and TB/s as advertised, GB/s of the link in both directions.
ADVERTISED = {
    "a100": (312, None, 80, 2.039, 600),
    "a100-40gb": (312, None, 40, 1.555, 600),
    "h100": (989, 1979, 80, 3.35, 900),
    "h200": (989, 1979, 141, 4.8, 900),
    "h800": (989, 1979, 80, 3.35, 400),
    "h20": (148, 296, 96, 4.0, 900),
    "b200": (2250, 4500, 180, 8.0, 1800),
    "b300": (2250, 4500, 270, 8.0, 1800),
    "gb200": (2500, 5000, 186, 8.0, 1800),
    "gb300": (2500, 5000, 279, 8.0, 1800),
    "mi300x": (1307, 2615, 192, 5.3, 896),
    "mi325x": (1307, 2615, 256, 6.0, 896),
    "mi355x": (2517, 5033, 288, 8.0, 1075),
}


@pytest.mark.parametrize("name", ADVERTISED)
def test_figures_are_those_of_the_data_sheets(name):
    gpu = gpu_named(name)
    bf16, fp8, memory, bandwidth, link = ADVERTISED[name]
    assert gpu.peak_flops["bf16"] == pytest.approx(bf16 * 1e12, rel=1e-3)
    assert gpu.peak_flops.get("fp8") == (None if fp8 is None else pytest.approx(fp8 * 1e12, rel=1e-3))
    # What the makers call GB are 2^30 bytes, of which the driver keeps a little.
    assert 0.97 <= gpu.memory_bytes / (memory * 2**30) <= 1.001
    assert gpu.memory_bandwidth == pytest.approx(bandwidth * 1e12, rel=1e-3)
    assert 2 * gpu.link_bandwidth == pytest.approx(link * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", gpu_names())
def test_every_figure_has_its_source_and_a_plausible_size(name):
    gpu = gpu_named(name)
    figures = {
        field
        for field in type(gpu).model_fields
        if field not in ("name", "vendor", "architecture", "superchip", "sources")
    }
    assert set(gpu.sources) == figures
    assert all(len(text) > 10 for text in gpu.sources.values())
    peaks = gpu.peak_flops
    assert list(peaks) == [precision for precision in PEAKS if precision in peaks]
    assert list(peaks.values()) == sorted(peaks.values())
    # Dense figures double from bf16 to fp8; where a sparse one slips in, it is four times as much.
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=1e-3)
    assert gpu.domain % gpu.gpus_per_node == 0


def test_dense_peaks_agree_with_the_racks_and_boards():
    # NVL72 racks and eight-GPU boards, PFLOP/s as printed; sparse figures are twice the dense.
    for name, count, precision, printed in (
        ("gb200", 72, "fp4", 1440 / 2),
        ("gb200", 72, "bf16", 360 / 2),
        ("gb300", 72, "fp4", 1080),
        ("gb300", 72, "fp8", 720 / 2),
        ("b200", 8, "fp4", 72),
        ("b200", 8, "fp8", 72 / 2),
        ("b300", 8, "fp4", 108),
        ("b300", 8, "tf32", 18 / 2),
    ):
        assert gpu_named(name).peak_flops[precision] * count == pytest.approx(printed * 1e15)


@pytest.mark.parametrize(
    ("written", "short"),
    [
        ("h100", "h100"),
        ("H100 (Eos)", "h100"),
        ("H100-SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("DGX-H100", "h100"),
        ("8xH100", "h100"),
        ("H100 (p5.48xlarge, EFA)", "h100"),
        ("H100 96GB HBM2e 500W", "h100-96gb"),
        ("DGX-GB300", "gb300"),
        ("GB200 NVL72", "gb200"),
        ("GB200 NVL72 (efficiencies of B200, 50 GB/s NIC per GPU at 0.9)", "gb200"),
        ("B300 (p6-b300, EFA)", "b300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("B200-SXM 8-GPU node", "b200"),
        ("A100-80GB SXM", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM (tool config a100-sxm-40gb)", "a100-40gb"),
        ("A100-PCIe 80GB 8-GPU node", "a100-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI355X", "mi355x"),
    ],
)
def test_usual_names_find_their_accelerator(written, short):
    assert gpu_named(written) == gpu_named(short)


@pytest.mark.parametrize(
    ("written", "said"),
    [("h1000", "'h100'"), ("gb20", "'gb200'"), ("tpu", "h100, "), ("", "h100, ")],
)
def test_unknown_names_get_the_nearest(written, said):
    with pytest.raises(SpecError, match="no accelerator") as caught:
        gpu_named(written)
    assert said in str(caught.value)


@pytest.mark.parametrize("written", ["H100 PCIe", "H100 (PCIe)", "H100 NVL", "H200 (NVL)"])
def test_another_board_of_the_name_is_not_taken_for_it(written):
    with pytest.raises(SpecError, match="no accelerator"):
        gpu_named(written)


def test_no_two_accelerators_share_a_name():
    names = [alias.casefold() for file in catalogue().values() for alias in [file.gpu.name or "", *file.gpu.aliases]]
    assert not [name for name, count in Counter(names).items() if count > 1]


# ---------------------------------------------------------------- load_cluster


def test_overrides_stand_before_the_makers_figures():
    cluster = load_cluster("h100", 64, domain=4, gpus_per_node=4, nic_gbps=200, link_gb_per_s=100, memory_gib=90)
    assert (cluster.gpus, cluster.fast_domain, cluster.node_size) == (64, 4, 4)
    assert cluster.network_bandwidth == 25e9
    assert cluster.gpu.link_bandwidth == 100e9 and cluster.gpu.memory_bytes == 90 * 2**30
    assert "user" in cluster.gpu.sources["memory_bytes"]
    assert gpu_named("h100").link_bandwidth == 450e9
    assert load_cluster("h100", 64).network_bandwidth == 400e9 / 8


@pytest.mark.parametrize(
    ("gpu", "gpus", "domain"),
    [
        ("h100", 4, 4),
        ("h100", 64, 8),
        ("h100", 12, 8),
        ("gb200", 64, 64),
        ("gb200", 72, 72),
        ("gb200", 256, 64),
        ("gb200", 144, 72),
        ("gb300", 96, 48),
        ("gb300", 2048, 64),
    ],
)
def test_racks_are_taken_in_equal_parts(gpu, gpus, domain):
    assert load_cluster(gpu, gpus).fast_domain == domain


def test_a_file_gives_all_of_its_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[cluster]\ngpus = 16\n[gpu]\nname = "Mine"\npeak_tflops = {bf16 = 100, fp8 = 200.5}\nmemory_gib = 64\n'
        "memory_gb_per_s = 1000\nlink_gb_per_s = 50\ndomain = 4\ngpus_per_node = 4\nnic_gbps = 100\n"
        "host_gb_per_s = 16\n"
        '[sources]\nmemory_gib = "the box"\n[rates]\nall_gather = [[4, 4, 0, 4e10]]\n'
    )
    cluster = load_cluster(path)
    assert cluster.gpus == 16 and cluster.gpu.name == "Mine" and cluster.fast_domain == 4
    assert cluster.gpu.peak_flops == {"bf16": 100e12, "fp8": 200.5e12}
    assert cluster.gpu.memory_bytes == 64 * 2**30 and cluster.network_bandwidth == 12.5e9
    assert cluster.gpu.sources == {"memory_bytes": "the box"}
    assert cluster.rates == {"all_gather": [[4, 4, 0, 4e10]]}
    assert load_cluster(str(path), 32, nic_gbps=50).model_copy(update={"gpus": 16, "nic_bandwidth": None}) == cluster


def test_a_name_is_a_name_whatever_lies_around(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("h100", "mine"):
        (tmp_path / name).write_text('[cluster]\ngpu = "b200"\ngpus = 4\n')
    assert load_cluster("h100", 8).gpu == gpu_named("h100")
    assert load_cluster("mine").gpu == gpu_named("b200")


def test_a_file_may_name_what_it_differs_from(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[cluster]\ngpu = "H100-SXM"\nnic_gbps = 200\n[gpu]\nname = "slow H100"\npeak_tflops = {bf16 = 700}\n'
    )
    cluster = load_cluster(path, 8)
    assert cluster.gpu.peak_flops["bf16"] == 700e12
    assert cluster.gpu.peak_flops["fp8"] == gpu_named("h100").peak_flops["fp8"]
    assert cluster.gpu.memory_bytes == gpu_named("h100").memory_bytes
    assert cluster.network_bandwidth == 25e9
    assert "mine.toml" in cluster.gpu.sources["peak_flops"]
    assert cluster.gpu.sources["memory_bytes"] == gpu_named("h100").sources["memory_bytes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu]\nmemory_gb = 80\n", "gpu.memory_gb': did you mean 'memory_gib'"),
        ("[gpus]\nname = 'x'\n", "did you mean 'gpu'"),
        ("[cluster]\nmemory_gib = 3\n", "did you mean 'gpu.memory_gib'"),
        ("gpus = 8\n", "write it under [cluster]"),
        ("gpu = 'h100'\n", "write [gpu]"),
        ("[cluster]\ngpus = '8'\n", "cluster.gpus is '8'"),
        ("[gpu]\nmemory_gib = -1\n", "in GiB"),
        ("[gpu]\npeak_tflops = {bf15 = 3}\n", "did you mean 'bf16'"),
        ("[gpu]\nname = 'x'\n", "lacks gpu.peak_tflops"),
        ("[sources]\nmemory = 'x'\n", "did you mean 'memory_g"),
        ("[rates]\nallgather = [[1, 2, 3, 4]]\n", "did you mean 'all_gather'"),
        ("[rates]\nall_gather = [[2, 2, 1e-5]]\n", "row 0 of rates.all_gather has 3 numbers"),
        ("[rates]\nall_gather = [[2, 2, 1e-5, 0]]\n", "must be above 0"),
        ("[cluster]\ngpu = 'h101'\n", "'h100'"),
        ("[cluster\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_told_the_way_out(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_cluster(path, 8)
    assert said in str(caught.value)


def test_what_is_missing_or_senseless_is_refused(tmp_path):
    with pytest.raises(SpecError, match="how many"):
        load_cluster("h100")
    with pytest.raises(SpecError, match="gpus is 0"):
        load_cluster("h100", 0)
    with pytest.raises(SpecError, match="nic_gbps"):
        load_cluster("h100", 8, nic_gbps=-1)
    with pytest.raises(SpecError, match="does not exist"):
        load_cluster(str(tmp_path / "no.toml"), 8)


def test_every_key_of_a_file_has_help():
    keys = file_keys()
    assert {"cluster.gpus", "gpu.memory_gib"} <= {key for key, _, _ in keys}
    assert all(text.endswith(".") for _, _, text in keys)


def test_the_cluster_of_a_run_file():
    cluster = cluster_of(ClusterTable(gpu="DGX-GB200", nodes=16))
    assert (cluster.gpus, cluster.node_size, cluster.fast_domain) == (64, 4, 64)
    cluster = cluster_of(ClusterTable(gpu="h100", nodes=4, gpus_per_node=4))
    assert (cluster.gpus, cluster.node_size) == (16, 4)
    assert cluster_of(ClusterTable(gpu="h100"), gpus=24).gpus == 24
    with pytest.raises(SpecError, match=r"cluster\.gpu is not set"):
        cluster_of(ClusterTable(nodes=2))


# ---------------------------------------------------------------- members_in_domain


def fewest(groups: list[tuple[int, ...]], domain: int) -> int:
    """By the definition: of all members of all groups, the fewest of its group in its domain."""
    return min(min(Counter(rank // domain for rank in group).values()) for group in groups)


small = st.integers(1, 6)
wide = st.integers(1, 5)


@st.composite
def layouts(draw):
    pp, dp, cp, tp = (draw(wide) for _ in range(4))
    stage = dp * cp * tp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if (stage // etp) % n == 0]))
    plain = {
        "cp_kind": "ring",
        "virtual_stages": 1,
        "sharding": "none",
        "replicas": 1,
        "micro_batch": 1,
        "dispatcher": "alltoall",
        "schedule": "1f1b",
        "order": "pp-outer",
        "stages": (),
        "experts_ep": (),
    }
    return Layout(pp, dp, cp, tp, stage // etp // ep, ep, etp, **plain)


@given(layouts(), st.integers(1, 16))
def test_members_are_those_of_the_rank_lists(layout, domain):
    below = {"tp": 1, "cp": layout.tp, "dp": layout.cp * layout.tp, "pp": layout.dp * layout.cp * layout.tp}
    below |= {"data": layout.tp, "sequence": 1, "stage": 1}
    for name, axes in GROUPS.items():
        groups = layout.groups(*axes)
        got = members_in_domain(below[name], len(groups[0]), domain, layout.world)
        assert got == fewest(groups, domain), (name, layout, domain)
    below = {"etp": 1, "ep": layout.etp, "edp": layout.etp * layout.ep, "ep_etp": 1}
    for name, axes in EXPERT_GROUPS.items():
        groups = layout.expert_groups(*axes)
        got = members_in_domain(below[name], len(groups[0]), domain, layout.world)
        assert got == fewest(groups, domain), (name, layout, domain)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 12), st.integers(1, 30))
def test_members_of_any_group_and_world(stride, size, domain, blocks):
    world = stride * size * blocks
    groups = [
        tuple(range(block + start, block + start + stride * size, stride))
        for block in range(0, world, stride * size)
        for start in range(stride)
    ]
    assert members_in_domain(stride, size, domain, world) == fewest(groups, domain)
    # Without a world, as many groups as it takes to meet all borders: never more than with one.
    assert members_in_domain(stride, size, domain) <= fewest(groups, domain)
    if blocks >= domain:
        assert members_in_domain(stride, size, domain) == fewest(groups, domain)


def test_members_come_as_arrays():
    strides, sizes = np.array([1, 1, 8, 2, 1, 1]), np.array([8, 64, 64, 4, 3, 1])
    assert members_in_domain(strides, sizes, 8).tolist() == [8, 8, 1, 4, 1, 1]
    assert members_in_domain(np.array([[1], [4]]), np.array([4, 16]), 72, 576).shape == (2, 2)
    # 64 ranks of an NVL72 rack, 8 left over: the next group has 8 in the first rack.
    assert members_in_domain(1, 64, 72) == 8 and members_in_domain(1, 64, 64) == 64


def test_a_spec_made_by_hand_needs_no_rates():
    cluster = ClusterSpec(gpu=gpu_named("h100"), gpus=16)
    assert cluster.rates == {} and cluster.fast_domain == 8
    assert {"matmul_bf16_forward", "grouped_bf16_weight", "all_to_all", "memory"} <= set(RATE_COLUMNS)


# ---------------------------------------------------------------- the handbook


def test_the_handbook_shows_the_catalogue_as_it_is():
    page = hardware_tables.PAGE.read_text(encoding="utf-8")
    assert page == hardware_tables.with_tables(page), "python -m tests.spec.hardware_tables writes the tables anew"


def test_the_handbooks_example_is_a_cluster(tmp_path):
    page = hardware_tables.PAGE.read_text(encoding="utf-8")
    example = page.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "mine.toml").write_text(example)
    cluster = load_cluster(tmp_path / "mine.toml")
    assert cluster.gpus == 256 and cluster.network_bandwidth == 25e9
    assert cluster.gpu.name == "H100 at 500 W" and cluster.gpu.peak_flops["bf16"] == 790e12
