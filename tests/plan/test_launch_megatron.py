"""Command lines of Megatron-LM: what its real parser takes, and what they say of the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesaic.cost.counts import parameters
from moesaic.cost.workload import OFFLOAD, OVERLAP, PRECISIONS, RECOMPUTE, Workload
from moesaic.plan.launch import Plan, check_flags, launch_files
from moesaic.plan.launch.flags import known_flags
from moesaic.plan.launch.megatron import flag_words, megatron_args
from moesaic.plan.launch.parts import Draft, pattern, short_stages
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, legal_layouts
from moesaic.spec.presets import PRESETS
from moesaic.spec.stages import expand, parse_stages, stages_text
from moesaic.spec.tables import LayoutTable
from tests.plan.launched import GB200, H100, example, plan


def arguments(made: Plan) -> dict:
    return megatron_args(Draft("Megatron-LM"), made)


def test_the_data_is_of_the_whole_parser():
    flags = known_flags()
    assert len(flags) > 800
    assert flags["--expert-tensor-parallel-size"].kind == "int"
    assert flags["--moe-token-dispatcher-type"].choices == ("allgather", "alltoall", "flex")
    assert flags["--sequence-parallel"].kind is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--expert-parallel-size", "8"], "--expert-parallel-size is no option"),
        (["--num-layers", "6.5"], "type int"),
        (["--num-layers"], "takes one value, but has 0"),
        (["--bf16", "true"], "takes no value"),
        (["--recompute-modules"], "at least one value"),
        (["--moe-token-dispatcher-type", "deepep"], "takes allgather, alltoall, flex"),
        (["--moe-layer-freq", "often"], "moe_freq_type"),
        (["--bf16", "--bf16"], "given twice"),
        (["8"], "stands before any option"),
    ],
)
def test_check_flags_finds_what_the_parser_would(words, says):
    (problem,) = check_flags(words)
    assert says in problem


def test_check_flags_lets_right_ones_through():
    words = "--num-layers 61 --moe-layer-freq ([0]*3+[1]*58) --window-size 127,0 --lr 3e-4 --recompute-modules mlp moe"
    assert check_flags(words.split()) == []


@lru_cache(maxsize=256)
def layouts(name: str, gpus: int, virtual: int) -> tuple[Layout, ...]:
    table = LayoutTable(virtual_stages=virtual, micro_batch=1)
    try:
        return tuple(legal_layouts(load_model_spec(name), gpus, seq_len=2048, global_batch=256, table=table))
    except SpecError:
        return ()


@st.composite
def plans(draw) -> Plan:
    name = draw(st.sampled_from(sorted(PRESETS)))
    found = layouts(name, draw(st.sampled_from([1, 8, 32])), draw(st.sampled_from([1, 2])))
    assume(found)
    layout = found[draw(st.integers(0, len(found) - 1))]
    some = {
        key: tuple(draw(st.lists(st.sampled_from(words), unique=True, max_size=3)))
        for key, words in (("recompute", RECOMPUTE), ("overlap", OVERLAP), ("offload", OFFLOAD))
    }
    if layout.dispatcher != "local":
        some["dispatcher"] = draw(st.sampled_from(["allgather", "alltoall", "deepep", "hybridep"]))
    sharding = draw(st.sampled_from(["none", "optimizer", "gradients", "parameters"]))
    work = Workload(
        load_model_spec(name),
        2048,
        256,
        draw(st.sampled_from(PRECISIONS)),
        moment_bytes=draw(st.sampled_from([2, 4])),
        gradient_bytes=draw(st.sampled_from([2, 4])),
    )
    cluster = ClusterSpec(gpu=draw(st.sampled_from([H100, GB200])), gpus=layout.world)
    return Plan(work, replace(layout, sharding=sharding, **some), cluster, "any")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_every_argument_is_one_that_the_parser_takes(made):
    draft = Draft("Megatron-LM")
    try:
        args = megatron_args(draft, made)
    except SpecError as error:
        assert str(error).startswith("Megatron-LM cannot run this plan: ")
        return
    assert check_flags(flag_words(args)) == []
    layout = made.layout
    # The degrees are all there, whatever their values, and none is left to a default.
    assert args["--expert-tensor-parallel-size"] == layout.etp
    assert args["--expert-model-parallel-size"] == layout.ep
    assert (args.get("--sequence-parallel", False)) is (layout.tp > 1)
    assert ("--pipeline-model-parallel-layout" in args) is (layout.pp > 1)
    # Every word of the plan is either among the arguments or spoken of in a note.
    said = " ".join([*flag_words(args), *draft.notes])
    for module in layout.recompute:
        assert module in said or "full" in layout.recompute
    for word, flag in (
        ("experts", "overlap-moe-expert"),
        ("tensor", "tp-comm-overlap"),
        ("gradients", "overlap-grad-reduce"),
    ):
        if word in layout.overlap:
            assert f"--{flag}" in said or f"overlap of {word}" in said
    for what, flag in (("optimizer", "--optimizer-cpu-offload"), ("activations", "--offload-modules")):
        assert (flag in args) is (what in layout.offload)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_written_or_refused_with_a_reason(name):
    model = load_model_spec(name)
    layout = next(legal_layouts(model, 1, seq_len=2048, global_batch=8))
    made = Plan(Workload(model, 2048, 8), layout, ClusterSpec(gpu=H100, gpus=1), "one")
    try:
        args = arguments(made)
    except SpecError as error:
        assert model.name in str(error) or "the model has" in str(error)
        return
    assert check_flags(flag_words(args)) == []
    assert (args["--num-layers"], args["--hidden-size"]) == (len(model.layers), model.hidden)
    assert args.get("--num-experts", 0) == max((x.moe.router.experts for x in model.layers if x.moe), default=0)
    freq = args.get("--moe-layer-freq", f"([1]*{len(model.layers)})")
    wanted = [int(layer.moe is not None) for layer in model.layers]
    assert eval(freq) == wanted or "--num-experts" not in args


def parameters_of(args: dict) -> int:
    """Parameters of the model that arguments of Megatron-LM describe, without prediction blocks: its own arithmetic
    (`megatron/training/theoretical_memory_usage.py`), with the biases and small vectors that it leaves out."""
    hidden, heads, layers = args["--hidden-size"], args["--num-attention-heads"], args["--num-layers"]
    biased = "--disable-bias-linear" not in args
    norm = hidden * (1 if args["--normalization"] == "RMSNorm" else 2)
    if "--multi-latent-attention" in args:
        nope, rope, value = args["--qk-head-dim"], args["--qk-pos-emb-head-dim"], args["--v-head-dim"]
        rank, query = args["--kv-lora-rank"], args.get("--q-lora-rank")
        attention = hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
        wide = heads * (nope + rope)
        attention += hidden * wide if query is None else hidden * query + query + query * wide
    else:
        each, groups = args["--kv-channels"], args.get("--num-query-groups", heads)
        out = each * (heads + 2 * groups)
        attention = hidden * out + each * heads * hidden
        attention += (out if biased or "--add-qkv-bias" in args else 0) + (hidden if biased else 0)
        attention += 2 * each if "--qk-layernorm" in args else 0
        attention += heads if args.get("--softmax-type") == "learnable" else 0
    gated = "--swiglu" in args or "--quick-geglu" in args

    def mlp(width: int) -> int:
        first = width * (2 if gated else 1)
        return hidden * first + width * hidden + (first + hidden if biased else 0)

    kinds = eval(str(args.get("--moe-layer-freq", f"([{int('--num-experts' in args)}]*{layers})")))
    total = layers * (attention + 2 * norm) + norm + (layers - sum(kinds)) * mlp(args["--ffn-hidden-size"])
    if sum(kinds):
        experts = args["--num-experts"]
        moe = experts * mlp(args["--moe-ffn-hidden-size"]) + hidden * experts + (experts if biased else 0)
        shared = args.get("--moe-shared-expert-intermediate-size")
        moe += mlp(shared) + (hidden if "--moe-shared-expert-gate" in args else 0) if shared else 0
        total += sum(kinds) * moe
    if args["--position-embedding-type"] == "learned_absolute":
        total += args["--max-position-embeddings"] * hidden
    return total + args["--vocab-size"] * hidden * (2 if "--untie-embeddings-and-output-weights" in args else 1)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_arguments_alone_give_the_models_parameters(name):
    model = load_model_spec(name)
    layout = next(legal_layouts(model, 1, seq_len=2048, global_batch=8))
    draft = Draft("Megatron-LM")
    try:
        args = megatron_args(draft, Plan(Workload(model, 2048, 8), layout, ClusterSpec(gpu=H100, gpus=1), "one"))
    except SpecError as error:
        assert "cannot run" in str(error)
        return
    extra = sum(layer.moe.router.experts for layer in model.layers if layer.moe)
    router_bias = extra if any("gives the router a bias" in note for note in draft.notes) else 0
    assert parameters_of(args) - router_bias == parameters(model).total


def test_deepseek_v3_is_what_its_published_recipe_says():
    """The arguments of NVIDIA's DeepSeek-V3 script (yanring/Megatron-MoE-ModelZoo, DeepSeek-V3.yaml)."""
    args = arguments(example())
    published = {
        "--num-layers": 61,
        "--hidden-size": 7168,
        "--ffn-hidden-size": 18432,
        "--num-attention-heads": 128,
        "--kv-channels": None,
        "--q-lora-rank": 1536,
        "--kv-lora-rank": 512,
        "--qk-head-dim": 128,
        "--qk-pos-emb-head-dim": 64,
        "--v-head-dim": 128,
        "--rotary-scaling-factor": 40.0,
        "--mscale": 1.0,
        "--mscale-all-dim": 1.0,
        "--num-experts": 256,
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--moe-ffn-hidden-size": 2048,
        "--moe-shared-expert-intermediate-size": 2048,
        "--moe-router-topk": 8,
        "--moe-router-num-groups": 8,
        "--moe-router-group-topk": 4,
        "--moe-router-pre-softmax": None,
        "--moe-router-topk-scaling-factor": 2.5,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-bias-update-rate": 1e-3,
        "--moe-router-dtype": "fp32",
        "--mtp-num-layers": 1,
    }
    assert {flag: args.get(flag) for flag in published} == published


