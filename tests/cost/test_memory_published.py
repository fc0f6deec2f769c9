"""Memory against what others measured or printed. Every test prints prediction and truth (pytest -s shows them)."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cost.habits import MEGASCALE, MEGATRON, Habits
from moesaic.cost.memory import StageMemory, memory, stage_memory
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from moesaic.spec.tables import LayoutTable

GIB, GB = 2**30, 1e9
ROWS = Path(__file__).parents[2] / "benchmarks" / "published" / "simumax_b200.csv"


def layout_of(model: ModelSpec, world: int, seq_len: int, global_batch: int, **keys: object) -> Layout:
    table = LayoutTable.model_validate({"sharding": "optimizer", **keys})
    return resolve_layout(table, model, world, seq_len=seq_len, global_batch=global_batch)


def compare(what: str, predicted: float, truth: float, unit: str) -> float:
    error = predicted / truth - 1
    print(f"{what}: predicted {predicted:.2f} {unit}, published {truth:.2f}, error {error:+.2%}")
    return abs(error)


def shortened(model: ModelSpec, layers: int, dense: int, kv_heads: int | None) -> ModelSpec:
    """A model cut to a few layers, of which `dense` come first without experts, with the launcher's key-value heads."""
    without = next(layer for layer in model.layers if layer.mlp is not None)
    chosen: list[LayerSpec] = [without] * dense
    if dense < layers:
        chosen += [next(layer for layer in model.layers if layer.moe is not None)] * (layers - dense)
    if kv_heads is not None:
        chosen = [
            layer.model_copy(update={"attention": layer.attention.model_copy(update={"kv_heads": kv_heads})})
            for layer in chosen
        ]
    return model.model_copy(update={"layers": tuple(chosen), "mtp": ()})


def test_simumax_b200_rows() -> None:
    # 43 measured peaks of torch.cuda.max_memory_allocated, largest over ranks (docs/b200 of MooreThreads/SimuMax):
    # Megatron-LM with Transformer Engine 2.11, fused loss, distributed optimizer, sequence parallelism, ulysses, and
    # experts padded to capacity 1. Its launch scripts give one dense layer to both DeepSeek cuts and 16 key-value heads
    # to Llama3-405B, which the file's columns say.
    errors = []
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = {key: int(row[key]) for key in ("layers", "dense_layers", "gpus", "seq_len", "global_batch")}
            kv_heads = int(row["kv_heads"]) if row["kv_heads"] else None
            model = shortened(load_model_spec(row["model"]), numbers["layers"], numbers["dense_layers"], kv_heads)
            degrees = {key: int(row[key]) for key in ("tp", "pp", "cp", "ep", "micro_batch")}
            layout = layout_of(model, numbers["gpus"], numbers["seq_len"], numbers["global_batch"], **degrees)
            work = Workload(model, numbers["seq_len"], numbers["global_batch"])
            predicted = float(memory(work, Columns.of([layout])).allocated[0]) / GIB
            errors.append(compare(row["case"], predicted, float(row["measured_gib"]), "GiB"))
    mean, worst = sum(errors) / len(errors), max(errors)
    print(f"{len(errors)} rows: mean {mean:.2%}, worst {worst:.2%}; SimuMax itself 0.46 % and 1.38 %")
    assert len(errors) == 43
    assert mean <= 0.01
    assert worst <= 0.03


def deepseek_v3(recompute: tuple[str, ...] = (), **changes: object) -> tuple[Workload, Layout]:
    """DeepSeek-V3 on 256 GPUs, PP4 VPP4 EP64, micro-batch 1, the prediction block with the last layer and the loss."""
    model = load_model_spec("deepseek-v3")
    layout = layout_of(model, 256, 4096, 2048, pp=4, virtual_stages=4, ep=64, stages="Et*4|(tttt|)*14tmL")
    work = replace(Workload(model, 4096, 2048), **changes)  # type: ignore[arg-type]
    return work, replace(layout, recompute=recompute)


def on_expert_rank(habits: Habits = MEGATRON, **changes: object) -> StageMemory:
    """The paper does not say which rank its figures are of. Pipeline rank 2 has 16 layers, all with experts, and holds
    15 passes of 4 layers: 60 layers' activations, which is what each of its printed savings amounts to."""
    work, layout = deepseek_v3(**changes)  # type: ignore[arg-type]
    return stage_memory(work, layout, habits)[2]


def test_deepseek_v3_states_and_activations_without_savings() -> None:
    # arXiv 2603.07685 table 3; "GB" there are GiB, as 12 bytes per parameter of the rank's experts say.
    found = on_expert_rank(replace(MEGATRON, weight_before_down=False))
    assert compare("weights and gradients", (found.weights + found.gradients) / GIB, 36.4, "GiB") <= 0.05
    assert compare("main weights and optimizer", found.optimizer / GIB, 32.1, "GiB") <= 0.05
    assert compare("activations", found.activations / GIB, 131.0, "GiB") <= 0.05
    parts = found.weights + found.gradients + found.optimizer + found.activations
    assert compare("together", parts / GIB, 199.5, "GiB") <= 0.05


