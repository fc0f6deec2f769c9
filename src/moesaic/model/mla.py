"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.dispatch.parts import cuts_wanted
from moesaic.mesh.autograd import gather_tokens
from moesaic.mesh.mesh import Mesh
from moesaic.model.by_rank import GatheredProducts, Reads
from moesaic.model.kernels import linear
from moesaic.model.linear import Linear, LinearToTokens
from moesaic.model.norms import RMSNorm
from moesaic.model.recompute import droppable, droppable_output, made_again
from moesaic.model.rope import rotate
from moesaic.model.sequences import Sequences
from moesaic.model.spread import attend_in_groups, attend_spread
from moesaic.spec.errors import SpecError
from moesaic.spec.model import AttentionSpec

Projection = tuple[Tensor, Tensor | None]
"""A weight and perhaps a bias."""


class LatentAttention(nn.Module):
    """Keys and values are expanded from one latent of `kv_rank` numbers per token.

    A head's query and key are `nope_dim` plain and `rope_dim` rotated dimensions; the rotated part of the key is shared
    by all heads. Queries come from a latent of `q_rank`, or directly where that is None.

    Tensor parallelism splits heads. The projections to latents are whole and see own tokens; only the latents, which
    are narrow, are gathered.
    """

    def __init__(
        self, spec: AttentionSpec, hidden: int, *, dtype: torch.dtype, device: torch.device | str, mesh: Mesh
    ) -> None:
        super().__init__()
        if spec.kv_rank is None or spec.nope_dim is None or spec.rope_dim is None:
            raise SpecError("multi-head latent attention needs kv_rank, nope_dim and rope_dim; give all three")
        self.spec, self.mesh = spec, mesh
        tp = mesh.tp
        self.heads = spec.heads // tp.size
        self.kv_rank, self.nope_dim, self.rope_dim = spec.kv_rank, spec.nope_dim, spec.rope_dim
        self.rope_key = "" if spec.rope is None else spec.rope.model_dump_json()
        q_width = spec.heads * (self.nope_dim + self.rope_dim)
        if spec.q_rank is None:
            self.q = Linear(hidden, q_width, dtype=dtype, device=device, split=tp)
        else:
            self.q_a = Linear(hidden, spec.q_rank, spec.qkv_bias, dtype=dtype, device=device)
            self.q_a_norm = RMSNorm(spec.q_rank, spec.norm_eps, dtype=dtype, device=device)
            self.q_b = Linear(spec.q_rank, q_width, dtype=dtype, device=device, split=tp)
        self.kv_a = Linear(hidden, self.kv_rank + self.rope_dim, spec.qkv_bias, dtype=dtype, device=device)
        self.kv_a_norm = RMSNorm(self.kv_rank, spec.norm_eps, dtype=dtype, device=device)
        kv_width = spec.heads * (self.nope_dim + spec.v_head_dim)
        self.kv_b = Linear(self.kv_rank, kv_width, dtype=dtype, device=device, split=tp)
        out_width = spec.heads * spec.v_head_dim
        by_rank = mesh.by_rank
        self.o = LinearToTokens(out_width, hidden, spec.o_bias, dtype=dtype, device=device, split=tp, by_rank=by_rank)
        self.gathered = GatheredProducts(tp) if by_rank else None

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D] of own tokens to [T, D]."""
        spec, tp = self.spec, self.mesh.tp
        # Queries come from this; where there is no query latent, from the input itself.
        source = x_TD
        if spec.q_rank is not None:
            source = droppable_output("mla_up_proj", self.q_a_norm, self.q_a(x_TD))
        latent, k_rope = self.kv_a(x_TD).split((self.kv_rank, self.rope_dim), dim=-1)
        latent = droppable_output("mla_up_proj", self.kv_a_norm, latent)
        make: Callable[..., tuple[Tensor, ...]] = self._up
        if self.gathered is not None:
            source, latent, k_rope = self._up_by_rank(source, latent, k_rope, sequences.batch)
            make = self._heads
        elif tp.size > 1:
            widths = (source.shape[1], self.kv_rank, self.rope_dim)
            joined = gather_tokens(torch.cat((source, latent, k_rope), dim=-1), tp, sequences.batch)
            source, latent, k_rope = joined.split(widths, dim=-1)
        groups = 1 if self.mesh.layout is None else self.mesh.layout.head_groups(self.heads)
        if groups > 1 and self.gathered is None and cuts_wanted():
            made = (
                droppable("mla_up_proj", partial(self._up_with, *pieces, sequences=sequences), source, latent, k_rope)
                for pieces in zip(self._up_q.pieces(groups), self.kv_b.pieces(groups), strict=True)
            )
            return self.o.of_parts(attend_in_groups(made, sequences, spec, self.mesh), sequences.batch)
        q, k, v = droppable("mla_up_proj", partial(make, sequences=sequences), source, latent, k_rope)
        out_TO = attend_spread(q, k, v, sequences, spec, self.mesh)
        return self.o(out_TO, sequences.batch)

    def _up_with(
        self, q: Projection, kv: Projection, source: Tensor, latent: Tensor, k_rope: Tensor, *, sequences: Sequences
    ) -> tuple[Tensor, ...]:
        """`_up` with the weights and biases of some heads."""
        return self._heads(linear(source, *q), linear(latent, *kv), k_rope, sequences)

    def _up(self, source: Tensor, latent: Tensor, k_rope: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """Queries and keys [T, H, d], values [T, H, dv] from what the tensor group's tokens are reduced to."""
        return self._heads(self._up_q(source), self.kv_b(latent), k_rope, sequences)

    @property
    def _up_q(self) -> Linear:
        return self.q if self.spec.q_rank is None else self.q_b

    def _up_by_rank(self, source: Tensor, latent: Tensor, k_rope: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys with values, and rotated keys before the rotation, of the tensor group's tokens."""
        assert self.gathered is not None
        a = source.shape[1]
        b = a + self.kv_rank
        reads = [Reads(self._up_q, 0, a), Reads(self.kv_b, a, b), Reads(None, b)]
        joined_nTL, q, kv, k_rope = self.gathered(torch.cat((source, latent, k_rope), dim=-1), batch, reads)
        made_again(
            "mla_up_proj", partial(GatheredProducts.again, batch=batch, reads=reads), (q, kv, k_rope), joined_nTL
        )
        return q, kv, k_rope

    def _heads(self, q: Tensor, kv: Tensor, k_rope: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        spec, rows = self.spec, (sequences.batch, sequences.part_length)
        q = q.view(*rows, -1, self.nope_dim + self.rope_dim)
        heads = q.shape[2]
        kv = kv.view(*rows, heads, self.nope_dim + spec.v_head_dim)
        k_nope, v = kv.split((self.nope_dim, spec.v_head_dim), dim=-1)
        k_rope = k_rope.reshape(*rows, 1, self.rope_dim)
        if spec.rope is not None:
            cos, sin = sequences.rope(spec.rope, self.rope_key)
            q = rotate(q, cos, sin, spec.rope.interleaved, offset=self.nope_dim)
            k_rope = rotate(k_rope, cos, sin, spec.rope.interleaved)
        k = torch.cat((k_nope, k_rope.expand(*rows, heads, self.rope_dim)), dim=-1)
        if self.mesh.cp.size == 1 and spec.v_head_dim < spec.head_dim:
            # As the attention core would, but here, where it can be dropped with the rest.
            v = F.pad(v, (0, spec.head_dim - spec.v_head_dim))
        elif self.mesh.cp.size > 1 and self.mesh.cp_kind == "ring":
            v = v.contiguous()  # likewise
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
