"""A layout as process groups: who this process is on both meshes, and whom it talks to.

The dense mesh is PP × DP × CP × TP, the expert mesh PP × EDP × EP × ETP, over the same ranks. Groups are made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from moesaic.mesh.group import Group
from moesaic.spec.layout import Layout

GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "data": ("dp", "cp"),
    "sequence": ("cp", "tp"),
    "stage": ("dp", "cp", "tp"),
}
"""Groups of the dense mesh and the axes along which their ranks differ."""

EXPERT_GROUPS: dict[str, tuple[str, ...]] = {"ep": ("ep",), "etp": ("etp",), "edp": ("edp",), "ep_etp": ("ep", "etp")}
"""Groups of the expert mesh. `ep_etp` holds all pieces of a layer's experts once."""


@dataclass(frozen=True)
class ExpertGroups:
    """The expert mesh as this rank sees it, for layers with one number of experts."""

    ep: Group
    etp: Group
    edp: Group
    ep_etp: Group


@dataclass(frozen=True)
class Links:
    """Connections along the pipeline, two ranks each, None where there is no other rank.

    One per direction, so that what travels forward never waits for what travels back, whatever order ranks work in.
    """

    forward_in: Group | None = None
    forward_out: Group | None = None
    backward_in: Group | None = None
    backward_out: Group | None = None


@dataclass(frozen=True)
class Mesh:
    """The groups of this process. Attributes are named as in `GROUPS`; `world` is everybody.

    `embedding` joins the ranks, one per pipeline stage that needs it, that hold the same piece of the embedding.
    """

    layout: Layout
    rank: int
    world: Group
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    data: Group
    sequence: Group
    stage: Group
    embedding: Group
    links: Links = field(default_factory=Links)
    experts_by_count: dict[int, ExpertGroups] = field(default_factory=dict)

    @classmethod
    def single(cls, layout: Layout | None = None) -> Mesh:
        """One process alone."""
        dense = {name: Group.single(name) for name in GROUPS}
        layout = layout or Layout.single()
        return cls(layout, 0, Group.single("world"), **dense, embedding=Group.single("embedding"))

    @classmethod
    def create(cls, layout: Layout, timeout_seconds: float) -> Mesh:
        """The groups of `layout`. `torch.distributed` must be initialised with `layout.world` processes."""
        if layout.world == 1:
            return cls.single(layout)
        rank = dist.get_rank()

        def group(name: str, partition: list[tuple[int, ...]]) -> Group:
            return Group.create(name, partition, timeout_seconds)

        dense = {name: group(name, layout.groups(*axes)) for name, axes in GROUPS.items()}
        experts: dict[int, ExpertGroups] = {}
        made: dict[int, ExpertGroups] = {}
        for count in layout.expert_counts:
            ep = layout.layer_ep(count)
            if ep not in made:
                suffix = "" if len(layout.expert_counts) == 1 else f"-{ep}"
                made[ep] = ExpertGroups(
                    *(
                        group(name + suffix, layout.expert_groups(*axes, experts=count))
                        for name, axes in EXPERT_GROUPS.items()
                    )
                )
            experts[count] = made[ep]
        pipelines = layout.groups("pp")
        holders = sorted({i % layout.pp for i, stage in enumerate(layout.stages) if stage.holds_embedding})
        embedding = group("embedding", [tuple(ranks[i] for i in holders) for ranks in pipelines])
        return cls(
            layout,
            rank,
            group("world", [tuple(range(layout.world))]),
            **dense,
            embedding=embedding,
            links=_links(layout, dense["pp"], timeout_seconds),
            experts_by_count=experts,
        )

    def expert(self, experts: int) -> ExpertGroups:
        """The expert mesh of layers with `experts` experts."""
        found = self.experts_by_count.get(experts)
        if found is None:
            found = ExpertGroups(*(Group.single(name, self.rank) for name in EXPERT_GROUPS))
        return found

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def pipeline_rank(self) -> int:
        """This process's place in its pipeline."""
        return self.pp.rank

    def close(self) -> None:
        """Forget the groups made here."""
        groups = [getattr(self, name) for name in (*GROUPS, "world", "embedding")]
        for each in self.experts_by_count.values():
            groups += [each.ep, each.etp, each.edp, each.ep_etp]
        groups += [self.links.forward_in, self.links.forward_out, self.links.backward_in, self.links.backward_out]
        handles = {id(g.handle): g.handle for g in groups if g is not None and g.handle is not None}
        for handle in handles.values():
            dist.destroy_process_group(handle)


def _links(layout: Layout, pp: Group, timeout_seconds: float) -> Links:
    """Both directions of every neighbouring pair of a pipeline, the last and the first too (virtual stages wrap)."""
    size = layout.pp
    if size == 1:
        return Links()
    found: dict[str, Group] = {}
    for direction in ("forward", "backward"):
        for start in range(size):
            end = (start + 1) % size
            if end == 0 and layout.virtual_stages == 1:
                continue
            pairs = [tuple(sorted((ranks[start], ranks[end]))) for ranks in layout.groups("pp")]
            if pp.rank not in (start, end):
                continue  # only members take part in the creation of a group
            group = Group.create(f"pp {direction} {start}-{end}", pairs, timeout_seconds)
            sends = pp.rank == (start if direction == "forward" else end)
            found[f"{direction}_{'out' if sends else 'in'}"] = group
    return Links(**found)
