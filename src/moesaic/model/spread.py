"""Attention for a context part: the whole context where there is no context parallelism, else by one of its two kinds.

`ulysses` (arXiv 2309.14509): two all-to-alls turn a piece of every sequence with all heads into all sequences with a
piece of the heads, and back. `ring` (arXiv 2310.01889): keys and values go around, see `ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moesaic.mesh.autograd import start_all_to_all
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
    (result,) = attend_in_groups([(q, k, v)], sequences, spec, mesh, None if sinks is None else [sinks])
    return result()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, segments: tuple[int, ...], spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The attention core, [T, H · dv]. Wider values than the model's are filled up, and cut here."""

    def core(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        sink = sinks[0] if sinks else None
        out = attend(q, k, v, segments, scale=spec.scale, window=spec.window, sinks=sink)
        return out[..., : spec.v_head_dim].flatten(1)

    return droppable("core_attn", core, q, k, v, *(() if sinks is None else (sinks,)))  # type: ignore[no-any-return]


class _Heads:
    """A group of heads of all ranks: to the ranks that attend with them, and their results back."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, mesh: Mesh) -> None:
        self.group, self.sequences = mesh.cp, sequences
        n = self.group.size
        self.heads = q.shape[1] // n
        if k.shape[1] % n:  # fewer key heads than ranks: each goes to all ranks whose query heads use it
            k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
        self.kv_heads = k.shape[1] // n
        self.widths = [self.heads * q.shape[2], self.kv_heads * k.shape[2], self.kv_heads * v.shape[2]]
        by_rank = torch.cat([x.unflatten(1, (n, -1)).flatten(2) for x in (q, k, v)], dim=-1)  # [T, n, its heads]
        self.there = self._start(by_rank.transpose(0, 1).flatten(0, 1))

    def attend(self, spec: AttentionSpec, sinks: Tensor | None) -> None:
        """Wait for this rank's heads [B · n · s, …], row after row, attend, and begin to send back."""
        n, batch = self.group.size, self.sequences.batch
        whole = self.there().unflatten(0, (n, batch, -1)).transpose(0, 1).flatten(0, 2)
        q, k, v = (
            part.unflatten(1, (count, -1))
            for part, count in zip(
                whole.split(self.widths, dim=-1), (self.heads, self.kv_heads, self.kv_heads), strict=True
            )
        )
        if sinks is not None:
            sinks = sinks.unflatten(0, (n, self.heads))[self.group.rank]
        out = _attend(q, k, v, self.sequences.segments(spec.chunk), spec, sinks)
        self.back = self._start(out.unflatten(0, (batch, n, -1)).transpose(0, 1).flatten(0, 2))

    def result(self) -> Tensor:
        """Wait for the results of own tokens, [T, heads · dv]."""
        n = self.group.size
        return self.back().unflatten(0, (n, -1)).unflatten(2, (self.heads, -1)).transpose(0, 1).flatten(1, 3)

    def _start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to send n equal pieces of rows."""
        each = [len(rows) // self.group.size] * self.group.size
        return start_all_to_all(rows, self.group, each, each, "head all-to-all")


def attend_in_groups(
    made: Iterable[tuple[Tensor, Tensor, Tensor]],
    sequences: Sequences,
    spec: AttentionSpec,
    mesh: Mesh,
    sinks: Sequence[Tensor] | None = None,
) -> list[Callable[[], Tensor]]:
    """`attend_spread` of groups of heads, each [T, H, d], [T, G, d], [T, G, dv]: what waits for the results of each.

    One group travels while the next is made, while another attends, and while the caller works on the results of the
    one before (cf. MegaScale-MoE, arXiv 2505.11432, §5.2). Backward has the same gaps.
    """
    groups = [_Heads(q, k, v, sequences, mesh) for q, k, v in made]
    for number, heads in enumerate(groups):
        heads.attend(spec, None if sinks is None else sinks[number])
    return [heads.result for heads in groups]