def test_deepseek_v3_savings() -> None:
    # arXiv 2603.07685 section on memory, table 4. Layer norms at 2.5 outputs per layer and activations at one byte per
    # value are savings of an fp8 run; in bf16 they would be 6.6 and 7.5 GiB.
    plain, fp8 = on_expert_rank().activations, on_expert_rank(precision="mxfp8").activations
    heavy = on_expert_rank(replace(MEGATRON, weight_before_down=False)).activations
    assert compare("memory-efficient permutation", (heavy - plain) / GIB, 26.3, "GiB") <= 0.05
    assert compare("fp8 activations", (plain - fp8) / GIB, 16.0, "GiB") <= 0.05
    for label, printed in (("mla_up_proj", 30.4), ("layernorm", 8.2), ("moe_act", 3.8)):
        left = on_expert_rank(precision="mxfp8", recompute=(label,)).activations
        assert compare(f"recompute of {label}", (fp8 - left) / GIB, printed, "GiB") <= 0.05
    bf16 = plain - on_expert_rank(recompute=("mla_up_proj",)).activations
    assert compare("recompute of mla_up_proj in bf16", bf16 / GIB, 30.4, "GiB") <= 0.05


def test_deepseek_v3_moments_in_bf16_save_10_to_12() -> None:
    saved = (on_expert_rank().optimizer - on_expert_rank(moment_bytes=2).optimizer) / GIB
    print(f"bf16 moments: predicted {saved:.2f} GiB, published 10 to 12")
    assert 10 <= saved <= 12


def test_mixtral_8x22b_on_128_gpus() -> None:
    # Megatron-LM's functional test mixtral_8x22b_tp2pp8ep8vpp1_release: ETP is not given, so it is TP; the loss is not
    # fused; 128 GPUs is the least that TP2·PP8·EP8·ETP2 take. Its memory is logged on the last rank, which has the last
    # stage. Peak of the facts 28.5 GB; the recorded value of another container is 28.17 GB.
    model = load_model_spec("mixtral-8x22b")
    layout = layout_of(model, 128, 4096, 256, tp=2, pp=8, ep=8, etp=2, dispatcher="alltoall")
    last = stage_memory(Workload(model, 4096, 256), layout, replace(MEGATRON, loss="fp32"))[-1]
    assert compare("Mixtral-8x22B, last rank", last.allocated / GB, 28.5, "GB") <= 0.05


def test_mixtral_8x7b_with_eight_virtual_stages() -> None:
    # Megatron-LM's functional test mixtral_8x7b_tp1pp4ep8vpp8_release (its file has TP 2): 35.51 GB on H100, on the
    # last rank. 64 GPUs: TP2·PP4 with EP8 leave EDP 2.
    model = load_model_spec("mixtral-8x7b")
    layout = layout_of(model, 64, 4096, 256, tp=2, pp=4, ep=8, virtual_stages=8, dispatcher="alltoall")
    last = stage_memory(Workload(model, 4096, 256), layout, replace(MEGATRON, loss="fp32"))[-1]
    assert compare("Mixtral-8x7B, last rank", last.allocated / GB, 35.51, "GB") <= 0.05


def test_deepseek_v3_proxy() -> None:
    # Megatron-LM's functional test deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release: 14 layers, 64 experts, TP2 PP4
    # EP16 VPP2, a tokenizer of 256,000 padded to 258,560, fused loss. The last rank has the prediction block and loss.
    model = load_model_spec("deepseek-v3-proxy").model_copy(update={"vocab": 258_560})
    layout = layout_of(model, 64, 4096, 512, tp=2, pp=4, ep=16, virtual_stages=2, stages="Et*2|(tt|)*5t|tmL")
    layout = replace(layout, dispatcher="deepep")
    stages = stage_memory(Workload(model, 4096, 512), layout)
    assert compare("DeepSeek-V3 proxy, last rank", stages[-1].allocated / GB, 46.2, "GB") <= 0.05
    assert max(stage.allocated for stage in stages) == stages[-1].allocated


