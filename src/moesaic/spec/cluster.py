"""The machines of a run: an accelerator's peaks and links, and how many of them stand together.

Bandwidths are in bytes per second and one direction, memory in bytes, rates in FLOP/s of dense matrices.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from . import gpus as catalogue
from .errors import SpecError
from .gpus.tables import RATE_COLUMNS, ClusterFile, GpuTable, read_cluster_file
from .model import Spec
from .tables import ClusterTable

__all__ = [
    "RATE_COLUMNS",
    "ClusterSpec",
    "GpuSpec",
    "cluster_of",
    "gpu_named",
    "gpu_names",
    "load_cluster",
    "members_in_domain",
]

GIB = 2**30


class GpuSpec(Spec):
    """One accelerator as its maker publishes it."""

    name: str
    vendor: str
    architecture: str = ""
    """Generation: ampere, hopper, blackwell, cdna3, cdna4, cpu; empty where a file does not say."""
    superchip: bool = False
    """Whether one package joins it to the host's processor, as in GB200."""
    peak_flops: dict[str, float]
    """Dense FLOP/s by precision: fp32, tf32, bf16, fp8, fp4; what is absent the accelerator cannot do."""
    memory_bytes: float
    """What programs can have: the total that the driver reports."""
    memory_bandwidth: float
    """Bytes per second to its own memory."""
    link_bandwidth: float
    """Bytes per second and direction to the others of its domain, all of them together (NVLink, xGMI)."""
    domain: int
    """Accelerators that reach each other over that link: 8 in an HGX node, up to 72 in an NVL72 rack."""
    gpus_per_node: int
    nic_bandwidth: float
    """Bytes per second and direction to other domains, per accelerator, in the maker's reference machine."""
    host_bandwidth: float
    """Bytes per second and direction between the accelerator and host memory."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each figure is from, by field."""

    @property
    def microscaled(self) -> bool:
        """Whether matmuls take blocks of 32 values with a scale each (OCP MX). Of an architecture that a file does not
        name, fp4 says so, which has no other form."""
        return self.architecture in ("blackwell", "cdna4") if self.architecture else "fp4" in self.peak_flops


