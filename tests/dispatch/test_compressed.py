"""Rows that travel in fp8: what arrives, the bytes that it takes, and what it does to training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch import make_dispatcher
from moesaic.dispatch.compressed import CompressedDispatcher
from moesaic.dispatch.fp8 import (
    dequantize_per_channel,
    dequantize_per_token,
    group_of,
    groups_of,
    quantize_per_channel,
    quantize_per_token,
)
from moesaic.dispatch.local import LocalDispatcher
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups
from moesaic.mesh.traffic import meter
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import resolve_layout
from moesaic.spec.options import words_rules
from moesaic.spec.tables import LayoutTable
from tests.dispatch.test_dispatchers import expert_groups
from tests.parity import models, runs
from tests.ranks import ranks

D, E, K = 24, 8, 3


def layer(rank: int, name: str, ep: int, etp: int, tokens: list[int], compressed: bool, dtype: torch.dtype) -> Any:
    """A layer whose experts multiply by their number plus 1, forward and backward of one rank, and what it sent."""
    groups = expert_groups(ep, etp)
    dispatcher = make_dispatcher(name, groups, E, compressed=compressed)
    made = torch.Generator().manual_seed(rank)
    T = tokens[rank]
    x = (torch.randn(T, D, generator=made) * torch.logspace(-3, 3, T)[:, None]).to(dtype).requires_grad_()
    grad = (torch.randn(T, D, generator=made) * torch.logspace(-3, 3, D)).to(dtype)
    ids = torch.rand(T, E, generator=made).topk(K, -1).indices
    weights = torch.rand(T, K, generator=made, requires_grad=True)
    with meter() as traffic:
        here = dispatcher.dispatch(x, ids, weights)
        factor = torch.where(here.ids_RK >= 0, here.ids_RK + 1 + dispatcher.first_expert, 0) * here.weights_RK / etp
        y = dispatcher.combine((here.rows_RD.to(factor.dtype) * factor.sum(1, keepdim=True)).to(dtype), here.handle)
        y.backward(grad)
    assert x.grad is not None
    factor = ((ids + 1) * weights.detach()).sum(1, keepdim=True)
    return y.detach(), x.grad, x.detach(), grad, factor, dict(traffic.bytes)


def there(x: Tensor) -> Tensor:
    """What experts see of hidden states."""
    return dequantize_per_token(*quantize_per_token(x), x.dtype)


def back(grad: Tensor) -> Tensor:
    """What experts see of gradients of one rank's tokens."""
    return dequantize_per_channel(*quantize_per_channel(grad), group_of(grad), grad.dtype)


@pytest.mark.parametrize("name", ["alltoall", "allgather"])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2), (4, 1), (1, 2)])
def test_what_arrives_is_what_was_rounded_before_it_left(name: str, ep: int, etp: int) -> None:
    """Of any rank and group of 128 tokens, one with a single token and a rank without tokens among them."""
    tokens = [129, 300, 0, 5][: ep * etp]
    found = ranks(ep * etp).run(layer, name, ep, etp, tokens, True, torch.float32)
    for y, grad_x, x, grad, factor, _ in found:
        torch.testing.assert_close(y, there(x) * factor, rtol=1e-5, atol=0)
        torch.testing.assert_close(grad_x, back(grad) * factor, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_a_row_is_a_byte_for_each_element_and_4(name: str, dtype: torch.dtype) -> None:
    tokens, n = [140, 7], 2
    plain, small = (ranks(n).run(layer, name, n, 1, tokens, flag, dtype) for flag in (False, True))
    group = "ep" if name == "alltoall" else "ep_etp"
    for rank in range(n):
        before, now = plain[rank][-1], small[rank][-1]
        for what in ("dispatch", "combine gradient"):
            assert now[what, group] * D * dtype.itemsize == before[what, group] * (D + 4) > 0
        scales = now.pop(("combine gradient scales", "ep_etp"))
        assert scales == groups_of(tokens[rank]) * D * 4 * (n - 1)
        for what in before.keys() - {(w, group) for w in ("dispatch", "combine gradient")}:
            assert now[what] == before[what] or what[0] == "counts", what


def test_nothing_is_compressed_where_nothing_travels() -> None:
    groups = ExpertGroups(*(Group.single(name) for name in ("ep", "etp", "edp", "ep_etp")))
    assert isinstance(make_dispatcher("alltoall", groups, 4, compressed=True), LocalDispatcher)
    pair = Group("ep", (0, 1), 0)
    groups = ExpertGroups(pair, Group.single("etp"), Group.single("edp"), pair)
    assert isinstance(make_dispatcher("alltoall", groups, 4, compressed=True), CompressedDispatcher)
    with pytest.raises(SpecError, match="'local'"):
        make_dispatcher("local", groups, 4, compressed=True)
    keys: dict[str, Any] = {"compression": ["dispatch"]}
    for ep, compressed in ((1, ()), (2, ("dispatch",))):
        table = LayoutTable(ep=ep, **keys)
        assert resolve_layout(table, models.model("mixtral"), 2, seq_len=16, global_batch=8).compressed == compressed


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_dispatchers_that_pack_rows_themselves_are_refused(backend: str) -> None:
    table = LayoutTable.model_validate(
        {"dispatcher": "flex", "dispatcher_backend": backend, "ep": 2, "compression": ["dispatch"]}
    )
    found = list(words_rules(table))
    assert any(f"compression 'dispatch' does not go with {backend}" in each for each in found)


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """2-norm of the difference of all gradients together over that of the exact ones."""
    difference = sum(float((found[name] - g).square().sum()) for name, g in wanted.items())
    return (difference / sum(float(g.square().sum()) for g in wanted.values())) ** 0.5


@pytest.mark.long
def test_training_stays_near_the_exact_one() -> None:
    """20 steps, in fp32 but for what travels. The gradients of the first are from the same weights."""
    plan, keys = runs.Plan(steps=20), {"ep": 2, "dispatcher": "alltoall", "compression": ["dispatch"]}
    exact = runs.alone("mixtral", 1, plan=plan)
    found = ranks(2).run(runs.outcome, "mixtral", keys, plan)[0]
    assert 0 < runs.difference(list(zip(found.losses, exact.losses, strict=True))) < 5e-3
    assert 0 < relative(found.gradients[0], exact.gradients[0]) < 0.05
    assert runs.difference(list(zip(found.norms, exact.norms, strict=True))) < 0.05
