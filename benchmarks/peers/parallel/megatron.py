"""Megatron-Core on several ranks: MoELayer and GPTModel from its local spec; `variant` names the token dispatcher."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.adapters import Layer, initialise, megatron
from benchmarks.peers.parallel import RankStep, held, micro_batches, own_experts, own_rows
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = (*megatron.IMPORTS, "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.pipeline_parallel")


def _name_types_as_on_cuda() -> None:
    """Its clipping and its sharded optimizer accept tensors by the name of their type, and know CUDA's names only."""
    name_of = torch.Tensor.type

    def as_on_cuda(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return name_of(self, *args, **kwargs)
        return name_of(self).replace("torch.Float", "torch.cuda.Float")

    torch.Tensor.type = as_on_cuda  # type: ignore[method-assign, assignment]


def _norms_under_sequence_parallelism() -> None:
    """Its stand-in for the fused norms refuses sequence parallelism, without which it trains no MoE under tensor
    parallelism; as the fused norms do, this marks the weights whose gradients are summed over the tensor ranks."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = make(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def _start(degrees: Degrees) -> dict[str, Any]:
    """Its process groups; returns what its config has to say of them."""
    if not torch.cuda.is_available():
        megatron.without_cuda()
        _name_types_as_on_cuda()
    _norms_under_sequence_parallelism()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "context_parallel_size": degrees.cp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.etp,
    }
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    return {**sizes, "sequence_parallel": degrees.tp > 1}


def layer(shape: LayerShape, variant: str) -> Layer:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    more = _start(Degrees(dp=ranks, ep=ranks))
    config, spec = megatron.config_and_spec(shape, torch.float32, False, moe_token_dispatcher_type=variant, **more)
    built = megatron.build_layer(config, spec)

    def load(weights: LayerWeights) -> None:
        built.load(own_experts(weights, rank, ranks))

    return Layer(built.module, built.call, load, f"{type(built.module.token_dispatcher).__name__}, {built.detail}")


def step(shape: StepShape, degrees: Degrees, variant: str) -> RankStep:
    """Its GPTModel, DistributedDataParallel, schedules, gradient finalisation and optimizer, as its training loop uses
    them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    more = _start(degrees)
    config, spec = megatron.config_and_spec(
        shape,
        torch.float32,
        False,
        moe_token_dispatcher_type=variant,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=False,
        **more,
    )
    gpt = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
    )
    initialise(gpt, torch.float32)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            params_dtype=torch.float32,
        ),
        [model],
    )
    parts, rows = micro_batches(shape, degrees), shape.batch // degrees.dp
    positions = torch.arange(shape.seq).expand(rows // parts, -1)
    hidden = torch.ones(1, 1, shape.seq, shape.seq, dtype=torch.bool).triu(1)
    run = get_forward_backward_func()
    place = parallel_state.get_data_parallel_rank()

    def forward(batches: Any, module: Any) -> Any:
        ids, labels = next(batches)

        def mean(losses: Tensor) -> Any:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place

        return module(ids, positions, hidden, labels=labels), mean

    def whole(ids: Tensor, labels: Tensor) -> float:
        own, own_labels = own_rows(ids, place, degrees.dp), own_rows(labels, place, degrees.dp)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        done = run(
            forward_step_func=forward,
            data_iterator=iter(list(zip(own.chunk(parts), own_labels.chunk(parts), strict=True))),
            model=[model],
            num_microbatches=parts,
            seq_length=shape.seq,
            micro_batch_size=rows // parts,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if not updated:
            raise RuntimeError("its optimizer skipped the step")
        return sum(float(one["loss"]) for one in done) / len(done) if done else float("nan")

    return RankStep(whole, held(gpt.parameters()), "GPTModel, DDP, local attention keeps all scores")
