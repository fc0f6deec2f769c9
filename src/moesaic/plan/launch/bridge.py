"""A plan as a configuration of Megatron-Bridge: `pretrain.py` builds the model, `overrides.yaml` has the rest.

Megatron-Bridge fills the same dataclasses as Megatron-LM's parser, under names of their own; what they mean and what
they forbid is Megatron-Core's, so the arguments of `megatron` are translated. Names are those of megatron-bridge 0.6.2
with megatron-core 0.19.
"""

from __future__ import annotations

import re
from typing import Any

from .megatron import megatron_args
from .parts import Draft, Value, comment, heading, yaml_text
from .plan import Plan
from .wrappers import train_script, wrapped

Fields = dict[str, Any]

_RENAMED = {
    "--norm-epsilon": "layernorm_epsilon",
    "--num-experts": "num_moe_experts",
    "--use-rope-scaling": "rope_scaling",
    "--rotary-seq-len-interpolation-factor": "seq_len_interpolation_factor",
}
_OFF = {
    "--untie-embeddings-and-output-weights": "share_embeddings_and_output_weights",
    "--disable-bias-linear": "add_bias_linear",
    "--no-rope-fusion": "apply_rope_fusion",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
}
_ACTIVATIONS = {
    "--swiglu": ("F.silu", True),
    "--squared-relu": ("squared_relu", False),
    "--quick-geglu": ("quick_gelu", True),
}
_ELSEWHERE = {
    "--micro-batch-size": ("train", "micro_batch_size"),
    "--global-batch-size": ("train", "global_batch_size"),
    "--train-iters": ("train", "train_iters"),
    "--manual-gc": ("train", "manual_gc"),
    "--manual-gc-interval": ("train", "manual_gc_interval"),
    "--overlap-grad-reduce": ("ddp", "overlap_grad_reduce"),
    "--overlap-param-gather": ("ddp", "overlap_param_gather"),
    "--data-parallel-sharding-strategy": ("ddp", "data_parallel_sharding_strategy"),
    "--num-distributed-optimizer-instances": ("ddp", "num_distributed_optimizer_instances"),
    "--ckpt-format": ("checkpoint", "ckpt_format"),
    "--use-tp-pp-dp-mapping": ("dist", "use_tp_pp_dp_mapping"),
    "--distributed-timeout-minutes": ("dist", "distributed_timeout_minutes"),
    "--use-precision-aware-optimizer": ("optimizer", "use_precision_aware_optimizer"),
    "--optimizer-cpu-offload": ("optimizer", "optimizer_cpu_offload"),
    "--overlap-cpu-optimizer-d2h-h2d": ("optimizer", "overlap_cpu_optimizer_d2h_h2d"),
    "--lr": ("optimizer", "lr"),
    "--min-lr": ("optimizer", "min_lr"),
    "--weight-decay": ("optimizer", "weight_decay"),
    "--adam-beta1": ("optimizer", "adam_beta1"),
    "--adam-beta2": ("optimizer", "adam_beta2"),
    "--clip-grad": ("optimizer", "clip_grad"),
    "--lr-decay-style": ("scheduler", "lr_decay_style"),
    "--lr-warmup-iters": ("scheduler", "lr_warmup_iters"),
    "--log-interval": ("logger", "log_interval"),
    "--log-throughput": ("logger", "log_throughput"),
    "--eval-iters": ("validation", "eval_iters"),
}
_FOLLOWS = {
    # Said by other fields, by the precision's name, or by the recipe that pretrain.py starts from.
    "--group-query-attention", "--max-position-embeddings", "--seq-length", "--bf16", "--fp8-format", "--fp8-recipe",
    "--fp4-format", "--fp4-recipe", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--grad-reduce-in-bf16",
    "--accumulate-allreduce-grads-in-fp32", "--use-distributed-optimizer", "--use-megatron-fsdp", "--tokenizer-type",
    "--mock-data",
}  # fmt: skip
_BOTH = re.compile(r"\[(\d)\]\*(\d+)")


def files(plan: Plan) -> dict[str, str]:
    """`pretrain.py` (the model), `overrides.yaml` (layout, batch, optimizer), `train.sh` and its wrappers."""
    draft = Draft("Megatron-Bridge")
    model, sections = bridge_config(draft, plan)
    usage = ["pretrain.py holds the model, overrides.yaml the layout and the rest; more overrides may follow train.sh."]
    top = comment(heading(plan, draft.target, draft.notes, usage))
    script = train_script(plan, draft, ['pretrain.py "$@"'], usage)
    texts = {
        "pretrain.py": top + _program(plan, draft, model),
        "overrides.yaml": top + yaml_text(sections),
        "train.sh": script,
    }
    return wrapped(plan, draft, texts)


