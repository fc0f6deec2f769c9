"""Parts of the trainer that calibration times as they run in training: experts, the attention core and a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.attend import attend
from moesaic.model.experts import Experts
from moesaic.model.norms import RMSNorm
from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec

TOP_K = 2


@dataclass(frozen=True)
class Calls:
    """A module's forward, which keeps what backward needs, and backward from what it returned."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], object]


def attention(positions: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Calls:
    """The causal core over one sequence."""
    q, k, v = (
        torch.randn(positions, heads, width, device=device).to(dtype).requires_grad_() for _ in range(3)
    )  # fmt: skip
    grad = torch.randn(positions, heads, width, device=device).to(dtype)
    return Calls(
        lambda: attend(q, k, v, (positions,), scale=width**-0.5),
        lambda y: torch.autograd.grad(y, (q, k, v), grad),
    )


def norm(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Calls:
    """An RMS norm: what stands for all that is limited by memory and not by products."""
    module = RMSNorm(hidden, eps=1e-6, dtype=dtype, device=device)
    torch.nn.init.ones_(module.weight)
    x_TD = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    grad_TD = torch.randn(tokens, hidden, device=device).to(dtype)
    return Calls(lambda: module(x_TD), lambda y_TD: torch.autograd.grad(y_TD, (x_TD, module.weight), grad_TD))


def experts(count: int, rows: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Calls:
    """`count` gated experts, to each of which `rows` choices of tokens go; weight gradients are added to, as from the
    second micro-batch on."""
    spec = MoeSpec(router=RouterSpec(experts=count, top_k=min(TOP_K, count)), expert=MlpSpec(width=width))
    module = Experts(spec, hidden, dtype, device)
    module.accumulate_in_place = True
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    top_k = spec.router.top_k
    tokens = max(1, count * rows // top_k)
    ids_TK = (torch.arange(tokens * top_k, device=device) % count).view(tokens, top_k)
    weights_TK = torch.rand(tokens, top_k, device=device).requires_grad_()
    x_TD = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    grad_TD = torch.randn(tokens, hidden, device=device).to(dtype)
    return Calls(
        lambda: module(x_TD, ids_TK, weights_TK),
        lambda y_TD: torch.autograd.backward(y_TD, grad_TD, inputs=[x_TD, weights_TK, *module.parameters()]),
    )
