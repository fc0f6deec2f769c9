"""What a real forward pass keeps, by layer and module, beside what the planner counts. Also on several ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from moesaic.cost.activations import layer_kept
from moesaic.cost.habits import MOESAIC
from moesaic.cost.workload import Columns, Workload
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.spec.layout import Layout, resolve_layout, single
from moesaic.spec.model import ModelSpec
from moesaic.spec.tables import LayoutTable
from moesaic.train.meter import Meter
from tests.cost.kinds import KINDS

SEQ_LEN = 112
"""Four times 28, the number of pairs of 8 experts: each rank of two can choose each pair equally often."""
VOCAB = 53


def every_pair(scores_TE: Tensor) -> Tensor:
    """Experts [T, 2]: all pairs one after the other, so that loads are those that the planner means by even."""
    pairs = torch.tensor(list(itertools.combinations(range(scores_TE.shape[1]), 2)), device=scores_TE.device)
    return pairs[torch.arange(len(scores_TE), device=scores_TE.device) % len(pairs)]


def model_of(kind: str, layers: int = 2) -> ModelSpec:
    """A model of equal layers."""
    return ModelSpec(name="t", family="moesaic", vocab=VOCAB, hidden=64, layers=(KINDS[kind],) * layers)


def layout_of(keys: dict[str, Any], model: ModelSpec, world: int) -> Layout:
    """The layout that `keys` of [layout] describe."""
    if world == 1:
        return single(model)
    table = LayoutTable.model_validate(keys)
    return resolve_layout(table, model, world, seq_len=SEQ_LEN, global_batch=8)


def measured(rank: int, kind: str, keys: dict[str, Any]) -> dict[tuple[int, str], int]:
    """Bytes by layer and module that the second of two forward passes kept on this rank."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = model_of(kind)
    mesh = Mesh.single() if world == 1 else Mesh.create(layout_of(keys, model, world), 60.0, False)
    decoder = Decoder(model, mesh=mesh)
    decoder.init_weights(0)
    for _, router in decoder.routers():
        router.choose = every_pair
    rows = keys.get("micro_batch", 1)
    ids = torch.randint(0, VOCAB, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(mesh.dp.rank))
    meter = Meter(decoder, {"parameters": decoder.parameters()})
    with meter:
        for _ in range(2):
            with meter.phase("forward"):
                total = decoder.loss(ids, ids.roll(-1, 1), step_tokens=ids.numel()).total
            with meter.phase("backward"):
                total.backward()
            del total
    return meter.kept()[1]


def counted(kind: str, keys: dict[str, Any], world: int) -> dict[str, int]:
    """Bytes by module that the planner counts for one layer."""
    model = model_of(kind)
    work = Workload(model, SEQ_LEN, 8, precision="fp32")
    columns = Columns.of([layout_of(keys, model, world)])
    sizes: dict[str, float] = {}
    for row in layer_kept(model, KINDS[kind], work, columns, MOESAIC):
        sizes[row.module] = sizes.get(row.module, 0.0) + float(row.left(columns)[0])
    return {module: round(size) for module, size in sizes.items() if size}
