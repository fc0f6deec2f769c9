"""Hugging Face configs become specifications; transformers' own models say how many parameters they have."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.cost.counts import parameters
from moesaic.spec.errors import SpecError
from moesaic.spec.families import FAMILIES, load_model_spec
from moesaic.spec.families.defaults import DEFAULTS
from moesaic.spec.presets import ALIASES, PRESETS

transformers.logging.set_verbosity_error()

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))

GIVEN = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 16, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
}
"""What a family's class leaves open and a model cannot do without."""

VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 8}),
    ("qwen3", {"attention_bias": True, "head_dim": 64}),
    ("qwen2_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {"mlp_only_layers": [3], "decoder_sparse_step": 2, "attention_bias": True}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ("olmoe", {"num_key_value_heads": 4, "attention_bias": True}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1}),
    ("deepseek_v3", {"attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0}),
    ("ernie4_5_moe", {"use_bias": True, "moe_layer_interval": 2, "moe_layer_start_index": 2}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_end_index": 2, "tie_word_embeddings": False}),
    ("hunyuan_v1_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "attention_bias": True}),
    ("llama4_text", {"moe_layers": [1, 2]}),
    ("gpt_oss", {"attention_bias": False}),
    ("minimax_m2", {"num_key_value_heads": 4}),
]


def built(family, keys):
    """transformers' config of `family` with four layers, its model on the meta device, and our specification."""
    config = CONFIG_MAPPING[family](num_hidden_layers=4, **{**GIVEN.get(family, {}), **keys})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, model, load_model_spec(config.to_dict())


def checked_count(family, keys):
    _, model, spec = built(family, keys)
    theirs = {name: tensor.numel() for name, tensor in model.named_parameters()}
    biases = sum(size for name, size in theirs.items() if name.endswith("e_score_correction_bias"))
    buffers = sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias"))
    ours = parameters(spec)
    assert ours.total == sum(theirs.values()) - biases
    assert ours.buffers == biases + buffers
    assert sum(ours.by_part.values()) == ours.total


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "moesaic"])
def test_class_default_has_as_many_parameters_as_transformers_builds(family):
    checked_count(family, {})


@pytest.mark.parametrize(("family", "keys"), VARIANTS, ids=lambda value: value if isinstance(value, str) else None)
def test_variant_has_as_many_parameters_as_transformers_builds(family, keys):
    checked_count(family, keys)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "moesaic"])
def test_saved_config_reads_like_the_one_in_memory(family, tmp_path):
    config = CONFIG_MAPPING[family](num_hidden_layers=4, **GIVEN.get(family, {}))
    config.save_pretrained(tmp_path)
    saved = load_model_spec(tmp_path, name="model")
    assert saved.layers == load_model_spec(config.to_dict()).layers
    assert saved.hf_config["model_type"] == family


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_released_config_loads(path):
    spec = load_model_spec(path)
    raw = json.loads(path.read_text())
    raw = raw.get("text_config", raw)
    assert len(spec.layers) == raw["num_hidden_layers"]
    assert spec.hf_config["hidden_size"] == spec.hidden == raw["hidden_size"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("DeepSeek-V3", "deepseek-ai--DeepSeek-V3"),
        ("Kimi-K2", "moonshotai--Kimi-K2-Instruct"),
        ("Qwen3-30B-A3B", "Qwen--Qwen3-30B-A3B"),
        ("Qwen3-235B-A22B", "Qwen--Qwen3-235B-A22B"),
        ("Qwen3-8B", "Qwen--Qwen3-8B"),
        ("Mixtral-8x7B", "mistralai--Mixtral-8x7B-v0.1"),
        ("Mixtral-8x22B", "mistralai--Mixtral-8x22B-v0.1"),
        ("GPT-OSS-120B", "openai--gpt-oss-120b"),
        ("MiniMax-M2", "MiniMaxAI--MiniMax-M2.5"),
        ("Llama3-8B", "meta-llama--Meta-Llama-3.1-8B"),
        ("Llama-4-Scout", "meta-llama--Llama-4-Scout-17B-16E-Instruct"),
    ],
)
def test_preset_is_the_released_config(name, file):
    preset = load_model_spec(name)
    released = load_model_spec(Path(__file__).parent / "configs" / f"{file}.json", name=preset.name)
    # The stored copies of MiniMax-M2 and Llama-4-Scout name no token that ends a document.
    apart = {"notes", "hf_config"} | ({"document_end"} if released.document_end is None else set())
    assert preset.model_dump(exclude=apart) == released.model_dump(exclude=apart)


