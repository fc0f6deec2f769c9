"""Bytes that one rank sends in each collective, over fast links and over the network, exactly.

A group of n ranks has `a` of them in one fast domain (NVLink), in n/a domains. A collective is split into what stays
inside a domain and what leaves it; both in bytes sent by one rank. All functions take arrays [N] or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from moesaic.spec.cluster import ClusterSpec, members_in_domain

from .rates import Rates
from .workload import SHARDING, Columns, Floats

_LEVEL = {name: place for place, name in enumerate(SHARDING)}
Numbers = Any
"""An array [N], or one number for all of them."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank sends."""

    fast: Numbers
    """To ranks of its own domain."""
    network: Numbers
    """To other domains."""

    @property
    def total(self) -> Numbers:
        """All of them."""
        return self.fast + self.network


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, `inside` of which share a fast domain."""

    size: Numbers
    inside: Numbers

    @property
    def domains(self) -> Numbers:
        """Domains that the group touches."""
        return self.size / self.inside


def group(size: Numbers, stride: Numbers, domain: int) -> Group:
    """The group of ranks r, r + stride, …; a domain is that many consecutive ranks."""
    return Group(size, members_in_domain(stride, size, domain))


@dataclass(frozen=True)
class Groups:
    """The groups of both meshes."""

    tp: Group
    cp: Group
    data: Group
    """dp·cp: holds the same dense parameters."""
    pp: Group
    etp: Group
    ep: Group
    edp: Group
    ep_etp: Group


def groups(columns: Columns, domain: int) -> Groups:
    """The groups of each layout on fast domains of that many ranks."""
    c, one = columns, np.ones_like(columns.tp)
    outside = np.where(c.dp_outer, c.pp, 1)
    dense, expert = c.tp * c.cp, c.etp * c.ep
    # dp·cp is not evenly spaced under dp_outer; its cp part is inside first.
    cp_inside = group(c.cp, c.tp, domain).inside
    dp_inside = group(c.dp, dense * outside, domain).inside
    return Groups(
        tp=group(c.tp, one, domain),
        cp=Group(c.cp, cp_inside),
        data=Group(c.dp * c.cp, cp_inside * dp_inside),
        pp=group(c.pp, np.where(c.dp_outer, dense, dense * c.dp), domain),
        etp=group(c.etp, one, domain),
        ep=group(c.ep, c.etp, domain),
        edp=group(c.edp, expert * outside, domain),
        ep_etp=group(expert, one, domain),
    )


# ---------------------------------------------------------------- collectives


def all_gather(whole: Numbers, g: Group) -> Bytes:
    """Bytes of gathering `whole` bytes, or of reduce-scattering them: whole·(n − 1)/n in one domain (MegaScale-MoE,
    Eq. 1). Across domains each member carries 1/a of what crosses, and the rest is passed on inside."""
    across = whole * (g.domains - 1) / (g.domains * g.inside)
    return Bytes(whole * (g.inside - 1) / g.inside, across)


def all_to_all(sent: Numbers, g: Group) -> Bytes:
    """Bytes of an exchange in which a rank has `sent` bytes, equally for all n, itself included: sent·(n − 1)/n."""
    return Bytes(sent * (g.inside - 1) / g.size, sent * (g.size - g.inside) / g.size)


def tensor_parallel(tokens: Numbers, width: int, item: int, g: Group) -> Bytes:
    """One all-gather or reduce-scatter of `tokens` rows (those of the whole group) under sequence parallelism; a block
    has one of each forward, so that both are 2·b·s·h·(n − 1)/n (MegaScale-MoE, Eqs. 1 and 4)."""
    return all_gather(tokens * width * item, g)


def ulysses(own: Numbers, columns: Numbers, item: int, g: Group) -> Bytes:
    """Exchange of sequence against heads: a rank's `own` rows of q, k, v and of the output, `columns` in all.

    h·(2 + 2/m) columns on b·s/n rows are b·s·h·(n − 1)/n·(2 + 2/m)/n (DeepSpeed-Ulysses, arXiv 2309.14509 section 3.2;
    half of MegaScale-MoE's Eq. 2, which counts twice)."""
    return all_to_all(own * columns * item, g)


def ring(own: Numbers, columns: Numbers, item: int, g: Group) -> Bytes:
    """Keys and values of a rank's `own` rows once around: (n − 1)·own·columns. One of the a members of a domain sends
    over its border."""
    sent = own * columns * item * (g.size - 1)
    crossing = np.where(g.domains > 1, 1.0 / g.inside, 0.0)
    return Bytes(sent * (1 - crossing), sent * crossing)


# ---------------------------------------------------------------- dispatch


@lru_cache(maxsize=4096)
def distinct(places: int, experts: int, top_k: int, kept: int = 1, limits: int = 1) -> float:
    """Places (nodes, ranks) that a token's `top_k` experts stand on, expected for uniform choices:
    N·(1 − C(E − E/N, k)/C(E, k)).

    With group-limited routing a token first keeps `kept` of `limits` equal, consecutive groups of experts and then
    chooses among theirs (DeepSeek-V3, arXiv 2412.19437 section 2.1.2). More places than experts count as one per
    expert.
    """
    places = min(places, experts)
    if places <= 1:
        return float(places)
    here, each = experts // places, experts // limits
    pool = kept * each
    missed = 0.0
    if here >= each:  # a place has whole groups: any number of them may be among the kept
        own = limits // places or 1
        for taken in range(min(own, kept) + 1):
            chance = comb(own, taken) * comb(limits - own, kept - taken) / comb(limits, kept)
            missed += chance * comb(pool - taken * each, top_k) / comb(pool, top_k)
    else:
        missed = 1 - kept / limits + kept / limits * comb(pool - here, top_k) / comb(pool, top_k)
    return places * (1 - missed)


def distinct_places(places: Numbers, experts: int, top_k: int, kept: int = 1, limits: int = 1) -> Floats:
    """`distinct` of an array of places [N]."""
    values, where = np.unique(places, return_inverse=True)
    return np.array([distinct(int(v), experts, top_k, kept, limits) for v in values])[where]


def dispatch(
    tokens: Numbers,
    width: int,
    item: int,
    router: tuple[int, int, int, int],
    columns: Columns,
    g: Groups,
    copy_per_rank: bool = False,
) -> Bytes:
    """Bytes of sending a rank's `tokens` rows to their experts; combining them is as much the other way.

    By dispatcher, for k choices: `allgather` b·s·h·(n − 1)/n over ep·etp whatever is chosen (MegaScale-MoE section
    4.2); `alltoall` a copy per choice, tokens·k·(n − 1)/n (Eq. 3); `hierarchical`, `deepep` and `hybridep` one copy
    per other domain that a token needs, passed on there to each rank that needs it.

    `router` is (experts, top_k, groups kept, groups). With `copy_per_rank`, `alltoall` sends one copy to each rank that
    a token needs instead (what our trainer does). Where experts are cut (etp > 1), what arrived is then gathered over
    the ranks of the cut.
    """
    experts, top_k, kept, limits = router
    row = width * item
    whole = all_gather(tokens * (columns.ep * columns.etp) * row, g.ep_etp)
    ranks = distinct_places(columns.ep, experts, top_k, kept, limits)
    copies = ranks if copy_per_rank else top_k
    plain = all_to_all(tokens * copies * row, g.ep)
    cut = all_gather(tokens * np.where(columns.dispatches("alltoall"), copies, ranks) * columns.etp * row, g.etp)
    domains = distinct_places(np.ceil(g.ep.domains), experts, top_k, kept, limits)
    # Every copy for a rank is sent inside some domain; by symmetry a rank passes on as many as it causes.
    once = Bytes(
        tokens * row * ranks * (g.ep.inside - 1) / g.ep.inside,
        tokens * row * domains * (g.ep.domains - 1) / g.ep.domains,
    )
    gathered, nodewise = columns.dispatches("allgather"), columns.dispatches("hierarchical", "deepep", "hybridep")
    off = columns.dispatches("local") | (columns.ep * columns.etp == 1)

    def pick(name: str) -> Floats:
        sparse = np.where(nodewise, getattr(once, name), getattr(plain, name)) + getattr(cut, name)
        return np.where(off, 0.0, np.where(gathered, getattr(whole, name), sparse))

    return Bytes(pick("fast"), pick("network"))


# ---------------------------------------------------------------- parameters


def data_parallel(
    count: Numbers, g: Group, columns: Columns, gradient_bytes: int, item: int, micro: Numbers
) -> tuple[Bytes, Bytes]:
    """Bytes of one step for `count` parameters on a rank: of gradients, and of gathering parameters.

    Sharding none: an all-reduce, 2·P·(n − 1)/n. Optimizer: one reduce-scatter and one gather. Gradients: a
    reduce-scatter per micro-batch. Parameters: gathered for each forward and backward pass as well. `micro` is the
    number of micro-batches; copies of the sharded state (`replicas`) add an all-reduce of a shard.
    """
    shard = Group(g.size / columns.replicas, np.maximum(1, np.minimum(g.inside, g.size / columns.replicas)))
    copies = Group(columns.replicas, np.maximum(1, np.minimum(columns.replicas, g.inside / shard.inside)))
    scatter, gather = all_gather(count * gradient_bytes, shard), all_gather(count * item, shard)
    between = all_gather(2.0 * count * gradient_bytes / shard.size, copies)
    reduce = all_gather(2.0 * count * gradient_bytes, g)
    level = columns.sharding
    whole = level == _LEVEL["none"]
    scatters = np.where(level >= _LEVEL["gradients"], micro, 1)
    gathers = np.where(level == _LEVEL["parameters"], 2 * micro, 1)

    def gradients(name: str) -> Numbers:
        return np.where(whole, getattr(reduce, name), getattr(scatter, name) * scatters + getattr(between, name))

    def weights(name: str) -> Numbers:
        return np.where(whole, 0.0, getattr(gather, name) * gathers)

    return Bytes(gradients("fast"), gradients("network")), Bytes(weights("fast"), weights("network"))


# ---------------------------------------------------------------- seconds


def seconds(sent: Bytes, cluster: ClusterSpec, rates: Rates, ratio: Numbers = 1.0, messages: Numbers = 1.0) -> Floats:
    """Seconds of a collective: fast links and network carry their bytes at the same time, so that the slower one
    counts, after a latency. `ratio` is its bandwidth over an all-gather's on fast links."""
    fast = sent.fast / (cluster.gpu.link_bandwidth * rates.fast_share * ratio)
    network = sent.network / (cluster.network_bandwidth * rates.network_share)
    latency = np.where(sent.network > 0, rates.network_latency, rates.fast_latency) * messages
    return np.where(sent.fast + sent.network > 0, np.maximum(fast, network) + latency, 0.0)
