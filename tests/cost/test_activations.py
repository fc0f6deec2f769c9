"""Kept tensors against the formulas of papers and against counting."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.activations import layer_kept, mtp_kept
from moesaic.cost.habits import MEGASCALE, MEGATRON, MOESAIC
from moesaic.cost.rows import received_tokens, routed_rows, tokens_per_rank
from moesaic.cost.workload import RECOMPUTE, Columns, Workload
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, resolve_layout, single
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from moesaic.spec.tables import LayoutTable

GIB = 2**30


def columns_of(model: ModelSpec, world: int, **keys: object) -> tuple[Layout, Columns]:
    layout = resolve_layout(LayoutTable.model_validate(keys), model, world, seq_len=None, global_batch=None)
    return layout, Columns.of([layout])


def total(model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns, **habits: object) -> float:
    rows = layer_kept(model, layer, work, columns, replace(MEGATRON, **habits))  # type: ignore[arg-type]
    return float(sum(row.left(columns)[0] for row in rows))


def by_module(model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in layer_kept(model, layer, work, columns):
        found[row.module] = found.get(row.module, 0.0) + float(row.left(columns)[0])
    return found


@pytest.mark.parametrize("tp", [1, 8])
def test_a_gpt_layer_keeps_what_the_selective_recompute_paper_counts(tp: int) -> None:
    # Korthikanti et al., arXiv 2205.05198, equation 6: 34·s·b·h/t with selective recompute of the attention core, of
    # which 1 + 1 are masks of the two dropouts; a flash core adds one fp32 log-sum per head and token.
    hidden, heads, seq = 12288, 96, 2048
    attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=128, v_head_dim=128, scale=128**-0.5)
    layer = LayerSpec(attention=attention, mlp=MlpSpec(width=4 * hidden, activation="gelu", gated=False))
    model = ModelSpec(name="gpt3", family="moesaic", vocab=51200, hidden=hidden, layers=(layer,))
    _, columns = columns_of(model, tp, tp=tp)
    kept = total(model, layer, Workload(model, seq, 1), columns)
    log_sums, norm_statistics = 4 * heads, 2 * 4
    assert kept == pytest.approx((32 * hidden + log_sums + norm_statistics) * seq / tp)


def test_a_deepseek_v3_expert_layer_keeps_the_bytes_that_its_shapes_say() -> None:
    model = load_model_spec("deepseek-v3")
    layer = model.layers[-1]
    _, columns = columns_of(model, 64, ep=64)
    kept = by_module(model, layer, Workload(model, 4096, 64), columns)
    per_token = {module: size / 4096 for module, size in kept.items()}
    hidden, heads, top_k, width = 7168, 128, 8, 2048
    assert per_token["residual"] == 2 * 2 * hidden
    assert per_token["latents"] == 2 * (1536 + 512 + 64) + 2 * (1536 + 512) + 2 * 4
    assert per_token["qkv"] == 2 * heads * (192 + 192 + 128)
    assert per_token["attention"] == 2 * heads * 128 + 4 * heads
    assert per_token["experts"] == 2 * top_k * (hidden + 2 * width + width)
    assert per_token["shared_experts"] == 2 * (2 * width + width)


def test_recompute_labels_drop_what_they_name_and_nothing_else() -> None:
    model = load_model_spec("deepseek-v3")
    layer = model.layers[-1]
    layout, columns = columns_of(model, 64, ep=64)
    work = Workload(model, 4096, 64)
    whole = by_module(model, layer, work, columns)

    def saved(*labels: str) -> dict[str, float]:
        left = by_module(model, layer, work, Columns.of([replace(layout, recompute=labels)]))
        saving = {module: (whole[module] - left[module]) / 4096 for module in whole}
        return {module: size for module, size in saving.items() if size}

    assert saved("mla_up_proj") == {"latents": 2 * 2048, "qkv": 2 * 65536}
    assert saved("layernorm") == {"norms": 2 * 2 * 7168}
    assert saved("moe_act") == {"experts": 2 * 8 * 2048}
    assert saved("core_attn") == {"attention": 4 * 128}
    assert saved("shared_experts") == {"shared_experts": 2 * 3 * 2048}
    assert saved("mlp") == {}
    assert set(saved("moe")) == {"router", "dispatch", "experts", "shared_experts"}
    full = by_module(model, layer, work, Columns.of([replace(layout, recompute=("full",))]))
    assert {module: size / 4096 for module, size in full.items() if size} == {"residual": 2 * 7168}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "qwen1.5-moe-a2.7b"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "nvfp4"])
def test_recompute_never_keeps_more(name: str, precision: str) -> None:
    model = load_model_spec(name)
    work = Workload(model, 4096, 8, precision=precision)  # type: ignore[arg-type]
    layout = single(model)
    for layer in (model.layers[0], model.layers[-1]):
        sizes = {
            labels: total(model, layer, work, Columns.of([replace(layout, recompute=labels)]))
            for count in (0, 1, 2)
            for labels in itertools.combinations(RECOMPUTE, count)
        }
        for labels, size in sizes.items():
            assert size <= min(sizes[labels[:at] + labels[at + 1 :]] for at in range(len(labels))) if labels else True
        assert min(sizes.values()) == sizes["full",]


def test_bytes_fall_with_tensor_and_context_degrees_and_rows_with_no_expert_degree() -> None:
    model = load_model_spec("mixtral-8x7b")
    layer, work = model.layers[0], Workload(model, 8192, 8)
    one = total(model, layer, work, columns_of(model, 8)[1])
    for keys in ({"tp": 4}, {"cp": 4, "cp_kind": "ring"}, {"tp": 2, "cp": 2, "cp_kind": "ring"}, {"tp": 4, "ep": 4}):
        assert total(model, layer, work, columns_of(model, 8, **keys)[1]) == pytest.approx(one / 4)
    assert total(model, layer, work, columns_of(model, 8, ep=8)[1]) == pytest.approx(one)


def test_ulysses_keeps_the_cores_output_on_both_sides_of_the_all_to_all() -> None:
    model = load_model_spec("mixtral-8x7b")
    layer, work = model.layers[0], Workload(model, 8192, 8)
    ring = total(model, layer, work, columns_of(model, 8, cp=4, cp_kind="ring")[1])
    ulysses = total(model, layer, work, columns_of(model, 8, cp=4)[1])
    assert ulysses - ring == 2 * 4096 * 8192 / 4
    # Eight key-value heads over sixteen context ranks are held twice.
    _, sixteen = columns_of(model, 16, cp=16)
    qkv = by_module(model, layer, work, sixteen)["qkv"]
    assert qkv == 2 * (4096 + 2 * 16 * 128) * 8192 / 16


def test_expert_tensor_parallelism_repeats_rows_and_cuts_widths() -> None:
    model = load_model_spec("mixtral-8x7b")
    layer, work = model.layers[0], Workload(model, 4096, 8)
    plain = by_module(model, layer, work, columns_of(model, 8, ep=4)[1])["experts"]
    cut = by_module(model, layer, work, columns_of(model, 8, ep=4, etp=2)[1])["experts"]
    assert cut - plain == 2 * 4096 * 2 * 4096


def test_imbalance_scales_the_rows_of_the_most_loaded_rank_up_to_all_of_them() -> None:
    model = load_model_spec("mixtral-8x7b")
    moe = model.layers[0].moe
    assert moe is not None
    _, columns = columns_of(model, 8, ep=4)
    rows = [float(routed_rows(moe, Workload(model, 4096, 8, imbalance=x), columns)[0]) for x in (1.0, 1.5, 100.0)]
    assert rows == [4096 * 2, 4096 * 3, 4096 * 2 * 4]


@pytest.mark.parametrize(("experts", "top_k", "ep"), [(8, 2, 4), (8, 3, 2), (6, 2, 6), (4, 4, 2)])
def test_distinct_tokens_of_a_rank_by_listing_every_choice(experts: int, top_k: int, ep: int) -> None:
    model = load_model_spec("mixtral-8x7b")
    moe = model.layers[0].moe
    assert moe is not None
    moe = moe.model_copy(update={"router": moe.router.model_copy(update={"experts": experts, "top_k": top_k})})
    columns = replace(columns_of(model, 8, ep=4)[1], ep=np.array([ep]), edp=np.array([8 // ep]))
    work = Workload(model, 4096, 8)
    choices = list(itertools.combinations(range(experts), top_k))
    hits = sum(any(expert < experts // ep for expert in choice) for choice in choices) / len(choices)
    tokens = float(tokens_per_rank(work, columns)[0])
    assert float(received_tokens(moe, work, columns)[0]) == pytest.approx(tokens * ep * hits)


def test_quantised_matmuls_keep_quantised_inputs() -> None:
    # arXiv 2603.07685 section on reduced-precision training: fp8 halves the inputs of linear layers that are kept.
    model = load_model_spec("deepseek-v3")
    layer = model.layers[-1]
    _, columns = columns_of(model, 64, ep=64)
    bf16 = by_module(model, layer, Workload(model, 4096, 64), columns)
    fp8 = by_module(model, layer, Workload(model, 4096, 64, precision="fp8"), columns)
    rows = 8 * (7168 + 2048) * 4096
    assert bf16["experts"] - fp8["experts"] == pytest.approx((2 - 1 - 4 / 128) * rows)
    assert fp8["attention"] == bf16["attention"] and fp8["qkv"] == bf16["qkv"]


def test_fused_norms_cannot_be_dropped_alone() -> None:
    model = load_model_spec("llama3-8b")
    layout = replace(single(model), recompute=("layernorm",))
    work, columns, plain = Workload(model, 4096, 1), Columns.of([layout]), Columns.of([single(model)])
    layer = model.layers[0]
    assert total(model, layer, work, columns) == total(model, layer, work, plain)
    loose = total(model, layer, work, columns, fused_norms=False)
    assert total(model, layer, work, plain) - loose == 2 * 2 * 4096 * 4096
    assert MOESAIC.fused_norms is False


def test_a_prediction_block_keeps_its_embedding_joined_norms_and_last_norm() -> None:
    model = load_model_spec("deepseek-v3")
    rows = mtp_kept(model, Workload(model, 4096, 1), Columns.of([single(model)]))
    assert sum(float(row.bytes[0]) for row in rows) == 2 * 5 * 7168 * 4096


@pytest.mark.parametrize(
    ("name", "all_units", "left_units"),
    # arXiv 2505.11432 section 4.1 and figure 9: 2n + 2k + 3kf + 12 + 5/m and 2kf + 4 + 2/m, with n = 8.
    [("mixtral-8x7b", 54.25, 18.5), ("mixtral-8x22b", 48.83, 15.0), ("megascale-moe-352b", 66.75, 25.5)],
)
def test_selective_rematerialisation_keeps_what_the_paper_lists(name: str, all_units: float, left_units: float) -> None:
    model = load_model_spec(name)
    layer, work = model.layers[0], Workload(model, 8192, 1)
    _, columns = columns_of(model, 8, cp=8, ep=8, dispatcher="allgather")
    unit = 2 * 8192 * model.hidden / 8
    sizes = {}
    for habit in ("megascale", "sar"):
        rows = layer_kept(model, layer, work, columns, replace(MEGASCALE, layer=habit))  # type: ignore[arg-type]
        sizes[habit] = sum(float(row.bytes[0]) for row in rows)
    print(name, sizes["megascale"] / unit, "printed", all_units, "and", sizes["sar"] / unit, "printed", left_units)
    assert sizes["megascale"] / unit == pytest.approx(all_units, abs=0.01)
    assert sizes["sar"] / unit == pytest.approx(left_units, abs=0.01)


def test_the_operator_list_refuses_other_layers() -> None:
    from moesaic.cost.sar import sar_rows

    model = load_model_spec("deepseek-v3")
    with pytest.raises(SpecError, match="mla attention and a dense block"):
        sar_rows(model, model.layers[0], Workload(model, 4096, 1), Columns.of([single(model)]))
