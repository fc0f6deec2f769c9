"""Attention for a context part: the whole context where there is no context parallelism, else by one of its two kinds.

`ulysses` (arXiv 2309.14509): two all-to-alls turn a piece of every sequence with all heads into all sequences with a
piece of the heads, and back. `ring` (arXiv 2310.01889): keys and values go around, see `ring`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.mesh.autograd import all_to_all
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.attend import attend
from moesaic.model.recompute import droppable
from moesaic.model.ring import attend_in_ring
from moesaic.model.sequences import Sequences
from moesaic.spec.model import AttentionSpec


def attend_spread(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    spec: AttentionSpec,
    mesh: Mesh,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, d], k [T, G, d], v [T, G, dv] of the context part's T = B · S/cp tokens to [T, H · dv].

    H and G are this rank's heads under tensor parallelism; `sinks` [H].
    """
    group = mesh.cp
    if group.size == 1:
        segments = sequences.segments(spec.chunk)
        return _attend(q, k, v, segments, spec, sinks)
    if mesh.cp_kind == "ring":
        plan = sequences.ring_plan(spec.chunk, spec.window)
        return attend_in_ring(q, k, v, plan, group, scale=spec.scale, sinks=sinks).flatten(1)
    return _ulysses(q, k, v, sequences, spec, group, sinks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, segments: tuple[int, ...], spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The attention core, [T, H · dv]. Wider values than the model's are filled up, and cut here."""

    def core(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        sink = sinks[0] if sinks else None
        out = attend(q, k, v, segments, scale=spec.scale, window=spec.window, sinks=sink)
        return out[..., : spec.v_head_dim].flatten(1)

    return droppable("core_attn", core, q, k, v, *(() if sinks is None else (sinks,)))  # type: ignore[no-any-return]


def _ulysses(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, spec: AttentionSpec, group: Group, sinks: Tensor | None
) -> Tensor:
    n, batch = group.size, sequences.batch
    heads = q.shape[1] // n
    if k.shape[1] % n:  # fewer key heads than ranks: each goes to all ranks whose query heads use it
        k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    kv_heads = k.shape[1] // n
    widths = [heads * q.shape[2], kv_heads * k.shape[2], kv_heads * v.shape[2]]
    by_rank = torch.cat([x.unflatten(1, (n, -1)).flatten(2) for x in (q, k, v)], dim=-1)  # [T, n, its heads]
    whole = _exchange(by_rank.transpose(0, 1), group, batch)
    q, k, v = (
        part.unflatten(1, (count, -1))
        for part, count in zip(whole.split(widths, dim=-1), (heads, kv_heads, kv_heads), strict=True)
    )
    if sinks is not None:
        sinks = sinks.unflatten(0, (n, heads))[group.rank]
    segments = sequences.segments(spec.chunk)
    out = _attend(q, k, v, segments, spec, sinks)
    parts = out.unflatten(0, (batch, n, -1)).transpose(0, 1).flatten(0, 2)
    tokens = len(out) // n
    back = all_to_all(parts, group, [tokens] * n, [tokens] * n, "head all-to-all")
    return back.unflatten(0, (n, tokens)).unflatten(2, (heads, -1)).transpose(0, 1).flatten(1, 3)


def _exchange(by_rank_nTW: Tensor, group: Group, batch: int) -> Tensor:
    """[n, B · s, W], a block for each rank, to this rank's block of all tokens, [B · n · s, W], row after row."""
    n, tokens = by_rank_nTW.shape[:2]
    received = all_to_all(by_rank_nTW.flatten(0, 1), group, [tokens] * n, [tokens] * n, "head all-to-all")
    return received.unflatten(0, (n, batch, -1)).transpose(0, 1).flatten(0, 2)