def test_qwen3_30b_on_16_gpus() -> None:
    # Megatron-Bridge's skill on overlap of expert communication: 16 H100, EP16, HybridEP, rank 0 peaks at 62.166 GiB.
    model = load_model_spec("qwen3-30b-a3b")
    layout = replace(layout_of(model, 16, 4096, 1024, ep=16), dispatcher="hybridep", overlap=("experts",))
    found = stage_memory(Workload(model, 4096, 1024), layout)[0]
    assert compare("Qwen3-30B-A3B", found.allocated / GIB, 62.166, "GiB") <= 0.05


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "virtual", "batch", "gib", "percent"),
    # arXiv 2205.05198 table 3 and figures 1 and 7: 22B, 175B, 530B and 1T at sequence 2048, TP 8, attention that is not
    # flash, with dropout. GiB: nothing recomputed and no sequence parallelism; the attention core recomputed with
    # sequence parallelism. Percent of the first: sequence parallelism alone, the core recomputed alone, full recompute.
    [
        (48, 6144, 64, 1, 1, 4, (59.25, 9.5625), (66.84, 49.42, 7.64)),
        (96, 12288, 96, 8, 3, 1, (66.84375, 12.3515625), (62.04, 56.53, 8.71)),
        (105, 20480, 128, 35, 3, 1, (114.0234375, 23.076171875), (58.31, 62.04, 9.42)),
        (128, 25600, 160, 64, 1, 1, (131.25, 26.5625), (58.31, 62.04, 9.42)),
    ],
)
def test_selective_recompute_paper(
    layers: int, hidden: int, heads: int, pp: int, virtual: int, batch: int,
    gib: tuple[float, float], percent: tuple[float, float, float],
) -> None:  # fmt: skip
    width = hidden // heads
    attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=width, v_head_dim=width, scale=width**-0.5)
    layer = LayerSpec(attention=attention, mlp=MlpSpec(width=4 * hidden, activation="gelu", gated=False))
    model = ModelSpec(name="gpt", family="moesaic", vocab=51200, hidden=hidden, layers=(layer,) * layers)
    layout = layout_of(
        model, 8 * pp, 2048, 4 * 64 * pp, tp=8, pp=pp, virtual_stages=virtual, micro_batch=batch, sharding="none"
    )
    work = Workload(model, 2048, 4 * 64 * pp)

    def activations(shared: bool, *recompute: str) -> float:
        habits = replace(MEGATRON, flash=False, dropout=True, sequence_parallel=shared)
        found = stage_memory(work, replace(layout, recompute=recompute), habits)[0]
        return (found.activations - found.kept.get("head", 0.0)) / GIB  # the paper counts layers only

    none = activations(False)
    assert compare("nothing", none, gib[0], "GiB") <= 0.01
    assert compare("both", activations(True, "core_attn"), gib[1], "GiB") <= 0.01
    assert compare("sequence parallelism", 100 * activations(True) / none, percent[0], "%") <= 0.01
    assert compare("core recomputed", 100 * activations(False, "core_attn") / none, percent[1], "%") <= 0.01
    # This one bar is up to 1.1 % off the paper's own 2·s·b·h per layer.
    assert compare("full recompute", 100 * activations(False, "full") / none, percent[2], "%") <= 0.02


@pytest.mark.parametrize("measured_gb", [57.14, 58.19, 58.22])
def test_gpt3_7b_without_sequence_parallelism(measured_gb: float) -> None:
    # Megatron-LM's functional test gpt3_7b_tp4_pp1_memory_speed on 8 H100, A100 and GB200: biases, dropout 0.1, grouped
    # queries, vocabulary 131,072, loss not fused, no sequence parallelism.
    attention = AttentionSpec(heads=32, kv_heads=8, head_dim=128, v_head_dim=128, scale=0.1, qkv_bias=True, o_bias=True)
    layer = LayerSpec(attention=attention, mlp=MlpSpec(width=16384, activation="gelu", gated=False, bias=True))
    model = ModelSpec(name="gpt3-7b", family="moesaic", vocab=131_072, hidden=4096, layers=(layer,) * 32)
    layout = layout_of(model, 8, 8192, 8, tp=4, micro_batch=2)
    habits = replace(MEGATRON, sequence_parallel=False, dropout=True, loss="fp32")
    found = stage_memory(Workload(model, 8192, 8), layout, habits)[0]
    assert compare("GPT-3 7B", found.allocated / GB, measured_gb, "GB") <= 0.03


@pytest.mark.parametrize(
    ("name", "pp", "saved_gb", "activations_gb"),
    # arXiv 2505.11432 figure 17, 128 H800, read off the bars. The pipeline is the one that fits the printed states.
    [("mixtral-8x7b", 2, 9.59, (20.18, 10.59)), ("mixtral-8x22b", 8, 24.36, (42.61, 18.25))],
)
def test_megascale_selective_rematerialisation(
    name: str, pp: int, saved_gb: float, activations_gb: tuple[float, float]
) -> None:
    model = load_model_spec(name)
    layout = layout_of(model, 128, 8192, 128, pp=pp, cp=8, ep=8, dispatcher="allgather")
    work = Workload(model, 8192, 128)
    sizes = [stage_memory(work, layout, replace(MEGASCALE, layer=layer))[0] for layer in ("megascale", "sar")]
    print(f"{name} layers: {[f'{size.activations / GB:.2f}' for size in sizes]} GB, with all else {activations_gb}")
    assert compare(f"{name}, saved", (sizes[0].activations - sizes[1].activations) / GB, saved_gb, "GB") <= 0.03
