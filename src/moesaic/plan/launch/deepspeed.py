"""A plan as a configuration of DeepSpeed (0.19) with AutoEP, for a Hugging Face model.

Keys are those of DeepSpeed's `docs/_pages/config-json.md` and `docs/code-docs/source/autoep.rst`. DeepSpeed is a
library, so a short program that trains on random tokens comes with the configuration.
"""

from __future__ import annotations

import json
from typing import Any

from moesaic.spec.model import ModelSpec

from .parts import Draft, comment, heading, note_storage, refuse_uneven_recompute
from .plan import Plan
from .wrappers import train_script, wrapped

_PRESETS = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""AutoEP's preset by Hugging Face model type."""
_STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


def files(plan: Plan) -> dict[str, str]:
    """`ds_config.json`, the model's `config.json`, `train.py`, `train.sh` and its wrappers.

    Raises:
        SpecError: DeepSpeed has no such mesh, dispatcher, precision or model.
    """
    draft = Draft("DeepSpeed")
    config = deepspeed_config(draft, plan)
    usage = [
        "ds_config.json is DeepSpeed's, config.json the model's (Hugging Face), and train.py trains on random tokens;",
        "put your own data loader there.",
    ]
    lines = comment(heading(plan, draft.target, draft.notes, usage))
    texts = {
        "ds_config.json": json.dumps(config, indent=2) + "\n",
        "config.json": json.dumps(_hf_config(draft, plan.workload.model), indent=2) + "\n",
        "train.py": lines + _program(plan),
        "train.sh": train_script(plan, draft, ["train.py"], usage),
    }
    return wrapped(plan, draft, texts)


def deepspeed_config(draft: Draft, plan: Plan) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` takes.

    Raises:
        SpecError: as `files`.
    """
    work, layout = plan.workload, plan.layout
    if layout.pp > 1:
        raise draft.refuse(
            f"pp {layout.pp}; AutoEP takes a whole Hugging Face model, while its pipelines want one cut into a "
            f"PipelineModule: use pp 1"
        )
    if layout.cp > 1:
        raise draft.refuse(f"cp {layout.cp}; its sequence parallelism is set up in the model's code: use cp 1")
    if work.precision not in ("fp32", "bf16"):
        raise draft.refuse(f"precision {work.precision}: use bf16")
    if work.model.mtp and work.mtp:
        raise draft.refuse("prediction blocks; Hugging Face's model has none, so plan without multi-token prediction")
    stage = _STAGES[layout.sharding]
    if layout.replicas > 1:
        raise draft.refuse(f"{layout.replicas} replicas of the sharded state: use replicas 1")
    config: dict[str, Any] = {
        "train_batch_size": work.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": work.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32" if work.gradient_bytes == 4 else "bf16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": "gradients" in layout.overlap or "parameters" in layout.overlap,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
        # Its check counts tensor-parallel ranks as data-parallel ones; without this key it asks for no equation.
        del config["train_batch_size"]
        draft.remark(
            f"train_batch_size is left out with tensor parallelism: DeepSpeed would count all {layout.world} ranks, "
            f"and shows {config['train_micro_batch_size_per_gpu'] * plan.micro_batches * layout.world} sequences a step"
        )
    if "optimizer" in layout.offload:
        if stage == 0:
            raise draft.refuse("an optimizer in host memory without sharding; its offload belongs to ZeRO")
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if work.model.moe_layers:
        config |= _experts(draft, plan)
    _losses(draft, plan)
    return config


def _experts(draft: Draft, plan: Plan) -> dict[str, Any]:
    layout, model = plan.layout, plan.workload.model
    if layout.etp > 1:
        raise draft.refuse(f"etp {layout.etp}; AutoEP has no tensor parallelism inside experts: use etp 1")
    moe = next(layer.moe for layer in model.layers if layer.moe is not None)
    if moe.router.select_bias:
        draft.lost("updates of the selection bias; AutoEP refuses load_balance_coeff, so nothing balances the experts")
    if layout.ep == 1:
        if layout.tp > 1:
            raise draft.refuse(f"tp {layout.tp} with ep 1 and experts; AutoEP folds with tp from ep 2 on")
        return {}
    if model.family not in _PRESETS:
        raise draft.refuse(f"experts of model type {model.family}; AutoEP has presets for {', '.join(_PRESETS)}")
    if len(layout.experts_ep) > 1:
        raise draft.refuse("layers with different numbers of experts; AutoEP has one autoep_size")
    if layout.dp * layout.tp % layout.ep:
        raise draft.refuse(f"dp·tp % ep = {layout.dp}·{layout.tp} % {layout.ep} is not 0")
    if layout.dispatcher not in ("alltoall", "deepep"):
        raise draft.refuse(f"the {layout.dispatcher} dispatcher; AutoEP has alltoall and deepep")
    parallel: dict[str, Any] = {
        "enabled": True,
        "autoep_size": layout.ep,
        "preset_model": _PRESETS[model.family],
        "comm_backend": "deepep" if layout.dispatcher == "deepep" else "comm",
    }
    if layout.dispatcher == "deepep":
        parallel["comm_max_tokens_per_rank"] = layout.micro_batch * plan.workload.seq_len
    return {"expert_parallel": parallel}


def _losses(draft: Draft, plan: Plan) -> None:
    work, layout = plan.workload, plan.layout
    refuse_uneven_recompute(draft, layout)
    for module in layout.recompute:
        if module != "full":
            draft.lost(f"recompute of {module}; Hugging Face's gradient checkpointing is whole layers or none")
    for word in layout.overlap:
        if word not in ("gradients", "parameters"):
            draft.lost(f"overlap of {word}")
    if "parameters" in layout.overlap and layout.sharding != "parameters":
        draft.lost(f"overlap of parameters with sharding {layout.sharding}; ZeRO below stage 3 gathers after the step")
    if "activations" in layout.offload:
        draft.lost("activations in host memory")
    note_storage(draft, plan)
    if work.moment_bytes != 4:
        draft.lost(f"moments of {work.moment_bytes} bytes; ZeRO keeps them in fp32, 4 bytes")


def _hf_config(draft: Draft, model: ModelSpec) -> dict[str, Any]:
    if model.family == "moesaic" or not model.hf_config:
        raise draft.refuse(f"{model.name}; it has no Hugging Face model")
    config = {key: value for key, value in model.hf_config.items() if key not in ("name", "notes", "source")}
    # Models of another name but the same architecture (Kimi-K2) are known to Hugging Face by the architecture's.
    return config | {"model_type": model.family}


def _program(plan: Plan) -> str:
    work, layout = plan.workload, plan.layout
    dtype = "float32" if work.precision == "fp32" else "bfloat16"
    checkpointing = "model.gradient_checkpointing_enable()\n" if "full" in layout.recompute else ""
    return f"""import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

deepspeed.init_distributed()
config = AutoConfig.from_pretrained(".")
model = AutoModelForCausalLM.from_config(config, dtype=torch.{dtype})
{checkpointing}parameters = model.parameters()
engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config="ds_config.json")
# Ranks of a tensor-parallel group read the same tokens, others their own.
torch.manual_seed(deepspeed.comm.get_rank() // {layout.tp})
for step in range(100 * engine.gradient_accumulation_steps()):
    tokens = torch.randint(config.vocab_size, ({layout.micro_batch}, {work.seq_len}), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
"""
