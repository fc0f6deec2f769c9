"""Sums that run in the background have the bits of those that do not; sums in bf16 are as exact as one rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.mesh.collectives import all_reduce
from moesaic.mesh.reduction import PendingSum, reduce_scatter_compressed, sum_parts
from moesaic.mesh.traffic import meter
from tests.mesh.test_collectives import world_group
from tests.ranks import ranks


def gradient(rank: int, size: int, kind: str, numbers: int) -> Tensor:
    """Gradients of a rank; `adversarial` ones nearly cancel, or are a large one and many that a bf16 sum would lose."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(numbers, generator=generator)
    if kind == "adversarial":
        x = x * 2.0**-9
        x[::2] += 1.0 if rank == 0 else 0.0
        x[1::2] += 64.0 * (-1) ** rank
    return x


def _pending(rank: int, numbers: int) -> bool:
    group, size = world_group(), world_group().size
    xs = [gradient(rank, size, "random", numbers) * (i + 1) for i in range(3)]
    expected = [all_reduce(x.clone(), group) for x in xs]
    sums = [PendingSum(x, group) for x in xs]
    for each in sums:
        if not each.advance():
            break
    return all(torch.equal(each.wait(), want) for each, want in zip(sums, expected, strict=True))


@pytest.mark.parametrize("numbers", [0, 7, 5001])
def test_a_pending_sum_has_the_bits_of_a_sum(numbers: int) -> None:
    assert all(ranks(4).run(_pending, numbers))


def _compressed(rank: int, kind: str, numbers: int) -> tuple[Tensor, Tensor, dict[tuple[str, str], int]]:
    group = world_group()
    x = gradient(rank, group.size, kind, numbers)
    with meter() as traffic:
        scattered = reduce_scatter_compressed(x.view(group.size, -1), group)
        total = PendingSum(x.clone(), group, compress=True).wait()
    return total, scattered, dict(traffic.bytes)


def ring_in_bf16(xs: list[Tensor]) -> Tensor:
    """A reduce-scatter around a ring that adds in bf16: part p starts at rank p + 1 and is rounded at every hop."""
    n = len(xs)
    parts = [x.bfloat16().chunk(n) for x in xs]
    out = []
    for p in range(n):
        total = parts[(p + 1) % n][p]
        for hop in range(2, n + 1):
            total = (total.float() + parts[(p + hop) % n][p].float()).bfloat16()
        out.append(total.float())
    return torch.cat(out)


def within_one_rounding(total: Tensor, xs: list[Tensor]) -> bool:
    """bf16 has 8 bits of significand, so rounding to the nearest errs by at most 2^-8 of an addend; fp32 adds 2^-24 of
    the sum so far each time."""
    exact = torch.stack(xs).double().sum(0)
    bound = torch.stack(xs).double().abs().sum(0) * (2.0**-8 + len(xs) * 2.0**-24)
    return bool(((total.double() - exact).abs() <= bound).all())


def mean_error(total: Tensor, xs: list[Tensor]) -> float:
    """Root of the mean squared error of a sum."""
    return float((total.double() - torch.stack(xs).double().sum(0)).square().mean().sqrt())


@pytest.mark.parametrize(("kind", "ratio"), [("random", 2.0), ("adversarial", 1.1)])
def test_eight_ranks_sums_in_fp32_err_less_than_a_ring_in_bf16(kind: str, ratio: float) -> None:
    xs = [gradient(r, 8, kind, 8 * 1000) for r in range(8)]
    parts = [[x.bfloat16().chunk(8)[p] for x in xs] for p in range(8)]  # what an all-to-all brings to each rank
    total = torch.cat([sum_parts(torch.stack(part), torch.float32) for part in parts])
    assert within_one_rounding(total, xs)
    assert mean_error(ring_in_bf16(xs), xs) > ratio * mean_error(total, xs)
    assert mean_error(total, xs) > 100 * mean_error(torch.stack(xs).sum(0), xs)  # it is not fp32


@pytest.mark.parametrize("kind", ["random", "adversarial"])
def test_sums_sent_in_bf16_are_within_one_rounding_of_each_addend_and_better_than_a_ring(kind: str) -> None:
    size, numbers = 4, 4 * 2000
    found = ranks(size).run(_compressed, kind, numbers)
    xs = [gradient(r, size, kind, numbers) for r in range(size)]
    total = found[0][0]
    assert all(torch.equal(each[0], total) for each in found)
    assert torch.equal(torch.cat([each[1] for each in found]), total)
    assert within_one_rounding(total, xs)
    assert mean_error(total, xs) < mean_error(ring_in_bf16(xs), xs)
    sent = found[0][2]
    share = numbers // size * (size - 1)
    assert sent["all-to-all of gradients", "all"] == 2 * share * 2  # both calls; fp32 takes twice as much
    assert sent["all-gather of gradients", "all"] == share * 4
