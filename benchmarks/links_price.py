"""What moesaic's cost model says of a benchmark's workload on the cluster of a file of `moesaic calibrate`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.parallel.ours import model_spec, options, table
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import LayerShape, StepShape
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns, Workload
from moesaic.spec.cluster import load_cluster
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable


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
    work = Workload(model, seq, batch, precision="fp32")
    return float(step_time(work, Columns.of([layout]), cluster, rates_for(cluster, Stack("moesaic"))).total[0])
