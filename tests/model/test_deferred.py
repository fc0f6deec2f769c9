"""Weight gradients done later are those of an ordinary backward, bit for bit, and parameters' hooks see them once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.model.decoder import Decoder
from moesaic.model.deferred import WeightGradients, deferring, recompute_contexts
from moesaic.model.experts import Experts
from moesaic.model.kernels import linear
from moesaic.model.losses import LossWeights
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec

Run = Callable[[], Tensor]


def assert_same_when_deferred(module: nn.Module, losses: list[Run], left_out: set[str] = frozenset()) -> None:
    """Accumulate over `losses`, all at once and in two parts; `left_out` are the parameters that B may give."""
    module.zero_grad()
    for loss in losses:
        loss().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for loss in losses:
        queue = WeightGradients()
        with deferring(queue):
            value = loss()
        before = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        value.backward()
        for name, p in module.named_parameters():
            if name in left_out or (before[name] is None and p.grad is None):
                continue
            assert before[name] is not None, f"{name} has a gradient before the queue ran"
            assert torch.equal(p.grad, before[name]), f"{name} changed before the queue ran"
        assert len(queue)
        queue.run()
        assert not len(queue)
    got = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), name


class Toy(nn.Module):
    """A weight used twice, another once, with biases; the input needs a gradient as that of a later stage does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.twice = nn.Parameter(torch.randn(6, 6).to(dtype))
        self.once = nn.Parameter(torch.randn(4, 6).to(dtype))
        self.bias = nn.Parameter(torch.randn(6).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.twice, self.bias).tanh()
        return linear(linear(x, self.twice).tanh(), self.once).square().sum()


