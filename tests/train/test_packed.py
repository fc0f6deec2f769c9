"""Optimizer state that is split, in bf16, or on the host, beside state that is simply there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.cost.habits import MOESAIC
from moesaic.cost.memory import stage_memory
from moesaic.cost.workload import Workload
from moesaic.mesh.host_memory import HostMemory
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import single
from moesaic.train.optimizer import Optimizer
from moesaic.train.packed import Storing, join, split
from moesaic.train.state import Host, TrainState
from tests.parity import models


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(37, 29)
        self.norm = nn.LayerNorm(29)
        self.stack = nn.Parameter(torch.randn(3, 29, 11) * 0.3)
        self.idle = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edf->bef", self.norm(self.proj(x)), self.stack)


def trained(dtype: torch.dtype, steps: int = 6, **storing: Any) -> Optimizer:
    torch.manual_seed(0)
    model = Small()
    optimizer = Optimizer(model, dtype=dtype, storing=Storing(**storing), beta2=0.9)
    run(model, optimizer, steps)
    optimizer.model = model  # type: ignore[attr-defined]
    return optimizer


def run(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        x = torch.randn(16, 37).to(next(model.parameters()).dtype)
        model(x).float().pow(2).mean().backward()
        optimizer.clip(0.5)
        optimizer.step(1e-2 / (1 + step))


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights as the model sees them, masters, moments and counts."""
    weights, moments = optimizer.saved()
    found = {f"weight.{name}": p.detach().clone() for name, p in optimizer.parameters.items()}
    found |= {f"master.{name}": w.detach().clone() for name, w in weights.items()}
    return found | {f"{k}.{name}": t.clone() for name, each in moments.items() for k, t in each.items()}


def assert_same(a: Optimizer, b: Optimizer) -> None:
    x, y = everything(a), everything(b)
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype
        assert torch.equal(x[name], y[name]), name


def test_splitting_is_exact_for_every_kind_of_number() -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2_000_000,)).to(torch.int32)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    # Every bf16 number, subnormals and infinities among them, with the low bits at which rounding turns.
    every = (torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16 | low).flatten()
    values = torch.cat([bits, every]).view(torch.float32)
    values = values[~values.isnan()]
    assert bool((values[values != 0].abs() < torch.finfo(torch.float32).tiny).any())
    rounded, rest, up = split(values)
    assert torch.equal(rounded, values.bfloat16())
    assert rest.dtype == torch.int16
    assert torch.equal(join(rounded, rest, up).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_state_on_the_host_changes_no_bit(dtype: torch.dtype, fraction: float, tmp_path: Path) -> None:
    away = trained(dtype, host=HostMemory(tmp_path), fraction=fraction)
    assert_same(away, trained(dtype))
    counts = {name: master.numel() for name, master in away.masters.items()}
    there = sum(counts[name] for name in away.packed)
    assert fraction * sum(counts.values()) - max(counts.values()) < there <= fraction * sum(counts.values())
    for each in away.packed.values():
        size = (8 if dtype == torch.float32 else 12) * each.master.numel()
        assert each.bytes == {"device": 0, "host": size}
        assert each.stays or each.master.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("on_host", [False, True])
def test_split_masters_change_no_bit(on_host: bool, tmp_path: Path) -> None:
    found = trained(torch.bfloat16, split=True, host=HostMemory(tmp_path) if on_host else None)
    assert_same(found, trained(torch.bfloat16))
    count = sum(master.numel() for master in found.masters.values())
    assert sum(sum(each.bytes.values()) for each in found.packed.values()) == (4 + 4 + 2) * count


def test_bf16_moments_stay_near_fp32_moments() -> None:
    exact, rough = everything(trained(torch.float32)), everything(trained(torch.float32, moments=torch.bfloat16))
    for name, value in exact.items():
        if not name.startswith("master."):
            continue
        start = everything(trained(torch.float32, steps=0))[name]
        moved = (value - start).abs().max()
        # A moment is off by 2⁻⁸ at most each time it is rounded, and forgets a tenth each step.
        assert float((rough[name] - value).abs().max()) <= 0.05 * float(moved), name
    assert any(not torch.equal(rough[name], value) for name, value in exact.items())


@pytest.mark.parametrize(
    "storing", [{"split": True}, {"moments": torch.bfloat16}, {"split": True, "moments": torch.bfloat16}, {}]
)
@pytest.mark.parametrize("on_host", [False, True])
def test_saved_state_goes_on_where_it_was(storing: dict[str, Any], on_host: bool, tmp_path: Path) -> None:
    if on_host:
        storing = storing | {"host": HostMemory(tmp_path)}
    whole = trained(torch.bfloat16, **storing)
    weights, moments = copy.deepcopy(whole.saved())
    other = trained(torch.bfloat16, steps=2, **storing)
    into_weights, into_moments = other.saved()
    with torch.no_grad():
        for name in into_weights:
            into_weights[name].copy_(weights[name])
            for kind, tensor in into_moments[name].items():
                tensor.copy_(moments[name][kind])
    other.take(into_weights, into_moments)
    assert_same(other, whole)
    for each in (whole, other):
        run(each.model, each, 2)  # type: ignore[attr-defined]
    assert_same(other, whole)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("dtype", "moments", "master", "away"),
    [
        ("fp32", 4, "fp32", False),
        ("fp32", 2, "fp32", False),
        ("fp32", 4, "fp32", True),
        ("bf16", 4, "fp32", False),
        ("bf16", 2, "fp32", False),
        ("bf16", 4, "split", False),
        ("bf16", 2, "split", False),
        ("bf16", 4, "fp32", True),
        ("bf16", 2, "split", True),
    ],
)
def test_the_planner_counts_these_bytes(name: str, dtype: str, moments: int, master: str, away: bool) -> None:
    spec = models.model(name)
    decoder = Decoder(spec)
    decoder.init_weights(0)
    state = TrainState.of(
        decoder,
        {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        moments={2: torch.bfloat16, 4: torch.float32}[moments],
        split_masters=master == "split",
        host=Host(("optimizer",)) if away else None,
    )
    work = Workload(spec, 16, 1, precision=dtype, moment_bytes=moments, master=master)  # type: ignore[arg-type]
    planned = stage_memory(work, replace(single(spec), offload=("optimizer",) if away else ()), MOESAIC)[0]
    weights = sum(p.numel() * p.itemsize for p in decoder.parameters())
    held = sum(each.bytes["device"] for each in state.optimizer.packed.values())
    for parameter, moment in state.optimizer.state().items():
        kept = state.optimizer.masters[parameter]
        alone = 0 if kept is state.optimizer.parameters[parameter] else kept.numel() * kept.itemsize
        held += alone + sum(moment[kind].numel() * moment[kind].itemsize for kind in ("exp_avg", "exp_avg_sq"))
    assert (weights, held) == (planned.weights, planned.optimizer)
