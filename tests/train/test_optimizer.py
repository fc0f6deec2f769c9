"""AdamW, masters, accumulation and clipping against torch's own."""

import copy

import pytest
import torch
from torch import nn

from moesaic.train.optimizer import Optimizer, decays


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.stack = nn.Parameter(torch.randn(3, 5, 2) * 0.3)

    def forward(self, x):
        return torch.einsum("bd,edf->bef", self.norm(self.proj(x)), self.stack.to(x.dtype))


def settings():
    return {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}


def reference(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, foreach=False, fused=False)


def test_fp32_steps_are_adamw_with_decay_on_matrices_only():
    torch.manual_seed(0)
    ours, theirs = Small(), None
    theirs = copy.deepcopy(ours)
    optimizer, expected = Optimizer(ours, **settings()), reference(theirs)
    for _ in range(4):
        x = torch.randn(7, 6)
        for model in (ours, theirs):
            model(x).pow(2).mean().backward()
        optimizer.step(1e-2)
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bf16_parameters_are_the_rounded_fp32_masters_of_a_reference():
    torch.manual_seed(0)
    model = Small().bfloat16()
    holder = nn.ParameterList([nn.Parameter(p.detach().float()) for p in model.parameters()])
    expected = reference(holder)
    optimizer = Optimizer(model, **settings())
    for _ in range(3):
        optimizer.zero_grad()
        expected.zero_grad()
        for _ in range(2):
            x = torch.randn(7, 6).bfloat16()
            values = list(model.parameters())
            gradients = torch.autograd.grad(model(x).float().pow(2).mean(), values)
            for master, gradient in zip(holder.parameters(), gradients, strict=True):
                master.grad = gradient.float() + (0 if master.grad is None else master.grad)
            model(x).float().pow(2).mean().backward()
        optimizer.step(1e-2)
        expected.step()
        for (name, p), master in zip(model.named_parameters(), holder.parameters(), strict=True):
            torch.testing.assert_close(optimizer.masters[name].detach(), master.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(p.detach(), optimizer.masters[name].detach().bfloat16()), name


def test_masters_of_a_model_built_in_fp32_start_unrounded():
    torch.manual_seed(0)
    model = Small()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, dtype=torch.bfloat16, **settings())
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.masters[name].detach(), exact[name])
        assert torch.equal(p.detach(), exact[name].bfloat16())
    model(torch.randn(7, 6).bfloat16()).float().pow(2).mean().backward()
    optimizer.step(1e-2)
    for name, p in model.named_parameters():
        assert not torch.equal(optimizer.masters[name].detach(), exact[name])
        assert torch.equal(p.detach(), optimizer.masters[name].detach().bfloat16())


def test_bf16_gradients_add_up_in_fp32():
    """512 gradients of 1 + 2⁻⁷: in bf16 the sum would stop growing at 256."""
    parameter = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = Optimizer(parameter, **settings())
    value = 1 + 2**-7
    for _ in range(512):
        parameter(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert float(optimizer.gradients()["weight"]) == 512 * value
    assert parameter.weight.grad is None


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_is_torchs(limit):
    torch.manual_seed(1)
    ours = Small()
    theirs = copy.deepcopy(ours)
    x = torch.randn(7, 6)
    optimizer = Optimizer(ours, **settings())
    for model in (ours, theirs):
        model(x).pow(2).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert optimizer.clip(limit) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_clip_zero_leaves_gradients_alone():
    model = Small()
    optimizer = Optimizer(model, **settings())
    model(torch.randn(7, 6)).pow(2).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert optimizer.clip(0.0) > 0
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.attn.q.weight", (4, 4), True),
        ("layers.0.moe.experts.gate_up", (2, 4, 4), True),
        ("layers.0.moe.experts.gate_up_bias", (2, 4), False),
        ("layers.0.attn.q.bias", (4,), False),
        ("norm.weight", (4,), False),
    ],
)
def test_what_decays(name, shape, expected):
    assert decays(name, torch.empty(shape)) is expected
