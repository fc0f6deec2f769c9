"""A plan as a command line of Megatron-LM (`pretrain_gpt.py`).

The constraints are those that its own `validate_args` and `TransformerConfig` check, so that what is written here
starts there: the model in `megatron_model`, the layout below.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from moesaic.cost.workload import Precision

from .megatron_model import Args, model_args
from .parts import Draft, Shape, Value, note_storage, refuse_recompute_by_stage, shape, short_stages
from .plan import Plan
from .wrappers import train_script, wrapped

MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts")
"""What --recompute-modules takes of the planner's words."""
OFFLOADED = ("attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Modules whose inputs --offload-modules sends to the host, if it is to send all that it can."""


def files(plan: Plan) -> dict[str, str]:
    """`train.sh` with every argument, and its Slurm and Kubernetes wrappers."""
    draft = Draft("Megatron-LM")
    args = megatron_args(draft, plan)
    command = ['"${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}/pretrain_gpt.py"']
    command += _lines(args)
    usage = [
        "Arguments of Megatron-LM as of 2026-08-22 (d98e8a64dd). It trains on random tokens: to train on data, put",
        "--data-path, --split and a tokenizer in place of --mock-data and NullTokenizer.",
    ]
    script = train_script(plan, draft, command, usage)
    return wrapped(plan, draft, {"train.sh": script}, checkout="MEGATRON")


def megatron_args(draft: Draft, plan: Plan) -> Args:
    """Every argument of the plan, and in `draft` the environment that goes with them.

    Raises:
        SpecError: Megatron-LM has no word for a part of the model or of the layout, or forbids what it combines.
    """
    work, layout = plan.workload, plan.layout
    parts = shape(draft, plan)
    mtp = len(work.model.mtp) if work.mtp else 0
    if work.model.mtp and not work.mtp:
        draft.remark("multi-token prediction is left out, as in the plan")
    args: Args = {"--transformer-impl": "transformer_engine"}
    args |= model_args(draft, parts, mtp, work.seq_len)
    args |= _meshes(draft, plan, mtp)
    args |= {
        "--seq-length": work.seq_len,
        "--micro-batch-size": layout.micro_batch,
        "--global-batch-size": work.global_batch,
    }
    args |= precision_args(draft, plan, parts)
    args |= _sharding(draft, plan)
    args |= _dispatcher(draft, plan, parts)
    args |= _recompute(draft, plan, parts)
    args |= _overlap(draft, plan, parts, mtp)
    args |= _offload(draft, plan)
    note_storage(draft, plan)
    _environment(draft, plan)
    return args | {
        "--train-iters": 100,
        "--lr": 3e-4,
        "--min-lr": 3e-5,
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": 10,
        "--weight-decay": 0.1,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--clip-grad": 1.0,
        "--tokenizer-type": "NullTokenizer",
        "--mock-data": True,
        "--log-interval": 1,
        "--log-throughput": True,
        "--eval-iters": 0,
        "--manual-gc": True,
        "--manual-gc-interval": 10,
        "--distributed-timeout-minutes": 60,
    }


def flag_words(args: Mapping[str, Value]) -> list[str]:
    """The command line, word by word, without shell quotes."""
    return [word for flag, value in args.items() for word in (flag, *_text(value))]


def _lines(args: Args) -> list[str]:
    return [" ".join([flag, *map(shlex.quote, _text(value))]) for flag, value in args.items()]


def _text(value: Value) -> list[str]:
    if value is True:
        return []
    if isinstance(value, list):
        return list(value)
    return [f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)]


