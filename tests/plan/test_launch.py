"""Launch files of every target: they parse, fit together, and refuse what the target cannot run."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesaic.plan.launch import TARGETS, Plan, launch_files, plain_name, write_launch_files
from moesaic.plan.launch.bridge import bridge_config
from moesaic.plan.launch.deepspeed import deepspeed_config
from moesaic.plan.launch.parts import Draft
from moesaic.plan.launch.run_file import run_tables
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import resolve_layout
from moesaic.spec.run import parse_run
from tests.examples.test_launch_scripts import PYTORCHJOB, unknown
from tests.plan.launched import GB200, H100, MI300X, example, plan
from tests.plan.test_launch_megatron import plans

RUNS: dict[str, Plan] = {
    "megatron": example(),
    "bridge": example(),
    "torchtitan": plan(
        pp=4,
        ep=8,
        tp=2,
        virtual_stages=2,
        sharding="parameters",
        work={"mtp": False},
        with_options={"dispatcher": "deepep"},
    ),
    "deepspeed": plan("qwen3-30b-a3b", 16, ep=8, dispatcher="alltoall", sharding="gradients", global_batch=64),
    "nanotron": plan("qwen2-57b-a14b", 16, pp=2, sharding="optimizer", global_batch=64),
    "run-file": plan("mixtral-8x7b", 16, gpu=MI300X, ep=8, pp=2, sharding="optimizer", global_batch=64),
}


@pytest.mark.parametrize("target", TARGETS)
def test_files_are_what_their_names_say(target, tmp_path):
    files = launch_files(target, RUNS[target])
    assert {"train.sh", "slurm.sbatch", "pytorchjob.yaml"} <= set(files)
    for name, text in files.items():
        if name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith(".yaml"):
            assert yaml.safe_load(text)
        elif name.endswith(".json"):
            json.loads(text)
        elif name.endswith(".py"):
            ast.parse(text)
        else:
            assert text.startswith("#!/usr/bin/env bash\n")
            check_shell(tmp_path / name, text)


def check_shell(path: Path, text: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed, so scripts cannot be parsed")
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_train_sh_starts_one_process_per_accelerator(target, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed, so scripts cannot be run")
    made = RUNS[target]
    (tmp_path / "train.sh").write_text(launch_files(target, made)["train.sh"], encoding="utf-8")
    environment = {"PATH": "/usr/bin:/bin", "TORCHRUN": "echo", "MEGATRON": "/m", "NANOTRON": "/n"}
    run = ["bash", str(tmp_path / "train.sh")]
    alone = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert alone.returncode != 0 and "set HEAD" in alone.stderr
    slurm = subprocess.run(run, env=environment | {"HEAD": "node7", "JOB": "1"}, capture_output=True, text=True)
    assert slurm.returncode == 0, slurm.stderr
    words = slurm.stdout.split()
    nodes, each = (int(words[words.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node"))
    assert nodes * each == made.layout.world and each == 8
    assert words[words.index("--rdzv-endpoint") + 1] == "node7:29400"
    # Kubernetes' operator says where to meet, and torchrun reads that from its environment.
    pod = subprocess.run(run, env=environment | {"PET_RDZV_ENDPOINT": "w-0:1"}, capture_output=True, text=True)
    assert pod.returncode == 0 and "--rdzv-endpoint" not in pod.stdout and "--nnodes" not in pod.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_wrappers_agree_on_nodes_and_accelerators(target):
    made = RUNS[target]
    files = launch_files(target, made)
    job = yaml.safe_load(files["pytorchjob.yaml"])
    assert not unknown(job, PYTORCHJOB)
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for that name"
    assert (
        worker["replicas"] == made.nodes == spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"]
    )
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == made.nodes
    vendor = made.cluster.gpu.vendor.lower()
    assert container["resources"]["limits"] == {f"{vendor}.com/gpu": made.gpus_per_node}
    assert spec["nprocPerNode"] == str(made.gpus_per_node)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    grace = re.search(r"--shutdown-timeout (\d+)", files["train.sh"])
    assert (grace is not None) is (target == "run-file"), "only this project's trainer saves when it is stopped"
    assert grace is None or int(grace[1]) < pod["terminationGracePeriodSeconds"]
    slurm = files["slurm.sbatch"]
    assert f"#SBATCH --nodes={made.nodes}\n" in slurm
    assert f"#SBATCH --gpus-per-node={made.gpus_per_node}\n" in slurm
    for name in set(re.findall(r"\$\{(MEGATRON|NANOTRON):", files["train.sh"])):
        assert name in slurm and any(each["name"] == name for each in container["env"])


def test_slurm_keeps_nodes_of_a_domain_together():
    made = plan(gpu=GB200, gpus=72, ep=8, global_batch=72)
    assert "#SBATCH --segment=18\n" in launch_files("megatron", made)["slurm.sbatch"]
    assert "--segment" not in launch_files("megatron", example())["slurm.sbatch"]


def test_unknown_targets_get_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'megatron'"):
        launch_files("megatron-lm", example())


def test_files_are_written_into_a_folder(tmp_path):
    paths = write_launch_files("megatron", example(), tmp_path / "new" / "folder")
    assert {path.name: path.read_text(encoding="utf-8") for path in paths} == launch_files("megatron", example())
    with pytest.raises(SpecError, match="cannot be written to"):
        write_launch_files("megatron", example(), paths[0])
    with pytest.raises(SpecError, match="cannot start with ep above 1"):
        write_launch_files("nanotron", plan("qwen2-57b-a14b", 8, ep=8, global_batch=64), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "My Plan"}, "such as 'my-plan'"),
        ({"cluster": ClusterSpec(gpu=H100, gpus=128)}, "256 ranks, but the cluster has 128"),
        ({"cluster": ClusterSpec(gpu=H100.model_copy(update={"gpus_per_node": 7}), gpus=256)}, "252 or 259"),
        ({"workload": replace(example().workload, global_batch=100)}, "use a multiple of 16"),
    ],
)
def test_plans_that_do_not_fit_together(change, says):
    with pytest.raises(SpecError, match=re.escape(says)):
        replace(example(), **change)


def test_names_become_plain():
    assert plain_name("DeepSeek-V3 (671B)") == "deepseek-v3-671b"
    assert plain_name("…") == "plan"


# The run file: what it resolves to is the plan.


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_a_run_file_names_the_package_that_it_needs(name):
    made = plan("mixtral-8x7b", 16, gpu=H100, ep=8, pp=2, global_batch=64, with_options={"dispatcher": name})
    files = launch_files("run-file", made)
    text = "\n".join(files.values())
    assert f"dispatcher {name} needs the package deep_ep on every node" in text
    assert tomllib.loads(files["run.toml"])["layout"]["dispatcher_backend"] == name
    cut = plan("mixtral-8x7b", 16, gpu=H100, ep=4, etp=2, pp=2, global_batch=64, with_options={"dispatcher": name})
    with pytest.raises(SpecError, match=f"cannot run this plan: {name} brings tokens to whole experts"):
        launch_files("run-file", cut)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans(), st.booleans())
def test_the_run_file_is_read_back_as_the_plan(made, plain):
    if plain:
        kept = {"recompute": (), "overlap": (), "offload": ()}
        dispatcher = "local" if made.layout.ep * made.layout.etp == 1 else "alltoall"
        made = replace(
            made,
            layout=replace(made.layout, **kept, dispatcher=dispatcher),
            workload=replace(made.workload, precision="bf16"),
        )
    try:
        text = launch_files("run-file", made)["run.toml"]
    except SpecError as error:
        # The trainer refuses what it lacks; a plain plan only where the prediction blocks stand in the way.
        assert not plain or "zero_bubble" in str(error), str(error)
        return
    run = parse_run(tomllib.loads(text))
    layout = resolve_layout(run.layout, run.model_spec(), made.layout.world, seq_len=2048, global_batch=256)
    assert layout == made.layout
    assert (run.train.seq_len, run.train.global_batch) == (2048, 256)
    assert run.model_spec().layers == made.workload.model.layers


def test_the_run_file_keeps_state_as_planned():
    options = {"offload": ("optimizer", "activations"), "offload_fraction": 0.5, "offload_modules": ("norms", "moe")}
    work = {"moment_bytes": 2, "master": "split"}
    made = plan("mixtral-8x7b", 16, ep=8, global_batch=64, with_options=options, work=work)
    run = parse_run(tomllib.loads(launch_files("run-file", made)["run.toml"]))
    assert (run.train.moment_dtype, run.train.master) == ("bf16", "split")
    layout = resolve_layout(run.layout, run.model_spec(), 16, seq_len=run.train.seq_len, global_batch=64)
    assert layout == made.layout


def test_the_run_file_refuses_what_the_trainer_lacks():
    made = plan("mixtral-8x7b", 16, ep=8, global_batch=64, work={"precision": "fp8"})
    with pytest.raises(SpecError, match=re.escape("train.dtype 'fp8' does not exist yet")):
        launch_files("run-file", made)


def test_an_unpublished_model_is_written_into_the_run_file():
    config = {
        "model_type": "mixtral", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    from moesaic.spec.families import load_model_spec
    from moesaic.spec.tables import LayoutTable

    base = plan("mixtral-8x7b", 8, ep=8, global_batch=64)
    model = load_model_spec(config, name="mine")
    layout = resolve_layout(LayoutTable(ep=8), model, 8, seq_len=4096, global_batch=64)
    made = replace(base, workload=replace(base.workload, model=model), layout=layout)
    run = parse_run(run_tables(Draft("moesaic"), made))
    assert run.model_spec().layers == model.layers


# Megatron-Bridge.


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_megatron_bridge_has_every_field(made):
    facts = json.loads((Path(__file__).parent / "megatron-bridge-fields.json").read_text(encoding="utf-8"))["fields"]
    try:
        model, sections = bridge_config(Draft("Megatron-Bridge"), made)
    except SpecError:
        assume(False)
    provider = set(facts["mla" if model.get("multi_latent_attention") else "gpt"])
    assert set(model) <= provider
    assert set(sections["model"]) <= provider
    for name, fields in sections.items():
        if name != "model":
            assert set(fields) <= set(facts[name]), name
    layout = made.layout
    names = ("tensor", "pipeline", "expert_model", "expert_tensor", "context")
    degrees = [
        sections["model"][key]
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "context_parallel_size",
        )
    ]
    assert dict(zip(names, degrees, strict=True)) == dict(
        zip(names, (layout.tp, layout.pp, layout.ep, layout.etp, layout.cp), strict=True)
    )


def test_megatron_bridge_can_say_what_megatron_lm_cannot():
    kimi = plan("kimi-k2", 64, ep=32, global_batch=64)
    assert "not expressed: beta_fast 1 of YaRN" in launch_files("megatron", kimi)["train.sh"]
    files = launch_files("bridge", kimi)
    assert "beta_fast=1.0" in files["pretrain.py"] and "not expressed" not in files["pretrain.py"]


# torchtitan.


def keywords(program: str, called: str) -> dict[str, Any]:
    (call,) = (
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == called
    )
    return {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}


def test_torchtitan_gets_meshes_stages_and_batch():
    made = RUNS["torchtitan"]
    program = launch_files("torchtitan", made)["moesaic_plan.py"]
    parallel, training = keywords(program, "ParallelismConfig"), keywords(program, "TrainingConfig")
    degrees = ("tensor", "context", "pipeline", "expert")
    assert [parallel[f"{name}_parallel_degree"] for name in degrees] == [2, 1, 4, 8]
    # Its equation: dp_shard · cp · tp = efsdp · ep over the ranks of one stage and replica.
    assert parallel["data_parallel_shard_degree"] * 2 % 8 == 0
    assert parallel["data_parallel_shard_degree"] == made.layout.dp
    parts = parallel["module_fqns_per_model_part"]
    assert len(parts) == 8 and parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "lm_head"]
    assert [name for part in parts for name in part if name.startswith("layers.")] == [f"layers.{i}" for i in range(61)]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert training["local_batch_size"] * made.layout.dp == made.workload.global_batch == training["global_batch_size"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (plan("mixtral-8x7b", 8, ep=8, global_batch=64), "none has the sizes of Mixtral-8x7B"),
        (plan("qwen3-30b-a3b", 8, ep=4, etp=2, global_batch=64), "no tensor parallelism inside experts"),
        (plan("qwen3-30b-a3b", 8, tp=4, global_batch=64), "use etp 4 or ep of at least 2"),
        (plan(pp=4, ep=8, sharding="parameters"), "multi-token prediction has no pipeline yet"),
        (plan("qwen3-30b-a3b", 8, ep=8, global_batch=64), "dp_shard·cp·tp = efsdp·ep does not hold: 1·1·1"),
        (plan("qwen3-30b-a3b", 8, ep=2, sharding="parameters", global_batch=64), "the allgather dispatcher"),
        (plan("qwen3-30b-a3b", 8, cp=2, global_batch=64), "by ulysses"),
    ],
)
def test_torchtitan_refuses(made, says):
    with pytest.raises(SpecError, match=re.escape(says)):
        launch_files("torchtitan", made)


# DeepSpeed.


def test_deepspeed_gets_stage_batch_and_experts():
    config = json.loads(launch_files("deepspeed", RUNS["deepspeed"])["ds_config.json"])
    assert config["zero_optimization"]["stage"] == 2
    assert config["expert_parallel"] | {"comm_backend": "comm"} == {
        "enabled": True, "autoep_size": 8, "preset_model": "qwen3_moe", "comm_backend": "comm",
    }  # fmt: skip
    each = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert each * RUNS["deepspeed"].layout.dp == config["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (plan(pp=4, ep=8, work={"mtp": False}), "use pp 1"),
        (plan(ep=8), "prediction blocks"),
        (plan("qwen3-30b-a3b", 8, ep=4, etp=2, global_batch=64), "use etp 1"),
        (plan("qwen3-30b-a3b", 8, cp=2, global_batch=64), "use cp 1"),
        (plan("qwen3-30b-a3b", 16, ep=2, global_batch=64), "the allgather dispatcher"),
        (plan("gpt-oss-20b", 8, ep=8, global_batch=64), "AutoEP has presets for mixtral"),
        (plan("megascale-moe-352b", 8, global_batch=64), "no Hugging Face model"),
    ],
)
def test_deepspeed_refuses(made, says):
    with pytest.raises(SpecError, match=re.escape(says)):
        launch_files("deepspeed", made)


def test_deepspeed_says_that_nothing_updates_the_selection_bias():
    draft = Draft("DeepSpeed")
    deepspeed_config(draft, plan(gpus=64, ep=64, sharding="gradients", work={"mtp": False}))
    assert any("updates of the selection bias" in note for note in draft.notes)


# nanotron.


def test_nanotron_gets_meshes_and_batch():
    made = RUNS["nanotron"]
    config = yaml.safe_load(launch_files("nanotron", made)["config.yaml"])
    parallel, tokens = config["parallelism"], config["tokens"]
    assert parallel["dp"] * parallel["pp"] * parallel["tp"] * parallel["context_parallel_size"] == 16
    assert tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * parallel["dp"] == 64
    assert config["optimizer"]["zero_stage"] == 1
    moe = config["model"]["model_config"]["moe_config"]
    assert (moe["num_experts"], moe["top_k"], moe["moe_intermediate_size"]) == (64, 8, 2560)
    assert moe["layers"] == list(range(28))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (plan("qwen2-57b-a14b", 8, ep=8, global_batch=64), "it cannot start with ep above 1"),
        (plan("qwen2-57b-a14b", 8, tp=2, global_batch=64), "nothing keeps the copies of router and experts"),
        (plan("qwen2-57b-a14b", 8, etp=2, global_batch=64), "no tensor parallelism inside experts"),
        (plan("qwen2-57b-a14b", 8, pp=2, virtual_stages=2, global_batch=64), "interleaved schedule"),
        (plan("qwen2-57b-a14b", 8, sharding="parameters", global_batch=64), "ZeRO stages 0 and 1"),
        (plan("mixtral-8x7b", 8, global_batch=64), "keeps the top-k weights as they are"),
        (plan("qwen3-8b", 8, global_batch=64), "norms of queries and keys"),
    ],
)
def test_nanotron_refuses(made, says):
    with pytest.raises(SpecError, match=re.escape(says)):
        launch_files("nanotron", made)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans(), st.sampled_from(sorted(TARGETS)))
def test_no_target_drops_anything_silently(made, target):
    """Whatever is not in the files' settings stands in a note, or the plan is refused in one sentence."""
    try:
        files = launch_files(target, made)
    except SpecError as error:
        assert str(error).endswith(".")
        assert "cannot run this plan" in str(error) or "does not exist yet" in str(error)
        return
    text = "\n".join(files.values())
    work, layout = made.workload, made.layout
    if work.moment_bytes == 2:
        assert (
            "moments of 2 bytes" in text or "exp-avg-dtype" in text or "exp_avg_dtype" in text or "moment_dtype" in text
        )
    for module in layout.recompute:
        assert module in text or "full" in layout.recompute
    for word in layout.overlap:
        said = {
            "gradients": ("overlap-grad-reduce", "overlap_grad_reduce", "overlap_comm", "under backward"),
            "parameters": ("overlap-param-gather", "overlap_param_gather", "overlap_comm", "under backward"),
            "tensor": ("tp-comm-overlap", "tp_comm_overlap", "async"),
            "shared_experts": ("moe-shared-expert-overlap", "moe_shared_expert_overlap"),
            "experts": ("overlap-moe-expert", "overlap_moe_expert"),
            "weight_gradients": ("wgrad",),
        }.get(word, ())
        notes = (f"overlap of {word}", f"overlaps {word}", f"overlap {word}", "overlap of shared", "overlap of tensor")
        own = (f'"{word}"',) if target == "run-file" else ()  # a run file has the words themselves
        assert any(each in text for each in (*said, *notes, *own, "overlap between", "overlap inside")), word


def test_the_docs_show_what_the_code_writes():
    page = (Path(__file__).resolve().parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    files = launch_files("megatron", example())
    for name in ("train.sh", "slurm.sbatch"):
        assert f"```bash\n{files[name]}```" in page, f"docs/launch.md does not show {name} as it is written"
    table = page[page.index("| target |") :]
    for target in TARGETS:
        assert f"| `{target}` |" in table