class ClusterSpec(Spec):
    """Equal accelerators and their links. A figure that is None is the accelerator's own."""

    gpu: GpuSpec
    gpus: int
    domain: int | None = None
    nic_bandwidth: float | None = None
    rates: dict[str, list[list[float]]] = Field(default_factory=dict)
    """Measured on these very machines by `moesaic calibrate`, for the cost model; empty where none were. Names and
    columns are those of `RATE_COLUMNS`."""
    gpus_per_node: int | None = None
    network: str = ""
    """What joins domains where it is no InfiniBand or RoCE, whose cards move data on their own: "efa" (AWS)."""

    @property
    def node_size(self) -> int:
        """Accelerators in one machine."""
        return min(self.gpus_per_node or self.gpu.gpus_per_node, self.gpus)

    @property
    def fast_domain(self) -> int:
        """Accelerators of this cluster that share the fast link: ranks 0 to fast_domain−1, the next as many, and so on.

        A cluster larger than one domain of several nodes (an NVL72 rack) takes equal parts of the racks, in whole
        nodes, which is how schedulers hand them out (Slurm's --segment): 256 GPUs are 64 in each of four racks.
        """
        domain = self.domain or self.gpu.domain
        if self.gpus <= domain:
            return self.gpus
        parts = (size for size in range(domain, 0, -self.node_size) if self.gpus % size == 0)
        return next(parts, domain) if domain % self.node_size == 0 else domain

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second and direction of one accelerator to other domains."""
        return self.gpu.nic_bandwidth if self.nic_bandwidth is None else self.nic_bandwidth


def gpu_names() -> list[str]:
    """Short names of the catalogue."""
    return catalogue.names()


@functools.cache
def gpu_named(name: str) -> GpuSpec:
    """An accelerator of the catalogue, by any of its usual names: "h100", "H100-SXM", "H100 (Eos)", "DGX-GB300".

    Raises:
        SpecError: it is not in the catalogue; the sentence has the nearest names.
    """
    file = catalogue.catalogue()[catalogue.find(name)]
    return _gpu_spec(file.gpu, file.sources, name)


def load_cluster(
    gpu: str | Path,
    gpus: int | None = None,
    *,
    domain: int | None = None,
    gpus_per_node: int | None = None,
    nic_gbps: float | None = None,
    link_gb_per_s: float | None = None,
    memory_gib: float | None = None,
    network: str = "",
) -> ClusterSpec:
    """So many accelerators of the catalogue, or the cluster that a TOML file describes (`spec.gpus.tables`).

    gpu: a name as `gpu_named` takes it, or the path of a file. gpus: accelerators in all; a file may give them. What is
    given besides replaces the file's or the maker's figure: domain and gpus_per_node in accelerators, nic_gbps in
    Gbit/s per accelerator and direction, link_gb_per_s in GB/s per direction, memory_gib in GiB. network: as in
    `ClusterSpec`.

    Raises:
        SpecError: unknown accelerator, file, key or value, or an accelerator that lacks a figure.
    """
    if _is_file(gpu):
        file = read_cluster_file(Path(gpu))
        spec, keys, rates = _gpu_of(file, str(gpu)), file.cluster, file.rates
    else:
        spec, keys, rates = gpu_named(str(gpu)), ClusterFile().cluster, {}
    gpus = keys.gpus if gpus is None else gpus
    if gpus is None:
        raise SpecError(f"{str(gpu)!r} does not say how many accelerators: give gpus, or [cluster] gpus in a file.")
    given = {
        "gpus": gpus,
        "domain": domain,
        "gpus_per_node": gpus_per_node,
        "nic_gbps": nic_gbps,
        "link_gb_per_s": link_gb_per_s,
        "memory_gib": memory_gib,
    }
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"{name} is {value:g}, but a cluster has more than 0 of it.")
    changed = {}
    if link_gb_per_s is not None:
        changed["link_bandwidth"] = link_gb_per_s * 1e9
    if memory_gib is not None:
        changed["memory_bytes"] = memory_gib * GIB
    if changed:
        sources = spec.sources | dict.fromkeys(changed, "given by the user")
        spec = spec.model_copy(update={**changed, "sources": sources})
    nic = keys.nic_gbps if nic_gbps is None else nic_gbps
    return ClusterSpec(
        gpu=spec,
        gpus=gpus,
        domain=keys.domain if domain is None else domain,
        gpus_per_node=keys.gpus_per_node if gpus_per_node is None else gpus_per_node,
        nic_bandwidth=None if nic is None else nic * _NIC,
        rates=rates,
        network=network,
    )


def cluster_of(table: ClusterTable, gpus: int | None = None) -> ClusterSpec:
    """The cluster that [cluster] of a run file names; its `gpu` is a name or the path of a cluster file. `gpus` stands
    in where the table does not say how many.

    Raises:
        SpecError: the table names no accelerator or no number of them, or as in `load_cluster`.
    """
    if table.gpu is None:
        raise SpecError(f"cluster.gpu is not set: name an accelerator ({', '.join(gpu_names())}) or a cluster file.")
    per_node = table.gpus_per_node
    if table.nodes is not None:
        if per_node is None:
            per_node = load_cluster(table.gpu, 1).gpu.gpus_per_node
        gpus = table.nodes * per_node
    return load_cluster(table.gpu, gpus, gpus_per_node=table.gpus_per_node)


def members_in_domain(
    stride: ArrayLike, size: ArrayLike, domain: ArrayLike, world: ArrayLike | None = None
) -> NDArray[np.int64]:
    """How many members of a group, each counted among them, share a fast domain: the fewest that any member finds.

    A group is `size` ranks that are `stride` apart, as those of one axis of a layout (or of neighbouring axes) are:
    stride is the product of the axes' sizes below. Groups follow each other without gaps, and fast domains are `domain`
    consecutive ranks each. The result is `size` where no group leaves its domain, 1 where some rank reaches all others
    of its group over the network only. All arguments broadcast; with `world`, ranks in all, only groups below it count.
    """
    strides, sizes, domains, worlds = np.broadcast_arrays(
        np.asarray(stride, np.int64),
        np.asarray(size, np.int64),
        np.asarray(domain, np.int64),
        np.asarray(-1 if world is None else world, np.int64),
    )
    span = strides * sizes
    members = np.array(np.minimum(sizes, np.maximum(1, domains // strides)))
    # A group lies whole in a domain, or fills whole domains, where the one divides the other; else its members meet
    # the borders at different places, and they are counted one by one. There are few such cases, and many layouts.
    even = (domains % strides == 0) & ((domains % span == 0) | (span % domains == 0))
    odd = ~even & (strides < domains) & (sizes > 1)
    if odd.any():
        step, count, part = strides[odd], sizes[odd], domains[odd]
        # Where in a domain groups start repeats after so many, and the pattern of one group's members after `period`.
        repeat = part // np.gcd(step * count, part)
        blocks = repeat if world is None else np.clip(worlds[odd] // (step * count), 1, repeat)
        period = part // np.gcd(step, part)
        short = np.where(count > 3 * period, 2 * period + count % period, count)
        # One number for each case: blocks, stride < domain, and a short group has fewer than three domains' members.
        radix = int(part.max()) + 1
        codes = ((step * radix + blocks) * radix + part) * (3 * radix) + short
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        cases = zip(*(column[first].tolist() for column in (step, count, part, blocks, short)), strict=True)
        members[odd] = np.array([_fewest(*case) for case in cases], np.int64)[inverse]
    return members


@functools.lru_cache(maxsize=4096)
def _fewest(stride: int, size: int, domain: int, blocks: int, counted: int) -> int:
    """`members_in_domain` of `blocks` blocks of such groups, by counting `counted` members of each, which are all or
    those of both ends and one period between them."""
    starts = np.unique((np.arange(blocks)[:, None] * stride * size + np.arange(stride)) % domain)
    where = (starts[:, None] + stride * np.arange(counted)) // domain
    # Members of a domain stand next to each other, so that runs of equal numbers are what is counted.
    borders = np.diff(where, axis=1, prepend=-1, append=where.max() + 2).nonzero()
    runs = np.diff(borders[1])[np.diff(borders[0]) == 0]
    return int(runs.min())


def _is_file(gpu: str | Path) -> bool:
    """Whether this is a path; a name of the catalogue is that, whatever lies in the current folder."""
    if isinstance(gpu, Path) or gpu.endswith(".toml"):
        return True
    try:
        catalogue.find(gpu)
    except SpecError:
        return Path(gpu).is_file()
    return False


_NIC = 1e9 / 8
_FIELDS: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_per_s": ("memory_bandwidth", 1e9),
    "link_gb_per_s": ("link_bandwidth", 1e9),
    "domain": ("domain", 1),
    "gpus_per_node": ("gpus_per_node", 1),
    "nic_gbps": ("nic_bandwidth", _NIC),
    "host_gb_per_s": ("host_bandwidth", 1e9),
}
"""Key of [gpu] → field of `GpuSpec`, and the field's units in one of the key's."""


def _gpu_of(file: ClusterFile, where: str) -> GpuSpec:
    """The accelerator of a file: its own figures, and those of the catalogue's where [cluster] names one."""
    own = file.gpu.model_dump(exclude_unset=True)
    if file.cluster.gpu is None:
        return _gpu_spec(file.gpu, file.sources, where)
    base = catalogue.catalogue()[catalogue.find(file.cluster.gpu)]
    if file.gpu.peak_tflops is not None:
        own["peak_tflops"] = {**(base.gpu.peak_tflops or {}), **file.gpu.peak_tflops}
    table = base.gpu.model_copy(update=own)
    here = dict.fromkeys(
        own.keys() - {"name", "aliases", "vendor", "architecture", "superchip"}, f"given in {Path(where).name}"
    )
    return _gpu_spec(table, base.sources | here | file.sources, where)


def _gpu_spec(table: GpuTable, sources: dict[str, str], where: str) -> GpuSpec:
    needed = ("name", "peak_tflops", *_FIELDS)
    missing = [key for key in needed if getattr(table, key) is None]
    if missing:
        raise SpecError(
            f"{where!r} lacks gpu.{', gpu.'.join(missing)}: give them, or name an accelerator of the catalogue as "
            f"[cluster] gpu and only what differs."
        )
    fields: dict[str, Any] = {field: getattr(table, key) * unit for key, (field, unit) in _FIELDS.items()}
    names = {key: field for key, (field, _) in _FIELDS.items()} | {"peak_tflops": "peak_flops"}
    assert table.peak_tflops is not None
    return GpuSpec(
        name=table.name or where,
        vendor=table.vendor or "",
        architecture=table.architecture or "",
        superchip=bool(table.superchip),
        peak_flops={precision: peak * 1e12 for precision, peak in table.peak_tflops.items()},
        **fields,
        sources={names.get(key, key): text for key, text in sources.items()},
    )