def test_gpt_oss_has_its_windows_sinks_biases_and_clamped_activation():
    args = arguments(plan("gpt-oss-120b", 8, ep=8, global_batch=64))
    assert args["--window-size"] == "127,0" and eval(str(args["--window-attn-skip-freq"])) == [1, 0] * 18
    assert args["--softmax-type"] == "learnable"
    assert "--disable-bias-linear" not in args
    assert args["--quick-geglu"] and args["--activation-func-clamp-value"] == 7.0


def test_the_layout_string_is_the_plans_stages():
    made = example()
    text = str(arguments(made)["--pipeline-model-parallel-layout"])
    assert text == "Et*2|(t*2|)*29t|mL"
    assert parse_stages(text, 61, 1) == made.layout.stages


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any))
def test_short_stage_strings_mean_the_same(counts):
    text = "E" + "|".join("t" * count for count in counts) + "L"
    stages = parse_stages(text, sum(counts), 0)
    assert expand(short_stages(stages, 0)) == expand(stages_text(stages, 0)) == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_patterns_mean_the_same(kinds):
    assert eval(pattern(kinds)) == [int(kind) for kind in kinds]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute": ("moe",)}, "does not go with recompute of moe"),
        ({"recompute": ("full",)}, "does not go with full recompute"),
        ({"overlap": ("experts", "shared_experts")}, "does not go with overlap of shared experts"),
        ({"dispatcher": "allgather", "overlap": ("experts",)}, "allgather dispatcher"),
        ({"dispatcher": "hierarchical"}, "hierarchical dispatcher"),
        ({"schedule": "dualpipe"}, "dualpipe schedule"),
        ({"overlap": ("shared_experts",), "recompute": ("shared_experts",)}, "keep one of them"),
        ({"sharding": "none"}, "2 bytes"),
    ],
)
def test_what_megatron_forbids_is_refused(options, says):
    made = example()
    with pytest.raises(SpecError, match=re.escape(says)):
        launch_files("megatron", replace(made, layout=replace(made.layout, **options)))


