"""A layout as process groups: who this process is on both meshes, and whom it talks to.

The dense mesh is PP × DP × CP × TP, the expert mesh PP × EDP × EP × ETP, over the same ranks. Groups are made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.collectives import irecv, isend
from moesaic.mesh.device import device
from moesaic.mesh.group import Group
from moesaic.mesh.nodes import ranks_per_node_here, split_by_node
from moesaic.spec.layout import EXPERT_GROUPS, GROUPS, Layout


@dataclass(frozen=True)
class ExpertGroups:
    """The expert mesh as this rank sees it, for layers with one number of experts.

    The hierarchical dispatcher also has `ep_inside`, the ranks of `ep` on this node, and `ep_across`, those that have
    this rank's place on the nodes of `ep`.
    """

    ep: Group
    etp: Group
    edp: Group
    ep_etp: Group
    ep_inside: Group | None = None
    ep_across: Group | None = None


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

    layout: Layout | None
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
        return cls(layout, 0, Group.single("world"), **dense, embedding=Group.single("embedding"))  # type: ignore[arg-type]

    @classmethod
    def create(
        cls,
        layout: Layout,
        timeout_seconds: float,
        tied_embeddings: bool = False,
        ranks_per_node: int | None = None,
    ) -> Mesh:
        """The groups of `layout`. `torch.distributed` must be initialised with `layout.world` processes.

        With `tied_embeddings` the last stage holds a copy of the embedding, as every stage with prediction blocks does.
        `ranks_per_node` is by default what torchrun started on this node; it is the same on all ranks.

        Raises:
            SpecError: the hierarchical dispatcher is asked for, and expert-parallel ranks lie unevenly on nodes.
        """
        if layout.world == 1:
            return cls.single(layout)
        rank = dist.get_rank()

        def group(name: str, partition: list[tuple[int, ...]], small: bool = False) -> Group:
            return Group.create(name, partition, timeout_seconds, small=small)

        dense = {name: group(name, layout.groups(*axes)) for name, axes in GROUPS.items()}
        experts: dict[int, ExpertGroups] = {}
        made: dict[int, ExpertGroups] = {}
        for count, ep in layout.experts_ep:
            if ep not in made:
                suffix = "" if len(layout.experts_ep) == 1 else f"-{ep}"
                partitions = {name: layout.expert_groups(*axes, experts=count) for name, axes in EXPERT_GROUPS.items()}
                if layout.dispatcher == "hierarchical":
                    inside, across = split_by_node(
                        partitions["ep"], ranks_per_node or ranks_per_node_here(layout.world)
                    )
                    partitions |= {"ep_inside": inside, "ep_across": across}
                made[ep] = ExpertGroups(
                    **{name: group(name + suffix, each, name != "edp") for name, each in partitions.items()}
                )
            experts[count] = made[ep]
        pipelines = layout.groups("pp")
        holders = sorted(
            {
                i % layout.pp
                for i, stage in enumerate(layout.stages)
                if stage.embed or stage.mtp or (stage.head and tied_embeddings)
            }
        )
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

    @property
    def cp_kind(self) -> str:
        """How a sequence is split: `ulysses` or `ring`."""
        return "ulysses" if self.layout is None else self.layout.cp_kind

    @property
    def dispatcher(self) -> str:
        """How tokens travel to experts: `local`, `allgather`, `alltoall` or `hierarchical`."""
        return "local" if self.layout is None else self.layout.dispatcher

    @property
    def overlap(self) -> tuple[str, ...]:
        """What runs at the same time (`spec.options.OVERLAP`)."""
        return () if self.layout is None else self.layout.overlap

    @property
    def by_rank(self) -> bool:
        """Whether tensor-parallel messages travel under products, rank by rank."""
        return self.tp.size > 1 and "tensor" in self.overlap

    @property
    def compression(self) -> tuple[str, ...]:
        """What travels with fewer bits (`spec.options.COMPRESSION`)."""
        return () if self.layout is None else self.layout.compression

    def expert(self, experts: int) -> ExpertGroups:
        """The expert mesh of layers with `experts` experts."""
        found = self.experts_by_count.get(experts)
        if found is None:
            found = ExpertGroups(*(Group.single(name, self.rank) for name in EXPERT_GROUPS))
        return found

    def gradient_channels(self) -> dict[int, Group]:
        """For the id of every group over which gradients may be summed, one of the same ranks with connections of its
        own, so that sums under backward never stand before what layers send. All ranks call this, in one order."""
        layout = self.layout
        assert layout is not None

        def own(group: Group, partition: list[tuple[int, ...]]) -> Group:
            return Group.create(group.name, partition, self.world.timeout_seconds, channel=f"gradients {group.name}")

        found = {id(self.embedding): self.embedding}
        for name in ("tp", "data", "stage"):
            found[id(getattr(self, name))] = own(getattr(self, name), layout.groups(*GROUPS[name]))
        for count, groups in self.experts_by_count.items():
            for name in ("edp", "etp"):
                partition = layout.expert_groups(*EXPERT_GROUPS[name], experts=count)
                found[id(getattr(groups, name))] = own(getattr(groups, name), partition)
        return found

    def on_device(self, tensor: Tensor) -> Tensor:
        """`tensor` where this mesh's groups can send it from."""
        return tensor.to(device().torch_device) if self.world.needs_device else tensor


def _links(layout: Layout, pp: Group, timeout_seconds: float) -> Links:
    """Both directions of every neighbouring pair of a pipeline, the last and the first too (virtual stages wrap)."""
    size = layout.pp
    if size == 1:
        return Links()
    edges = list(range(size if layout.virtual_stages > 1 else size - 1))
    # Pairs of one colour share no rank, so each colour is a partition: neighbours alternate, and the wrap of an odd
    # ring is a colour of its own.
    colours = [[i for i in edges if (2 if i == size - 1 and size % 2 else i % 2) == colour] for colour in range(3)]
    found: dict[str, Group] = {}
    for direction in ("forward", "backward"):
        for colour, chosen in enumerate(colours):
            pairs = [tuple(sorted((ranks[i], ranks[(i + 1) % size]))) for ranks in layout.groups("pp") for i in chosen]
            if not pairs:
                continue
            group = Group.create(f"pp {direction}", pairs, timeout_seconds, channel=f"{direction} {colour}")
            start = next((i for i in chosen if pp.rank in (i, (i + 1) % size)), None)
            if start is None:
                continue
            sends = pp.rank == (start if direction == "forward" else (start + 1) % size)
            found[f"{direction}_{'out' if sends else 'in'}"] = group
            if group.needs_device:
                # NCCL connects at a link's first message and blocks until both ends are there: now, in one order.
                first = torch.zeros(1, device=device().torch_device)
                (isend if sends else irecv)(first, group, 1 - group.rank).wait()
    return Links(**found)
