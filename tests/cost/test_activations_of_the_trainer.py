"""What this project's trainer keeps for backward is what the planner counts, byte for byte."""

from __future__ import annotations

import pytest
import torch

from moesaic.cost.activations import layer_kept
from moesaic.cost.habits import MOESAIC
from moesaic.cost.workload import Columns, Workload
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import single
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec

TOKENS = 128


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
    "latent attention, dense": LayerSpec(attention=latent(), mlp=MlpSpec(width=96)),
    "latent attention, shared expert": LayerSpec(attention=latent(), moe=mixture()),
    "latent attention without a query rank": LayerSpec(attention=latent(q_rank=None), moe=mixture()),
}


def saved_bytes(layer: LayerSpec, layers: int) -> int:
    """Bytes of distinct storages that autograd saves in a forward pass, parameters aside."""
    torch.manual_seed(0)
    model = Decoder(ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(layer,) * layers))
    model.init_weights(0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: list[torch.Tensor] = []
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)
            # Expert rows stand in pooled memory with a little room, so a contiguous tensor counts by itself.
            whole = tensor.numel() * tensor.itemsize if tensor.is_contiguous() else storage.nbytes()
            sizes[storage.data_ptr()] = max(whole, sizes.get(storage.data_ptr(), 0))
        return tensor

    ids = torch.randint(0, 53, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(ids, ids.roll(-1, 1), step_tokens=TOKENS)
    return sum(sizes.values())


@pytest.mark.parametrize("name", KINDS)
def test_one_layer_more_keeps_the_bytes_of_the_table(name: str) -> None:
    layer = KINDS[name]
    model = ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(layer,))
    columns = Columns.of([single(model)])
    rows = layer_kept(model, layer, Workload(model, TOKENS, 1, precision="fp32"), columns, MOESAIC)
    # Row numbers are integers that the operation holds itself, not through autograd.
    counted = {(row.module, row.tensor): float(row.bytes[0]) for row in rows if "order and token" not in row.tensor}
    measured = saved_bytes(layer, 3) - saved_bytes(layer, 2)
    print(name, measured, "bytes saved,", sum(counted.values()), "counted:", counted)
    assert measured == sum(counted.values())