def test_hardware_queues_follow_what_needs_them():
    """`validate_args` wants 1 with tp or cp above 1 before Blackwell; overlap of experts and FSDP want more."""

    def queues(**options) -> str:
        draft = Draft("Megatron-LM")
        made = plan(tp=2, ep=8, pp=1, gpus=64, with_options={"dispatcher": "alltoall"} | options)
        megatron_args(draft, made)
        return draft.env["CUDA_DEVICE_MAX_CONNECTIONS"]

    assert queues() == "1"
    assert queues(overlap=("experts",)) == "32"
    assert queues(sharding="parameters") == "32"


def test_hybridep_is_told_of_the_real_domain():
    def env(gpu, gpus, ep):
        draft = Draft("Megatron-LM")
        megatron_args(draft, plan(gpu=gpu, gpus=gpus, ep=ep, with_options={"dispatcher": "hybridep"}))
        names = ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "NVLINK_DOMAIN_SIZE", "USE_MNNVL")
        return tuple(draft.env[name] for name in names)

    assert env(H100, 64, 64) == ("8", "8", "0")
    assert env(GB200, 64, 32) == ("32", "72", "1")


@pytest.mark.parametrize(
    ("precision", "gpu", "flags"),
    [
        ("bf16", H100, {"--bf16": True, "--fp8-recipe": None}),
        ("fp8", H100, {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"}),
        ("mxfp8", GB200, {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"}),
        ("nvfp4", GB200, {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4", "--fp8-format": None}),
    ],
)
def test_precision_recipes(precision, gpu, flags):
    args = arguments(plan(gpu=gpu, gpus=64, ep=8, work={"precision": precision}))
    assert {flag: args.get(flag) for flag in flags} == flags


def test_precision_that_the_accelerator_lacks_is_refused():
    with pytest.raises(SpecError, match="H100 has no fp4"):
        arguments(plan(gpus=64, ep=8, work={"precision": "nvfp4"}))


def test_words_with_nothing_to_act_on_are_left_out_and_noted():
    draft = Draft("Megatron-LM")
    made = plan(
        "llama3-8b",
        8,
        global_batch=64,
        with_options={"recompute": ("moe_act", "mla_up_proj"), "overlap": ("tensor", "shared_experts", "experts")},
    )
    args = megatron_args(draft, made)
    assert "--recompute-modules" not in args and "--tp-comm-overlap" not in args
    assert len(draft.notes) == 5 and all("left out" in note for note in draft.notes)


def test_layouts_that_change_no_number_are_noted():
    text = launch_files(
        "megatron", plan("deepseek-v2", 8, ep=8, global_batch=64, with_options={"overlap": ("inside",)})
    )
    assert "# NOTE not expressed: overlap inside operators" in text["train.sh"]
    assert "# NOTE not expressed: a group's score is its best" in text["train.sh"]


def test_recompute_of_some_layers_is_written_as_it_is() -> None:
    def flags(**keys: object) -> str:
        return " ".join(flag_words(megatron_args(Draft("Megatron-LM"), plan(pp=8, ep=8, recompute=["full"], **keys))))

    assert "--recompute-method block --recompute-num-layers 2" in flags(recompute_method="block", recompute_layers=2)
    assert "--recompute-method uniform --recompute-num-layers 4" in flags(recompute_layers=4)
    assert "--recompute-method uniform --recompute-num-layers 1" in flags()


def test_recompute_by_stage_is_refused() -> None:
    with pytest.raises(SpecError, match="recompute by pipeline stage"):
        megatron_args(Draft("Megatron-LM"), plan(pp=8, ep=8, recompute_stages=[["full"]] * 4 + [[]] * 4))