def _meshes(draft: Draft, plan: Plan, mtp: int) -> Args:
    layout, work = plan.layout, plan.workload
    args: Args = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
        # Left out it would be the tensor-parallel size, not 1.
        "--expert-tensor-parallel-size": layout.etp,
    }
    if layout.tp > 1:
        args["--sequence-parallel"] = True
    if layout.cp > 1:
        args["--cp-comm-type"] = ["p2p" if layout.cp_kind == "ring" else "a2a"]
        if work.seq_len % (2 * layout.cp):
            raise draft.refuse(f"seq_len % (2·cp) = {work.seq_len} % {2 * layout.cp} is not 0")
    if layout.etp > 1 and any(layer.moe is not None and layer.moe.expert.bias for layer in work.model.layers):
        raise draft.refuse(f"etp is {layout.etp}, and experts with biases need etp 1 there")
    if layout.order == "dp-outer":
        if layout.sharding in ("gradients", "parameters"):
            raise draft.refuse(f"order dp-outer with sharding {layout.sharding}, which Megatron-FSDP does not have")
        args["--use-tp-pp-dp-mapping"] = True
    if any(ep != layout.ep for _, ep in layout.experts_ep):
        raise draft.refuse(f"layers take other expert-parallel degrees than {layout.ep}, and it has one for all")
    if layout.schedule in ("zero_bubble", "dualpipe"):
        raise draft.refuse(f"the {layout.schedule} schedule; it has 1F1B and its interleaved form")
    if layout.pp == 1:
        return args
    holder = next((i for i, stage in enumerate(layout.stages) if stage.mtp), None)
    if mtp and holder is not None and (holder // layout.pp < layout.virtual_stages - 1 or holder % layout.pp == 0):
        raise draft.refuse(
            f"the prediction blocks stand on virtual stage {holder} of {len(layout.stages)}, and there they stand on "
            f"the last virtual stage of a pipeline rank other than the first"
        )
    # The number of virtual stages follows from the string's length.
    args["--pipeline-model-parallel-layout"] = short_stages(layout.stages, mtp)
    return args


def precision_args(draft: Draft, plan: Plan, parts: Shape) -> Args:
    """Arguments for the precision of matmuls, gradients and moments."""
    work, layout, gpu = plan.workload, plan.layout, plan.cluster.gpu
    precision: Precision = work.precision
    args: Args = {}
    needed = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision)
    if needed is not None and needed not in gpu.peak_flops:
        raise draft.refuse(f"{gpu.name} has no {needed} matrices for precision {precision}")
    if precision != "fp32":
        args["--bf16"] = True
    if precision == "fp8":
        recipe = "blockwise" if gpu.architecture == "hopper" else "tensorwise"
        args |= {"--fp8-format": "e4m3" if recipe == "blockwise" else "hybrid", "--fp8-recipe": recipe}
    elif precision == "mxfp8":
        args |= {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"}
    elif precision == "nvfp4":
        args |= {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}
    if needed is not None and parts.moe is not None and layout.dispatcher != "allgather":
        args["--moe-router-padding-for-quantization"] = True
    if work.moment_bytes == 2:
        if layout.sharding == "none":
            raise draft.refuse("moments of 2 bytes; they need a distributed optimizer there, hence some sharding")
        args |= {
            "--use-precision-aware-optimizer": True,
            "--exp-avg-dtype": "bf16",
            "--exp-avg-sq-dtype": "bf16",
        }
    if work.gradient_bytes == 2:
        args["--grad-reduce-in-bf16"] = True
    elif precision != "fp32":
        args["--accumulate-allreduce-grads-in-fp32"] = True
    return args


def _sharding(draft: Draft, plan: Plan) -> Args:
    layout = plan.layout
    if layout.sharding == "none":
        if layout.replicas > 1:
            raise draft.refuse(f"{layout.replicas} replicas of a state that is not sharded")
        return {}
    args: Args = {"--use-distributed-optimizer": True}
    if layout.sharding != "optimizer":
        args |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": {"gradients": "optim_grads", "parameters": "optim_grads_params"}[
                layout.sharding
            ],
            "--ckpt-format": "fsdp_dtensor",
            "--no-gradient-accumulation-fusion": True,
            "--init-model-with-meta-device": True,
        }
        if layout.pp > 1:
            draft.remark(
                f"sharding {layout.sharding} with {layout.pp} pipeline stages gathers and scatters once per micro-batch"
            )
    if layout.replicas > 1:
        args["--num-distributed-optimizer-instances"] = layout.replicas
    return args