def test_every_preset_loads_strictly_and_names_its_source():
    for name, keys in PRESETS.items():
        spec = load_model_spec(keys, strict=True, name=name)
        assert keys["source"] and spec == load_model_spec(name)


def test_presets_are_found_under_any_case_and_with_an_owner():
    assert load_model_spec("mixtral-8x7b").name == "Mixtral-8x7B"
    assert load_model_spec("deepseek-ai/deepseek-v3").name == "DeepSeek-V3"
    for other, name in ALIASES.items():
        assert load_model_spec(other).name == name


def test_a_folder_is_not_mistaken_for_a_preset(tmp_path):
    folder = tmp_path / "mixtral-8x7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "llama"}))
    assert load_model_spec(str(folder)).family == "llama"


TINY = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **{key: TINY[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    "model_type": "deepseek_v3",
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}


# --- semantics, against the values that transformers computes ---


def test_yarn_scales_deepseek_attention_as_transformers_does():
    scaling = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    scaling |= {"original_max_position_embeddings": 64}
    config, model, spec = built("deepseek_v2", {"rope_scaling": scaling, "max_position_embeddings": 2560})
    attention = spec.layers[0].attention
    assert attention.scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-12)
    assert attention.rope.params["attention_factor"] == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert attention.rope.interleaved and attention.rope.dim == config.qk_rope_head_dim


def test_gpt_oss_yarn_attention_factor_is_transformers():
    _, model, spec = built("gpt_oss", {})
    assert spec.layers[0].attention.rope.params["attention_factor"] == model.model.rotary_emb.attention_scaling
    assert [layer.attention.window for layer in spec.layers] == [128, None, 128, None]


def test_old_and_new_spelling_of_rope_agree():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    base = {**TINY, "model_type": "llama"}
    old = load_model_spec({**base, "rope_theta": 5e5, "rope_scaling": {**scaling, "rope_type": "llama3"}})
    new = load_model_spec({**base, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}})
    assert old.layers == new.layers
    assert old.layers[0].attention.rope.theta == 5e5


def test_partial_rotary_embeddings():
    assert load_model_spec("GLM-4.5").layers[0].attention.rope.dim == 64
    assert load_model_spec("MiniMax-M2").layers[0].attention.rope.dim == 64
    config = CONFIG_MAPPING["minimax_m2"](num_hidden_layers=2, rotary_dim=32)
    assert load_model_spec(config.to_dict()).layers[0].attention.rope.dim == 32


def test_hunyuan_alpha_and_norm_after_rope():
    attention = load_model_spec("Hunyuan-A13B").layers[0].attention
    assert (attention.rope.kind, attention.rope.params["alpha"]) == ("ntk_alpha", 1000.0)
    assert attention.qk_norm == "head" and attention.qk_norm_after_rope


def test_hunyuan_counts_may_differ_by_layer():
    keys = {**TINY, "model_type": "hunyuan_v1_moe", "num_experts": [4, 8, 8, 2], "moe_topk": [1, 2, 2, 1]}
    routers = [layer.moe.router for layer in load_model_spec(keys).layers]
    assert [(router.experts, router.top_k) for router in routers] == [(4, 1), (8, 2), (8, 2), (2, 1)]


def test_llama4_layers():
    config, model, spec = built("llama4_text", {"interleave_moe_layer_step": 2})
    assert [layer.attention.rope is not None for layer in spec.layers] == [True, True, True, False]
    assert [layer.attention.chunk for layer in spec.layers] == [8192, 8192, 8192, None]
    assert [layer.attention.qk_norm for layer in spec.layers] == ["l2", "l2", "l2", "none"]
    assert [hasattr(layer.self_attn, "qk_norm") for layer in model.model.layers] == [True, True, True, False]
    assert spec.layers[3].attention.temperature.floor_positions == config.floor_scale
    assert spec.moe_layers == (1, 3)
    assert [layer.is_moe_layer for layer in model.model.layers] == [False, True, False, True]
    assert spec.layers[1].moe.router.apply == "input" and spec.layers[1].moe.router.when == "post"


SPELLINGS = [
    ("mixtral", {}, (0, 1, 2, 3)),
    ("qwen3_moe", {"decoder_sparse_step": 2}, (1, 3)),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}, (1, 3)),
    ("deepseek_v3", {"first_k_dense_replace": 3, "num_experts_per_tok": 8}, (3,)),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, (1, 2)),
    ("llama4_text", {"moe_layers": [2]}, (2,)),
    ("llama4_text", {"interleave_moe_layer_step": 4}, (3,)),
]


