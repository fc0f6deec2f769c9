"""The comparison over several ranks: its arithmetic of layouts, its verdicts, and a run with moesaic alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.folding import STEP, legal, peer_names, step_cells
from benchmarks.folding_tables import fastest_peer, markdown, ratio
from benchmarks.peers.parallel import clip_by_mesh, micro_batches, own_experts, own_rows
from benchmarks.peers.parallel.registry import PARALLEL_PEERS, Degrees, all_degrees, parse_degrees
from benchmarks.peers.workload import LayerShape, StepShape, layer_weights
from benchmarks.rounds import Row
from benchmarks.teams import ParallelCell

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_all_degrees_are_those_of_a_brute_force_search(world: int) -> None:
    sizes = range(1, world + 1)
    dense = [d for d in product(sizes, repeat=4) if math.prod(d) == world]
    expected = {(*d, *e) for d in dense for e in product(sizes, repeat=3) if d[0] * math.prod(e) == world}
    found = [tuple(degrees.as_json().values()) for degrees in all_degrees(world)]
    assert len(found) == len(set(found)) and set(found) == expected


@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_written_layout_is_read_back(world: int) -> None:
    for degrees in all_degrees(world):
        assert parse_degrees(degrees.text(), world) == degrees


def test_data_parallel_degrees_are_filled_in() -> None:
    assert parse_degrees("tp2 / ep2", 4) == Degrees(dp=2, tp=2, edp=2, ep=2)


@pytest.mark.parametrize("text", ["tp3", "zz2", "dp2 tp4", "tp2 / ep2 etp4"])
def test_a_layout_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ranks|not a degree"):
        parse_degrees(text, 4)


def test_layouts_refused_for_transformers_are_those_it_refuses() -> None:
    from transformers.distributed import DistributedConfig

    misfit = PARALLEL_PEERS["hf"].misfit
    for degrees in all_degrees(8):
        if degrees.pp == degrees.cp == degrees.etp == 1 and degrees.ep > 1:
            try:
                DistributedConfig(tp_size=degrees.tp, fsdp_size=degrees.dp, ep_size=degrees.ep)
                refused = False
            except ValueError:
                refused = True
            assert bool(misfit(degrees)) == refused, degrees.text()


def test_every_layout_that_moesaic_accepts_is_a_cell() -> None:
    cells = list(step_cells(STEP, 4, []))
    assert len(cells) == len({cell.degrees for cell in cells})
    for degrees in all_degrees(4):
        variants = ("", "ring") if degrees.cp > 1 else ("",)
        accepted = any(not legal(STEP, degrees, variant) for variant in variants)
        assert accepted == (degrees in {cell.degrees for cell in cells})
    assert "stages" in legal(StepShape(layers=2, batch=8), Degrees(pp=4))


def test_ranks_hold_the_experts_and_rows_once() -> None:
    weights = layer_weights(LayerShape(16, 8, 8, 2, 4))
    pieces = [own_experts(weights, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([piece.gate_up for piece in pieces]), weights.gate_up)
    assert torch.equal(torch.cat([piece.down for piece in pieces]), weights.down)
    ids = torch.arange(24).view(8, 3)
    assert torch.equal(torch.cat([own_rows(ids, part, 4) for part in range(4)]), ids)


@pytest.mark.parametrize("degrees", [d for d in all_degrees(4) if STEP.batch % d.dp == 0], ids=Degrees.text)
def test_micro_batches_cut_the_rows_evenly_and_fill_the_stages(degrees: Degrees) -> None:
    parts, rows = micro_batches(STEP, degrees), STEP.batch // degrees.dp
    assert rows % parts == 0 and (parts >= degrees.pp if rows >= degrees.pp else parts == rows)


def test_clipping_by_mesh_is_that_of_torch_on_one_mesh() -> None:
    torch.manual_seed(0)
    sets = [[torch.nn.Parameter(torch.zeros(size)) for size in (3, 40)] for _ in range(2)]
    for first, second in zip(*sets, strict=True):
        first.grad = torch.randn_like(first)
        second.grad = first.grad.clone()
    clip_by_mesh(sets[0], 1.0)
    torch.nn.utils.clip_grad_norm_(sets[1], 1.0)
    for first, second in zip(*sets, strict=True):
        torch.testing.assert_close(first.grad, second.grad)


def row(peer: str, *seconds: list[float], error: str = "") -> Row:
    title = PARALLEL_PEERS[peer].title
    return Row(peer, title, times=list(seconds), idle_mb=100.0, peak_mb=110.0, error=error, cpu=[1.0])


def cell(*rows: Row, work: str = "layer") -> ParallelCell:
    shape = LayerShape(1024, 512, 32, 4, 2048) if work == "layer" else STEP
    return ParallelCell(work, shape, Degrees(dp=4, ep=4), rows=list(rows))


def test_tokens_of_a_layer_are_per_rank_and_of_a_step_global() -> None:
    assert cell().tokens == 4 * 2048
    assert cell(work="step").tokens == STEP.batch * STEP.seq


def test_ratios_are_by_the_best_iteration_and_by_the_median_of_rounds() -> None:
    ours = row("moesaic", [2.0, 1.0], [4.0], [3.0])
    found = cell(ours, row("hf", [1.5], [6.0], [9.0]), row("deepspeed", [2.0], [5.0], [4.5]))
    best, typical = fastest_peer(found), fastest_peer(found, "median")
    assert best is not None and best.peer == "hf" and ratio(found, best) == 1.5
    assert typical is not None and typical.peer == "deepspeed" and ratio(found, typical, "median") == 1.5


def test_only_peers_that_did_the_same_work_are_compared() -> None:
    found = cell(
        row("moesaic", [1.0]),
        row("moesaic_sharded", [0.5]),
        row("torchtitan", [0.1]),
        row("megatron_alltoall", [0.2], error="rank 1: it fell over"),
        row("automodel", [3.0]),
    )
    best = fastest_peer(found)
    assert best is not None and best.peer == "automodel"
    text = markdown([found])
    assert "not compared" in text and "it fell over" in text and "3.00× the fastest peer" in text


def test_a_layout_that_a_peer_cannot_run_is_no_failure() -> None:
    degrees = Degrees(pp=2, dp=2, ep=2)
    reason = PARALLEL_PEERS["hf"].misfit(degrees)
    found = ParallelCell("step", STEP, degrees, [row("moesaic", [1.0]), row("hf", error=reason)], {"hf": reason})
    text = markdown([found])
    assert reason in text and "failed" not in text and "pp2 dp2 / ep2" in text


def test_unknown_peers_are_named() -> None:
    with pytest.raises(Exception, match="no peer named nobody; there are moesaic"):
        peer_names("moesaic,nobody")


@pytest.mark.slow
def test_a_run_with_moesaic_alone(tmp_path: Path) -> None:
    """A layer and two layouts of a step: all numbers are there, and the loss does not depend on the layout."""
    command = [sys.executable, str(ROOT / "benchmarks" / "folding.py"), "--ranks", "2", "--rounds", "1", "--iters", "1"]
    command += ["--peers", "moesaic,deepspeed", "--envs", str(tmp_path / "none")]
    command += ["--layouts", "dp2 / ep2", "tp2 / etp2", "--layer-shape", "32,16,4,2,64"]
    command += "--hidden 32 --ffn 16 --experts 4 --layers 2 --heads 2 --vocab 64 --seq 16 --batch 4".split()
    command += ["--json", str(tmp_path / "out.json"), "--out", str(tmp_path / "out.md")]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [found["layout"] for found in cells] == ["dp2 / ep2", "dp2 / ep2", "tp2 / etp2"]
    for found in cells:
        ours, missing = found["rows"]
        assert ours["error"] == "" and ours["tokens_per_second"] > 0 and ours["peak_mb"] >= ours["idle_mb"] > 0
        assert missing["error"]
    assert cells[0]["rows"][0]["output_error"] < 1e-4
    first, second = (found["rows"][0]["losses"][0] for found in cells[1:])
    assert math.isclose(first, second, rel_tol=1e-5) and abs(first - math.log(64)) < 0.2
    assert (tmp_path / "out.md").read_text().count("| layout |") == 1
