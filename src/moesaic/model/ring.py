"""Context-parallel attention: keys and values travel around a ring while each rank attends with its own queries.

Every rank holds some places of every row (`model.context`) and ends with the attention output of its own tokens, exact
up to rounding: partial outputs are merged by their log-sum-exp, as in ring attention (Liu et al. 2023, section 3) with
the block arithmetic of FlashAttention-2 (Dao 2023, section 3.1). The next keys are under way while the present ones are
used. In backward they go around once more, and the sums of their gradients follow one step behind and end at home.

Bytes that a rank sends, with n = T · G · (d + dv) elements of keys and values and h hops (as many as `RingPlan.shifts`:
c − 1, less where segments or windows rule all pairs of ranks at some distance out): h · n · (bytes of their type)
forward, and backward as many again plus h · n · 4 for the sums of gradients, which are fp32 (8 for fp64 inputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.mesh import collectives
from moesaic.mesh.collectives import Pending
from moesaic.mesh.group import Group
from moesaic.model.kernels import compute_dtype
from moesaic.model.ring_blocks import blocks_for
from moesaic.model.ring_plan import Block, RingPlan


def attend_in_ring(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    plan: RingPlan,
    group: Group,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within segments over rows that the ranks of `group` share.

    q [T, H, d], k [T, G, d], v [T, G, dv], T = B · S/c tokens of this rank, row after row, H a multiple of G; returns
    [T, H, dv] in q's type. `plan` is this rank's `ring_plan`, which layers with equal segments and windows share.
    `sinks` [H] are extra logits that join each softmax and carry no value; their gradient is this rank's share, from
    its own tokens. Kept for backward: q, k, v, the output and its log-sum-exp [B, H, S/c]. Every rank of the group must
    call this. Raises ValueError where the number of tokens or ranks is not the plan's.
    """
    if plan.size != group.size or q_THd.shape[0] != plan.batch * plan.length:
        raise ValueError(
            f"{q_THd.shape[0]} tokens on each of {group.size} ranks, but the plan is for {plan.batch} rows with "
            f"{plan.length} tokens each on {plan.size} ranks."
        )
    # Values cut out of a wider projection would keep all of it for backward.
    return _Ring.apply(q_THd, k_TGd, v_TGd.contiguous(), sinks, plan, group, scale)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        sinks: Tensor | None,
        plan: RingPlan,
        group: Group,
        scale: float,
    ) -> Tensor:
        dtype, travelling = compute_dtype(q_THd), _Travelling(plan, group)
        kv = _pack(k_TGd, v_TGd)
        travelling.depart(kv)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kernel = blocks_for(q_THd.device, scale, q_THd.shape[-1], v_TGd.shape[-1])
        rows = (plan.batch, plan.length)
        q = kernel.widen_keys(q_THd.to(dtype).unflatten(0, rows))
        heads, value_width = q_THd.shape[1], v_TGd.shape[-1]
        out_BNHd = torch.zeros(*rows, heads, value_width, dtype=wide, device=q.device)
        lse_BHN = torch.full((plan.batch, heads, plan.length), -torch.inf, dtype=wide, device=q.device)

        def merge(blocks: tuple[Block, ...], k: Tensor, v: Tensor) -> None:
            for block in blocks:
                part, lse = kernel.forward(
                    q[block.rows, block.queries], k[block.rows, block.keys], v[block.rows, block.keys], block
                )
                out, total = out_BNHd[block.rows, block.queries], lse_BHN[block.rows, :, block.queries]
                # The new part's share of the softmax. A total of −∞, before the first part, gives it all.
                share = torch.sigmoid(lse - total).transpose(1, 2)[..., None]
                out.lerp_(part[..., :value_width].to(wide), share)
                torch.logaddexp(total, lse, out=total)

        def unpack(buffer: Tensor) -> tuple[Tensor, Tensor]:
            k, v = _unpack(buffer, k_TGd.shape, v_TGd.shape)
            k, v = (x.to(dtype).unflatten(0, rows) for x in (k, v))
            return kernel.widen_keys(k), kernel.widen_values(v)

        merge(plan.own, *unpack(kv))
        for index, blocks in enumerate(plan.others):
            kv = travelling.arrive(index)
            if blocks:
                merge(blocks, *unpack(kv))
        if sinks is not None:
            total = torch.logaddexp(lse_BHN, sinks.to(wide)[:, None])
            out_BNHd.mul_(torch.exp(lse_BHN - total).transpose(1, 2)[..., None])
            lse_BHN = total
        out_THd = out_BNHd.flatten(0, 1).to(q_THd.dtype)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, out_THd, lse_BHN, sinks)
        return out_THd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGd, out_THd, lse_BHN, sinks = ctx.saved_tensors
        plan, group = ctx.plan, ctx.group
        dtype, travelling, following = compute_dtype(q_THd), _Travelling(plan, group), _Following(plan, group)
        kv = _pack(k_TGd, v_TGd)
        travelling.depart(kv)
        wide = lse_BHN.dtype
        kernel = blocks_for(q_THd.device, ctx.scale, q_THd.shape[-1], v_TGd.shape[-1])
        rows = (plan.batch, plan.length)
        q = kernel.widen_keys(q_THd.to(dtype).unflatten(0, rows))
        out, grad_out = (kernel.widen_values(x.to(dtype).unflatten(0, rows)) for x in (out_THd, grads[0]))
        grad_q = torch.zeros(*rows, *q_THd.shape[1:], dtype=wide, device=q.device)

        def grad_of(blocks: tuple[Block, ...], buffer: Tensor) -> Tensor:
            """Adds to grad_q; the gradient of the packed keys and values from these blocks."""
            sums = torch.zeros(buffer.shape, dtype=wide, device=buffer.device)
            if not blocks:
                return sums
            k, v = _unpack(buffer, k_TGd.shape, v_TGd.shape)
            k, v = (x.to(dtype).unflatten(0, rows) for x in (k, v))
            k, v = kernel.widen_keys(k), kernel.widen_values(v)
            grad_k, grad_v = (x.unflatten(0, rows) for x in _unpack(sums, k_TGd.shape, v_TGd.shape))
            for block in blocks:
                queries, keys = (block.rows, block.queries), (block.rows, block.keys)
                lse = lse_BHN[block.rows, :, block.queries]
                parts = kernel.backward(grad_out[queries], q[queries], k[keys], v[keys], out[queries], lse, block)
                for grad, at, part in zip((grad_q, grad_k, grad_v), (queries, keys, keys), parts, strict=True):
                    grad[at] += part[..., : grad.shape[-1]]
            return sums

        own = grad_of(plan.own, kv)
        for index, blocks in enumerate(plan.others):
            following.add(index, grad_of(blocks, travelling.arrive(index)))
        if plan.others:
            own += following.home()
        grad_k, grad_v = _unpack(own, k_TGd.shape, v_TGd.shape)
        grad_sinks = None
        if sinks is not None:
            # A sink's value is 0, so its logit's gradient is −(its share) · (grad_out · out), over this rank's queries.
            delta_TH = (grads[0].to(wide) * out_THd.to(wide)).sum(-1)
            share_BHN = torch.exp(sinks.to(wide)[:, None] - lse_BHN)
            grad_sinks = -(share_BHN.transpose(1, 2).flatten(0, 1) * delta_TH).sum(0).to(sinks.dtype)
        return (
            grad_q.flatten(0, 1).to(q_THd.dtype),
            grad_k.to(k_TGd.dtype),
            grad_v.to(v_TGd.dtype),
            grad_sinks,
            None,
            None,
            None,
        )


