"""A whole mixture block, router and shared expert included, folded over two ranks, against one process."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.cut import cut_of
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups, Mesh
from moesaic.model.init import init_weights
from moesaic.model.moe import Moe
from moesaic.spec.layout import single
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec
from tests.ranks import ranks

HIDDEN, EXPERTS, BATCH, OWN = 6, 4, 3, 4
"""OWN tokens of each of BATCH rows are on each rank."""


def spec(combine: str, bias: bool) -> MoeSpec:
    """A small block."""
    return MoeSpec(
        router=RouterSpec(experts=EXPERTS, top_k=2, score="sigmoid", norm=True),
        expert=MlpSpec(width=8, bias=bias),
        shared=MlpSpec(width=10),
        shared_combine=combine,
    )


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's x and the gradient of its y."""
    made = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH * OWN, HIDDEN, generator=made), torch.randn(BATCH * OWN, HIDDEN, generator=made)


def whole(combine: str, bias: bool) -> Moe:
    """The block in one process, the same in every process."""
    moe = Moe(spec(combine, bias), HIDDEN, dtype=torch.float32, device="cpu")
    init_weights(moe, seed=0, std=0.5)
    made = torch.Generator().manual_seed(5)
    for parameter in moe.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=made) * 0.5)
    return moe


@functools.cache
def pair(name: str) -> Group:
    """Both ranks."""
    return Group.create(name, [(0, 1)], 60.0)


def mesh_of(dispatcher: str, tp: int, etp: int) -> Mesh:
    """tp2 or dp2 on the dense side, ep2 or etp2 on the expert side."""
    rank = dist.get_rank()
    alone = Group.single("alone", rank)
    ep, cut = (alone, pair("etp")) if etp == 2 else (pair("ep"), alone)
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=6, v_head_dim=6, scale=1.0, rope=RopeSpec(dim=6))
    layer = LayerSpec(attention=attention, moe=spec("sum", False))
    layout = single(ModelSpec(name="x", family="moesaic", vocab=8, hidden=HIDDEN, layers=(layer,)))
    return dataclasses.replace(
        Mesh.single(dataclasses.replace(layout, dispatcher=dispatcher)),
        rank=rank,
        tp=pair("tp") if tp == 2 else alone,
        experts_by_count={EXPERTS: ExpertGroups(ep, cut, alone, pair("ep_etp"))},
    )


def on_a_rank(rank: int, dispatcher: str, tp: int, etp: int, combine: str, bias: bool) -> dict[str, Any]:
    """Forward and backward of one rank."""
    moe = Moe(spec(combine, bias), HIDDEN, dtype=torch.float32, device="cpu", mesh=mesh_of(dispatcher, tp, etp))
    full = dict(whole(combine, bias).named_parameters())
    for name, parameter in moe.named_parameters():
        parameter.data.copy_(cut_of(parameter).take(full[name].data))
    x, grad_y = tokens(rank)
    x.requires_grad_()
    y, routing = moe(x, BATCH)
    y.backward(grad_y)
    return {
        "y": y.detach(),
        "x": x.grad,
        "ids": routing.ids_TK,
        "parameters": {name: (cut_of(p), p.grad) for name, p in moe.named_parameters()},
    }


@pytest.mark.parametrize(
    ("dispatcher", "tp", "etp", "combine", "bias"),
    [
        ("alltoall", 2, 1, "sigmoid_gate", False),
        ("alltoall", 1, 1, "learned", True),
        ("allgather", 2, 1, "sum", True),
        ("allgather", 1, 2, "sigmoid_gate", True),
        ("alltoall", 2, 2, "sum", False),
    ],
)
def test_a_folded_mixture_equals_one_process(dispatcher: str, tp: int, etp: int, combine: str, bias: bool) -> None:
    found = ranks(2).run(on_a_rank, dispatcher, tp, etp, combine, bias)
    moe = whole(combine, bias)
    x, grad_y = (torch.cat(each) for each in zip(*(tokens(rank) for rank in range(2)), strict=True))
    x.requires_grad_()
    y, routing = moe(x)
    y.backward(grad_y)
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([each["y"] for each in found]), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([each["x"] for each in found]), x.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([each["ids"] for each in found]), routing.ids_TK)
    for name, parameter in moe.named_parameters():
        total = torch.zeros_like(parameter)
        for each in found:  # rule: a gradient is the sum over the ranks that hold the parameter, or its pieces
            cut, grad = each["parameters"][name]
            for box, of in zip(cut.boxes(), (box.of(grad) for box in cut.boxes()), strict=True):
                total[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += of
        torch.testing.assert_close(total, parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
