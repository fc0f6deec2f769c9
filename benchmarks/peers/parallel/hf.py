"""Hugging Face transformers on several ranks: its expert parallelism by all-to-all, its tensor plan, and FSDP2."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.adapters import Layer, hf, initialise, put
from benchmarks.peers.parallel import RankStep, adamw, clip_by_mesh, held, own_experts, own_rows
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = (*hf.IMPORTS, "transformers.distributed.expert_parallel", "transformers.modeling_utils")
EXPERTS = "grouped_mm"


def layer(shape: LayerShape, variant: str) -> Layer:
    """The block alone under its expert plan: under FSDP2 only a whole model could be called."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    rank, ranks = dist.get_rank(), dist.get_world_size()
    built = hf.layer(shape, torch.float32, EXPERTS)
    block = built.module
    plan = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    meshes = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(block, meshes["ep"], meshes["tp"], plan, "all_to_all")

    def load(weights: LayerWeights) -> None:
        mine = own_experts(weights, rank, ranks)
        put(block.gate.weight, mine.router)
        put(block.experts.gate_up_proj.to_local(), mine.gate_up)
        put(block.experts.down_proj.to_local(), mine.down)

    return Layer(block, built.call, load, f"ep_implementation=all_to_all, {built.detail}")


def step(shape: StepShape, degrees: Degrees, variant: str) -> RankStep:
    """Its Mixtral as `from_pretrained(distributed_config=…)` lays it out: FSDP2 over dp, its tensor plan over tp, its
    expert plan with all-to-all over ep. Only a saved model can be laid out, so rank 0 saves one."""
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    rank = dist.get_rank()
    where = [tempfile.mkdtemp(prefix="moesaic-benchmark-") if rank == 0 else ""]
    dist.broadcast_object_list(where)
    if rank == 0:
        whole = initialise(MixtralForCausalLM(hf.config(shape, EXPERTS)), torch.float32)
        whole.save_pretrained(where[0])
        del whole
    dist.barrier()
    expert = {"ep_size": degrees.ep, "ep_implementation": "all_to_all"} if degrees.ep > 1 else {}
    # Gathered weights stay until the backward pass: gathering is what gloo does worst.
    keep = {"fsdp_plan": {"model.layers.*": "keep_full_weight"}} if degrees.dp > 1 else {}
    model = MixtralForCausalLM.from_pretrained(
        where[0],
        dtype=torch.float32,
        experts_implementation=EXPERTS,
        attn_implementation="sdpa",
        distributed_config=DistributedConfig(fsdp_size=degrees.dp, tp_size=degrees.tp, **keep, **expert),
    ).train()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(where[0])
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    place = rank // degrees.tp

    def whole_step(ids: Tensor, labels: Tensor) -> float:
        own, own_labels = own_rows(ids, place, degrees.dp), own_rows(labels, place, degrees.dp)
        logits = model(input_ids=own).logits
        loss = F.cross_entropy(logits.reshape(-1, shape.vocab).float(), own_labels.reshape(-1))
        loss.backward()
        clip_by_mesh(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return RankStep(
        whole_step, held(parameters), f"FSDP2 and its plans, {EXPERTS}, {model.config._attn_implementation}"
    )
