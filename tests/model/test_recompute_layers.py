"""Whole layers computed again, a number of them or several together: the same gradients to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.layer import Layer
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout
from moesaic.spec.model import ModelSpec, RouterSpec
from moesaic.spec.tables import LayoutTable
from tests.model.test_recompute import DEEPSEEK, WEIGHTS, batch, decoder_of, small

WAYS: list[dict[str, Any]] = [
    {"recompute": ["full"], "recompute_method": "block", "recompute_layers": 1},
    {"recompute": ["full", "sar"], "recompute_method": "block", "recompute_layers": 1},
    {"recompute": ["full"], "recompute_layers": 2},
    {"recompute": ["full", "layernorm"], "recompute_layers": 8},
    {"recompute_stages": [["mla_up_proj", "core_attn"]]},
]
MODELS = {
    "deepseek": load_model_spec({"model_type": DEEPSEEK.model_type, **DEEPSEEK.config}),
    "noise": small(RouterSpec(experts=8, top_k=2, score="sparsemixer", jitter=0.3)),
    "blocks": small(RouterSpec(experts=8, top_k=2), mtp=small(RouterSpec(experts=8, top_k=2)).layers[:1]),
}


def recomputing(spec: ModelSpec, keys: dict[str, Any]) -> Decoder:
    """With the weights of `decoder_of`."""
    layout = resolve_layout(LayoutTable.model_validate(keys), spec, 1, seq_len=None, global_batch=None)
    model = Decoder(spec, mesh=Mesh.create(layout, 60.0, spec.tied_embeddings))
    model.load_state_dict(decoder_of(spec).state_dict())
    return model.train()


def trained(model: Decoder, queue: WeightGradients | None = None) -> tuple[Tensor, dict[str, Tensor], list[list[int]]]:
    """Loss, gradients, and choices counted, of one micro-batch."""
    torch.manual_seed(5)
    ids, labels, positions, documents = batch(model.spec.vocab)
    with deferring(queue):
        loss = model.loss(ids, labels, positions, documents, weights=WEIGHTS, step_tokens=labels.numel()).total
    loss.backward()
    if queue is not None:
        queue.run()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, [router.step_counts.tolist() for _, router in model.routers()]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keys", WAYS, ids=str)
def test_gradients_are_the_same_to_the_last_bit(keys: dict[str, Any], name: str, later: bool) -> None:
    spec = MODELS[name]
    loss, gradients, counts = trained(recomputing(spec, keys), WeightGradients() if later else None)
    wanted_loss, wanted, wanted_counts = trained(decoder_of(spec))
    assert torch.equal(loss, wanted_loss) and counts == wanted_counts and gradients.keys() == wanted.keys()
    assert [each for each in wanted if not torch.equal(gradients[each], wanted[each])] == []


def test_each_layer_runs_as_often_as_asked() -> None:
    """Four layers: the first of a block twice, the others once; in chunks of three all of them twice."""
    layer = small(RouterSpec(experts=8, top_k=2)).layers[0]
    spec = ModelSpec(name="t", family="moesaic", vocab=31, hidden=16, layers=(layer,) * 4)

    def runs(keys: dict[str, Any]) -> list[int]:
        model, found = recomputing(spec, keys), [0] * 4

        def count(index: int) -> None:
            found[index] += 1

        for index, each in enumerate(model.layers):
            each.attn_norm.register_forward_pre_hook(lambda *_, index=index: count(index))
        trained(model)
        return found

    assert runs({}) == [1, 1, 1, 1]
    assert runs(WAYS[0]) == [2, 1, 1, 1]
    assert runs({"recompute": ["full"], "recompute_layers": 3}) == [2, 2, 2, 2]
    assert runs({"recompute": ["full"]}) == [2, 2, 2, 2]


def test_prediction_blocks_follow_megatron_core() -> None:
    """Recomputed whole with uniform and 1 alone."""

    def words(keys: dict[str, Any]) -> set[str]:
        block: nn.Module = recomputing(MODELS["blocks"], keys).mtp[0]
        layer = block.get_submodule("layer")
        assert isinstance(layer, Layer)
        return set(layer.recompute)

    assert words({"recompute": ["full"]}) == {"full"}
    assert words(WAYS[1]) == {"layernorm", "moe_act"}
    assert words(WAYS[2]) == set()
