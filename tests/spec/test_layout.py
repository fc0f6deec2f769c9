"""The written form of a layout, and which rank is where on its two meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import EXPERT_GROUPS, GROUPS, Layout, parse_degrees, parse_layout, resolve_layout, written
from moesaic.spec.layout import single as single_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.tables import LayoutTable

FULL = "pp2 dp4 cp1 tp2 / edp1 ep8 etp1"
Build = Callable[..., ModelSpec]


@pytest.mark.parametrize("text", [FULL, "pp2 dp4 tp2/ep8", "tp2 dp4 pp2 / ep8 etp1"])
def test_written_form_reads_back(text: str) -> None:
    assert written(parse_layout(text)) == FULL


def test_automatic_data_parallelism_needs_its_degree() -> None:
    layout = LayoutTable(tp=2, ep=4)
    assert written(layout, dp=8) == "pp1 dp8 cp1 tp2 / edp4 ep4 etp1"
    with pytest.raises(SpecError, match="auto"):
        written(layout)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dp4 / ep3", "1·1·4 = 4"),
        ("dp8 / edp2 ep8", "edp1"),
        ("dq4", "'dp'"),
        ("ep4", "'ep4'"),
        ("dp2 dp4", "dp twice"),
        ("dp0", "at least 1"),
        ("dp2 / ep2 / etp1", "more than one slash"),
        ("dp", "'dp'"),
        ("dp9999999999999999999", "'dp9999999999999999999'"),
    ],
)
def test_illegal_forms(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layout(text)
    assert part in str(caught.value)


def test_degrees_are_read_without_asking_whether_they_fit() -> None:
    assert parse_degrees("dp4 / ep3") == {"pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 3, "etp": 1}
    assert parse_degrees("/ edp2")["edp"] == 2


def mesh(
    pp: int,
    dp: int,
    cp: int,
    tp: int,
    edp: int,
    ep: int,
    etp: int,
    order: str = "pp-outer",
    experts: Sequence[int] = (),
) -> Layout:
    """A layout of which only the meshes matter."""
    return Layout(
        *(pp, dp, cp, tp, edp, ep, etp),
        cp_kind="ulysses",
        virtual_stages=1,
        sharding="none",
        replicas=1,
        micro_batch=1,
        dispatcher="alltoall",
        schedule="1f1b",
        order=order,
        stages=(),
        experts_ep=tuple((count, math.gcd(ep, count)) for count in experts),
    )


@st.composite
def meshes(draw: st.DrawFn) -> Layout:
    """Any degrees whose two meshes cover the same ranks, in both orders where that is legal."""
    pp, cp, tp, ep, etp = (draw(st.integers(1, 4)) for _ in range(5))
    stage = math.lcm(cp * tp, ep * etp) * draw(st.integers(1, 2))
    dp, edp = stage // (cp * tp), stage // (ep * etp)
    orders = ["pp-outer", "dp-outer"] if pp == 1 or dp == edp else ["pp-outer"]
    return mesh(pp, dp, cp, tp, edp, ep, etp, draw(st.sampled_from(orders)))


def groups_of(ranks: np.ndarray, names: Sequence[str], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Groups along `axes` of an array with one dimension per name."""
    chosen = [i for i, name in enumerate(names) if name in axes]
    moved = np.moveaxis(ranks, chosen, range(len(names) - len(chosen), len(names)))
    size = math.prod(ranks.shape[i] for i in chosen)
    return sorted(tuple(sorted(row)) for row in moved.reshape(-1, size).tolist())


@given(meshes())
def test_both_meshes_are_reshaped_ranks(layout: Layout) -> None:
    """The listing of the folding paper (arXiv 2504.14960): arange(world) reshaped to the sizes, slowest first."""
    sizes = {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "edp", "ep", "etp")}
    outer = ("pp", "dp") if layout.order == "pp-outer" else ("dp", "pp")
    dense = (*outer, "cp", "tp")
    expert = (*(f"e{name}" if name == "dp" else name for name in outer), "ep", "etp")
    for names, coords, groups, named in (
        (dense, layout.dense_coords, layout.groups, GROUPS),
        (expert, layout.expert_coords, layout.expert_groups, EXPERT_GROUPS),
    ):
        ranks = np.arange(layout.world).reshape([sizes[name] for name in names])
        for rank in range(layout.world):
            at = coords(rank)
            assert set(at) == set(names) and ranks[tuple(at[name] for name in names)] == rank
        for axes in [*named.values(), (), *((name,) for name in names), names]:
            assert groups(*axes) == groups_of(ranks, names, axes)


