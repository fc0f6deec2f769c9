"""A plain decoder for peers that offer only a layer, and a process group of one for those that insist on a group."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.workload import StepShape


def one_process_group() -> None:
    """Starts gloo with this process alone; the rendezvous is in memory, so that no port is needed."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ[name] = value
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x)); causal attention, no position embedding."""

    def __init__(self, shape: StepShape, moe: nn.Module):
        super().__init__()
        self.heads = shape.heads
        self.attn_norm, self.moe_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.moe = moe

    def forward(self, x_BSD: Tensor) -> Tensor:
        split = self.qkv(self.attn_norm(x_BSD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BSD + self.moe(self.moe_norm(x_BSD))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head: ids [B, S] → logits [B, S, V]."""

    def __init__(self, shape: StepShape, make_moe: Callable[[], nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, make_moe()) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))
