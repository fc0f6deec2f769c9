"""Parameters, bytes and FLOPs against published figures and against counting positions one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.counts import (
    attention_core_flops,
    checkpoint_bytes,
    flops_per_token,
    layer_flops,
    layer_parameters,
    parameters,
    visible_positions,
)
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import AttentionSpec
from moesaic.spec.presets import PRESETS

TOTALS = {
    # name: (total in billions, active in billions); model cards, papers, and transformers' models on the meta device
    "Mixtral-8x7B": (46.70, 12.88),
    "Mixtral-8x22B": (140.62, 39.15),
    "DeepSeek-V2-Lite": (15.71, 2.66),
    "DeepSeek-V2": (235.74, 21.38),
    "DeepSeek-V3": (671.03, 37.55),
    "Kimi-K2": (1026.41, 32.86),
    "Qwen1.5-MoE-A2.7B": (14.32, 2.69),
    "Qwen2-57B-A14B": (57.41, 14.25),
    "Qwen3-30B-A3B": (30.53, 3.35),
    "Qwen3-235B-A22B": (235.09, 22.19),
    "Qwen3-Coder-480B-A35B": (480.15, 35.47),
    "GLM-4.5": (352.80, 33.63),
    "GLM-4.5-Air": (106.85, 13.42),
    "GPT-OSS-20B": (20.91, 4.19),
    "GPT-OSS-120B": (116.83, 5.71),
    "OLMoE-1B-7B": (6.92, 1.28),
    "Granite-3.0-1B-A400M": (1.33, 0.43),
    "Granite-3.0-3B-A800M": (3.30, 0.88),
    "Phi-3.5-MoE": (41.87, 6.64),
    "MiniMax-M2": (228.69, 11.03),
    "Llama-4-Scout": (107.77, 17.17),
    "Llama-4-Maverick": (400.71, 17.18),
    "ERNIE-4.5-21B-A3B": (21.83, 3.35),
    "ERNIE-4.5-300B-A47B": (299.48, 47.93),
    "Hunyuan-A13B": (80.39, 12.75),
    "dots.llm1": (142.77, 14.02),
    "Llama2-7B": (6.74, 6.74),
    "Llama2-13B": (13.02, 13.02),
    "Llama2-70B": (68.98, 68.98),
    "Llama3-8B": (8.03, 8.03),
    "Llama3-70B": (70.55, 70.55),
    "Llama3.1-405B": (405.85, 405.85),
    "Qwen3-8B": (8.19, 8.19),
    "Mistral-7B": (7.24, 7.24),
}


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals(name):
    counts = parameters(load_model_spec(name))
    total, active = TOTALS[name]
    assert counts.total / 1e9 == pytest.approx(total, abs=0.006)
    assert counts.active / 1e9 == pytest.approx(active, abs=0.006)
    assert sum(counts.by_part.values()) == counts.total


def test_hunyuan_large_total():
    # The paper prints 389 B and 52 B; cross-layer attention removes 0.3 B of keys and values that are counted here.
    counts = parameters(load_model_spec("Hunyuan-Large"))
    assert round(counts.total / 1e9) == 389 and round(counts.active / 1e9) == 52


def test_prediction_blocks_are_counted_apart():
    counts = parameters(load_model_spec("DeepSeek-V3"))
    assert (counts.total + counts.mtp) / 1e9 == pytest.approx(682.6, abs=0.06)
    for name, both in (("GLM-4.5", 356.8), ("GLM-4.5-Air", 109.2)):
        counts = parameters(load_model_spec(name))
        assert (counts.total + counts.mtp) / 1e9 == pytest.approx(both, abs=0.06)


PUBLISHED = [
    # TFLOP/s over tokens/s in Megatron-Core, NeMo and Megatron-Bridge releases, in GFLOP per token
    ("DeepSeek-V3", 4096, False, 249.7),
    ("DeepSeek-V3", 4096, True, 260.0),
    ("Kimi-K2", 4096, False, 204.5),
    ("Qwen3-30B-A3B", 4096, False, 23.0),
    ("Qwen3-235B-A22B", 4096, False, 148.0),
    ("GPT-OSS-120B", 4096, False, 32.6),
    ("Llama3-8B", 8192, False, 51.5),
    ("Llama3-70B", 8192, False, 449.2),
    ("Llama3.1-405B", 8192, False, 2524),
    # MegaScale-MoE, arXiv 2505.11432: from its model FLOP utilisation
    ("MegaScale-MoE-352B", 8192, False, 282.5),
    # the same convention applied by hand to the dimensions, to the digits printed
    ("DeepSeek-V2", 4096, False, 155.0),
    ("DeepSeek-V2-Lite", 4096, False, 16.4),
    ("Mixtral-8x7B", 4096, False, 79.7),
    ("Mixtral-8x22B", 4096, False, 242.0),
    ("Qwen2-57B-A14B", 4096, False, 84.7),
    ("Llama3-8x70B", 4096, False, 771.0),
]


@pytest.mark.parametrize(("name", "seq_len", "mtp", "published"), PUBLISHED)
def test_published_flops_per_token(name, seq_len, mtp, published):
    flops = flops_per_token(load_model_spec(name), seq_len, mtp=mtp)
    assert flops.total / 1e9 == pytest.approx(published, rel=2e-3)
    assert sum(flops.by_part.values()) == pytest.approx(flops.total)


@pytest.mark.parametrize(
    ("name", "mtp", "windows", "by_hand"),
    [
        ("GPT-OSS-120B", False, False, 34.4),
        ("GPT-OSS-120B", False, True, 32.7),
        ("GPT-OSS-20B", False, False, 24.1),
        ("GLM-4.5", False, True, 225),
        ("GLM-4.5", True, True, 232),
        ("GLM-4.5-Air", False, True, 90.7),
        ("GLM-4.5-Air", True, True, 96.5),
    ],
)
def test_flops_with_the_router(name, mtp, windows, by_hand):
    flops = flops_per_token(load_model_spec(name), 4096, mtp=mtp, windows=windows)
    assert (flops.total + flops.excluded["router"]) / 1e9 == pytest.approx(by_hand, rel=2e-3)


def test_megascale_total_needs_the_shared_expert():
    # 352 B in the name; 341.3 B as its table prints it.
    counts = parameters(load_model_spec("MegaScale-MoE-352B"))
    assert counts.total / 1e9 == pytest.approx(351.9, abs=0.06)
    without = load_model_spec({**PRESETS["MegaScale-MoE-352B"], "shared_intermediate_size": 0})
    assert parameters(without).total / 1e9 == pytest.approx(341.3, abs=0.06)
    assert any("inferred" in note for note in load_model_spec("MegaScale-MoE-352B").notes)


DEEPSPEED = {
    # arXiv 2201.05596, tables 1 and 6: billions, to the digits printed
    "DeepSpeed-350M+MoE-128": (13, 0.5),
    "DeepSpeed-350M+PR-MoE-32/64": (4, 0.5),
    "DeepSpeed-350M+PR-MoE+L21+MoS": (3.5, 0.05),
    "DeepSpeed-1.3B+MoE-128": (52, 0.5),
    "DeepSpeed-1.3B+PR-MoE-64/128": (31, 0.5),
    "DeepSpeed-1.3B+PR-MoE+L21+MoS": (27, 0.5),
}


def billions(name):
    return parameters(load_model_spec(name)).total / 1e9


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_totals(name):
    printed, half_digit = DEEPSPEED[name]
    assert billions(name) == pytest.approx(printed, abs=half_digit)


@pytest.mark.parametrize(
    ("large", "small", "ratio"),
    [
        ("DeepSpeed-350M+MoE-128", "DeepSpeed-350M+PR-MoE-32/64", 3.25),
        ("DeepSpeed-350M+MoE-128", "DeepSpeed-350M+PR-MoE+L21+MoS", 3.7),
        ("DeepSpeed-1.3B+MoE-128", "DeepSpeed-1.3B+PR-MoE-64/128", 1.68),
        ("DeepSpeed-1.3B+MoE-128", "DeepSpeed-1.3B+PR-MoE+L21+MoS", 1.9),
    ],
)
def test_deepspeed_ratios(large, small, ratio):
    # The claimed ratios are quotients of rounded totals (13/4 = 3.25), hence the 3 %.
    assert billions(large) / billions(small) == pytest.approx(ratio, rel=0.03)


def test_deepspeed_routed_experts():
    # Experts in total and parameters per expert (8 h² + 5 h), from the paper's table.
    for name, experts, hidden in (
        ("DeepSpeed-350M+MoE-128", 1536, 1024),
        ("DeepSpeed-350M+PR-MoE-32/64", 448, 1024),
        ("DeepSpeed-350M+PR-MoE+L21+MoS", 384, 1024),
        ("DeepSpeed-1.3B+MoE-128", 1536, 2048),
        ("DeepSpeed-1.3B+PR-MoE-64/128", 896, 2048),
        ("DeepSpeed-1.3B+PR-MoE+L21+MoS", 768, 2048),
    ):
        counts = parameters(load_model_spec(name))
        assert counts.by_part["experts"] == experts * (8 * hidden**2 + 5 * hidden)


def test_checkpoint_bytes():
    spec = load_model_spec("Mixtral-8x7B")
    assert checkpoint_bytes(spec) == 2 * parameters(spec).total  # 93.4 GB of safetensors on the hub
    spec = load_model_spec("DeepSeek-V3")
    assert checkpoint_bytes(spec) == 2 * parameters(spec).total + 4 * 58 * 256
    assert checkpoint_bytes(spec, mtp=True) - checkpoint_bytes(spec) == 2 * parameters(spec).mtp + 4 * 256


def attention(**more):
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 4, "v_head_dim": 4, "scale": 0.5}
    return AttentionSpec(**sizes, **more)


def counted(seq_len, window=None, chunk=None):
    """Mean number of visible positions, token by token."""
    seen = 0
    for token in range(seq_len):
        first = 0
        if window is not None:
            first = max(first, token - window + 1)
        if chunk is not None:
            first = max(first, token - token % chunk)
        seen += token - first + 1
    return seen / seq_len


@given(st.integers(1, 300), st.none() | st.integers(1, 300), st.none() | st.integers(1, 300))
def test_visible_positions_against_counting(seq_len, window, chunk):
    if window is not None and chunk is not None:
        chunk = None
    block = attention(window=window, chunk=chunk)
    # The convention takes a causal triangle of side n as n²/2, half a position per token below n(n+1)/2.
    assert 0 <= counted(seq_len, window, chunk) - visible_positions(block, seq_len) <= 0.5 + 1e-9


def test_attention_core_is_proportional_to_what_is_visible():
    full, window = attention(), attention(window=128)
    assert attention_core_flops(full, 4096) == 6 * 2 * 8 * 2048
    assert attention_core_flops(window, 4096) == 6 * 2 * 8 * (128 - 2)
    assert attention_core_flops(window, 64) == attention_core_flops(full, 64)


@pytest.mark.parametrize("name", PRESETS)
def test_layers_sum_to_the_model(name):
    spec = load_model_spec(name)
    width = spec.hidden * (2 if spec.norm_bias else 1)
    counts = parameters(spec)
    outside = sum(counts.by_part.get(part, 0) for part in ("embedding", "positions", "head")) + width
    layers = sum(sum(layer_parameters(layer, spec.hidden, width).values()) for layer in spec.layers)
    assert layers + outside == counts.total
    assert counts.active <= counts.total
    flops = flops_per_token(spec, 512)
    per_layer = sum(sum(layer_flops(layer, spec.hidden, 512).values()) for layer in spec.layers)
    assert per_layer + flops.by_part["head"] == pytest.approx(flops.total + flops.excluded.get("router", 0))


def test_empty_sequence_is_refused():
    with pytest.raises(SpecError, match="0"):
        flops_per_token(load_model_spec("Mixtral-8x7B"), 0)