@given(meshes())
def test_every_rank_is_in_one_group_of_each_kind(layout: Layout) -> None:
    assert layout.tp * layout.cp * layout.dp == layout.etp * layout.ep * layout.edp == layout.world // layout.pp
    everybody = list(range(layout.world))
    for groups, named in ((layout.groups, GROUPS), (layout.expert_groups, EXPERT_GROUPS)):
        for axes in named.values():
            partition = groups(*axes)
            assert sorted(rank for group in partition for rank in group) == everybody
            assert {len(group) for group in partition} == {math.prod(getattr(layout, axis) for axis in axes)}
            assert partition == sorted(partition) and all(list(group) == sorted(group) for group in partition)
    # A token leaves its pipeline on neither mesh: the stages of both are the same ranks.
    assert layout.groups("pp") == layout.expert_groups("pp")
    assert layout.groups("dp", "cp", "tp") == layout.expert_groups("edp", "ep", "etp")


def test_rank_formulas_of_the_default_order() -> None:
    layout = mesh(2, 3, 2, 2, 2, 3, 2)
    for rank in range(layout.world):
        at = layout.dense_coords(rank) | {f"e-{name}": i for name, i in layout.expert_coords(rank).items()}
        assert rank == ((at["pp"] * 3 + at["dp"]) * 2 + at["cp"]) * 2 + at["tp"]
        assert rank == ((at["e-pp"] * 2 + at["e-edp"]) * 3 + at["e-ep"]) * 2 + at["e-etp"]


def test_folding_lets_experts_spread_over_tensor_and_context_ranks(tiny: Build) -> None:
    """The worked example of Parallel Folding: 256 ranks, TP 4, CP 2, PP 4 make DP 8; EP 64 needs no DP of 64."""
    table = LayoutTable(pp=4, cp=2, tp=4, ep=64)
    layout = resolve_layout(table, tiny([64] * 4, heads=32, kv_heads=8), 256, seq_len=4096, global_batch=64)
    assert str(layout) == "pp4 dp8 cp2 tp4 / edp1 ep64 etp1"
    assert layout.world == 256 and layout.expert_groups("ep")[1] == tuple(range(64, 128))
    assert [len(group) for group in layout.groups("dp")] == [8] * 32
    assert layout.micro_batches(64) == 8


def test_a_pyramid_has_its_own_expert_parallelism_per_layer(tiny: Build) -> None:
    """DeepSpeed-MoE (arXiv 2201.05596): layers of 32, 64 and 128 experts on 128 ranks take EP 32, 64, 128
    and expert-data parallelism 4, 2, 1, with one expert per rank everywhere."""
    model = tiny([32, 64, 128])
    layout = resolve_layout(LayoutTable(ep=128), model, 128, seq_len=128, global_batch=128)
    assert layout.experts_ep == ((32, 32), (64, 64), (128, 128))
    assert [(layout.layer_ep(n), layout.layer_edp(n)) for n in (32, 64, 128)] == [(32, 4), (64, 2), (128, 1)]
    for experts, edp in ((32, 4), (64, 2), (128, 1)):
        ranks = np.arange(128).reshape(1, edp, experts, 1)
        names = ("pp", "edp", "ep", "etp")
        for axes in EXPERT_GROUPS.values():
            assert layout.expert_groups(*axes, experts=experts) == groups_of(ranks, names, axes)
        assert layout.expert_coords(77, experts) == {"pp": 0, "edp": 77 // experts, "ep": 77 % experts, "etp": 0}


def test_a_pyramid_with_data_parallelism_outside() -> None:
    layout = mesh(2, 2, 2, 2, 2, 4, 1, "dp-outer", experts=(2, 4))
    ranks = np.arange(16).reshape(2, 2, 2, 2, 1)
    names = ("edp", "pp", "edp", "ep", "etp")
    for axes in (*EXPERT_GROUPS.values(), ("pp",)):
        assert layout.expert_groups(*axes, experts=2) == groups_of(ranks, names, axes)
    assert layout.expert_groups("pp", experts=2) == layout.groups("pp") == layout.expert_groups("pp", experts=4)
    # The two digits of edp count on from each other, so that no two ranks with the same experts share a coordinate.
    for group in layout.expert_groups("edp", experts=2):
        assert [layout.expert_coords(rank, 2)["edp"] for rank in group] == [0, 1, 2, 3]


def test_one_process(tiny: Build) -> None:
    model = tiny([0, 8], mtp=1)
    layout = single_layout(model, micro_batch=4)
    assert str(layout) == "pp1 dp1 cp1 tp1 / edp1 ep1 etp1" and layout.world == 1
    assert layout == resolve_layout(LayoutTable(micro_batch=4), model, 1, seq_len=7, global_batch=4)
    (stage,) = layout.stages
    assert stage.embed and stage.head and stage.mtp and stage.layers == (0, 1)
    assert layout.dispatcher == "local" and layout.groups("dp", "cp") == [(0,)]


def test_questions_that_make_no_sense() -> None:
    layout = mesh(1, 2, 1, 1, 1, 2, 1)
    with pytest.raises(SpecError, match="'ep' is not an axis"):
        layout.groups("ep")
    with pytest.raises(SpecError, match="rank 2 is not one of the 2 ranks"):
        layout.dense_coords(2)
