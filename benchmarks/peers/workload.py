"""The two workloads, their FLOPs, and one set of weights and inputs that every peer receives.

T tokens, D hidden, E experts, K top-k, F expert width, S sequence, B batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SEED = 20240731


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer: softmax top-k router with normalised weights, gated SiLU experts, no bias, nothing dropped."""

    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int

    def flops(self) -> int:
        """Multiply-adds of the expert products counted twice, forward and backward (3 × forward); router left out."""
        return 3 * 2 * self.tokens * self.topk * 3 * self.hidden * self.ffn

    def text(self) -> str:
        return f"D {self.hidden}, F {self.ffn}, E {self.experts}, K {self.topk}, {self.tokens} tokens"


@dataclass(frozen=True)
class StepShape:
    """A decoder with full causal attention and an MoE in every layer."""

    hidden: int = 512
    ffn: int = 1024
    experts: int = 16
    topk: int = 2
    layers: int = 8
    heads: int = 8
    vocab: int = 32000
    seq: int = 1024
    batch: int = 4
    micro_batch: int = 0
    """Sequences that a rank computes at a time where it accumulates gradients; 0: all that it has."""

    @property
    def tokens(self) -> int:
        return self.seq * self.batch

    def flops(self) -> int:
        """Forward and backward of experts, attention projections, causal attention and head; no embedding, no norms."""
        per_token = self.layers * (self.topk * 3 * self.hidden * self.ffn + 4 * self.hidden**2)
        per_token += self.hidden * self.vocab
        attention = self.layers * 2 * self.tokens * self.seq * self.hidden  # QK and AV, half of each causal square
        return 3 * (2 * per_token * self.tokens + attention)

    def text(self) -> str:
        return (
            f"D {self.hidden}, {self.layers} layers, {self.heads} heads, {self.experts} experts, top-{self.topk}, "
            f"F {self.ffn}, vocabulary {self.vocab}, {self.batch} x {self.seq} tokens"
        )


LAYER_SHAPES = (
    LayerShape(1024, 512, 32, 4, 8192),
    LayerShape(512, 512, 16, 2, 4096),
    LayerShape(512, 256, 64, 8, 4096),
)


def as_json(shape: LayerShape | StepShape) -> dict[str, int]:
    return asdict(shape)


@dataclass
class LayerWeights:
    """router [E, D], gate_up [E, 2F, D] (gate rows, then up rows), down [E, D, F]; fp32."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def layer_weights(shape: LayerShape) -> LayerWeights:
    """The same numbers in every process: normal, standard deviation 0.02, a fixed seed."""
    import torch

    random = torch.Generator().manual_seed(SEED)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size).normal_(0, 0.02, generator=random)

    e, d, f = shape.experts, shape.hidden, shape.ffn
    return LayerWeights(normal(e, d), normal(e, 2 * f, d), normal(e, d, f))


def layer_inputs(shape: LayerShape, dtype: torch.dtype, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [1, T, D] and the gradient of the layer's output, of the same shape."""
    import torch

    random = torch.Generator().manual_seed(SEED + 1)
    size = (1, tokens or shape.tokens, shape.hidden)
    x, grad = (torch.empty(size).normal_(generator=random) for _ in range(2))
    return x.to(dtype), grad.to(dtype)


def expected_output(x: torch.Tensor, weights: LayerWeights, topk: int) -> torch.Tensor:
    """The layer by its definition, token by token in fp64: what each peer's output is compared with before timing.

    x [1, T, D] → [1, T, D].
    """
    import torch
    import torch.nn.functional as F

    x_TD = x.double()[0]
    scores_TE = (x_TD @ weights.router.double().T).softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(topk, dim=-1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    rows = []
    for token, ids, shares in zip(x_TD, ids_TK.tolist(), weights_TK, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(ids, shares, strict=True):
            gate, up = (weights.gate_up[expert].double() @ token).chunk(2)
            total += share * (weights.down[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)[None]


def step_tokens(shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [B, S]: random, the same for everybody and in every step."""
    import torch

    random = torch.Generator().manual_seed(SEED + 2)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1), generator=random)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
