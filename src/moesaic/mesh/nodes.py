"""Which ranks share a node, as expert-parallel groups that are split by it."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import EXPERT_GROUPS, Layout

Partition = list[tuple[int, ...]]


def ranks_per_node_here(world: int) -> int:
    """Ranks on this node: what torchrun says in LOCAL_WORLD_SIZE, or all `world` of them where nothing is said."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else world


def split_by_node(partition: Partition, ranks_per_node: int) -> tuple[Partition, Partition]:
    """Each group of `partition` as its ranks on one node, and as ranks of the same place on each of its nodes.

    A node is `ranks_per_node` consecutive ranks, and ranks of a group ascend: rank i of a group with m ranks per node
    is rank i % m on its node i // m.

    Raises:
        SpecError: a group has more ranks on one of its nodes than on another.
    """
    inside: Partition = []
    across: Partition = []
    for ranks in partition:
        counts = Counter(rank // ranks_per_node for rank in ranks)
        differing = next(((a, b) for a, b in pairwise(sorted(counts)) if counts[a] != counts[b]), None)
        if differing is not None:
            a, b = differing
            raise SpecError(
                f"the expert-parallel ranks {ranks[0]} to {ranks[-1]} lie unevenly on nodes of {ranks_per_node} ranks, "
                f"{counts[a]} on node {a} and {counts[b]} on node {b}, so the hierarchical dispatcher cannot pair "
                "them: take an ep that divides the ranks of a node or is a multiple of them, or dispatcher alltoall."
            )
        each = len(ranks) // len(counts)
        inside += [ranks[i : i + each] for i in range(0, len(ranks), each)]
        across += [ranks[i::each] for i in range(each)]
    return inside, across


def check_nodes(layout: Layout, ranks_per_node: int) -> None:
    """Raises SpecError unless the layout's expert-parallel groups split evenly, where its dispatcher needs that."""
    if layout.dispatcher == "hierarchical":
        for count, _ in layout.experts_ep:
            split_by_node(layout.expert_groups(*EXPERT_GROUPS["ep"], experts=count), ranks_per_node)