@pytest.mark.parametrize(
    ("family", "keys", "sparse"), SPELLINGS, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(SPELLINGS)]
)
def test_which_layers_are_sparse(family, keys, sparse):
    _, model, spec = built(family, keys)
    assert spec.moe_layers == sparse
    theirs = tuple(
        i
        for i, layer in enumerate(model.model.layers)
        if any("experts" in name for name, _ in layer.named_parameters())
    )
    assert theirs == sparse


def test_sparse_layers_listed_by_count():
    experts = [0, 4, 0, 8]
    spec = load_model_spec({**TINY, "model_type": "moesaic", "num_experts": experts, "num_local_experts": None})
    assert [layer.moe.router.experts if layer.moe else 0 for layer in spec.layers] == experts


def test_kimi_and_moonlight_are_deepseek_v3():
    kimi = load_model_spec({**DEEPSEEK, "model_type": "kimi_k2"})
    assert kimi.family == "deepseek_v3" and kimi.layers == load_model_spec(DEEPSEEK).layers
    moonlight = load_model_spec("Moonlight-16B-A3B")
    assert moonlight.layers[0].attention.q_rank is None and moonlight.layers[1].moe.router.groups == 1


def test_granite_multipliers_and_phi_norms():
    granite = load_model_spec("Granite-3.0-1B-A400M")
    assert (granite.embedding_scale, granite.residual_scale, granite.logits_divisor) == (12.0, 0.22, 6.0)
    assert granite.layers[0].attention.scale == 0.015625
    phi = load_model_spec("Phi-3.5-MoE")
    assert (phi.norm, phi.norm_bias, phi.head_bias) == ("layer", True, True)
    assert phi.layers[0].moe.router.score == "sparsemixer"


def test_longrope_factor_is_transformers():
    scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling |= {"short_mscale": 1.24, "long_mscale": 1.24, "original_max_position_embeddings": 4096}
    _, model, spec = built("phimoe", {"rope_scaling": scaling})
    rope = spec.layers[0].attention.rope
    assert rope.kind == "longrope"
    assert rope.params["attention_factor"] == pytest.approx(model.model.rotary_emb.attention_scaling)


def test_balancing_coefficient_is_in_units_of_one():
    # Hugging Face's loss of a perfectly balanced layer is k: 0.001 at top-8 is 0.008 where balance costs 1.
    assert load_model_spec("Qwen3-30B-A3B").balance_coefficient == pytest.approx(0.008)
    assert load_model_spec("DeepSeek-V3").balance_coefficient == 0.0


def test_text_model_of_a_multimodal_config():
    outer = {"model_type": "llama4", "text_config": {**TINY, "model_type": "llama4_text"}}
    spec = load_model_spec(outer)
    assert spec.family == "llama4_text" and "text" in spec.notes[0]


def test_noise_of_the_config_that_is_left_out_is_said():
    (note,) = load_model_spec({**TINY, "attention_dropout": 0.1, "router_jitter_noise": 0.0}).notes
    assert note.startswith("attention_dropout = 0.1 is not done")


def test_defaults_of_sizes_are_said():
    keys = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    assert any("num_key_value_heads = 8" in note for note in load_model_spec({**keys, "num_attention_heads": 8}).notes)


# --- bad input ---

