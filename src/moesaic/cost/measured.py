"""What `moesaic calibrate` measured on a machine, as constants of the closed form (`rates.Rates`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from moesaic.spec.cluster import ClusterSpec

if TYPE_CHECKING:
    from .rates import Rates

Rows = Sequence[Sequence[float]]
WIDTH = 128
"""Head width that the rate of attention cores refers to."""


def measured(cluster: ClusterSpec, rates: Rates) -> dict[str, float]:
    """Rates that follow from the measurements in a cluster file, by name. Matmuls take the fastest shape, links the
    fastest group, a ratio of passes the middle one; experts and attention cores a line through all shapes; norms and
    messages under products the middle one."""
    held, found = cluster.rates, dict[str, float]()
    peaks = cluster.gpu.peak_flops
    kind = "bf16" if "matmul_bf16_forward" in held else "fp32"
    forward = {(m, n, k): share for m, n, k, share in held.get(f"matmul_{kind}_forward", ())}
    if forward and "bf16" in peaks:
        found["gemm_share"] = max(forward.values()) * (1 + peaks["bf16"] / rates.gemm_half_peak)
    backward = [
        share / forward[m, n, k]
        for m, n, k, share in held.get(f"matmul_{kind}_weight", ())
        if forward.get((m, n, k), 0.0) > 0
    ]
    if backward:
        found["weight_gradient_share"] = median(backward)
    if kind in peaks:
        item = 2 if kind == "bf16" else 4
        found |= _experts(held.get(f"experts_{kind}_forward", ()), 6.0, item, peaks[kind], "expert")
        found |= _experts(held.get(f"experts_{kind}_backward", ()), 12.0, item, peaks[kind], "expert_backward")
        # What a core's rate refers to: large matmuls in bf16, which stand for fp32 where all is.
        large = peaks.get("bf16", peaks[kind]) * found.get("gemm_share", rates.gemm_share)
        large /= 1 + peaks.get("bf16", peaks[kind]) / rates.gemm_half_peak
        forward_cores, backward_cores = (held.get(f"attention_{kind}_{way}", ()) for way in ("forward", "backward"))
        found |= _attention(forward_cores, backward_cores, rates, peaks[kind] / large)
    if held.get("memory"):
        speeds = [speed for _, speed in held["memory"]]
        # The largest copies of an accelerator are the fastest. A processor's are the slowest, the smallest being in its
        # caches; what a layer reads and writes is in between.
        usual = median(speeds) if cluster.gpu.architecture == "cpu" else max(speeds)
        found["memory_share"] = usual / cluster.gpu.memory_bandwidth
        # What a processor does one operation after the other, each reading and writing memory or a cache again.
        norms = [row[-1] for way in ("forward", "backward") for row in held.get(f"norm_{kind}_{way}", ())]
        if norms:
            found["other_work"] = usual / median(norms)
    if held.get("launch"):
        found["launch_seconds"] = median(row[0] for row in held["launch"])
    return found | _links(cluster) | _slowdown(held.get("overlap", ()))


def _links(cluster: ClusterSpec) -> dict[str, float]:
    held, found = cluster.rates, dict[str, float]()
    near = [row for row in held.get("all_gather", ()) if row[0] == row[1]]
    far = [row for row in held.get("all_gather", ()) if row[0] > row[1]]
    if near:
        best = max(near, key=lambda row: row[3])
        found |= {"fast_latency": best[2], "fast_share": best[3] / cluster.gpu.link_bandwidth}
    if far:
        best = max(far, key=lambda row: row[3])
        found |= {"network_latency": best[2], "network_share": best[3] / cluster.network_bandwidth}
    if near or far:
        inside = bool(near)
        gathers = near if inside else far
        exchanges = [row[3] for row in held.get("all_to_all", ()) if (row[0] == row[1]) == inside]
        if exchanges:
            found["alltoall_ratio"] = max(exchanges) / max(row[3] for row in gathers)
    return found


def lost_share(message: float, products: float, both: float) -> float:
    """What is lost, between 0 and 1, of the shorter of two times when both things run at the same time."""
    return min(1.0, max(0.0, (both - max(message, products)) / max(min(message, products), 1e-12)))


def _slowdown(rows: Rows) -> dict[str, float]:
    """Seconds lost per second that a message and products ran at the same time: 0 where both took as long as the longer
    one of them, 1 where they took as long as one after the other. The middle one of the groups inside a domain, and of
    those beyond it; where there is one kind only it stands for the other."""
    if not rows:
        return {}
    lost: dict[bool, list[float]] = {True: [], False: []}
    for size, members, *seconds in rows:
        lost[size == members].append(lost_share(*seconds))
    near, far = (lost[inside] or lost[not inside] for inside in (True, False))
    return {"slowdown": median(near), "slowdown_network": median(far)}


def _experts(rows: Rows, work: float, item: int, peak: float, name: str) -> dict[str, float]:
    """seconds = a·FLOPs + b·bytes of weights, of `work` FLOPs per choice, width and hidden element."""
    if not rows:
        return {}
    count, each, width, hidden, share = np.array(rows, float).T
    flops = work * count * each * width * hidden
    a, b = nonnegative_line(flops, 3.0 * item * count * width * hidden, flops / (share * peak))
    return {f"{name}_flop_seconds": a, f"{name}_byte_seconds": b}


def _attention(forward: Rows, backward: Rows, rates: Rates, scale: float) -> dict[str, float]:
    """1/share = (1 + half/positions)/(share of long sequences), where heads are as wide as the reference."""
    if not forward:
        return {}
    positions, _, width, share = np.array(forward, float).T
    narrow = (width / WIDTH) * (WIDTH + rates.attention_half_width) / (width + rates.attention_half_width)
    a, b = nonnegative_line(np.ones_like(share), 1 / positions, narrow / (share * scale))
    found = (
        {"attention_share": 1 / a, "attention_half": b / a}
        if a > 0
        else {"attention_share": float(np.median(share * scale))}
    )
    shares = {tuple(row[:3]): row[3] for row in forward}
    ratios = [row[3] / shares[tuple(row[:3])] for row in backward if tuple(row[:3]) in shares]
    return found | ({"attention_backward": median(ratios)} if ratios else {})


def nonnegative_line(
    x: np.ndarray[tuple[int], np.dtype[np.float64]],
    z: np.ndarray[tuple[int], np.dtype[np.float64]],
    y: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> tuple[float, float]:
    """a and b, neither below 0, of y = a·x + b·z with the least sum of squared relative errors; all are positive."""
    both = np.stack([x / y, z / y], axis=1)
    if np.linalg.matrix_rank(both) == 2:
        (a, b), *_ = np.linalg.lstsq(both, np.ones_like(y), rcond=None)
        if a >= 0 and b >= 0:
            return float(a), float(b)
    alone = [float(column.sum() / (column**2).sum()) for column in both.T]
    errors = [float(((column * each - 1) ** 2).sum()) for column, each in zip(both.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
