"""Models of any size, for layouts to be legal for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec


def build(
    experts: Sequence[int] = (8, 8, 8, 8),
    heads: int = 8,
    kv_heads: int = 4,
    width: int = 16,
    expert_width: int = 8,
    top_k: int = 2,
    shared: int | None = None,
    mtp: int = 0,
    latent: bool = False,
) -> ModelSpec:
    """One layer per entry of `experts`, dense where that is 0; prediction blocks are as the last layer."""
    attention = AttentionSpec(
        kind="mla" if latent else "gqa", heads=heads, kv_heads=kv_heads, head_dim=8, v_head_dim=8, scale=1.0
    )

    def layer(count: int) -> LayerSpec:
        if count == 0:
            return LayerSpec(attention=attention, mlp=MlpSpec(width=width))
        moe = MoeSpec(
            router=RouterSpec(experts=count, top_k=top_k),
            expert=MlpSpec(width=expert_width),
            shared=None if shared is None else MlpSpec(width=shared),
        )
        return LayerSpec(attention=attention, moe=moe)

    kinds = {count: layer(count) for count in set(experts)}
    layers = tuple(kinds[count] for count in experts)
    return ModelSpec(name="tiny", family="moesaic", vocab=64, hidden=32, layers=layers, mtp=layers[-1:] * mtp)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., ModelSpec]:
    return build
