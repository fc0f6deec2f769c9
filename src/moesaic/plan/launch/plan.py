"""A plan: what is trained, how it is spread, and on which machines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.cost.workload import Workload
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class Plan:
    """One layout of one workload on one cluster.

    Raises:
        SpecError: the layout has another number of ranks than the cluster has accelerators, they do not fill whole
            nodes, the batch is no whole number of micro-batches, or the name is not one that files, Slurm and
            Kubernetes all take.
    """

    workload: Workload
    layout: Layout
    cluster: ClusterSpec
    name: str
    """Of the job and its files: lower-case letters, digits and dashes."""

    def __post_init__(self) -> None:
        world, gpus, each = self.layout.world, self.cluster.gpus, self.cluster.gpu.gpus_per_node
        if world != gpus:
            raise SpecError(f"layout {self.layout} has {world} ranks, but the cluster has {gpus} accelerators.")
        if world > each and world % each:
            raise SpecError(
                f"{world} ranks do not fill nodes of {each} accelerators: use {world // each * each} or "
                f"{-(-world // each) * each}."
            )
        step = self.layout.micro_batch * self.layout.dp
        if self.workload.global_batch % step:
            raise SpecError(
                f"global_batch % (micro_batch·dp) = {self.workload.global_batch} % ({self.layout.micro_batch}·"
                f"{self.layout.dp}) = {self.workload.global_batch % step}, not 0: use a multiple of {step}."
            )
        if _NAME.fullmatch(self.name) is None:
            raise SpecError(
                f"a plan's name is {self.name!r}, but files, Slurm and Kubernetes together take at most 52 lower-case "
                f"letters, digits and inner dashes, such as {plain_name(self.name)!r}."
            )

    @property
    def gpus_per_node(self) -> int:
        """Processes on one node."""
        return min(self.layout.world, self.cluster.gpu.gpus_per_node)

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.layout.world // self.gpus_per_node

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one rank works through in a step."""
        return self.layout.micro_batches(self.workload.global_batch)


def plain_name(text: str) -> str:
    """The nearest name that files, Slurm and Kubernetes take."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:52].strip("-") or "plan"
