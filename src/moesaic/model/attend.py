"""Causal attention over segments of tokens, on top of `scaled_dot_product_attention`.

Three choices keep it on the fused kernels, which never hold a matrix of all scores:

- Documents and chunks are not masks but cuts: each segment is its own causal problem, so nothing that a mask would
  hide is computed.
- A sliding window shorter than the segment runs over blocks of queries, each with its own block of keys and the one
  before: linear in the length, where a mask is quadratic.
- An attention sink (a logit that joins the softmax and carries no value, gpt-oss) is one more key: queries get one more
  dimension that holds the sink, the extra key is 1 there and 0 elsewhere, and its value is 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.model.kernels import compute_dtype

_SMALLEST_BLOCK = 128


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each segment.

    q [T, H, d], k [T, G, d], v [T, G, dv] with G key/value heads, H a multiple of G; `segments` are lengths that sum to
    T. A token sees itself and the tokens before it in its segment, at most `window` of them in all. `sinks` [H] are
    extra logits. Returns [T, H, dv] in q's type.
    """
    dtype = q.dtype
    wide = compute_dtype(q)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    sinks = None if sinks is None else sinks.to(wide)
    if len(set(segments)) == 1:
        shape = (len(segments), segments[0])
        out = _causal(q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape), scale, window, sinks)
        return out.flatten(0, 1).to(dtype)
    parts = zip(q.split(segments), k.split(segments), v.split(segments), strict=True)
    return torch.cat([_causal(a[None], b[None], c[None], scale, window, sinks)[0] for a, b, c in parts]).to(dtype)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [N, S, H, d], k [N, S, G, d], v [N, S, G, dv] to [N, S, H, dv]."""
    if sinks is not None:
        q = torch.cat((q, (sinks / scale)[None, None, :, None].expand(*q.shape[:3], 1)), dim=-1)
        k = F.pad(k, (0, 1))
    length = q.shape[1]
    if window is not None and window < length:
        return _windowed(q, k, v, scale, window, sinks is not None)
    if sinks is None:
        return _sdpa(q, k, v, scale, None)
    # The sink is key 0, so a query 0 that is thrown away keeps the causal triangle square.
    return _sdpa(F.pad(q, (0, 0, 0, 0, 1, 0)), _with_sink(k), F.pad(v, (0, 0, 0, 0, 1, 0)), scale, None)[:, 1:]


def _with_sink(k: Tensor) -> Tensor:
    """Keys [N, S, G, d + 1] preceded by the sink's key."""
    key = F.pad(k.new_ones(k.shape[0], 1, k.shape[2], 1), (k.shape[3] - 1, 0))
    return torch.cat((key, k), dim=1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sink: bool) -> Tensor:
    """Blocks of queries against their own and the previous block of keys. A block is at least as long as the window."""
    rows, length = q.shape[:2]
    block = max(window, _SMALLEST_BLOCK)
    if length <= block:
        mask = _window_mask(length, length, 0, window, sink, q.device)
        if sink:
            k, v = _with_sink(k), F.pad(v, (0, 0, 0, 0, 1, 0))
        return _sdpa(q, k, v, scale, mask)
    blocks = -(-length // block)
    short = blocks * block - length

    def pairs_of_blocks(x: Tensor) -> Tensor:
        """[N, S, G, d] to [N · blocks, 2 · block, G, d]: the previous block (zeros before the first) and the block."""
        x = F.pad(x, (0, 0, 0, 0, block, short)).unflatten(1, (blocks + 1, block))
        return torch.cat((x[:, :-1], x[:, 1:]), dim=2).flatten(0, 1)

    mask = _window_mask(block, 2 * block, block, window, sink, q.device).repeat(blocks, 1, 1, 1)
    mask[0, :, :, int(sink) : int(sink) + block] = False
    q = F.pad(q, (0, 0, 0, 0, 0, short)).unflatten(1, (blocks, block)).flatten(0, 1)
    k, v = pairs_of_blocks(k), pairs_of_blocks(v)
    if sink:
        k, v = _with_sink(k), F.pad(v, (0, 0, 0, 0, 1, 0))
    out = _sdpa(q, k, v, scale, mask.repeat(rows, 1, 1, 1))
    return out.unflatten(0, (rows, blocks)).flatten(1, 2)[:, :length]


def _window_mask(queries: int, keys: int, ahead: int, window: int, sink: bool, device: torch.device) -> Tensor:
    """[1, 1, queries, keys (+ 1)]: whether query i, which is key i + `ahead`, sees key j. The sink is always seen."""
    distance = torch.arange(queries, device=device)[:, None] + ahead - torch.arange(keys, device=device)[None]
    mask = (distance >= 0) & (distance < window)
    return F.pad(mask, (1, 0), value=True)[None, None] if sink else mask[None, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """`scaled_dot_product_attention` on [N, S, H, d]; causal when there is no mask."""
    value_width = v.shape[-1]
    width = q.shape[-1]
    if value_width < width:  # the fused CPU kernel wants one width; zeros change nothing
        v = F.pad(v, (0, width - value_width))
    elif value_width > width:
        q, k = F.pad(q, (0, value_width - width)), F.pad(k, (0, value_width - width))
    if q.is_meta:  # the kernel that keeps no scores, which torch takes only where there is a device
        heads = (x.transpose(1, 2) for x in (q, k, v))
        core = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, _ = core(*heads, is_causal=mask is None, attn_mask=mask, scale=scale)
        return out.transpose(1, 2)[..., :value_width]  # type: ignore[no-any-return]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)[..., :value_width]
