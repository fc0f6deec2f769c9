"""The benchmark harness: its FLOP counts against torch's counter, its arithmetic, and one run with moesaic alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.options import layer_shape, peer_names
from benchmarks.peers.workload import (
    LAYER_SHAPES,
    LayerShape,
    StepShape,
    expected_output,
    layer_inputs,
    layer_weights,
)
from benchmarks.rounds import Cell, Row
from benchmarks.tables import markdown, verdict

ROOT = Path(__file__).resolve().parents[2]


def transformers_block(shape: LayerShape) -> torch.nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        experts_implementation="eager",
    )
    return MixtralSparseMoeBlock(config)


def test_layer_flops_are_those_torch_counts() -> None:
    shape = LayerShape(32, 16, 4, 2, 24)
    block = transformers_block(shape)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, shape.tokens, shape.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        block(x).sum().backward()
    router = 3 * 2 * shape.tokens * shape.hidden * shape.experts
    assert counter.get_total_flops() == shape.flops() + router


def test_the_definition_of_the_layer_is_that_of_transformers() -> None:
    shape = LayerShape(32, 16, 4, 2, 12)
    weights, (x, _) = layer_weights(shape), layer_inputs(shape, torch.float32)
    block = transformers_block(shape)
    with torch.no_grad():
        block.gate.weight.copy_(weights.router)
        block.experts.gate_up_proj.copy_(weights.gate_up)
        block.experts.down_proj.copy_(weights.down)
    expected = expected_output(x, weights, shape.topk)
    torch.testing.assert_close(block(x).double(), expected, rtol=1e-4, atol=1e-6)


def test_step_flops_are_those_torch_counts() -> None:
    """One dense product per weight, and attention as the full square that torch counts, of which half is causal."""
    shape = StepShape(hidden=16, ffn=8, experts=4, topk=2, layers=1, heads=2, vocab=40, seq=6, batch=2)
    q = torch.randn(2, 2, 6, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        scores = q @ q.detach().clone().requires_grad_().transpose(-1, -2)
        (scores @ q.detach().clone().requires_grad_()).sum().backward()
    attention = counter.get_total_flops()
    weights = torch.randn(16 * 16 * 4 + 2 * 3 * 16 * 8 + 16 * 40, 1, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.randn(12, 1, requires_grad=True), weights).sum().backward()
    assert shape.flops() == counter.get_total_flops() + attention // 2


def test_shapes_are_the_three_that_are_compared() -> None:
    assert [(s.hidden, s.ffn, s.experts, s.topk, s.tokens) for s in LAYER_SHAPES] == [
        (1024, 512, 32, 4, 8192),
        (512, 512, 16, 2, 4096),
        (512, 256, 64, 8, 4096),
    ]


def row(peer: str, *seconds: float, over: float | None = None, extra: float = 10.0) -> Row:
    return Row(peer, peer, times=[[s] for s in seconds], over_limit=over, idle_mb=100.0, peak_mb=100.0 + extra)


def test_verdict_takes_the_best_of_all_rounds_and_the_fastest_peer() -> None:
    cell = Cell("layer", LAYER_SHAPES[1], "fp32", "stock", matmul={"fp32": [50e9, 100e9]})
    cell.rows = [
        row("moesaic", 2.0, 1.0, extra=8),
        row("hf_grouped", 3.0, 1.5),
        row("litgpt", 2.0, 4.0, extra=20),
    ]
    found = verdict(cell)
    assert found["fastest"] == "hf_grouped" and found["speedup"] == 1.5 and not found["at_least"]
    assert found["leanest"] == "hf_grouped" and math.isclose(found["memory_ratio"], 0.8)
    assert math.isclose(found["share_of_matmul"], cell.shape.flops() / 100e9)


def test_fp32_is_not_compared_with_experts_in_bf16() -> None:
    rows = [row("moesaic", 1.0), row("torchtitan", 0.1), row("hf_eager", 2.0)]
    in_fp32 = Cell("layer", LAYER_SHAPES[1], "fp32", "stock", rows=rows)
    in_bf16 = Cell("layer", LAYER_SHAPES[1], "bf16", "stock", rows=rows)
    assert verdict(in_fp32)["fastest"] == "hf_eager"
    assert verdict(in_bf16)["fastest"] == "torchtitan"
    assert "not compared" in markdown(in_fp32) and "not compared" not in markdown(in_bf16)


def test_a_stopped_peer_gives_a_lower_bound() -> None:
    cell = Cell("layer", LAYER_SHAPES[1], "bf16", "stock", rows=[row("moesaic", 1.0), row("hf_eager", over=20.0)])
    assert verdict(cell)["at_least"] and verdict(cell)["speedup"] == 20.0
    assert "> 20.0" in markdown(cell)


def test_bf16_is_measured_against_the_faster_plain_product() -> None:
    cell = Cell("layer", LAYER_SHAPES[1], "bf16", "stock", matmul={"fp32": [100e9], "bf16": [2e9]})
    assert cell.reference == ("fp32", 100e9)


@pytest.mark.parametrize("text", ["1,2,3", "a,b,c,d,e", "8,8,2,4,16", "0,8,2,1,16"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"five whole numbers|at least 1"):
        layer_shape(text)


def test_unknown_peers_are_named() -> None:
    with pytest.raises(Exception, match="no peer named nobody; there are moesaic"):
        peer_names("moesaic,nobody")


@pytest.mark.slow
def test_a_run_with_moesaic_alone(tmp_path: Path) -> None:
    """Both dtypes and a peer whose environment is missing: every number is there or has a reason."""
    command = [sys.executable, str(ROOT / "benchmarks" / "moe_layer.py"), "--shapes", "32,16,4,2,64", "--rounds", "2"]
    command += [
        "--malloc",
        "stock",
        "--peers",
        "moesaic,litgpt",
        "--iters",
        "1",
        "--threads",
        "1",
        "--envs",
        str(tmp_path / "none"),
    ]
    command += ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"), "--profile", "moesaic"]
    subprocess.run(command, check=True, capture_output=True, timeout=1500)
    record = json.loads((tmp_path / "out.json").read_text())
    assert len(record["cells"]) == 2
    for cell in record["cells"]:
        ours, missing = cell["rows"]
        assert ours["error"] == "" and len(ours["times"]) == 2 and ours["best"] > 0
        assert ours["peak_mb"] >= ours["idle_mb"] > 0
        assert ours["output_error"] < (1e-4 if cell["dtype"] == "fp32" else 4e-2)
        assert ours["profile"]
        assert cell["matmul"]["fp32"][0] > 0
        assert "no environment" in missing["error"]
    assert (tmp_path / "out.md").read_text().count("malloc**") == 2
