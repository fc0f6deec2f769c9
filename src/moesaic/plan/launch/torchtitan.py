"""A plan as a configuration of torchtitan 0.3: a Python module, since its models and settings are Python there.

Names are those of the package's `config/configs.py`, `trainer.py` and `models/*/__init__.py` (release 0.3.0). Its
models are flavours in code, so a plan's model must be one of them.
"""

from __future__ import annotations

from typing import Any

from moesaic.spec.model import ModelSpec

from .parts import Draft, comment, heading, note_storage, refuse_uneven_recompute
from .plan import Plan
from .wrappers import train_script, wrapped

_FLAVOURS = {
    ("mla", 102400, 2048, 27, 64): ("deepseek_v3", "16B"),
    ("mla", 102400, 5120, 60, 160): ("deepseek_v3", "236B"),
    ("mla", 129280, 7168, 61, 256): ("deepseek_v3", "671B"),
    ("gqa", 151936, 4096, 36, 0): ("qwen3", "8B"),
    ("gqa", 151936, 2048, 48, 128): ("qwen3", "30B-A3B"),
    ("gqa", 151936, 4096, 94, 128): ("qwen3", "235B-A22B"),
    ("gqa", 128256, 4096, 32, 0): ("llama3", "8B"),
    ("gqa", 128256, 8192, 80, 0): ("llama3", "70B"),
    ("gqa", 128256, 16384, 126, 0): ("llama3", "405B"),
    ("gqa", 201088, 2880, 24, 32): ("gpt_oss", "20b"),
    ("gqa", 201088, 2880, 36, 128): ("gpt_oss", "120b"),
}
"""Module and flavour by kind of attention, vocabulary, hidden size, layers and experts of a layer."""
_BACKENDS = {"local": "standard", "alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}


def files(plan: Plan) -> dict[str, str]:
    """`moesaic_plan.py` with the configuration, `train.sh` that names it, and its wrappers.

    Raises:
        SpecError: torchtitan has no such model, mesh, schedule, dispatcher or precision.
    """
    draft = Draft("torchtitan")
    module, flavour = _flavour(draft, plan.workload.model)
    settings = _settings(draft, plan, module)
    usage = [
        "For torchtitan 0.3.0. Its data set is C4; ASSETS is a folder with the model's tokenizer, and options such as",
        "--training.steps 100 may follow train.sh.",
    ]
    draft.env["PYTHONPATH"] = '"$PWD:${PYTHONPATH:-}"'
    program = comment(heading(plan, draft.target, draft.notes, usage)) + _program(plan, module, flavour, settings)
    command = ['-m torchtitan.train --module moesaic_plan --config plan "$@"']
    return wrapped(plan, draft, {"moesaic_plan.py": program, "train.sh": train_script(plan, draft, command, usage)})


def _flavour(draft: Draft, model: ModelSpec) -> tuple[str, str]:
    kinds = {layer.attention.kind for layer in model.layers}
    experts = {layer.moe.router.experts for layer in (*model.layers, *model.mtp) if layer.moe is not None} or {0}
    key = (kinds.pop(), model.vocab, model.hidden, len(model.layers), max(experts))
    if kinds or len(experts) > 1 or key not in _FLAVOURS:
        known = ", ".join(f"{module} {flavour}" for module, flavour in _FLAVOURS.values())
        raise draft.refuse(
            f"its models are flavours in code, and none has the sizes of {model.name} (vocabulary {model.vocab}, "
            f"hidden {model.hidden}, {len(model.layers)} layers, {max(experts)} experts); known are {known}"
        )
    return _FLAVOURS[key]


def _settings(draft: Draft, plan: Plan, module: str) -> dict[str, Any]:
    """Keyword arguments of `ParallelismConfig` and `TrainingConfig`, and what the program chooses by."""
    work, layout = plan.workload, plan.layout
    moe = bool(work.model.moe_layers)
    mtp = len(work.model.mtp) if work.mtp else 0
    if layout.order == "dp-outer" and layout.pp > 1:
        raise draft.refuse("order dp-outer; pipeline stages are always its slowest mesh axis")
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        raise draft.refuse(f"cp {layout.cp} by ulysses; its context parallelism moves keys and values")
    if work.model.tied_embeddings and layout.pp > 1:
        raise draft.refuse("tied embeddings with a pipeline, which it refuses")
    if mtp and module != "deepseek_v3":
        raise draft.refuse(f"{mtp} prediction blocks; only its deepseek_v3 models have any")
    if mtp and layout.pp > 1:
        raise draft.refuse(
            f"prediction blocks with pp {layout.pp}; its multi-token prediction has no pipeline yet, so plan without "
            f"it or with pp 1"
        )
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp if layout.sharding == "none" else layout.replicas,
        "data_parallel_shard_degree": 1 if layout.sharding == "none" else layout.dp // layout.replicas,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.sharding != "none" and layout.dp % layout.replicas:
        raise draft.refuse(f"{layout.replicas} replicas do not divide dp {layout.dp}; its replicas are whole dp ranks")
    _experts(draft, plan, parallel, moe)
    _shard(draft, plan, parallel)
    training: dict[str, Any] = {
        "local_batch_size": layout.micro_batch * (plan.micro_batches if layout.pp > 1 else 1),
        "global_batch_size": work.global_batch,
        "seq_len": work.seq_len,
        "steps": 100,
    }
    if layout.pp > 1:
        parallel |= _pipeline(draft, plan)
        parallel["pipeline_parallel_microbatch_size"] = layout.micro_batch
    if work.precision == "fp32":
        training["mixed_precision_param"] = "float32"
        if moe:
            draft.lost("fp32 experts; its grouped matmuls are always bf16")
    if work.precision == "nvfp4" or (work.precision == "mxfp8" and plan.cluster.gpu.architecture == "hopper"):
        raise draft.refuse(f"precision {work.precision} on {plan.cluster.gpu.name}; it has bf16, fp8 and mxfp8")
    if "optimizer" in layout.offload:
        training["enable_cpu_offload"] = True
        draft.remark("training.enable_cpu_offload sends parameters and gradients to the host along with the optimizer")
    if "activations" in layout.offload:
        draft.lost("activations in host memory")
    note_storage(draft, plan)
    if work.moment_bytes != 4:
        draft.lost(f"moments of {work.moment_bytes} bytes; they are fp32, 4 bytes")
    if work.gradient_bytes != 4:
        draft.lost(f"gradients of {work.gradient_bytes} bytes; they are fp32, 4 bytes")
    return {"parallel": parallel, "training": training, "mtp": mtp, "moe": moe} | _work(draft, plan)


def _experts(draft: Draft, plan: Plan, parallel: dict[str, Any], moe: bool) -> None:
    layout = plan.layout
    if not moe:
        return
    if layout.ep > 1 and layout.etp > 1:
        raise draft.refuse(f"etp {layout.etp} with ep {layout.ep}; it has no tensor parallelism inside experts")
    if layout.ep == 1 and layout.etp != layout.tp:
        raise draft.refuse(
            f"etp {layout.etp} with ep 1 and tp {layout.tp}; without expert parallelism its experts are cut by tp, "
            f"so use etp {layout.tp} or ep of at least 2"
        )
    shard = parallel["data_parallel_shard_degree"]
    if shard * layout.cp * layout.tp % layout.ep:
        raise draft.refuse(
            f"dp_shard·cp·tp = efsdp·ep does not hold: {shard}·{layout.cp}·{layout.tp} is no multiple of ep "
            f"{layout.ep}; only ranks that share sharded parameters can share experts, so shard more"
        )
    if layout.dispatcher not in _BACKENDS:
        raise draft.refuse(f"the {layout.dispatcher} dispatcher; it has alltoall, deepep and hybridep")


def _shard(draft: Draft, plan: Plan, parallel: dict[str, Any]) -> None:
    sharding = plan.layout.sharding
    if sharding == "none":
        return
    parallel["fsdp_reshard_after_forward"] = "always" if sharding == "parameters" else "never"
    if sharding == "optimizer":
        draft.lost(
            "sharding of the optimizer alone; FSDP2 that keeps parameters after forward also shards gradients, and "
            "scatters them once per micro-batch"
        )


def _pipeline(draft: Draft, plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    schedules = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble"}
    if layout.schedule not in schedules:
        raise draft.refuse(f"the {layout.schedule} schedule; its V schedules place stages otherwise than this layout")
    if layout.schedule == "zero_bubble" and layout.virtual_stages == 1:
        raise draft.refuse("zero_bubble with one virtual stage; its InterleavedZeroBubble needs at least 2")
    parts = []
    for stage in layout.stages:
        names = ["tok_embeddings"] if stage.embed else []
        names += [f"layers.{layer}" for layer in stage.layers]
        parts.append([*names, *(["norm", "lm_head"] if stage.head else [])])
    if not all(parts):
        raise draft.refuse("a virtual stage that holds nothing")
    return {"pipeline_parallel_schedule": schedules[layout.schedule], "module_fqns_per_model_part": parts}


def _work(draft: Draft, plan: Plan) -> dict[str, Any]:
    """What is recomputed and what overlaps."""
    layout = plan.layout
    refuse_uneven_recompute(draft, layout)
    if "full" in layout.recompute:
        checkpoint = "FullAC.Config()"
    elif layout.recompute:
        checkpoint = "SelectiveAC.Config()"
        draft.lost(
            f"recompute of {', '.join(layout.recompute)} and nothing else; SelectiveAC chooses among operators, not "
            f"modules"
        )
    else:
        checkpoint = "None"
    for word in layout.overlap:
        if word in ("gradients", "parameters"):
            if layout.sharding == "none":
                draft.remark("DDP reduces gradients under backward by itself")
            else:
                draft.remark(f"FSDP2 overlaps {word} by itself")
        elif word == "tensor":
            if layout.tp == 1:
                draft.remark("overlap of tensor-parallel traffic has nothing to act on: tp is 1")
        else:
            draft.lost(f"overlap of {word}")
    return {"checkpoint": checkpoint, "async_tp": "tensor" in layout.overlap and layout.tp > 1}


def _program(plan: Plan, module: str, flavour: str, settings: dict[str, Any]) -> str:
    work = plan.workload
    registry = [repr(flavour)]
    imports = ["from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC"]
    if settings["moe"]:
        registry.append(f"moe_comm_backend={_BACKENDS[plan.layout.dispatcher]!r}")
    if settings["mtp"]:
        registry.append(f"num_mtp_layers={settings['mtp']}")
        imports.append("from torchtitan.models.deepseek_v3.mtp import MTPLoss")
        loss = "MTPLoss.Config(global_vocab_size=decoder_vocab_size(spec))"
    else:
        loss = (
            "ChunkedLossWrapper.Config(\n"
            "            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),\n        )"
        )
    compiled = settings["async_tp"]
    if work.precision in ("fp8", "mxfp8"):
        kind = {"fp8": "Float8", "mxfp8": "MXFP8"}[work.precision]
        names = [f"{kind}LinearConverter"] + ([f"{kind}GroupedExpertsConverter"] if settings["moe"] else [])
        imports.append(f"from torchtitan.components.quantization import {', '.join(names)}")
        # The head and the router stay in bf16.
        which = (
            'filter_fqns=["lm_head", "router.gate"], '
            if kind == "Float8"
            else 'fqns=["attention", "feed_forward", "shared_experts"], '
        )
        options = [f"{names[0]}.Config({which}model_compile_enabled={compiled})"]
        options += [f"{name}.Config(model_compile_enabled={compiled})" for name in names[1:]]
        registry.append(f"converters=[{', '.join(options)}]")
    components = '["model", "loss"]' if compiled else '["loss"]'
    tp = ", enable_async_tensor_parallel=True" if compiled else ""
    return f"""import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{module} import model_registry
from torchtitan.trainer import Trainer
{chr(10).join(imports)}


def plan() -> Trainer.Config:
    spec = model_registry({", ".join(registry)})
    return Trainer.Config(
        loss={loss},
        hf_assets_path=os.environ.get("ASSETS", "./assets"),
        model_spec=spec,
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_type="cosine", min_lr_factor=0.1),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint={settings["checkpoint"]},
        compile=CompileConfig(enable=True, components={components}{tp}),
        training=TrainingConfig(
            disable_cuda_graphs=True,
{_keywords(settings["training"])}        ),
        parallelism=ParallelismConfig(
{_keywords(settings["parallel"])}        ),
    )
"""


def _keywords(values: dict[str, Any]) -> str:
    return "".join(f"            {name}={value!r},\n" for name, value in values.items())