class _Travelling:
    """Packed keys and values on their way from shift to shift, always one ahead of their use."""

    def __init__(self, plan: RingPlan, group: Group) -> None:
        self.hops, self.group = plan.hops, group
        self.under_way: Pending | None = None

    def depart(self, buffer: Tensor) -> None:
        """Send this rank's own to where they are used first."""
        if len(self.hops) > 1:
            self.under_way = _start_hop(buffer, self.group, self.hops[0])

    def arrive(self, index: int) -> Tensor:
        """What is used at shift number `index`; it is sent on at once, and must not change."""
        assert self.under_way is not None
        buffer = self.under_way.wait()
        self.under_way = None
        if index + 2 < len(self.hops):
            self.under_way = _start_hop(buffer, self.group, self.hops[index + 1])
        return buffer


class _Following:
    """Sums of gradients on their way behind the keys and values they belong to."""

    def __init__(self, plan: RingPlan, group: Group) -> None:
        self.hops, self.group = plan.hops, group
        self.under_way: Pending | None = None

    def add(self, index: int, sums: Tensor) -> None:
        """Add this rank's part, `sums` of shift number `index`, to what has come so far and send the total on."""
        if self.under_way is not None:
            sums += self.under_way.wait()
        self.under_way = _start_hop(sums, self.group, self.hops[index + 1])

    def home(self) -> Tensor:
        """What the other ranks found for this rank's own keys and values."""
        assert self.under_way is not None
        return self.under_way.wait()


def _start_hop(buffer: Tensor, group: Group, distance: int) -> Pending:
    """Begin to send to the rank `distance` further on and to receive from the one as far back."""
    if distance == 1:
        return collectives.start_shift(buffer, group)
    send, receive = [0] * group.size, [0] * group.size
    send[(group.rank + distance) % group.size] = receive[(group.rank - distance) % group.size] = len(buffer)
    return collectives.start_all_to_all(buffer, group, send, receive, "shift")


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys, then values, as one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpack(buffer: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Views of the keys and the values in a message."""
    k, v = buffer.split((k_shape.numel(), v_shape.numel()))
    return k.view(k_shape), v.view(v_shape)
