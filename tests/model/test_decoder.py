from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.errors import MoesaicError, SpecError
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec

VOCAB = 31
EVERYTHING = LossWeights(z=0.01, batch_aux=0.1, sequence_aux=0.1, global_aux=0.1, mtp=0.3)


def _attention(**fields: object) -> AttentionSpec:
    return AttentionSpec(
        **{"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "scale": 0.35, "rope": RopeSpec(dim=8)} | fields
    )


def _mla() -> AttentionSpec:
    sizes = {"kv_heads": 4, "head_dim": 12, "q_rank": 10, "kv_rank": 6, "nope_dim": 8, "rope_dim": 4}
    return _attention(kind="mla", **sizes, rope=RopeSpec(dim=4, interleaved=True))


def _spec(mtp: int = 0, **fields: object) -> ModelSpec:
    """One layer of each kind: dense with a window, mixture with sinks and a chunk, mixture on latent attention."""
    moe = MoeSpec(router=RouterSpec(experts=4, top_k=2, norm=True), expert=MlpSpec(width=12), shared=MlpSpec(width=8))
    layers = (
        LayerSpec(attention=_attention(window=3), mlp=MlpSpec(width=20)),
        LayerSpec(attention=_attention(sinks=True, chunk=4, qk_norm="head"), moe=moe),
        LayerSpec(attention=_mla(), moe=moe),
    )
    ahead = tuple(LayerSpec(attention=_attention(), moe=moe) for _ in range(mtp))
    return ModelSpec(
        **{"name": "t", "family": "moesaic", "vocab": VOCAB, "hidden": 16, "layers": layers, "mtp": ahead} | fields
    )


def _model(seed: int = 0, **fields: object) -> Decoder:
    model = Decoder(_spec(**fields))
    model.init_weights(seed)
    with torch.no_grad():  # away from uniform routing and uniform attention
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model


def _batch(rows: int = 4, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same_gradients(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, (ids, labels) = _model(logits_divisor=2.0, head_bias=True), _batch()
    labels[1, 3:] = -100
    trained = int((labels != -100).sum())
    parts = model.loss(ids, labels, step_tokens=trained)
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    assert parts.tokens == trained
    torch.testing.assert_close(parts.cross_entropy_sum, expected.detach())
    torch.testing.assert_close(parts.total, expected / trained)
    parts.total.backward()
    got = _gradients(model)
    model.zero_grad()
    (F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())).backward()
    _assert_same_gradients(got, _gradients(model))


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    model, (ids, labels) = _model(mtp=1), _batch()
    labels[0, :7] = -100
    weights = LossWeights(sequence_aux=0.1, mtp=0.3)
    whole = model.loss(ids, labels, weights=weights, step_tokens=33)
    whole.total.backward()
    wanted = _gradients(model)
    model.zero_grad()
    parts = [model.loss(ids[a:b], labels[a:b], weights=weights, step_tokens=33) for a, b in pairwise((0, 1, 3, 4))]
    for part in parts:
        part.total.backward()
    assert sum(part.tokens for part in parts) == whole.tokens == 33
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    for name in ("sequence_aux", "mtp"):
        torch.testing.assert_close(sum(part.parts[name] for part in parts), whole.parts[name])
    _assert_same_gradients(_gradients(model), wanted)


def test_total_is_the_weighted_sum_of_its_parts() -> None:
    model, (ids, labels) = _model(mtp=2), _batch()
    loss = model.loss(ids, labels, weights=EVERYTHING, step_tokens=40)
    assert set(loss.parts) == {"z", "batch_aux", "sequence_aux", "global_aux", "mtp"}
    total = loss.cross_entropy_sum / 40 + sum(getattr(EVERYTHING, name) * part for name, part in loss.parts.items())
    torch.testing.assert_close(loss.total.detach(), total)


def test_packed_documents_are_as_if_alone() -> None:
    model = _model()
    ids, _ = _batch(1, 14)
    documents = torch.tensor([[0] * 5 + [1] * 1 + [2] * 8])
    positions = torch.tensor([[*range(5), *range(1), *range(8)]])
    packed = model(ids, positions, documents)
    for part in (slice(0, 5), slice(5, 6), slice(6, 14)):
        torch.testing.assert_close(packed[:, part], model(ids[:, part]), rtol=1e-4, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    model, (ids, _) = _model(), _batch()
    together = model(ids)
    for row in range(len(ids)):
        torch.testing.assert_close(together[row], model(ids[row : row + 1])[0], rtol=1e-4, atol=1e-5)


def test_no_token_sees_the_future() -> None:
    model, (ids, _) = _model(), _batch(1, 12)
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % VOCAB
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_each_choice_is_counted_once() -> None:
    model, (ids, labels) = _model(mtp=1), _batch()
    loss = model.loss(ids, labels, weights=EVERYTHING, step_tokens=40)
    loss.total.backward()
    assert [index for index, _ in model.routers()] == [1, 2, 3]
    assert [int(router.step_counts.sum()) for _, router in model.routers()] == [4 * 10 * 2] * 3
    model.eval()
    model.loss(ids, labels, step_tokens=40)
    assert [int(router.step_counts.sum()) for _, router in model.routers()] == [4 * 10 * 2] * 3


def test_padding_changes_neither_losses_nor_counts_nor_gradients() -> None:
    ids, labels = _batch(2, 10)
    alone, padded = _model(mtp=1), _model(mtp=1)
    documents = torch.zeros_like(ids)
    documents[:, 7:] = -1
    short = [part[:, :7].contiguous() for part in (ids, labels, documents)]
    labels[:, 7:] = -100
    for model, (ids_, labels_, documents_) in ((alone, short), (padded, (ids, labels, documents))):
        loss = model.loss(ids_, labels_, None, documents_, weights=EVERYTHING, step_tokens=14)
        loss.total.backward()
    short_loss = alone.loss(short[0], short[1], None, short[2], weights=EVERYTHING, step_tokens=14)
    for name, part in short_loss.parts.items():
        torch.testing.assert_close(loss.parts[name], part, msg=lambda m, n=name: f"{n}: {m}")
    _assert_same_gradients(_gradients(padded), _gradients(alone))
    for (_, a), (_, b) in zip(padded.routers(), alone.routers(), strict=True):
        assert int(a.step_counts.sum()) == 2 * 7 * 2
        assert torch.equal(a.step_counts * 2, b.step_counts)


def test_a_prediction_block_predicts_one_token_further() -> None:
    """Against the definition: the block sees token i + 1 and the state at i, and is scored on token i + 2."""
    model, (ids, labels) = _model(mtp=1), _batch(2, 9)
    documents = torch.tensor([[0] * 9, [0] * 4 + [1] * 5])
    mtp = model.loss(ids, labels, None, documents, weights=LossWeights(mtp=1.0), step_tokens=18).parts["mtp"]
    block = model.mtp[0]
    hidden = model.hidden(ids, None, documents)
    ahead = torch.zeros_like(ids)
    ahead[:, :-1] = ids[:, 1:]
    ahead[1, 3] = 0  # the document ends there
    from moesaic.model.sequences import Sequences

    state, _ = block(hidden, model.embed(ahead.flatten()), Sequences(2, 9, None, documents))
    logits = model.logits(state).view(2, 9, VOCAB)
    total = 0.0
    for b in range(2):
        for i in range(8):
            if documents[b, i] == documents[b, i + 1]:
                total -= float(logits[b, i].detach().log_softmax(-1)[labels[b, i + 1]])
    assert float(mtp) == pytest.approx(total / 18, rel=1e-4)


def test_prediction_blocks_leave_the_logits_alone() -> None:
    ids, _ = _batch()
    torch.testing.assert_close(_model(mtp=0)(ids), _model(mtp=2)(ids))


def test_tied_head_has_no_weight_of_its_own() -> None:
    model = _model(tied_embeddings=True, head_bias=True)
    names = set(model.state_dict())
    assert "head.weight" not in names and "head.bias" in names
    ids, labels = _batch()
    model.loss(ids, labels, step_tokens=40).total.backward()
    got = _gradients(model)["embed.weight"]
    model.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(got, _gradients(model)["embed.weight"], rtol=1e-4, atol=1e-6)


def test_learned_positions_are_added() -> None:
    model = _model(learned_positions=True, max_positions=10)
    ids, _ = _batch()
    assert model.positions is not None
    with_positions = model(ids)
    shifted = model(ids[:, :5], torch.arange(5, 10).expand(4, 5))
    assert not torch.allclose(with_positions[:, :5], shifted)
    with pytest.raises(MoesaicError, match="position 10 is beyond the 10"):
        model(ids, torch.arange(1, 11).expand(4, 10))


def test_multipliers_of_granite_scale_what_they_name() -> None:
    ids, _ = _batch()
    plain, divided = _model(), _model(logits_divisor=4.0)
    torch.testing.assert_close(plain(ids) / 4, divided(ids))
    # With residual scale 0 only the embedding reaches the head, whatever its size, since the norm removes it.
    bare, large = _model(residual_scale=0.0), _model(residual_scale=0.0, embedding_scale=5.0)
    torch.testing.assert_close(bare(ids), large(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("wrong", "shown"), [(VOCAB, f"{VOCAB} is outside"), (-1, "-1 is outside")])
def test_token_ids_outside_the_vocabulary_are_refused(wrong: int, shown: str) -> None:
    ids, _ = _batch()
    ids[2, 2] = wrong
    with pytest.raises(MoesaicError, match=shown):
        _model()(ids)


def test_a_layer_is_dense_or_a_mixture() -> None:
    with pytest.raises(SpecError, match="exactly one"):
        Decoder(_spec(layers=(LayerSpec(attention=_attention()),)))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    small, large = Decoder(_spec()), Decoder(_spec(mtp=1))
    small.init_weights(5)
    large.init_weights(5)
    for name, value in small.state_dict().items():
        assert torch.equal(value, large.state_dict()[name]), name
    assert not torch.equal(_model(1).embed.weight, _model(2).embed.weight)


def test_initial_weights_have_the_stated_spread() -> None:
    model = Decoder(_spec(init_std=0.1, hidden=64))
    model.init_weights(0, scale_residual=True)
    assert float(model.embed.weight.detach().std()) == pytest.approx(0.1, rel=0.1)
    assert float(model.layers[0].mlp.down.weight.detach().std()) == pytest.approx(0.1 / 6**0.5, rel=0.1)
    assert float(model.layers[1].moe.experts.down.detach().std()) == pytest.approx(0.1 / 6**0.5, rel=0.1)
    assert torch.equal(model.layers[1].attn.q_norm.weight, torch.ones(8))


def test_a_model_built_without_memory_is_the_same_model() -> None:
    model = Decoder(_spec(mtp=1), device="meta").to_empty(device="cpu")
    model.init_weights(3)
    here = Decoder(_spec(mtp=1))
    here.init_weights(3)
    for (name, a), (_, b) in zip(model.state_dict().items(), here.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_bf16_model_trains_close_to_fp32() -> None:
    ids, labels = _batch()
    narrow = Decoder(_spec(), dtype=torch.bfloat16)
    narrow.init_weights(0)
    wide = Decoder(_spec())
    wide.load_state_dict(narrow.state_dict())
    losses = []
    for model in (narrow, wide):
        loss = model.loss(ids, labels, weights=EVERYTHING, step_tokens=40)
        loss.total.backward()
        losses.append(loss.total.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for name, parameter in narrow.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16, name
        assert parameter.grad.isfinite().all(), name