def bridge_config(draft: Draft, plan: Plan) -> tuple[Fields, dict[str, Fields]]:
    """The fields of the model provider that say what the model is, and the overrides by section.

    Raises:
        SpecError: as `megatron_args`.
    """
    work, layout = plan.workload, plan.layout
    # The environment that Megatron-LM needs is needed here as well.
    args = megatron_args(draft, plan)
    latent = "--multi-latent-attention" in args
    model: Fields = {"add_bias_linear": True, "share_embeddings_and_output_weights": True, "should_pad_vocab": True}
    sections: dict[str, Fields] = {name: {} for name in ("model", "train", "ddp", "optimizer", "dist")}
    architecture = True
    for flag, value in args.items():
        # Arguments of the model come first, those of the layout from this one on.
        architecture = architecture and flag != "--tensor-model-parallel-size"
        if flag in _FOLLOWS:
            continue
        if flag in _ELSEWHERE:
            section, name = _ELSEWHERE[flag]
            sections.setdefault(section, {})[name] = value
        elif flag in _ACTIVATIONS:
            model["gated_linear_unit"] = _ACTIVATIONS[flag][1]
        else:
            name, plain = _field(flag, value, latent)
            (model if architecture else sections["model"])[name] = plain
    if latent:
        _yarn(draft, plan, model)
    if layout.pp > 1 and layout.virtual_stages > 1:
        sections["model"]["virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    sections["model"]["seq_length"] = work.seq_len
    sections["dataset"] = {"seq_length": work.seq_len}
    sharded, fsdp = layout.sharding != "none", layout.sharding in ("gradients", "parameters")
    sections["ddp"] = {"overlap_grad_reduce": False, "overlap_param_gather": False} | sections["ddp"]
    sections["ddp"] |= {"use_distributed_optimizer": sharded, "use_megatron_fsdp": fsdp}
    if not fsdp:
        sections["ddp"]["data_parallel_sharding_strategy"] = "no_shard"
    sections["optimizer"]["use_distributed_optimizer"] = sharded
    sections["dist"]["use_megatron_fsdp"] = fsdp
    if layout.replicas > 1:
        sections["dist"]["num_distributed_optimizer_instances"] = layout.replicas
    return model, {name: fields for name, fields in sections.items() if fields}


def _field(flag: str, value: Value, latent: bool) -> tuple[str, Any]:
    """The provider's field of a Megatron-LM argument, and its value there."""
    if flag in _OFF:
        return _OFF[flag], False
    if flag in ("--moe-layer-freq", "--no-rope-freq", "--window-attn-skip-freq"):
        return flag[2:].replace("-", "_"), [
            int(kind) for kind, count in _BOTH.findall(str(value)) for _ in range(int(count))
        ]
    if flag == "--window-size":
        return "window_size", [int(part) for part in str(value).split(",")]
    if flag in ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--cp-comm-type"):
        assert isinstance(value, list) and len(value) == 1
        return flag[2:].replace("-", "_"), float(value[0]) if flag == "--moe-aux-loss-coeff" else value[0]
    if not latent and flag in ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim"):
        return "yarn_" + flag[2:].replace("-", "_"), value
    return _RENAMED.get(flag, flag[2:].replace("-", "_")), value


def _yarn(draft: Draft, plan: Plan, model: Fields) -> None:
    """Latent attention's provider has the fields for which Megatron-LM has no arguments."""
    draft.notes = [note for note in draft.notes if "for latent attention Megatron-LM has" not in note]
    rope = plan.workload.model.layers[0].attention.rope
    if rope is None or rope.kind != "yarn":
        return
    model["original_max_position_embeddings"] = int(rope.params["original_max_position_embeddings"])
    model |= {name: float(rope.params[name]) for name in ("beta_fast", "beta_slow")}


def _precision(plan: Plan) -> str:
    """The name of a mixed-precision recipe; fp32 has none."""
    work = plan.workload
    if work.precision == "fp8":
        kind = "subchannel" if plan.cluster.gpu.architecture == "hopper" else "current"
        return f"bf16_with_fp8_{kind}_scaling_mixed"
    return {"bf16": "bf16_mixed", "mxfp8": "bf16_with_mxfp8_mixed", "nvfp4": "bf16_with_nvfp4_mixed"}[work.precision]


def _program(plan: Plan, draft: Draft, model: Fields) -> str:
    work = plan.workload
    latent = bool(model.get("multi_latent_attention"))
    provider, module = ("MLAModelProvider", "mla_provider") if latent else ("GPTModelProvider", "gpt_provider")
    blocks = [layer.mlp if layer.moe is None else layer.moe.expert for layer in work.model.layers]
    activation = blocks[0].activation if blocks[0] is not None else "silu"
    function = {"silu": "F.silu", "relu2": "squared_relu", "swiglu_clamped": "quick_gelu"}.get(activation, "F.gelu")
    rows = "".join(f"    {name}={value!r},\n" for name, value in model.items())
    imports = ["import torch"]
    if function.startswith("F."):
        imports.append("import torch.nn.functional as F")
    else:
        where = "fusions.fused_bias_geglu" if function == "quick_gelu" else "activations"
        imports.append(f"from megatron.core.{where} import {function}")
    precision = "None" if work.precision == "fp32" else f"get_mixed_precision_config({_precision(plan)!r})"
    lines = [f"config.mixed_precision = {precision}"]
    if work.precision != "fp32":
        lines.append(f"config.mixed_precision.grad_reduce_in_fp32 = {work.gradient_bytes == 4}")
    if work.moment_bytes == 2:
        lines += [f"config.optimizer.{name} = torch.bfloat16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    if plan.layout.pp > 1:
        lines.append(f"config.model.pipeline_dtype = torch.{'float32' if work.precision == 'fp32' else 'bfloat16'}")
    settings = "\n".join(lines)
    starts = "\n".join(imports)
    return f"""import sys

{starts}
from megatron.bridge.models.{module} import {provider}
from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

# Its data set is random tokens; set config.dataset.blend and config.tokenizer to train on text.
config = vanilla_gpt_pretrain_config()
config.model = {provider}(
    activation_func={function},
{rows})
config.tokenizer.vocab_size = {work.model.vocab}
config.comm_overlap = None
{settings}
config = process_config_with_overrides(config, config_filepath="overrides.yaml", cli_overrides=sys.argv[1:])

if __name__ == "__main__":
    pretrain(config=config, forward_step_func=forward_step)
"""
