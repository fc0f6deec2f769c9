"""What backward computes again: the same gradients to the last bit, no work twice for nothing, the same choices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.model import recompute
from moesaic.model.decoder import Decoder
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.forced import Forced
from moesaic.model.losses import LossWeights
from moesaic.model.mlp import Mlp
from moesaic.model.norms import RMSNorm
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec
from moesaic.spec.options import RECOMPUTE
from tests.hf.tiny_models import TINY_MODELS, Tiny

WEIGHTS = LossWeights(z=0.1, batch_aux=0.1, sequence_aux=0.1, mtp=0.3)
CHEAP = frozenset({"layernorm", "core_attn", "mlp", "shared_experts", "mla_up_proj"})
SETS = (CHEAP, CHEAP | {"moe"}, frozenset({"full"}))


def decoder_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(spec, dtype=dtype)
    model.init_weights(0)
    with torch.no_grad():  # away from uniform routing and uniform attention
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.train()


def small(router: RouterSpec, **fields: Any) -> ModelSpec:
    attention = AttentionSpec(
        heads=2, kv_heads=1, head_dim=8, v_head_dim=8, rope=RopeSpec(dim=8), scale=0.35, qk_norm="head"
    )
    moe = MoeSpec(router=router, expert=MlpSpec(width=12), shared=MlpSpec(width=12))
    layer = LayerSpec(attention=attention, moe=moe)
    return ModelSpec(name="t", family="moesaic", vocab=31, hidden=16, layers=(layer, layer), **fields)


def batch(vocab: int, rows: int = 2, length: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, labels, positions and documents of rows that hold two documents each."""
    ids = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(length) >= 7).long().expand(rows, -1)
    positions = (torch.arange(length) - 7 * (torch.arange(length) >= 7)).expand(rows, -1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, documents


def use(model: Decoder, words: Collection[str]) -> None:
    for layer in (*model.layers, *(block.get_submodule("layer") for block in model.mtp)):
        layer.recompute = frozenset(words)  # type: ignore[union-attr]


def trained(model: Decoder, words: Collection[str]) -> tuple[Tensor, dict[str, Tensor], list[list[int]]]:
    """Loss, gradients, and choices counted, of one micro-batch."""
    use(model, words)
    model.zero_grad()
    for _, router in model.routers():
        router.step_counts.zero_()
    torch.manual_seed(5)
    ids, labels, positions, documents = batch(model.spec.vocab)
    loss = model.loss(ids, labels, positions, documents, weights=WEIGHTS, step_tokens=labels.numel()).total
    noise = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), noise)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, [router.step_counts.tolist() for _, router in model.routers()]


def assert_same(model: Decoder, words: Collection[str]) -> None:
    (loss, gradients, counts), (wanted_loss, wanted, wanted_counts) = trained(model, words), trained(model, ())
    assert torch.equal(loss, wanted_loss) and counts == wanted_counts and gradients.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_every_family_has_the_same_gradients_to_the_last_bit(tiny: Tiny) -> None:
    model = decoder_of(load_model_spec({"model_type": tiny.model_type, **tiny.config}))
    for words in SETS:
        assert_same(model, words)


DEEPSEEK = next(tiny for tiny in TINY_MODELS if tiny.model_type == "deepseek_v3")


@settings(max_examples=25)
@given(st.sets(st.sampled_from(RECOMPUTE)), st.sampled_from([torch.float32, torch.bfloat16]))
def test_so_does_any_set_of_words(words: set[str], dtype: torch.dtype) -> None:
    model = decoder_of(load_model_spec({"model_type": DEEPSEEK.model_type, **DEEPSEEK.config}), dtype)
    assert_same(model, words)


@pytest.mark.parametrize("words", SETS, ids=lambda words: "-".join(sorted(words)))
def test_ties_are_broken_as_before(words: Collection[str]) -> None:
    """Router weights of zero: every expert ties with every other."""
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    for _, router in model.routers():
        torch.nn.init.zeros_(router.weight)
    assert_same(model, words)


@pytest.mark.parametrize("words", SETS, ids=lambda words: "-".join(sorted(words)))
def test_routers_that_draw_noise_draw_the_same(words: Collection[str]) -> None:
    assert_same(decoder_of(small(RouterSpec(experts=8, top_k=2, score="sparsemixer", jitter=0.3))), words)


@pytest.mark.parametrize("words", SETS, ids=lambda words: "-".join(sorted(words)))
def test_weight_gradients_are_left_for_later_all_the_same(words: Collection[str]) -> None:
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    wanted = trained(model, ())[1]
    use(model, words)
    model.zero_grad()
    queue, (ids, labels, positions, documents) = WeightGradients(), batch(model.spec.vocab)
    with deferring(queue):
        loss = model.loss(ids, labels, positions, documents, weights=WEIGHTS, step_tokens=labels.numel()).total
    loss.backward()
    experts = [name for name in wanted if "experts" in name]
    assert experts and all(model.get_parameter(name).grad is None for name in experts)
    queue.run()
    assert all(torch.equal(model.get_parameter(name).grad, wanted[name]) for name in wanted)


