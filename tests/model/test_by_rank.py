"""Products whose rows travel rank by rank are those of whole gathers and sums, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.mesh.autograd import gather_tokens
from moesaic.mesh.group import Group
from moesaic.mesh.traffic import meter
from moesaic.model.by_rank import GatheredProducts, Reads
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.linear import Linear, LinearToTokens
from tests.ranks import ranks

D, F, WIDE = 10, 6, 3
"""Inputs, outputs, and columns at the end that are only gathered."""


def compared(rank: int, batch: int, length: int, dtype: torch.dtype, later: bool, pairs: bool) -> dict[str, Any]:
    """Results, gradients and bytes of two layers by rank and with whole messages. `pairs`: messages are sent and
    received in pairs, as on an accelerator."""
    world = torch.distributed.get_world_size()
    plain_group = group = Group.create("tp", [tuple(range(world))], 60.0)
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layers = [
        Linear(D, world * F, bias=True, dtype=dtype, split=group),
        Linear(D, world * F, dtype=dtype, split=group),
        Linear(D - WIDE, world * F, dtype=dtype, split=group),
    ]
    out = LinearToTokens(world * 2 * F, D, bias=True, dtype=dtype, split=group)
    for module in (*layers, out):
        for parameter in module.parameters():
            parameter.data = parameter.cut.take(numbers(*parameter.cut.shape)).clone()  # type: ignore[attr-defined]
    x_TD, toward_TD = numbers(world, batch * length, D)[rank], numbers(world, batch * length, D)[rank]

    def run(by_rank: bool) -> dict[str, Any]:
        out.by_rank, group = by_rank, replace(plain_group, needs_device=by_rank and pairs)
        out.split = group
        own_TD = x_TD.clone().requires_grad_()
        queue = WeightGradients()
        with meter() as traffic, deferring(queue if later else None):
            if by_rank:
                reads = [Reads(layers[0]), Reads(layers[1]), Reads(layers[2], 0, D - WIDE), Reads(None, D - WIDE)]
                _, *parts = GatheredProducts(group)(own_TD, batch, reads)
            else:
                all_TD = gather_tokens(own_TD, group, batch)
                narrow_TD, wide_TD = all_TD.split((D - WIDE, WIDE), dim=1)
                parts = [layers[0](all_TD), layers[1](all_TD), layers[2](narrow_TD), wide_TD]
            a, b, c, d = parts
            y_TD = out(torch.cat((a * b.sigmoid(), c * d.sum(1, keepdim=True)), dim=1), batch)
            y_TD.backward(toward_TD)
            queue.run()
        found = {"y": y_TD.detach(), "grad x": own_TD.grad}
        for place, module in enumerate((*layers, out)):
            for name, parameter in module.named_parameters():
                found[f"grad {place} {name}"], parameter.grad = parameter.grad, None
        return {"tensors": found, "bytes": dict(traffic.bytes), "calls": dict(traffic.calls)}

    plain, mine = run(False), run(True)
    errors = {
        name: float((mine["tensors"][name] - wanted).double().norm() / wanted.double().norm())
        for name, wanted in plain["tensors"].items()
    }
    return {"errors": errors, "same traffic": plain["bytes"] == mine["bytes"] and plain["calls"] == mine["calls"]}


CASES = [
    (1, 7, torch.float32, False, False),
    (3, 5, torch.float32, False, True),
    (2, 1, torch.float32, True, False),
    (3, 4, torch.bfloat16, False, False),
]


def check(world: int, case: tuple[Any, ...]) -> None:
    limit = 1e-6 if case[2] == torch.float32 else 0.02
    for found in ranks(world).run(compared, *case):
        assert found["same traffic"]
        assert len(found["errors"]) == 2 + 4 + 2
        assert max(found["errors"].values()) <= limit, found["errors"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_rank_is_as_whole(case: tuple[Any, ...]) -> None:
    check(2, case)


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 4])
def test_so_on_more_ranks(world: int) -> None:
    for case in CASES:
        check(world, case)