BAD = [
    ({**TINY, "model_type": "mixtrall"}, ["mixtrall", "mixtral"]),
    ({**TINY, "model_type": None}, ["model_type", "qwen3_moe"]),
    ({"model_type": "mixtral", "hidden_size": 32}, ["num_hidden_layers", "num_attention_heads", "vocab_size"]),
    ({**TINY, "num_attention_heads": 5, "num_key_value_heads": 5}, ["32", "5", "4"]),
    ({**TINY, "num_key_value_heads": 3}, ["4", "3", "1, 2, 4"]),
    ({**TINY, "num_experts_per_tok": 9}, ["9", "8 experts"]),
    ({**TINY, "hidden_size": "wide"}, ["hidden_size", "wide"]),
    ({**TINY, "num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({**TINY, "num_hidden_layers": 10**9}, ["4096"]),
    ({**TINY, "num_local_experts": 2.5}, ["num_local_experts", "2.5"]),
    ({**TINY, "hidden_act": "sillu"}, ["sillu", "silu"]),
    ({**TINY, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
    ({**TINY, "rope_scaling": {"type": "llama3", "factor": 2.0}}, ["low_freq_factor", "high_freq_factor"]),
    ({**TINY, "rope_scaling": {"type": "yarn", "factor": "two"}}, ["factor", "two"]),
    ({**TINY, "rope_theta": -1.0}, ["rope_theta", "-1.0"]),
    ({**TINY, "rope_scaling": "yarn"}, ["rope_scaling", "yarn"]),
    ({**TINY, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["layer type"]),
    ({**TINY, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({**TINY, "head_dim": 7}, ["7"]),
    ({**TINY, "model_type": "phimoe", "num_experts_per_tok": 4}, ["4", "2"]),
    ({**TINY, "model_type": "gpt_oss", "swiglu_limit": 5.0}, ["5.0", "7.0"]),
    ({**TINY, "model_type": "gpt_oss", "layer_types": ["full_attention"] * 3}, ["4 layers", "3"]),
    ({**TINY, "model_type": "gpt_oss", "layer_types": ["sliding"] * 4}, ["sliding", "sliding_attention"]),
    ({**TINY, "model_type": "hunyuan_v1_moe", "num_experts": [4, 4]}, ["2", "4 layers"]),
    ({**DEEPSEEK, "n_group": 3}, ["16", "3"]),
    ({**DEEPSEEK, "topk_group": 5}, ["5", "4"]),
    ({**DEEPSEEK, "n_group": 16}, ["16", "8"]),
    ({**DEEPSEEK, "num_experts_per_tok": 12}, ["12", "8"]),
    ({**DEEPSEEK, "scoring_func": "softmax"}, ["softmax", "sigmoid"]),
    ({**TINY, "model_type": "moesaic", "shared_combine": "learned"}, ["shared_intermediate_size"]),
    ({"model_type": "llama4"}, ["text_config"]),
]


@pytest.mark.parametrize(("keys", "words"), BAD, ids=range(len(BAD)))
def test_bad_config_gets_a_sentence_with_the_numbers(keys, words):
    with pytest.raises(SpecError) as caught:
        load_model_spec(keys)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_misspelt_key_gets_the_nearest_names():
    with pytest.raises(SpecError, match="num_local_experts"):
        load_model_spec({**TINY, "num_local_expert": 4}, strict=True)
    with pytest.raises(SpecError, match="rope_theta"):
        load_model_spec({**TINY, "rope_thetta": 4, "something_of_a_file": 1}, strict=["rope_thetta"])
    assert load_model_spec({**TINY, "something_of_a_file": 1}).family == "mixtral"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["JSON", "line 1"]),
        ("[1]", ["list"]),
        ('{"model_type": "mixtral", "hidden_size": NaN}', ["mixtral"]),
    ],
)
def test_bad_file_gets_a_sentence(tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_model_spec(file)
    assert all(word in str(caught.value) for word in words)


def test_missing_places(tmp_path):
    with pytest.raises(SpecError, match="Mixtral-8x7B"):
        load_model_spec("Mixtral-8x7")
    with pytest.raises(SpecError, match="no file"):
        load_model_spec(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"config\.json"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        load_model_spec(tmp_path)


def test_attention_scale_of_grouped_query_attention():
    assert load_model_spec(TINY).layers[0].attention.scale == pytest.approx(1 / math.sqrt(8))


ODD = [None, -1, 0, 3, 2.5, float("nan"), True, "odd", [], [1], {"a": 1}]


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_give_a_specification_or_a_sentence(family):
    base = {**TINY, **GIVEN.get(family, {}), "model_type": family, "head_dim": 8, "num_hidden_layers": 4}
    for key in [*DEFAULTS[family], *TINY, "router_aux_loss_coef", "eos_token_id", "notes", "partial_rotary_factor"]:
        for value in ODD:
            try:
                load_model_spec({**base, key: value}, strict=True)
            except SpecError as error:
                assert str(error).endswith((".", "?", ")")) or "known are" in str(error) or "did you mean" in str(error)
    for key in ("factor", "type", "alpha", "short_factor", "mscale_all_dim", "original_max_position_embeddings"):
        for value in ODD:
            for kind in ("yarn", "longrope", "dynamic") if family in ("llama", "deepseek_v3") else ():
                scaling = {"type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, key: value}
                try:
                    load_model_spec({**base, "rope_scaling": scaling})
                except SpecError:
                    continue
