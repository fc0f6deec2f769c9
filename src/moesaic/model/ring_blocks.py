"""Attention of some queries with some keys, with the log-sum-exp that lets such parts be merged, and its backward.

`backward` takes the output and the log-sum-exp of the whole softmax, of which the block is a part, so parts need no
correction of their own (FlashAttention-2, Dao 2023, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.model.ring_plan import Block

_SCORE_BYTES = 64 << 20
"""The largest matrix of scores that exists at a time."""

_FEWEST = 64
"""So many queries at a time are worth more than all rows at a time."""

_FUSED_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Blocks(Protocol):
    """How one device computes blocks. q [N, L, H, d], k [N, M, G, d], v [N, M, G, dv]; N rows, L queries, M keys."""

    def widen_keys(self, x: Tensor) -> Tensor:
        """Queries or keys, as the other functions want them."""
        ...

    def widen_values(self, x: Tensor) -> Tensor:
        """Values, outputs or their gradients, as the other functions want them."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output [N, L, H, dv] and log-sum-exp [N, H, L] of the block alone."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the block adds to the gradients of q, k and v; `out` and `lse` are of the whole softmax."""
        ...


def blocks_for(device: torch.device, scale: float, width: int, value_width: int) -> Blocks:
    """The fastest way that a device has for keys of `width` and values of `value_width`."""
    return FusedBlocks(scale, width, value_width) if device.type == "cpu" else PlainBlocks(scale)


class FusedBlocks:
    """PyTorch's fused CPU kernel, about twice as fast as the plain products. It wants keys and values of one width."""

    def __init__(self, scale: float, width: int, value_width: int) -> None:
        self.scale = scale
        self.pad_keys, self.pad_values = max(0, value_width - width), max(0, width - value_width)

    def widen_keys(self, x: Tensor) -> Tensor:
        """Zeros added to scores change nothing."""
        return F.pad(x, (0, self.pad_keys)) if self.pad_keys else x

    def widen_values(self, x: Tensor) -> Tensor:
        """Zeros give zeros, which the caller cuts off."""
        return F.pad(x, (0, self.pad_values)) if self.pad_values else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """As `Blocks.forward`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _FUSED_FORWARD(q, k, v, 0.0, block.causal, attn_mask=_bias(block, q), scale=self.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Blocks.backward`."""
        bias = _bias(block, q)
        grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
        grads = _FUSED_BACKWARD(
            grad_out, q, k, v, out, lse.contiguous(), 0.0, block.causal, attn_mask=bias, scale=self.scale
        )
        return tuple(x.transpose(1, 2) for x in grads)  # type: ignore[return-value]


class PlainBlocks:
    """Matrix products around a softmax in at least fp32, some rows and queries at a time."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def widen_keys(self, x: Tensor) -> Tensor:
        """Any width will do."""
        return x

    def widen_values(self, x: Tensor) -> Tensor:
        """Any width will do."""
        return x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """As `Blocks.forward`."""
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=_wide(q), device=q.device)
        for rows, queries, keys, hidden in _strips(q, k, block):
            scores = self._scores(q[rows, queries], k[rows, keys], hidden)
            total = scores.logsumexp(-1, keepdim=True)
            shares = scores.sub_(total).exp_().to(v.dtype)
            length = queries.stop - queries.start
            out[rows, queries] = _by_query(shares @ v[rows, keys].transpose(1, 2), length)
            lse[rows, :, queries] = total.squeeze(-1).unflatten(2, (-1, length)).flatten(1, 2)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Blocks.backward`."""
        wide, groups = _wide(q), k.shape[2]
        grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        delta_NLH = (grad_out.to(wide) * out.to(wide)).sum(-1)
        for rows, queries, keys, hidden in _strips(q, k, block):
            q_part, k_part, v_part = q[rows, queries], k[rows, keys].transpose(1, 2), v[rows, keys].transpose(1, 2)
            grad_part = _by_group(grad_out[rows, queries], groups)
            scores = self._scores(q_part, k[rows, keys], hidden)
            lse_part = lse[rows, :, queries].unflatten(1, (groups, -1)).flatten(2, 3)
            shares = scores.sub_(lse_part[..., None]).exp_()
            grad_v[rows, keys] += (shares.to(v.dtype).transpose(2, 3) @ grad_part).transpose(1, 2)
            grad_scores = (grad_part @ v_part.transpose(2, 3)).to(wide)
            grad_scores.sub_(_by_group(delta_NLH[rows, queries, :, None], groups)).mul_(shares).mul_(self.scale)
            grad_scores = grad_scores.to(q.dtype)
            grad_q[rows, queries] += _by_query(grad_scores @ k_part, queries.stop - queries.start)
            grad_k[rows, keys] += (grad_scores.transpose(2, 3) @ _by_group(q_part, groups)).transpose(1, 2)
        return grad_q, grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """[N, G, H/G · L, M] in at least fp32, −∞ where `hidden` [L, M]."""
        scores = (_by_group(q, k.shape[2]) @ k.permute(0, 2, 3, 1)).to(_wide(q)).mul_(self.scale)
        if hidden is not None:
            scores.unflatten(2, (-1, q.shape[1])).masked_fill_(hidden, -torch.inf)
        return scores


