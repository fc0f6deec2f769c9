"""What moesaic's cost model says of a benchmark's workload on the cluster of a file of `moesaic calibrate`.

How unevenly the workload's tokens choose is told to the model, as `moesaic plan --imbalance` is by who has seen a run's
loads: it is a property of the workload, which no model of time can know.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.peers.parallel import micro_batches, own_rows
from benchmarks.peers.parallel.ours import model_spec, options, table
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, StepShape, layer_inputs, layer_weights, step_tokens
from moesaic.cost.inside import choose_chunks
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Workload
from moesaic.model.decoder import Decoder
from moesaic.spec.cluster import load_cluster
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable
from moesaic.train.balancing import take_counts


def step_seconds(shape: LayerShape | StepShape, degrees: Degrees, variant: str, file: Path) -> float:
    """Predicted seconds of a training step; of a layer's shape, of a model of one such layer, a sequence per rank."""
    model = model_spec(shape)
    if isinstance(shape, StepShape):
        seq, batch, chosen = shape.seq, shape.batch, table(shape, degrees, variant)
    else:
        seq, batch = shape.tokens, degrees.world
        chosen = LayoutTable(ep=degrees.ep, **options(variant))
    layout = resolve_layout(chosen, model, degrees.world, seq_len=seq, global_batch=batch)
    cluster = load_cluster(file, gpus=degrees.world)
    work = Workload(model, seq, batch, precision="fp32", imbalance=imbalance(shape, degrees))
    rates = rates_for(cluster, Stack("moesaic"))
    seconds = float(step_time(work, Columns.of([layout]), cluster, rates).total[0])
    # The benchmark's trainer is told of no cluster, so it cuts its layers in two whatever that costs.
    for choice in choose_chunks(work, layout, cluster, rates):
        passes = len(model.layers) * batch // layout.dp // layout.micro_batch
        seconds += passes * max(0.0, choice.seconds[layout.chunks(choice.experts)] - choice.seconds[1])
    return seconds


@lru_cache(maxsize=8)
@torch.no_grad()
def imbalance(shape: LayerShape | StepShape, degrees: Degrees) -> float:
    """Rows of the most loaded expert-parallel rank over the mean, with the weights and tokens of the benchmark's first
    iteration: the mean over a step's micro-batches and layers, since ranks wait for each other in each."""
    if degrees.ep == 1:
        return 1.0
    if isinstance(shape, LayerShape):
        x, _ = layer_inputs(shape, torch.float32, tokens=shape.tokens * degrees.world)
        chosen = (x[0] @ layer_weights(shape).router.t()).topk(shape.topk, -1).indices
        return _over_mean(torch.bincount(chosen.flatten(), minlength=shape.experts), degrees.ep)
    decoder = Decoder(model_spec(shape))
    decoder.init_weights(1)
    ids, _ = step_tokens(shape)
    parts = micro_batches(shape, degrees)
    found = []
    for part in range(parts):
        rows = [own_rows(ids, rank, degrees.dp).chunk(parts)[part] for rank in range(degrees.dp)]
        take_counts(decoder.routers())
        decoder.hidden(torch.cat(rows))
        found += [_over_mean(counts, degrees.ep) for counts in take_counts(decoder.routers()).values()]
    return sum(found) / len(found)


def _over_mean(counts_E: torch.Tensor, ranks: int) -> float:
    per_rank = counts_E.view(ranks, -1).sum(1).double()
    return float(per_rank.max() / per_rank.mean())
