"""A mixture made from a dense model computes what the dense model did."""

from __future__ import annotations

import pytest
import torch

from moesaic.hf import export_decoder
from moesaic.mesh.cut import Cut
from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.families import load_model_spec
from moesaic.train import loop
from moesaic.train.checkpoint import save_model_checkpoint
from moesaic.train.upcycle import load_dense, upcycle
from tests.meshes import layouts_by_share, mesh_of

SIZES = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DENSE = {"model_type": "llama", "intermediate_size": 24, **SIZES}
DENSE_QK = {"model_type": "qwen3", "intermediate_size": 24, "head_dim": 8, **SIZES}
MIXTRAL = {
    "model_type": "mixtral",
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    **SIZES,
}
QWEN = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "head_dim": 8,
    "decoder_sparse_step": 2,
    **SIZES,
}


def made(config, seed=0):
    decoder = Decoder(load_model_spec(config))
    decoder.init_weights(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" not in name:
                parameter.mul_(8)
    return decoder


NATIVE = {
    "model_type": "moesaic",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "intermediate_size": 24,
    "num_experts": 0,
    **SIZES,
}
RESIDUAL = NATIVE | {
    "num_experts": [0, 4],
    "num_experts_per_tok": 1,
    "shared_intermediate_size": 24,
    "shared_combine": "learned",
    "norm_topk_prob": True,
}
GRANITE = MIXTRAL | {
    "model_type": "granitemoe",
    "tie_word_embeddings": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 8**-0.5,
}


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        (DENSE, MIXTRAL),
        (DENSE_QK, QWEN),
        (NATIVE, RESIDUAL),
        (DENSE, GRANITE),
        (DENSE | {"tie_word_embeddings": True}, MIXTRAL),
    ],
)
def test_the_first_logits_are_the_dense_models(dense, sparse):
    source, target = made(dense, 1), made(sparse, 2)
    ids_BS = torch.randint(0, 257, (2, 20))
    assert upcycle(source, target) == []
    with torch.no_grad():
        expected = source(ids_BS)
        assert expected.std() > 0.5
        torch.testing.assert_close(target(ids_BS), expected, rtol=1e-4, atol=1e-5)


def test_noise_parts_the_experts_and_is_reproducible():
    targets = []
    for _ in range(2):
        source, target = made(DENSE, 1), made(MIXTRAL, 2)
        upcycle(source, target, noise=0.1, seed=7)
        targets.append(target.layers[0].moe.experts.down.detach())
    assert torch.equal(*targets)
    first, second = targets[0][0], targets[0][1]
    spread = float((first - second).std()) / float(first.std())
    assert 0.1 < spread < 0.2, "two draws of 0.1 standard deviations differ by √2 · 0.1"


def test_a_router_that_does_not_normalise_is_said():
    source = made(DENSE_QK)
    notes = upcycle(source, made(QWEN | {"norm_topk_prob": False}))
    assert any("do not sum to one" in note for note in notes)


def test_another_rotary_base_is_said():
    notes = upcycle(made(DENSE), made(MIXTRAL | {"rope_theta": 1e6}))
    (note,) = notes
    assert "layers.0.attention.rope.theta is 10000.0 in the dense model and 1000000.0 here" in note


@pytest.mark.parametrize(
    ("dense", "sparse", "expected"),
    [
        (DENSE, MIXTRAL | {"intermediate_size": 32}, "width is 24 and the experts' is 32"),
        (DENSE, MIXTRAL | {"num_hidden_layers": 3}, "has 2 layers and .* has 3"),
        (DENSE | {"vocab_size": 300}, MIXTRAL, r"embed.weight is \[300, 16\] .* \[257, 16\]"),
        (MIXTRAL, MIXTRAL, "already has experts"),
        (DENSE, DENSE, "no experts to fill"),
    ],
)
def test_models_that_do_not_fit_are_refused_with_the_numbers(dense, sparse, expected):
    with pytest.raises(MoesaicError, match=expected):
        upcycle(made(dense), made(sparse))


def test_a_run_upcycles_from_a_checkpoint(make_run, console, tmp_path, metrics):
    run = make_run("dense", model=DENSE | {"rms_norm_eps": 1e-5})
    assert loop.train(run, console=console) == 0
    sets = ["model.init='upcycle'", f"model.upcycle_from='{tmp_path / 'dense'}'", "train.warmup_steps=0"]
    assert loop.train(make_run("sparse", *sets, model=MIXTRAL | {"rms_norm_eps": 1e-5}), console=console) == 0
    dense, sparse = metrics(tmp_path / "dense"), metrics(tmp_path / "sparse")
    assert sparse[0]["loss"] < dense[0]["loss"] - 0.2, "it starts where the dense model stopped"


def test_a_run_starts_from_an_imported_model(make_run, console, tmp_path):
    source = made(DENSE, 3)
    save_model_checkpoint(source, source.spec, tmp_path / "imported")
    sets = ["model.init='upcycle'", f"model.upcycle_from='{tmp_path / 'imported'}'", "train.steps=1"]
    assert loop.train(make_run("from_imported", *sets, "train.warmup_steps=0", model=MIXTRAL), console=console) == 0


@pytest.mark.parametrize("sparse", [QWEN, RESIDUAL], ids=["qwen", "residual"])
def test_every_rank_of_a_layout_gets_its_share(sparse, tmp_path):
    """Of the dense weights, read one by one from a checkpoint, and of the noise: what one process has."""
    dense, heads = (DENSE_QK if sparse is QWEN else NATIVE), {"num_key_value_heads": 2}
    source, whole = made(dense | heads, 1), made(sparse | heads, 2)
    save_model_checkpoint(source, source.spec, tmp_path / "step-1")
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    upcycle(source, whole, noise=0.1, seed=3)
    after = whole.state_dict()
    layouts = list(layouts_by_share(whole.spec, 4))
    assert len(layouts) > 4
    for layout, ranks in layouts:
        for rank in ranks:
            share = Decoder(whole.spec, mesh=mesh_of(layout, rank))
            cuts = {name: share.cuts.get(name, Cut(tuple(tensor.shape))) for name, tensor in before.items()}
            for name, tensor in share.state_dict().items():
                tensor.copy_(cuts[name].take(before[name]))
            upcycle(load_dense(tmp_path / "step-1"), share, noise=0.1, seed=3)
            for name, tensor in share.state_dict().items():
                assert torch.equal(tensor, cuts[name].take(after[name])), f"{name} of rank {rank} of {layout}"


def test_a_hugging_face_folder_gives_the_dense_weights(tmp_path):
    source = made(DENSE, 1)
    export_decoder(source, tmp_path / "hf")
    targets = made(MIXTRAL, 2), made(MIXTRAL, 2)
    assert upcycle(load_dense(tmp_path / "hf"), targets[0]) == upcycle(source, targets[1])
    first, second = (target.state_dict() for target in targets)
    assert all(torch.equal(first[name], second[name]) for name in first)
