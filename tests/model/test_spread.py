"""Heads that travel in groups: results of heads that travel together, and messages that overlap in both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moesaic.mesh import collectives
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.attention import Attention
from moesaic.model.mla import LatentAttention
from moesaic.model.sequences import Sequences
from moesaic.spec.layout import Layout, single
from moesaic.spec.model import AttentionSpec
from tests.parity import models
from tests.ranks import ranks

HIDDEN, BATCH, LENGTH = 12, 2, 8


def layout(groups: int) -> Layout:
    return replace(single(models.model("mixtral")), cp=2, overlap=("inside",), heads_in=groups)


@dataclass(frozen=True)
class Found:
    """Of one rank: what attention gives, its gradients, and messages in the order of forward and of backward."""

    y: torch.Tensor
    gradients: dict[str, torch.Tensor]
    forward: list[str]
    backward: list[str]


def attend(rank: int, spec: AttentionSpec, groups: int) -> Found:
    group = Group.create("cp", [tuple(range(dist.get_world_size()))], 60.0)
    mesh = replace(Mesh.single(layout(groups)), rank=rank, cp=group, sequence=group)
    kind = LatentAttention if spec.kind == "mla" else Attention
    module = kind(spec, HIDDEN, dtype=torch.float32, device="cpu", mesh=mesh)
    made = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=made) * 0.5)
    made.manual_seed(rank)
    tokens = BATCH * LENGTH // group.size
    x, grad = (torch.randn(tokens, HIDDEN, generator=made) for _ in range(2))
    x.requires_grad_()
    events: list[str] = []
    start, count = collectives.start_all_to_all, 0

    def watched(*args: Any) -> Any:
        nonlocal count
        pending, number = start(*args), count
        wait = pending.wait
        count += 1
        events.append(f"start {number}")
        pending.wait = lambda: (events.append(f"wait {number}"), wait())[1]
        return pending

    sequences = Sequences.of(torch.zeros(BATCH, LENGTH, dtype=torch.int64), None, None, mesh)
    collectives.start_all_to_all = watched  # type: ignore[assignment]
    try:
        y = module(x, sequences)
        forward, count = events.copy(), 0
        events.clear()
        y.backward(grad)
    finally:
        collectives.start_all_to_all = start
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return Found(y.detach(), gradients | {"x": x.grad}, forward, events)


PLAIN: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 4, "v_head_dim": 4, "scale": 0.5}
SPECS = {
    "gqa": AttentionSpec(kind="gqa", **PLAIN),
    "everything": AttentionSpec(
        kind="gqa", qkv_bias=True, o_bias=True, qk_norm="head", sinks=True, clip_qkv=1.0, **PLAIN
    ),
    "mla": AttentionSpec(
        kind="mla", kv_rank=6, q_rank=5, nope_dim=3, rope_dim=2, **{**PLAIN, "kv_heads": 8, "head_dim": 5}
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_groups_of_heads_give_what_all_heads_give(name: str) -> None:
    whole, cut = (ranks(2).run(attend, SPECS[name], groups) for groups in (1, 2))
    # Groups are other heads on a rank, so only the sum of ranks' gradients is the same.
    keys = sorted(whole[0].gradients.keys() - {"x"})
    sums = [{key: sum(each.gradients[key] for each in found) for key in keys} for found in (whole, cut)]
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-4, atol=1e-5)
    for one, two in zip(whole, cut, strict=True):
        torch.testing.assert_close(two.y, one.y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(two.gradients["x"], one.gradients["x"], rtol=1e-4, atol=1e-5)
        assert one.forward == one.backward == ["start 0", "wait 0", "start 1", "wait 1"]
        order = ["start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3"]
        assert two.forward == two.backward == order


@pytest.mark.parametrize(
    ("kv_heads", "most", "groups"), [(8, 1, 1), (8, 2, 2), (8, 3, 2), (8, 9, 4), (6, 3, 3), (2, 4, 1), (1, 4, 1)]
)
def test_ranks_have_as_many_heads_of_each_group(kv_heads: int, most: int, groups: int) -> None:
    """Two ranks: kv_heads / 2 of each, of which a group must have a whole share; fewer key heads than ranks stay."""
    assert layout(most).head_groups(kv_heads) == groups
    for other in ({"cp_kind": "ring"}, {"overlap": ()}, {"cp": 1}):
        assert replace(layout(most), **other).head_groups(kv_heads) == 1