@pytest.mark.parametrize("words", SETS, ids=lambda words: "-".join(sorted(words)))
def test_gradients_are_added_where_others_are(words: Collection[str]) -> None:
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    for layer in model.layers:
        assert layer.moe is not None
        layer.moe.experts.accumulate_in_place = True
    use(model, words)
    ids, labels, *_ = batch(31)
    found = []
    for _ in range(2):
        model.loss(ids, labels, step_tokens=40).total.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        addresses = [layer.moe.experts.down.grad.data_ptr() for layer in model.layers]
    assert all(torch.allclose(found[1][name], 2 * found[0][name], rtol=1e-4, atol=1e-6) for name in found[0])
    model.loss(ids, labels, step_tokens=40).total.backward()
    assert [layer.moe.experts.down.grad.data_ptr() for layer in model.layers] == addresses


def calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Filled with an entry for each call of a method."""
    found: list[str] = []
    method = getattr(owner, name)

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        found.append(name)
        return method(self, *args, **named)

    monkeypatch.setattr(owner, name, counted)
    return found


def test_nothing_runs_more_than_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readers of a layer's first norm, three of its second: one more run for all of them."""
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    norms, blocks = calls(monkeypatch, RMSNorm, "forward"), calls(monkeypatch, Mlp, "_activation")
    trained(model, ())
    once, blocks_once = len(norms), len(blocks)
    trained(model, {"layernorm"})
    assert len(norms) - once == once + 2 * 2 and len(blocks) == 2 * blocks_once  # two layers, two norms each
    del norms[:], blocks[:]
    trained(model, {"shared_experts"})
    assert len(norms) == once and len(blocks) == 2 * blocks_once
    del norms[:], blocks[:]
    trained(model, {"moe", "shared_experts", "layernorm"})
    assert len(blocks) == 2 * blocks_once and len(norms) == once + 4
    del norms[:]
    with torch.no_grad():
        use(model, RECOMPUTE)
        model.loss(*batch(31)[:2], step_tokens=40)
    assert len(norms) == once


def test_a_second_backward_of_one_graph_makes_everything_once_more() -> None:
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    use(model, CHEAP)
    ids, labels, *_ = batch(31)
    loss = model.loss(ids, labels, step_tokens=40).total
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in first.items())


def test_parameters_below_a_frozen_embedding_have_their_gradients() -> None:
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    assert model.embed is not None
    model.embed.weight.requires_grad_(False)
    for words in SETS:
        assert_same(model, words)


@pytest.mark.parametrize("words", [{"moe"}, {"full"}], ids=str)
def test_forced_choices_are_those_of_the_micro_batch_itself(words: Collection[str]) -> None:
    """Another micro-batch is announced before the first one's backward, as in a pipeline or another lane."""
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    use(model, words)
    seen: list[Tensor] = []
    model.routers()[0][1].register_forward_hook(lambda module, inputs, routing: seen.append(routing.ids_TK))
    forced = Forced(model.routers(), seq_len=20, mode="even")
    forced.begin_step(1)
    losses = []
    for number in range(2):
        forced.set_tokens(torch.arange(1) + 3 * number, torch.arange(20))
        ids, labels, *_ = batch(31, rows=1)
        losses.append(model.loss(ids, labels, step_tokens=40).total)
    forced.clear_tokens()
    for loss in losses:
        loss.backward()
    first, second, first_again, second_again = seen
    assert not torch.equal(first, second)
    assert torch.equal(first_again, first) and torch.equal(second_again, second)


def test_recording_happens_on_the_first_pass_alone() -> None:
    model = decoder_of(small(RouterSpec(experts=8, top_k=2)))
    use(model, {"full"})
    written: list[int] = []

    class Sink:
        def write(self, step: int, layer: int, sequences_B: Tensor, places_S: Tensor, ids_BSK: Tensor) -> None:
            written.append(layer)

        def finish(self, step: int) -> None: ...

    forced = Forced(model.routers(), seq_len=20, sink=Sink())
    forced.begin_step(1)
    forced.set_tokens(torch.arange(2), torch.arange(20))
    trained(model, {"full"})
    assert written == [0, 1]


def test_a_tensor_that_took_the_place_of_a_dropped_one_is_kept() -> None:
    """Memory of a dropped result is used again within the same pass; what stands there then is another tensor."""
    x = torch.randn(64, 64, requires_grad=True)
    with recompute.recomputing(frozenset({"mlp"})):
        y = recompute.droppable_output("mlp", torch.sin, x)
        total = (y * 2).sum() / 2
        del y
        others = [torch.randn(64, 64) for _ in range(8)]
        total = total + sum((x * other).sum() for other in others)
    total.backward()
    assert torch.allclose(x.grad, x.detach().cos() + sum(others))
