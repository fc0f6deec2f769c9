"""torchtitan: its common MoE (local dispatcher, grouped experts) and its Qwen3-MoE model with its own SDPA attention.

`variant="no_cast"` leaves out the three casts to bf16 in the experts' forward, which the layer makes whatever the dtype
of its parameters; everything else is the peer's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("torchtitan.models.common.config_utils", "torchtitan.models.qwen3")


def _leave_out_casts() -> None:
    from torchtitan.models.common.moe import GroupedExperts

    def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        product = partial(self._grouped_mm, offs=ends)
        # On several ranks they are distributed tensors, of which each rank multiplies its own part.
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        gate = F.silu(product(A=x, B_t=w1.transpose(-2, -1)))
        up = product(A=x, B_t=w3.transpose(-2, -1))
        return product(A=gate * up, B_t=w2.transpose(-2, -1))

    GroupedExperts.forward = forward


def moe_config(shape: LayerShape, variant: str) -> Any:
    """The config of its MoE layer; `variant` is applied to the process."""
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    if variant == "no_cast":
        _leave_out_casts()
    normal = partial(nn.init.normal_, std=0.02)
    return make_moe_config(
        num_experts=shape.experts,
        load_balance_coeff=None,
        router=make_router_config(
            dim=shape.hidden,
            num_experts=shape.experts,
            gate_param_init={"weight": normal},
            top_k=shape.topk,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=shape.hidden,
            hidden_dim=shape.ffn,
            num_experts=shape.experts,
            top_k=shape.topk,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal),
            comm_backend="standard",
        ),
    )


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    moe = moe_config(shape, variant).build()
    moe.to(dtype).train()
    return Layer(moe, moe, partial(load, moe), type(moe.routed_experts.token_dispatcher).__name__)


def load(moe: Any, weights: LayerWeights) -> None:
    experts = moe.routed_experts.inner_experts
    gate, up = weights.gate_up.chunk(2, dim=1)
    put(moe.router.gate.weight, weights.router)
    put(experts.w1_EFD, gate)
    put(experts.w3_EFD, up)
    put(experts.w2_EDF, weights.down)


def model_config(shape: StepShape, variant: str) -> Any:
    """The config of its Qwen3-MoE; `variant` is applied to the process."""
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    if variant == "no_cast":
        _leave_out_casts()
    # Its flex and varlen attention have no backward on a CPU; its SDPA has.
    qwen3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    head = shape.hidden // shape.heads
    return qwen3.Qwen3Model.Config(
        vocab_size=shape.vocab,
        dim=shape.hidden,
        norm=qwen3._qwen3_norm(shape.hidden),
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.hidden, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=shape.hidden, out_features=shape.vocab, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=shape.layers,
            dim=shape.hidden,
            n_heads=shape.heads,
            n_kv_heads=shape.heads,
            head_dim=head,
            moe_hidden_dim=shape.ffn,
            num_experts=shape.experts,
            top_k=shape.topk,
            attn_backend="sdpa",
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=head, max_seq_len=shape.seq, theta=1e6),
        ),
    )


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    decoder = model_config(shape, variant).build()
    decoder.init_states(buffer_device=torch.device("cpu"))
    initialise(decoder, dtype)
    positions = torch.arange(shape.seq).expand(shape.batch, -1)
    return Model(decoder, lambda ids: decoder(ids, positions, None), "its Qwen3-MoE, SDPA")
