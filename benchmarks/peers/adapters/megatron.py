"""Megatron-Core: MoELayer and GPTModel from its local spec (no Transformer Engine), all-to-all dispatcher, one process.

It has no CPU path: streams, events and the CUDA random state are asked for while its modules are built and run. Where
there is no GPU, `without_cuda` puts objects that do nothing in their places.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.adapters import Layer, Model, initialise, put
from benchmarks.peers.adapters.skeleton import one_process_group
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape

IMPORTS = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.transformer.moe.moe_layer")


class _Idle:
    """A stream or an event of a device that is always done."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Idle()


def without_cuda() -> None:
    """Puts idle objects in the places of CUDA's streams, events, random states and devices, for the whole process."""
    from megatron.core.tensor_parallel import random as megatron_random

    cuda, cpu = torch.cuda, torch.device("cpu")
    stream = _Idle()

    def nothing(value: Any = None) -> Any:
        return lambda *args, **kwargs: value  # a new function each time: torch's compiler keeps them apart

    cuda.Stream = cuda.Event = _Idle
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_device = lambda: cpu
    for name, value in {"current_stream": stream, "default_stream": stream, "device_count": 1}.items():
        setattr(cuda, name, nothing(value))
    for name in ("synchronize", "set_device"):
        setattr(cuda, name, nothing())
    for name in ("memory_allocated", "max_memory_allocated"):
        setattr(cuda, name, nothing(0))
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = cuda.get_rng_state
    megatron_random._set_cuda_rng_state = cuda.set_rng_state
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None

    def on_cpu(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = cpu
            return function(*args, **kwargs)

        return call

    for name in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))

    # Split sizes stay tensors when there is no GPU to copy them from, and gloo wants lists.
    exchange = dist.all_to_all_single

    def all_to_all_single(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **rest: Any
    ):
        def as_list(splits: Any) -> Any:
            return splits.tolist() if isinstance(splits, Tensor) else splits

        return exchange(output, input, as_list(output_split_sizes), as_list(input_split_sizes), **rest)

    dist.all_to_all_single = all_to_all_single


def _start() -> None:
    one_process_group()
    if not torch.cuda.is_available():
        without_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=1)
    model_parallel_cuda_manual_seed(1)


def config_and_spec(shape: LayerShape | StepShape, dtype: torch.dtype, grouped: bool, **more: Any) -> tuple[Any, Any]:
    """Its TransformerConfig, with `more` in place of what stands here, and the spec of one layer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    step = shape if isinstance(shape, StepShape) else None
    settings = {
        "num_layers": step.layers if step else 1,
        "hidden_size": shape.hidden,
        "num_attention_heads": step.heads if step else 8,
        "ffn_hidden_size": shape.ffn,
        "moe_ffn_hidden_size": shape.ffn,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        # Fusions that exist as CUDA extensions only.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**{**settings, **more})
    spec = get_gpt_layer_local_spec(num_experts=shape.experts, moe_grouped_gemm=grouped, normalization="RMSNorm")
    return config, spec


def layer(shape: LayerShape, dtype: torch.dtype, variant: str) -> Layer:
    _start()
    return build_layer(*config_and_spec(shape, dtype, variant == "grouped"))


def build_layer(config: Any, spec: Any) -> Layer:
    from megatron.core.transformer.spec_utils import build_module

    builder = spec.submodules.mlp
    moe = build_module(builder, config=config) if hasattr(builder, "module") else builder(config=config)
    moe.to(config.params_dtype).train()

    def load(weights: LayerWeights) -> None:
        put(moe.router.weight, weights.router)
        for expert, gate_up, down in zip(moe.experts.local_experts, weights.gate_up, weights.down, strict=True):
            put(expert.linear_fc1.weight, gate_up)
            put(expert.linear_fc2.weight, down)

    def call(x_BTD: Tensor) -> Tensor:
        return moe(x_BTD.transpose(0, 1))[0].transpose(0, 1)  # it wants sequence first; batch is 1, so views do

    return Layer(moe, call, load, f"experts are {type(moe.experts).__name__}")


def model(shape: StepShape, dtype: torch.dtype, variant: str) -> Model:
    from megatron.core.models.gpt import GPTModel

    _start()
    config, spec = config_and_spec(shape, dtype, variant == "grouped")
    gpt = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    initialise(gpt, dtype)
    positions = torch.arange(shape.seq).expand(shape.batch, -1)
    hidden = torch.ones(1, 1, shape.seq, shape.seq, dtype=torch.bool).triu(1)
    return Model(gpt, lambda ids: gpt(ids, positions, hidden), "GPTModel; local attention keeps all scores")