def toy_input(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_linear(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    toy = Toy(dtype)
    inputs = [toy_input(dtype, *shape) for _ in range(3)]
    assert_same_when_deferred(toy, [lambda x=x: toy(x) for x in inputs])


def test_gradient_of_the_input_does_not_wait() -> None:
    torch.manual_seed(0)
    toy, x = Toy(torch.float32), toy_input(torch.float32, 5, 6)
    (wanted,) = torch.autograd.grad(toy(x), x)
    with deferring(WeightGradients()):
        loss = toy(x)
    loss.backward()
    assert torch.equal(x.grad, wanted)
    assert toy.once.grad is None


def test_parameters_that_are_not_trained_get_nothing() -> None:
    torch.manual_seed(0)
    toy = Toy(torch.float32)
    toy.twice.requires_grad_(False)
    x = toy_input(torch.float32, 5, 6)
    assert_same_when_deferred(toy, [lambda: toy(x)])
    assert toy.twice.grad is None


def test_computed_weights_get_their_gradient_in_backward() -> None:
    """A weight that is the result of an operation has a graph of its own, which does not outlive backward."""
    torch.manual_seed(0)
    weight, x = torch.randn(4, 6, requires_grad=True), toy_input(torch.float32, 5, 6)
    (wanted,) = torch.autograd.grad(linear(x, weight * 2).square().sum(), weight)
    queue = WeightGradients()
    with deferring(queue):
        loss = linear(x, weight * 2).square().sum()
    loss.backward()
    assert not len(queue)
    assert torch.equal(weight.grad, wanted)


def test_hooks_see_every_gradient_once_when_the_queue_runs() -> None:
    torch.manual_seed(0)
    toy, seen = Toy(torch.float32), []
    for name, p in toy.named_parameters():
        p.register_hook(lambda g, n=name: seen.append(("gradient", n, g is None)))
        p.register_post_accumulate_grad_hook(lambda p, n=name: seen.append(("accumulated", n, p.grad is None)))
    queue = WeightGradients()
    with deferring(queue):
        loss = toy(toy_input(torch.float32, 5, 6))
    loss.backward()
    assert seen == []
    queue.run()
    expected = [(kind, name, False) for kind in ("gradient", "accumulated") for name in ("twice", "once", "bias")]
    assert sorted(seen) == sorted(expected)


def test_a_first_gradient_is_stored_without_a_copy() -> None:
    weight, made = nn.Parameter(torch.zeros(3)), []

    def compute(leaves: tuple[Tensor | None, ...]) -> list[Tensor]:
        gradient = torch.ones(3)
        made.append(gradient.data_ptr())
        return [gradient]

    queue = WeightGradients()
    queue.append(compute, (weight,))
    queue.run()
    assert [weight.grad.data_ptr()] == made


def test_recomputed_modules_leave_their_gradients_once() -> None:
    """Also when backward runs on another thread, as it does for graphs on a GPU."""
    torch.manual_seed(0)
    toy, x = Toy(torch.float32), toy_input(torch.float32, 5, 6)
    toy(x).backward()
    wanted = {name: p.grad for name, p in toy.named_parameters()}
    toy.zero_grad()
    queue = WeightGradients()
    with deferring(queue):
        loss = checkpoint(toy, x, use_reentrant=False, context_fn=recompute_contexts)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert toy.once.grad is None
    queue.run()
    for name, p in toy.named_parameters():
        assert torch.equal(p.grad, wanted[name]), name


@pytest.mark.parametrize("recomputes", [False, True])
def test_uses_of_parameters_count_until_their_gradients_are_made(recomputes: bool) -> None:
    """Those of a module that is recomputed once."""
    toy, x, queue = Toy(torch.float32), toy_input(torch.float32, 5, 6), WeightGradients()

    def uses() -> list[int]:
        return [queue.uses(p) for p in (toy.once, toy.twice)]

    with deferring(queue):
        loss = checkpoint(toy, x, use_reentrant=False, context_fn=recompute_contexts) if recomputes else toy(x)
    assert uses() == [1, 2]
    loss.backward()
    assert uses() == [1, 2]
    left = []
    while queue.run_one():
        left.append(uses())
    assert left == [[0, 2], [0, 1], [0, 0]]


def experts_and_losses(dtype: torch.dtype, apply: str, **options: bool) -> tuple[Experts, list[Run]]:
    """Five experts, one of them without rows, on two micro-batches."""
    torch.manual_seed(0)
    moe = MoeSpec(router=RouterSpec(experts=5, top_k=2, apply=apply), expert=MlpSpec(width=8, **options))
    experts = Experts(moe, 16, dtype)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.5)

    def loss_of(x: Tensor, ids: Tensor, weights: Tensor) -> Run:
        return lambda: experts(x, ids, weights).square().sum()

    losses = []
    for _ in range(2):
        ids, weights = torch.rand(7, 4).topk(2, -1).indices, torch.rand(7, 2, requires_grad=True)
        losses.append(loss_of(torch.randn(7, 16).to(dtype).requires_grad_(), ids, weights))
    return experts, losses


@pytest.mark.parametrize("apply", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_experts(monkeypatch, grouped: bool, dtype: torch.dtype, bias: bool, apply: str) -> None:
    monkeypatch.setattr(Experts, "uses_grouped_products", lambda *_: grouped)
    experts, losses = experts_and_losses(dtype, apply, gated=True, bias=bias)
    assert_same_when_deferred(experts, losses)


def test_experts_that_accumulate_in_place() -> None:
    experts, losses = experts_and_losses(torch.float32, "output", gated=False, bias=True)
    experts.accumulate_in_place = True
    assert_same_when_deferred(experts, losses)


def tiny_model() -> Decoder:
    """Windowed, biased and latent attention; dense, mixture and shared experts; a prediction block."""

    def attention(**fields: object) -> AttentionSpec:
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "scale": 0.35, "rope": RopeSpec(dim=8)}
        return AttentionSpec(**sizes | fields)

    latent = attention(
        kind="mla",
        kv_heads=4,
        head_dim=12,
        q_rank=10,
        kv_rank=6,
        nope_dim=8,
        rope_dim=4,
        rope=RopeSpec(dim=4, interleaved=True),
    )
    moe = MoeSpec(router=RouterSpec(experts=4, top_k=2, norm=True), expert=MlpSpec(width=12), shared=MlpSpec(width=8))
    layers = (
        LayerSpec(attention=attention(window=3), mlp=MlpSpec(width=20, bias=True)),
        LayerSpec(attention=attention(qkv_bias=True, o_bias=True), moe=moe),
        LayerSpec(attention=latent, moe=moe),
    )
    ahead = (LayerSpec(attention=attention(), moe=moe),)
    decoder = Decoder(ModelSpec(name="t", family="moesaic", vocab=31, hidden=16, layers=layers, mtp=ahead))
    decoder.init_weights(0)
    return decoder


def test_a_whole_model() -> None:
    decoder = tiny_model()
    weights = LossWeights(z=0.01, sequence_aux=0.1, mtp=0.3)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 31, (2, 11), generator=generator) for _ in range(3)]

    def loss_of(tokens_BS: Tensor) -> Run:
        ids, labels = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
        return lambda: decoder.loss(ids, labels, weights=weights, step_tokens=60).total

    words = ("norm", "embed", "head.", "router")
    at_once = {name for name, _ in decoder.named_parameters() if any(word in name for word in words)}
    assert_same_when_deferred(decoder, [loss_of(each) for each in tokens], at_once)
