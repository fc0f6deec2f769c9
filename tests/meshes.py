"""Ranks of a layout without their processes, for tests of what a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moesaic.mesh.group import Group
from moesaic.mesh.mesh import EXPERT_GROUPS, GROUPS, ExpertGroups, Mesh
from moesaic.spec.layout import Layout, legal_layouts
from moesaic.spec.model import ModelSpec


def mesh_of(layout: Layout, rank: int) -> Mesh:
    """What a rank of `layout` knows of its groups. Nothing can be sent over them."""

    def group(name: str, partition: list[tuple[int, ...]]) -> Group:
        ranks = next(ranks for ranks in partition if rank in ranks)
        return Group(name, ranks, ranks.index(rank))

    dense = {name: group(name, layout.groups(*axes)) for name, axes in GROUPS.items()}
    experts = {
        count: ExpertGroups(
            *(group(name, layout.expert_groups(*axes, experts=count)) for name, axes in EXPERT_GROUPS.items())
        )
        for count, _ in layout.experts_ep
    }
    return replace(Mesh.single(layout), rank=rank, **dense, experts_by_count=experts)


def layouts_by_share(spec: ModelSpec, world: int) -> Iterator[tuple[Layout, list[int]]]:
    """The legal layouts of `world` ranks that differ in what ranks hold, each with its ranks that hold different
    things."""
    seen = set()
    for layout in legal_layouts(spec, world):
        kind = (layout.pp, layout.tp, layout.ep, layout.etp)
        if kind in seen:
            continue
        seen.add(kind)
        places = {}
        for rank in range(layout.world):
            dense, expert = layout.dense_coords(rank), layout.expert_coords(rank)
            places[dense["pp"], dense["tp"], expert["ep"], expert["etp"]] = rank
        yield layout, list(places.values())
