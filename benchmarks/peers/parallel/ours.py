"""moesaic on several ranks: its MoE block on an expert mesh, and its training step in any layout.

`variant` is words joined by "+": a dispatcher, an overlap; of a step also "ring", which splits sequences in a ring
instead of by heads, and "sharded", which spreads parameters, gradients and moments over data parallelism, as FSDP2 does
for the peers that use it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.adapters import Layer, put
from benchmarks.peers.parallel import RankStep, held, micro_batches, own_experts, own_rows
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, LayerWeights, StepShape
from moesaic.mesh.mesh import Mesh
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import OVERLAP
from moesaic.spec.tables import LayoutTable

IMPORTS = ("moesaic.model.decoder", "moesaic.model.moe", "moesaic.train.state", "moesaic.train.step")
TIMEOUT_SECONDS = 300.0
DISPATCHERS = ("alltoall", "allgather", "hierarchical")


def model_spec(shape: LayerShape | StepShape) -> ModelSpec:
    """The benchmark's model, a Mixtral; of a layer's shape, one layer of it."""
    step = shape if isinstance(shape, StepShape) else None
    heads = step.heads if step else 8
    return load_model_spec(
        {
            "model_type": "mixtral",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.topk,
            "num_hidden_layers": step.layers if step else 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": step.vocab if step else 128,
            "max_position_embeddings": 8192,
            "sliding_window": None,
        }
    )


def options(variant: str) -> dict[str, Any]:
    """Keys of a run file's layout that the words of `variant` stand for."""
    words = variant.split("+") if variant else []
    found: dict[str, Any] = {"overlap": [word for word in words if word in OVERLAP] or "none"}
    for word in words:
        if word in DISPATCHERS:
            found["dispatcher"] = word
    if "ring" in words:
        found["cp_kind"] = "ring"
    if "sharded" in words:
        found["sharding"] = "parameters"
    return found


def table(shape: StepShape, degrees: Degrees, variant: str) -> LayoutTable:
    """What a run file would say of this layout."""
    return LayoutTable(
        pp=degrees.pp,
        cp=degrees.cp,
        tp=degrees.tp,
        ep=degrees.ep,
        etp=degrees.etp,
        micro_batch=shape.batch // degrees.dp // micro_batches(shape, degrees),
        **options(variant),
    )


def layout_of(shape: StepShape, degrees: Degrees, variant: str) -> Layout:
    """Raises SpecError, a sentence with the reason, where moesaic cannot train in this layout."""
    spec = model_spec(shape)
    chosen = table(shape, degrees, variant)
    return resolve_layout(chosen, spec, degrees.world, seq_len=shape.seq, global_batch=shape.batch)


def layer(shape: LayerShape, variant: str) -> Layer:
    from moesaic.model.moe import Moe

    rank, ranks = dist.get_rank(), dist.get_world_size()
    spec = model_spec(shape)
    chosen = LayoutTable(ep=ranks, **options(variant))
    layout = resolve_layout(chosen, spec, ranks, seq_len=None, global_batch=None)
    mesh = Mesh.create(layout, TIMEOUT_SECONDS)
    block = spec.layers[0].moe
    assert block is not None
    moe = Moe(block, shape.hidden, dtype=torch.float32, device="cpu", mesh=mesh).train()

    def load(weights: LayerWeights) -> None:
        mine = own_experts(weights, rank, ranks)
        put(moe.router.weight, mine.router)
        put(moe.experts.gate_up, mine.gate_up)
        put(moe.experts.down, mine.down)

    detail = f"{mesh.dispatcher} dispatcher{', in parts' if moe.chunks > 1 else ''}"
    return Layer(moe, lambda x_BTD: moe(x_BTD[0])[0], load, detail)


def step(shape: StepShape, degrees: Degrees, variant: str) -> RankStep:
    from moesaic.model.decoder import Decoder
    from moesaic.model.losses import LossWeights
    from moesaic.train.data import Batch
    from moesaic.train.metrics import Stopwatch
    from moesaic.train.state import TrainState
    from moesaic.train.step import train_step

    layout = layout_of(shape, degrees, variant)
    mesh = Mesh.create(layout, TIMEOUT_SECONDS)
    decoder = Decoder(model_spec(shape), mesh=mesh)
    decoder.init_weights(1)
    state = TrainState.of(decoder, torch.float32, sharding=layout.sharding)
    parts, weights, clock = micro_batches(shape, degrees), LossWeights(), Stopwatch()
    done = 0

    def whole(ids_BS: Tensor, labels_BS: Tensor) -> float:
        nonlocal done
        done += 1
        own = (own_rows(tensor, mesh.dp.rank, degrees.dp).chunk(parts) for tensor in (ids_BS, labels_BS))
        batches = [Batch(ids, labels, None, None, labels.numel(), 0) for ids, labels in zip(*own, strict=True)]
        result = train_step(
            decoder,
            state.optimizer,
            batches,
            step=done,
            lr=1e-4,
            weights=weights,
            clip=1.0,
            bias_update=0.0,
            clock=clock,
            sharding=state.sharding,
        )
        return result.loss

    detail = f"{layout.dispatcher} dispatcher, {layout.schedule}, sharding {layout.sharding}"
    return RankStep(whole, held(decoder.parameters()), detail)
