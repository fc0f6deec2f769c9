"""Grouped-query attention with the options of the published families."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.dispatch.parts import cuts_wanted
from moesaic.mesh.autograd import gather_tokens
from moesaic.mesh.cut import Cut, Piece, new_parameter
from moesaic.mesh.mesh import Mesh
from moesaic.model.by_rank import GatheredProducts, Reads
from moesaic.model.kernels import linear
from moesaic.model.linear import Linear, LinearToTokens
from moesaic.model.norms import RMSNorm, SplitRMSNorm, rms_norm
from moesaic.model.rope import rotate
from moesaic.model.sequences import Sequences
from moesaic.model.spread import attend_in_groups, attend_spread
from moesaic.spec.model import AttentionSpec


class Attention(nn.Module):
    """Projections, query/key norms, rotary embedding, attention, output projection.

    Order: project → norm over the whole projection → clip → heads → per-head norm → rotate (or rotate, then per-head
    norm) → temperature → attend → project.
    """

    def __init__(
        self, spec: AttentionSpec, hidden: int, *, dtype: torch.dtype, device: torch.device | str, mesh: Mesh
    ) -> None:
        super().__init__()
        self.spec, self.mesh = spec, mesh
        tp = mesh.tp
        self.heads, self.kv_heads = spec.heads // tp.size, spec.kv_heads // tp.size
        self.rope_key = "" if spec.rope is None else spec.rope.model_dump_json()
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        v_width = spec.kv_heads * spec.v_head_dim
        self.q = Linear(hidden, q_width, spec.qkv_bias, dtype=dtype, device=device, split=tp)
        self.k = Linear(hidden, kv_width, spec.qkv_bias, dtype=dtype, device=device, split=tp)
        self.v = Linear(hidden, v_width, spec.qkv_bias, dtype=dtype, device=device, split=tp)
        out_width = spec.heads * spec.v_head_dim
        by_rank = mesh.by_rank
        self.o = LinearToTokens(out_width, hidden, spec.o_bias, dtype=dtype, device=device, split=tp, by_rank=by_rank)
        self.gathered = GatheredProducts(tp) if by_rank else None
        self.q_norm: RMSNorm | SplitRMSNorm
        self.k_norm: RMSNorm | SplitRMSNorm
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device)
        elif spec.qk_norm == "full":
            self.q_norm = SplitRMSNorm(q_width, spec.norm_eps, tp, dtype=dtype, device=device)
            self.k_norm = SplitRMSNorm(kv_width, spec.norm_eps, tp, dtype=dtype, device=device)
        self.sinks = None
        if spec.sinks:
            cut = Cut((spec.heads,), (Piece(0, tp.size, tp.rank),))
            self.sinks = new_parameter(cut, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D] of own tokens to [T, D]."""
        spec = self.spec
        layout, layers = self.mesh.layout, (self.q, self.k, self.v)
        if self.gathered is not None:
            _, q, k, v = self.gathered(x_TD, sequences.batch, [Reads(layer) for layer in layers])
        else:
            x_TD = gather_tokens(x_TD, self.mesh.tp, sequences.batch)
            # A norm of all heads together needs them all.
            groups = 1 if layout is None or spec.qk_norm == "full" else layout.head_groups(self.kv_heads)
            if groups > 1 and cuts_wanted():
                pieces = zip(*(layer.pieces(groups) for layer in layers), strict=True)
                made = (
                    self._heads(linear(x_TD, *q), linear(x_TD, *k), linear(x_TD, *v), sequences) for q, k, v in pieces
                )
                sinks = None if self.sinks is None else self.sinks.chunk(groups)
                return self.o.of_parts(attend_in_groups(made, sequences, spec, self.mesh, sinks), sequences.batch)
            q, k, v = (layer(x_TD) for layer in layers)
        if spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        out_TO = attend_spread(*self._heads(q, k, v, sequences), sequences, spec, self.mesh, self.sinks)
        return self.o(out_TO, sequences.batch)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Projections [T, H · d] of any heads to queries, keys and values [T, H, d] as attention takes them."""
        spec = self.spec
        if spec.clip_qkv is not None:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        rows = (sequences.batch, sequences.part_length)
        q = q.view(*rows, -1, spec.head_dim)
        k = k.view(*rows, -1, spec.head_dim)
        v = v.view(rows[0] * rows[1], -1, spec.v_head_dim)
        if not spec.qk_norm_after_rope:
            q, k = self._norm_heads(q, k)
        if spec.rope is not None:
            cos, sin = sequences.rope(spec.rope, self.rope_key)
            q = rotate(q, cos, sin, spec.rope.interleaved)
            k = rotate(k, cos, sin, spec.rope.interleaved)
        if spec.qk_norm_after_rope:
            q, k = self._norm_heads(q, k)
        if spec.temperature is not None:
            positions = sequences.part_positions[:, :, None, None]
            steps = torch.floor((positions.float() + 1) / spec.temperature.floor_positions)
            q = (q * (1 + spec.temperature.scale * torch.log1p(steps))).to(q.dtype)
        return q.flatten(0, 1), k.flatten(0, 1), v

    def _norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.spec.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        if self.spec.qk_norm == "l2":
            return rms_norm(q, None, self.spec.norm_eps), rms_norm(k, None, self.spec.norm_eps)
        return q, k
