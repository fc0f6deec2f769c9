"""Tokens and routed rows that one rank holds in one micro-batch. Arrays are float64 [N], one entry per layout."""

from __future__ import annotations

import numpy as np

from moesaic.spec.model import MoeSpec

from .habits import Habits
from .traffic import distinct_places
from .workload import Columns, Floats, Ints, Workload


def tokens_per_rank(work: Workload, columns: Columns) -> Floats:
    """T = b·S / (cp·tp): distinct tokens of a rank between modules, b sequences in a micro-batch."""
    return columns.micro_batch * work.seq_len / (columns.cp * columns.tp)


def tokens_between(work: Workload, columns: Columns, habits: Habits) -> Floats:
    """Tokens of a rank between modules: T, or all T·tp of its tensor group where that does not share them out."""
    return tokens_per_rank(work, columns) * (1 if habits.sequence_parallel else columns.tp)


def layer_ep(moe: MoeSpec, columns: Columns) -> Ints:
    """Expert-parallel degree of a layer: gcd(ep, E), which is ep itself unless layers differ in their experts."""
    return np.gcd(columns.ep, moe.router.experts)


def layer_edp(moe: MoeSpec, columns: Columns) -> Ints:
    """Ranks that hold the same experts of a layer: edp·ep / layer_ep."""
    return columns.edp * columns.ep // layer_ep(moe, columns)


def imbalance(moe: MoeSpec, work: Workload, columns: Columns) -> Floats:
    """Rows of the most loaded rank over the mean; no rank can get more than every token's choice, ep times the mean."""
    return np.minimum(work.imbalance, layer_ep(moe, columns).astype(np.float64))


def routed_rows(moe: MoeSpec, work: Workload, columns: Columns) -> Floats:
    """R = T·etp·k·imbalance: rows that the most loaded rank's experts compute.

    The T·ep·etp tokens of an expert group send k rows each to its ep places; ranks of one place share its rows and cut
    the experts' width by etp.
    """
    tokens = tokens_per_rank(work, columns)
    return tokens * columns.etp * moe.router.top_k * imbalance(moe, work, columns)


def received_tokens(moe: MoeSpec, work: Workload, columns: Columns) -> Floats:
    """Distinct tokens behind those rows: T·etp for each of the places among its ep that a token needs
    (`traffic.distinct`, with the limits of group-limited routing), and no more than the rows. It is what a dispatcher
    receives that sends a token once however many experts it has there.
    """
    router = moe.router
    needed = distinct_places(layer_ep(moe, columns), router.experts, router.top_k, router.groups_kept, router.groups)
    distinct = tokens_per_rank(work, columns) * columns.etp * needed
    rows = routed_rows(moe, work, columns)
    return np.minimum(distinct * imbalance(moe, work, columns), rows)
