"""Collectives against their definitions, and their gradients as transposes: <A x, y> = <x, Aᵀ y> over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.mesh import autograd, collectives
from moesaic.mesh.group import Group
from moesaic.mesh.traffic import meter
from tests.ranks import ranks

_groups: dict[int, Group] = {}


def world_group() -> Group:
    """One group over all ranks of the pool, made once per process."""
    size = dist.get_world_size()
    if size not in _groups:
        _groups[size] = Group.create("all", [tuple(range(size))], 60.0)
    return _groups[size]


def input_of(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` puts in: [rows, 3]."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(rank: int, counts: list[int], table: list[list[int]], dtype: torch.dtype) -> dict[str, Any]:
    group = world_group()
    n = group.size
    out: dict[str, Any] = {}
    with meter() as traffic:
        x = input_of(rank, counts[rank], dtype)
        out["gather_rows"] = collectives.all_gather_rows(x, group, counts)
        out["reduce_rows"] = collectives.reduce_scatter_rows(input_of(rank, sum(counts), dtype), group, counts)
        send, receive = table[rank], [row[rank] for row in table]
        assert collectives.exchange_counts(send, group) == receive
        out["all_to_all"] = collectives.all_to_all(input_of(rank, sum(send), dtype), group, send, receive)
        out["gather"] = collectives.all_gather(input_of(rank, 2, dtype), group)
        out["reduce"] = collectives.reduce_scatter(input_of(rank, 2 * n, dtype).unflatten(0, (n, 2)), group)
        out["sum"] = collectives.all_reduce(input_of(rank, 5, dtype), group)
        out["long_sum"] = collectives.all_reduce(input_of(rank, 3001, dtype), group)
        out["max"] = collectives.all_reduce(input_of(rank, 5, dtype), group, "max")
        out["shift"] = collectives.start_shift(input_of(rank, 4, dtype), group).wait()
    out["bytes"] = dict(traffic.bytes)
    return out


@settings(max_examples=8)
@given(data=st.data(), size=st.sampled_from([2, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_collectives_are_what_they_say(data: st.DataObject, size: int, dtype: torch.dtype) -> None:
    small = st.integers(0, 3)
    counts = data.draw(st.lists(small, min_size=size, max_size=size))
    table = data.draw(st.lists(st.lists(small, min_size=size, max_size=size), min_size=size, max_size=size))
    found = ranks(size).run(_collectives, counts, table, dtype)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    width = 3 * dtype.itemsize

    def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected.to(dtype), **close)  # type: ignore[arg-type]

    gathered = torch.cat([input_of(r, counts[r], dtype) for r in range(size)])
    whole_sum = sum(input_of(r, sum(counts), dtype).float() for r in range(size))
    assert isinstance(whole_sum, torch.Tensor)
    starts = [sum(counts[:r]) for r in range(size)]
    for r in range(size):
        same(found[r]["gather_rows"], gathered)
        same(found[r]["reduce_rows"], whole_sum[starts[r] : starts[r] + counts[r]])
        parts = [input_of(s, sum(table[s]), dtype).split(table[s])[r] for s in range(size)]
        same(found[r]["all_to_all"], torch.cat(parts))
        same(found[r]["gather"], torch.stack([input_of(s, 2, dtype) for s in range(size)]))
        sums = sum(input_of(s, 2 * size, dtype).float() for s in range(size))
        assert isinstance(sums, torch.Tensor)
        same(found[r]["reduce"], sums.unflatten(0, (size, 2))[r])
        for name, rows in (("sum", 5), ("long_sum", 3001)):
            total = torch.stack([input_of(s, rows, dtype).float() for s in range(size)]).sum(0)
            same(found[r][name], total)
            assert torch.equal(found[r][name], found[0][name])
        same(found[r]["max"], torch.stack([input_of(s, 5, dtype).float() for s in range(size)]).amax(0))
        same(found[r]["shift"], input_of((r - 1) % size, 4, dtype))
        sent = found[r]["bytes"]
        assert sent["all-to-all", "all"] == (sum(table[r]) - table[r][r]) * width
        assert sent["all-gather", "all"] == (counts[r] + 2) * (size - 1) * width
        assert sent["reduce-scatter", "all"] == (sum(counts) - counts[r] + 2 * (size - 1)) * width


def _transposes(rank: int, counts: list[int], batch: int) -> dict[str, tuple[float, float]]:
    """<A x, y> and <x, Aᵀ y> of each differentiable collective, this rank's shares."""
    group = world_group()
    n = group.size
    cases = {
        "gather": (counts[rank], lambda x: autograd.all_gather_rows(x, group, counts)),
        "reduce_scatter": (sum(counts), lambda x: autograd.reduce_scatter_rows(x, group, counts)),
        "all_reduce": (4, lambda x: autograd.all_reduce(x, group)),
        "gather_tokens": (batch * 2, lambda x: autograd.gather_tokens(x, group, batch)),
        "scatter_tokens": (batch * 2 * n, lambda x: autograd.scatter_tokens(x, group, batch)),
        "all_to_all": (
            n * (rank + 1),
            lambda x: autograd.start_all_to_all(x, group, [rank + 1] * n, list(range(1, n + 1)))(),
        ),
    }
    out = {}
    for name, (rows, function) in cases.items():
        x = input_of(rank, rows, torch.float64).requires_grad_()
        y = function(x)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
        (y * weight).sum().backward()
        assert x.grad is not None
        out[name] = (float((y * weight).sum()), float((x * x.grad).sum()))
    return out


@pytest.mark.parametrize(("size", "batch"), [(2, 1), (4, 3)])
def test_gradients_are_transposes(size: int, batch: int) -> None:
    found = ranks(size).run(_transposes, [3, 0, 2, 1][:size], batch)
    for name in found[0]:
        forward = sum(each[name][0] for each in found)
        backward = sum(each[name][1] for each in found)
        assert forward == pytest.approx(backward, rel=1e-12), name


def _order_of_tokens(rank: int) -> torch.Tensor:
    group = world_group()
    mine = torch.arange(8).view(2, 4)[:, rank * 2 : rank * 2 + 2]
    return autograd.gather_tokens(mine.reshape(-1, 1), group, 2).flatten()


def test_gathered_tokens_stand_row_after_row() -> None:
    for each in ranks(2).run(_order_of_tokens):
        assert each.tolist() == list(range(8))