def _dispatcher(draft: Draft, plan: Plan, parts: Shape) -> Args:
    layout = plan.layout
    if parts.moe is None:
        return {}
    if layout.dispatcher == "hierarchical":
        raise draft.refuse("the hierarchical dispatcher; its deepep and hybridep also send a token to a node once")
    if layout.dispatcher in ("deepep", "hybridep"):
        if layout.ep * layout.etp == 1:
            raise draft.refuse(f"{layout.dispatcher} with ep·etp = 1; use the local dispatcher")
        args: Args = {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": layout.dispatcher}
        if layout.dispatcher == "hybridep":
            domain = min(plan.cluster.fast_domain, layout.ep * layout.etp)
            draft.env["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = str(domain)
            draft.env["NVLINK_DOMAIN_SIZE"] = str(plan.cluster.domain or plan.cluster.gpu.domain)
            draft.env["USE_MNNVL"] = str(int(plan.cluster.fast_domain > plan.gpus_per_node))
        return args
    # With every expert on one rank all-to-all sends nothing; all-gather, the parser's default, would work as well.
    return {"--moe-token-dispatcher-type": "allgather" if layout.dispatcher == "allgather" else "alltoall"}


def _recompute(draft: Draft, plan: Plan, parts: Shape) -> Args:
    layout = plan.layout
    modules = [module for module in MODULES if module in layout.recompute]
    if "loss" in layout.recompute:
        draft.lost("recompute of the loss; --cross-entropy-loss-fusion below keeps less of it instead")
    fusion: Args = {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"}
    refuse_recompute_by_stage(draft, layout)
    if "full" in layout.recompute:
        if modules and layout.recompute_method == "block":
            draft.lost(f"recompute of {', '.join(modules)} in the layers that are not recomputed whole")
        return fusion | {
            "--recompute-granularity": "full",
            "--recompute-method": layout.recompute_method,
            "--recompute-num-layers": layout.recompute_layers,
        }
    shared = parts.moe is not None and parts.moe.shared is not None
    for module, there, what in (
        ("mla_up_proj", parts.attention.kind == "mla", "latent attention"),
        ("moe_act", parts.moe is not None, "experts"),
        ("moe", parts.moe is not None, "experts"),
        ("shared_experts", shared, "shared experts"),
    ):
        if module in modules and not there:
            modules.remove(module)
            draft.remark(f"recompute of {module} is left out: the model has no {what}")
    if not modules:
        return fusion
    return fusion | {"--recompute-granularity": "selective", "--recompute-modules": modules}


def _overlap(draft: Draft, plan: Plan, parts: Shape, mtp: int) -> Args:
    layout = plan.layout
    overlap = set(layout.overlap)
    args: Args = {}
    if "parameters" in overlap:
        if layout.sharding == "none":
            raise draft.refuse("overlap of parameters; nothing is gathered without sharding")
        overlap.add("gradients")
        args["--overlap-param-gather"] = True
    if "gradients" in overlap:
        args["--overlap-grad-reduce"] = True
    if "tensor" in overlap and layout.tp == 1:
        overlap.remove("tensor")
        draft.remark("overlap of tensor-parallel communication is left out: tp is 1")
    if "shared_experts" in overlap and (parts.moe is None or parts.moe.shared is None):
        overlap.remove("shared_experts")
        draft.remark("overlap of shared experts is left out: the model has none")
    for word in ("experts", "weight_gradients"):
        if word in overlap and layout.ep == 1:
            overlap.remove(word)
            draft.remark(f"overlap of {word} is left out: ep is 1, so that nothing is dispatched")
    if "tensor" in overlap:
        args["--tp-comm-overlap"] = True
    if "shared_experts" in overlap:
        if layout.dispatcher == "allgather":
            raise draft.refuse(
                "overlap of shared experts with the allgather dispatcher; use alltoall, deepep or hybridep"
            )
        if "shared_experts" in layout.recompute:
            raise draft.refuse("overlap and recompute of shared experts; keep one of them")
        args["--moe-shared-expert-overlap"] = True
    if "experts" in overlap:
        _check_expert_overlap(draft, plan, mtp, "shared_experts" in overlap)
        args["--overlap-moe-expert-parallel-comm"] = True
    if "weight_gradients" in overlap:
        flag = "--delay-wgrad-compute" if "experts" in overlap else "--overlap-dispatch-backward-with-experts-wgrad"
        args[flag] = True
    if "between" in overlap:
        draft.lost("overlap between operators of one micro-batch (MegaScale-MoE, arXiv 2505.11432, section 5.1)")
    if "inside" in overlap:
        draft.lost("overlap inside operators, chunk by chunk (MegaScale-MoE, arXiv 2505.11432, section 5.2)")
    return args


def _check_expert_overlap(draft: Draft, plan: Plan, mtp: int, shared: bool) -> None:
    """What `TransformerConfig` asks of overlap_moe_expert_parallel_comm."""
    layout = plan.layout
    rules = (
        (
            layout.dispatcher == "allgather",
            "does not go with the allgather dispatcher: use alltoall, deepep or hybridep",
        ),
        (plan.workload.precision == "fp32", "needs bf16"),
        ("full" in layout.recompute, "does not go with full recompute"),
        ("moe" in layout.recompute, "does not go with recompute of moe"),
        (shared, "does not go with overlap of shared experts"),
        (mtp > 1, f"goes with at most one prediction block, not {mtp}"),
        (layout.pp > 1 and layout.virtual_stages == 1, f"needs virtual stages with pp {layout.pp}"),
    )
    for broken, why in rules:
        if broken:
            raise draft.refuse(f"overlap of one micro-batch's experts with another's {why}")


def _offload(draft: Draft, plan: Plan) -> Args:
    args: Args = {}
    if "optimizer" in plan.layout.offload:
        if plan.layout.sharding == "none":
            raise draft.refuse(
                "an optimizer in host memory; it needs a distributed optimizer there, hence some sharding"
            )
        args |= {
            "--use-precision-aware-optimizer": True,
            "--optimizer-cpu-offload": True,
            "--overlap-cpu-optimizer-d2h-h2d": True,
        }
    if "activations" in plan.layout.offload:
        if "full" in plan.layout.recompute:
            raise draft.refuse("activations in host memory and full recompute; keep one of them")
        kept = {"moe": {"expert_fc1", "moe_act"}, "moe_act": {"moe_act"}, "layernorm": {"attn_norm", "mlp_norm"}}
        gone = set().union(*(kept.get(module, set()) for module in plan.layout.recompute))
        if not plan.workload.model.moe_layers:
            gone |= {"expert_fc1", "moe_act"}
        args |= {
            "--fine-grained-activation-offloading": True,
            "--offload-modules": [module for module in OFFLOADED if module not in gone],
        }
        # Transformer Engine 2.10 and later would offload weights as well.
        draft.env["NVTE_CPU_OFFLOAD_V1"] = "1"
    return args


def _environment(draft: Draft, plan: Plan) -> None:
    """Hardware queues: one keeps tensor- and context-parallel communication in order before Blackwell, while FSDP and
    the overlap of experts need several."""
    layout = plan.layout
    experts, fsdp = "experts" in layout.overlap and layout.ep > 1, layout.sharding in ("gradients", "parameters")
    if experts or fsdp:
        draft.env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        if (layout.tp > 1 or layout.cp > 1) and plan.cluster.gpu.architecture != "blackwell":
            draft.remark(
                "CUDA_DEVICE_MAX_CONNECTIONS is 32 for the overlap of experts or for FSDP, while tp or cp above 1 "
                "would like 1 on this accelerator: measure both"
                if not fsdp
                else "CUDA_DEVICE_MAX_CONNECTIONS is 32, as FSDP refuses 1, which tp or cp above 1 would like here"
            )
    else:
        draft.env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    draft.env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