def _strips(q: Tensor, k: Tensor, block: Block) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """Rows, queries, keys and what is hidden [L, M], for parts of a block with at most `_SCORE_BYTES` of scores."""
    row_count, length, heads = q.shape[:3]
    line = heads * k.shape[1] * torch.finfo(_wide(q)).bits // 8  # the scores of one query
    row_step = max(1, min(row_count, _SCORE_BYTES // (line * min(length, _FEWEST))))
    step = max(1, min(length, _SCORE_BYTES // (line * row_step)))
    for start in range(0, length, step):
        queries = slice(start, min(start + step, length))
        keys, hidden = _visible(block, queries, k.shape[1], q.device)
        for row in range(0, row_count, row_step):
            yield slice(row, min(row + row_step, row_count)), queries, keys, hidden


def _visible(block: Block, queries: slice, key_count: int, device: torch.device) -> tuple[slice, Tensor | None]:
    """The keys that some of these queries see, and which of them [L, M] each does not; None if each sees all."""
    if not block.causal and block.seen is None:
        return slice(0, key_count), None
    if block.seen is None:
        low, high = torch.zeros(queries.stop - queries.start, dtype=torch.int64), torch.arange(*_bounds(queries, 1))
    else:
        low, high = (torch.from_numpy(x[queries]) for x in block.seen)
    keys = slice(int(low[0]), int(high[-1]))
    if int(low[-1]) == keys.start and int(high[0]) == keys.stop:
        return keys, None
    places = torch.arange(*_bounds(keys, 0))
    return keys, ((places < low[:, None]) | (places >= high[:, None])).to(device)


def _bounds(of: slice, add: int) -> tuple[int, int]:
    return of.start + add, of.stop + add


def _bias(block: Block, q: Tensor) -> Tensor | None:
    """What the fused kernel adds to the scores [1, 1, L, M] of a block that needs a mask."""
    if block.seen is None:
        return None
    queries = slice(0, len(block.seen[0]))
    keys, hidden = _visible(block, queries, block.keys.stop - block.keys.start, q.device)
    shape = (1, 1, queries.stop, keys.stop - keys.start)
    bias = torch.zeros(shape, dtype=q.dtype, device=q.device)
    return bias if hidden is None else bias.masked_fill_(hidden, -torch.inf)


def _by_group(x_NLHd: Tensor, groups: int) -> Tensor:
    """[N, L, H, d] to [N, G, H/G · L, d]: all queries of a key/value head as the rows of one matrix."""
    return x_NLHd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_query(x: Tensor, length: int) -> Tensor:
    """The way back: [N, G, H/G · L, d] to [N, L, H, d]."""
    return x.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
