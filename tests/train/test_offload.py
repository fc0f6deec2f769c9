"""Kept activations in host memory: results to the bit, bytes as the planner counts them, and when they move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.cost.activations import layer_kept
from moesaic.cost.habits import MOESAIC
from moesaic.cost.offload import block_of, offloaded
from moesaic.cost.workload import Columns, Workload
from moesaic.mesh.device import Done
from moesaic.mesh.host_memory import HostMemory, Place
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import single
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec
from moesaic.spec.options import OFFLOAD_BLOCKS
from moesaic.train.offload import ActivationOffload, Piece

TOKENS = 128
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, v_head_dim=16, rope=RopeSpec(dim=16), scale=0.25)
LATENT = AttentionSpec(
    kind="mla", heads=4, kv_heads=4, head_dim=24, v_head_dim=16, q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8,
    rope=RopeSpec(dim=8), scale=0.2,
)  # fmt: skip
MIXTURE = MoeSpec(router=RouterSpec(experts=8, top_k=2), expert=MlpSpec(width=48), shared=MlpSpec(width=80))
KINDS = {
    "dense": LayerSpec(attention=ATTENTION, mlp=MlpSpec(width=96)),
    "experts": LayerSpec(attention=ATTENTION, moe=MIXTURE),
    "latent": LayerSpec(attention=LATENT, moe=MIXTURE),
}


def model_of(layer: LayerSpec, layers: int) -> ModelSpec:
    return ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(layer,) * layers)


def loss_of(
    layer: LayerSpec,
    layers: int,
    host: HostMemory | None,
    blocks: Sequence[str] = OFFLOAD_BLOCKS,
    prepare: Callable[[Decoder], None] | None = None,
) -> tuple[Decoder, ActivationOffload | None, Tensor]:
    torch.manual_seed(0)
    model = Decoder(model_of(layer, layers))
    model.init_weights(0)
    if prepare is not None:
        prepare(model)
    offload = None if host is None else ActivationOffload(model, host, blocks, smallest=0)
    ids = torch.randint(0, 53, (1, TOKENS))
    return model, offload, model.loss(ids, ids.roll(-1, 1), step_tokens=TOKENS).total


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("blocks", [OFFLOAD_BLOCKS, ("attention",), ("norms", "moe")])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind: str, blocks: tuple[str, ...]) -> None:
    model, _, loss = loss_of(KINDS[kind], 4, None)
    expected = gradients(model, loss)
    model, offload, loss = loss_of(KINDS[kind], 4, HostMemory(), blocks)
    found = gradients(model, loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offload is not None
    assert offload.sent > 0


@pytest.mark.parametrize("blocks", [OFFLOAD_BLOCKS, *((each,) for each in OFFLOAD_BLOCKS)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_sends_the_bytes_of_the_planner(kind: str, blocks: tuple[str, ...]) -> None:
    layer = KINDS[kind]
    sent = []
    for layers in (2, 3):
        _, offload, _ = loss_of(layer, layers, HostMemory(), blocks)
        assert offload is not None
        sent.append(offload.sent)
    model = model_of(layer, 1)
    columns = Columns.of([single(model)])
    columns.offload[:] = 2
    columns.offload_modules[:] = sum(1 << OFFLOAD_BLOCKS.index(block) for block in blocks)
    rows = layer_kept(model, layer, Workload(model, TOKENS, 1, precision="fp32"), columns, MOESAIC)
    assert sent[1] - sent[0] == int(offloaded(rows, layer.moe is not None, columns)[0])


@pytest.mark.parametrize(
    "words", [("layernorm", "moe_act", "mlp", "shared_experts", "mla_up_proj"), ("moe", "core_attn")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_is_not_sent(kind: str, words: tuple[str, ...]) -> None:
    """And the rest is, so that one layer more sends less and gradients have the same bits."""

    def recompute(model: Decoder) -> None:
        for layer in model.layers:
            for module in layer.modules():
                if hasattr(module, "recompute"):
                    module.recompute = frozenset(words)

    model, _, loss = loss_of(KINDS[kind], 3, None)
    expected = gradients(model, loss)
    _, plain, _ = loss_of(KINDS[kind], 3, HostMemory())
    model, offload, loss = loss_of(KINDS[kind], 3, HostMemory(), prepare=recompute)
    found = gradients(model, loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert plain is not None
    assert offload is not None
    assert 0 < offload.sent < plain.sent


def test_every_kept_tensor_belongs_to_one_part() -> None:
    for layer in KINDS.values():
        model = model_of(layer, 1)
        columns = Columns.of([single(model)])
        rows = layer_kept(model, layer, Workload(model, TOKENS, 1), columns, MOESAIC)
        parts = {block_of(row, layer.moe is not None) for row in rows}
        assert parts == {"norms", "attention", "mlp" if layer.moe is None else "moe"}
        assert not np.any(offloaded(rows, True, columns))


def test_two_layers_at_most_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: weakref.WeakSet[Piece] = weakref.WeakSet()
    seen: list[int] = []
    make, bring = Piece.__init__, HostMemory.bring

    def here() -> int:
        """Bytes on the device of the pieces that stand for saved tensors."""
        return sum(piece.size for piece in pieces if piece.here is not None)

    def watched_make(self: Piece, *args: Any) -> None:
        make(self, *args)
        pieces.add(self)

    def watched_bring(self: HostMemory, place: Place, tensor: Tensor) -> Done:
        seen.append(here())
        return bring(self, place, tensor)

    monkeypatch.setattr(Piece, "__init__", watched_make)
    monkeypatch.setattr(HostMemory, "bring", watched_bring)
    _, offload, loss = loss_of(KINDS["dense"], 6, HostMemory())
    assert offload is not None
    one = offload.sent / 6
    assert 0 < here() <= one
    loss.backward()
    assert len(seen) >= 5
    assert max(seen) <= 2 * one
    assert len(pieces) == 0


def test_evaluation_sends_nothing() -> None:
    torch.manual_seed(0)
    model = Decoder(model_of(KINDS["dense"], 2))
    model.init_weights(0)
    offload = ActivationOffload(model, HostMemory(), smallest=0)
    with torch.no_grad():
        model(torch.randint(0, 53, (1, TOKENS)))
    assert offload.sent == 0


def test_small_tensors_stay() -> None:
    torch.manual_seed(0)
    model = Decoder(model_of(KINDS["dense"], 2))
    model.init_weights(0)
    offload = ActivationOffload(model, HostMemory(), smallest=1 << 30)
    ids = torch.randint(0, 53, (1, TOKENS))
    model.loss(ids, ids, step_tokens=TOKENS).total.backward()
    assert offload.sent == 0
