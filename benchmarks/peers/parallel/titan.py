"""torchtitan on several ranks: its all-to-all dispatcher, and its Qwen3-MoE parallelized by its own function.

`variant="no_cast"` leaves out the bf16 casts of its experts, as in the comparison on one process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

# It takes CUDA for granted where no accelerator is found; the other modules copy these two when they are imported.
titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from benchmarks.peers.adapters import Layer, titan  # noqa: E402
from benchmarks.peers.parallel import RankStep, adamw, held, micro_batches, own_experts, own_rows  # noqa: E402
from benchmarks.peers.parallel.registry import Degrees  # noqa: E402
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape  # noqa: E402

IMPORTS = (*titan.IMPORTS, "torchtitan.distributed", "torchtitan.models.qwen3.parallelize", "torchtitan.trainer")


def layer(shape: LayerShape, variant: str) -> Layer:
    from torchtitan.distributed.utils import set_spmd_backend

    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_spmd_backend("partial_dtensor")  # plain tensors in the dispatcher; the other two want typed or distributed ones
    config = titan.moe_config(shape, variant)
    config.routed_experts.inner_experts.num_experts = shape.experts // ranks
    moe = config.build().train()
    dispatcher = moe.routed_experts.token_dispatcher
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))

    def load(weights: LayerWeights) -> None:
        titan.load(moe, own_experts(weights, rank, ranks))

    return Layer(moe, moe, load, type(dispatcher).__name__)


BACKEND = "partial_dtensor"


def step(shape: StepShape, degrees: Degrees, variant: str) -> RankStep:
    """Its Qwen3-MoE under its own parallelize and pipeline functions, and its loss, clipping and step as its trainer
    makes them; only the optimizer is the benchmark's."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context, set_spmd_backend
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3

    rows, parts = shape.batch // degrees.dp, micro_batches(shape, degrees)
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=degrees.dp,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
        pipeline_parallel_degree=degrees.pp,
        pipeline_parallel_microbatch_size=rows // parts,
        expert_parallel_degree=degrees.ep,
        fsdp_reshard_after_forward="never",  # gathering weights again is what gloo does worst
        spmd_backend=BACKEND,
    )
    training = TrainingConfig(local_batch_size=rows, seq_len=shape.seq, mixed_precision_param="float32")
    set_spmd_backend(BACKEND)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    config = titan.model_config(shape, variant)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
    with torch.device("meta"):
        model = config.build()
    loss_of = CrossEntropyLoss.Config(global_vocab_size=shape.vocab).build()
    common: dict[str, Any] = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    cpu = torch.device("cpu")
    schedule = None
    if degrees.pp > 1:
        schedule, models, first, last = pipeline_llm(
            model, **common, device=cpu, model_config=config, parallelize_fn=parallelize_qwen3, loss_fn=loss_of
        )
    else:
        models, first, last = [parallelize_qwen3(model, **common)], True, True
    for part in models:
        part.to_empty(device=cpu)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gloo has no scaled sum: sum, then divide
                module.set_force_sum_reduction_for_comms(True)
    parameters = [parameter for part in models for parameter in part.parameters()]
    optimizer = adamw(parameters)
    context = get_spmd_context(parallel_dims=dims)
    place = dims.get_mesh("batch").get_local_rank() if degrees.dp > 1 else 0

    def forward_backward(ids: Tensor, labels: Tensor, tokens: Tensor) -> float:
        positions = torch.arange(shape.seq).expand(len(ids), -1).contiguous()
        with context():
            loss, _ = loss_of(models[0](ids, positions=positions), labels, tokens)
            loss.backward()
        return loss.item()

    def through_stages(ids: Tensor, labels: Tensor, tokens: Tensor) -> float:
        positions = torch.arange(shape.seq).expand(len(ids), -1).contiguous()
        losses: list[Tensor] | None = [] if last else None
        with context():  # its trainer hands over micro-batches, which the pipelining of this torch cuts itself
            schedule.step(
                *([ids] if first else []),
                positions=positions,
                target=labels if last else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": tokens},
                return_outputs=False,
            )
        return float(sum(losses)) if losses else float("nan")

    def whole(ids: Tensor, labels: Tensor) -> float:
        own, own_labels = own_rows(ids, place, degrees.dp), own_rows(labels, place, degrees.dp)
        tokens = torch.tensor(labels.numel())
        loss = (through_stages if schedule else forward_backward)(own, own_labels, tokens)
        pipeline = dims.get_optional_mesh("pp")
        clip_grad_norm_(parameters, 1.0, foreach=True, pp_mesh=pipeline, ep_enabled=dims.ep_enabled)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss * degrees.dp

    return RankStep(whole, held(parameters), f"its Qwen3-MoE, SDPA, FSDP2, {BACKEND}")
