"""Sums of gradients over the ranks that hold a parameter, and their norm.

Every rank's gradient is what its own tokens say. A parameter's gradient is the sum over exactly the ranks that hold the
same piece of it: dense ones over dp × cp, and over tp too where tensor parallelism does not split them; experts over
edp, and over etp where it does not split them; an embedding that several pipeline stages hold, over those.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from moesaic.mesh.collectives import all_reduce
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.mesh.reduction import PendingSum
from moesaic.train.sharding import Held

BUCKET_BYTES = 64 * 2**20
"""Gradients are joined up to this size for one sum: fewer messages, and little memory."""


class GradientSums:
    """Which groups each parameter's gradient is summed over, and who counts it in the norm.

    `compress`: data-parallel sums travel in bf16 (`mesh.reduction`); those over copies of the embedding and over tensor
    parallelism alone do not.
    """

    def __init__(self, mesh: Mesh, held: dict[str, Held], compress: bool = False) -> None:
        self.mesh, self.compress = mesh, compress
        self._groups: dict[str, list[Group]] = {}
        self._data = {id(mesh.data)}
        if mesh.data.size > 1:
            self._data.add(id(mesh.stage))
        self._data |= {id(each.edp) for each in mesh.experts_by_count.values()}
        self._counted: dict[str, bool] = {}
        self.embedding = "embed.weight" if mesh.embedding.size > 1 and "embed.weight" in held else None
        for name, each in held.items():
            if each.cut.expert:
                experts = mesh.expert(each.cut.shape[0])
                data, inner, split = experts.edp, experts.etp, _is_split(each, experts.etp, first_dim=1)
            else:
                data, inner, split = mesh.data, mesh.tp, _is_split(each, mesh.tp, first_dim=0)
            replicas = [] if each.spread is not None else [data]
            if not split:
                replicas.append(inner)
            if not each.cut.expert and len(replicas) == 2:
                replicas = [mesh.stage]
            self._groups[name] = [group for group in replicas if group.size > 1]
            once = all(group.rank == 0 for group in self._groups[name])
            if each.spread is not None and each.spread.size < data.size:
                once = once and data.rank < each.spread.size  # of several copies of the shards, the first
            if name == self.embedding:
                self._groups[name].append(mesh.embedding)
                once = once and mesh.embedding.rank == 0
            self._counted[name] = once

    @torch.no_grad()
    def sum(self, gradients: dict[str, Tensor], begun: Collection[str] = ()) -> None:
        """Sum the gradients in place, over what has not summed them yet: those in `begun`, already summed over the
        first of their groups, over the others."""
        by_groups: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
        for name in gradients:
            if self._groups[name]:
                key = (name in begun, tuple(id(group) for group in self._groups[name]))
                by_groups.setdefault(key, []).append(name)
        for (is_begun, _), names in by_groups.items():
            for group in self._groups[names[0]][is_begun:]:
                _sum_in_buckets([gradients[name] for name in names], group, self.travels_compressed(group))

    def first_group(self, name: str) -> Group | None:
        """The group that a parameter's gradient is summed over first; None where no other rank has the piece."""
        return next(iter(self._groups[name]), None)

    def travels_compressed(self, group: Group) -> bool:
        """Whether sums over the group are sent in bf16."""
        return self.compress and id(group) in self._data

    def norm(self, gradients: dict[str, Tensor]) -> float:
        """The 2-norm of all gradients of the model together, each counted once; the same number on every rank."""
        mine = [g for name, g in gradients.items() if self._counted[name] and g.numel()]
        here = float(torch.nn.utils.get_total_norm(mine)) if mine else 0.0
        if self.mesh.world.size == 1:
            return here
        total = torch.tensor([here], dtype=torch.float64).square_()
        return math.sqrt(float(all_reduce(self.mesh.on_device(total), self.mesh.world)))


def _is_split(held: Held, group: Group, first_dim: int) -> bool:
    """Whether tensor parallelism over `group` splits this parameter: a dense one is cut by nothing else, an expert one
    from dimension `first_dim` on."""
    return group.size > 1 and any(piece.parts > 1 and piece.dim >= first_dim for piece in held.cut.pieces)


def _sum_in_buckets(tensors: list[Tensor], group: Group, compress: bool = False) -> None:
    def summed(x: Tensor) -> Tensor:
        return PendingSum(x, group, compress=True).wait() if compress else all_reduce(x, group)

    bucket: list[Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        if bucket and (tensor is None or size + tensor.numel() * tensor.element_size() > BUCKET_BYTES):
            if len(bucket) == 1:
                summed(bucket[0])
            else:
                flat = summed(torch.cat([each.reshape(-1) for each in bucket]))
                for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    each.copy_(part.view_as(each))
            bucket, size = [], 0
        if tensor is not None:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
