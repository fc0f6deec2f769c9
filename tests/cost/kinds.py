"""Kinds of decoder layers, small: what differs in what they keep."""

from __future__ import annotations

from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec, RouterSpec


def grouped_query(**fields: object) -> AttentionSpec:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "rope": RopeSpec(dim=16), "scale": 0.25}
    return AttentionSpec.model_validate(sizes | fields)


def latent(**fields: object) -> AttentionSpec:
    sizes = {"kind": "mla", "heads": 4, "kv_heads": 4, "head_dim": 24, "v_head_dim": 16, "q_rank": 40, "kv_rank": 32,
             "nope_dim": 16, "rope_dim": 8, "rope": RopeSpec(dim=8), "scale": 0.2}  # fmt: skip
    return AttentionSpec.model_validate(sizes | fields)


def mixture(**fields: object) -> MoeSpec:
    sizes = {"router": RouterSpec(experts=8, top_k=2), "expert": MlpSpec(width=48), "shared": MlpSpec(width=80)}
    return MoeSpec.model_validate(sizes | fields)


KINDS = {
    "grouped queries, dense": LayerSpec(attention=grouped_query(), mlp=MlpSpec(width=96)),
    "grouped queries, dense, not gated": LayerSpec(attention=grouped_query(), mlp=MlpSpec(width=96, gated=False)),
    "grouped queries, experts": LayerSpec(attention=grouped_query(), moe=mixture(shared=None)),
    "grouped queries, shared expert": LayerSpec(attention=grouped_query(), moe=mixture()),
    "normed queries, experts": LayerSpec(attention=grouped_query(qk_norm="head"), moe=mixture(shared=None)),
    "grouped queries, gated shared expert": LayerSpec(
        attention=grouped_query(), moe=mixture(shared_combine="sigmoid_gate")
    ),
    "grouped queries, two gates": LayerSpec(attention=grouped_query(), moe=mixture(shared_combine="learned")),
    "latent attention, dense": LayerSpec(attention=latent(), mlp=MlpSpec(width=96)),
    "latent attention, shared expert": LayerSpec(attention=latent(), moe=mixture()),
    "latent attention without a query rank": LayerSpec(attention=latent(q_rank=None), moe=mixture()),
}
