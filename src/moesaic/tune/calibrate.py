"""Measure a machine and write it down as a cluster file that `load_cluster` reads.

Raw seconds become rates: FLOP/s of each shape over the peak, bytes per second of copies, and for each collective and
group the latency and bandwidth of the line seconds = latency + bytes/bandwidth that fits its sizes best. The columns
are those of `moesaic.spec.cluster.RATE_COLUMNS`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesaic.spec.cluster import RATE_COLUMNS, gpu_named
from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.gpus import find
from moesaic.spec.gpus.tables import COLLECTIVES
from moesaic.spec.toml import write_toml

if TYPE_CHECKING:
    from .bench import Measurements

PRECISIONS = ("fp32", "tf32", "bf16")
"""What can be measured: products of fp8 and fp4 need kernels and scales of the stack that will run them."""
QUICK_SECONDS = 20.0
SECONDS = 60.0
_CROWDED = 0.85
"""Share of its cores below which a measurement on a processor says so."""


@dataclass(frozen=True)
class Calibration:
    """A measured machine."""

    tables: dict[str, dict[str, Any]]
    """[cluster], [gpu] and [sources] of the file; None where the catalogue's figure holds."""
    rates: dict[str, list[list[float]]]
    peaks: dict[str, float]
    """FLOP/s that the efficiencies are shares of."""
    notes: list[str]
    """What the user should know: skipped for want of time, or measured beside other work."""

    def to_toml(self) -> str:
        """The cluster file."""
        lines = ["# Written by moesaic calibrate.", write_toml(self.tables), "[rates]"]
        for name, rows in self.rates.items():
            lines += [f"# {', '.join(RATE_COLUMNS[name])}", f"{name} = ["]
            lines += [f"    [{', '.join(_number(value) for value in row)}]," for row in rows] + ["]"]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_toml())
            # mkstemp makes private files; this one is for whoever plans.
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def calibrate(
    *,
    precisions: Sequence[str] | None = None,
    processes: int | None = None,
    quick: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration | None:
    """Measure the machine that this runs on: as many processes as GPUs (on a CPU 2 or 4) that are started here, or all
    those that torchrun started, wherever they are. None on torchrun's ranks other than 0.

    Raises:
        SpecError: an unknown precision, more processes than GPUs, or `processes` given under torchrun.
        CalibrationError: a process failed.
        KeyboardInterrupt: interrupted; no process is left.
    """
    from . import ranks
    from .bench import Plan

    kind, devices = ranks.devices()
    chosen = tuple(precisions) if precisions else _usual_precisions(kind)
    for precision in chosen:
        if precision not in PRECISIONS:
            raise SpecError(f"precision {precision!r} cannot be measured: {nearest(precision, PRECISIONS)}")
        if precision == "tf32" and kind == "cpu":
            raise SpecError("tf32 is a mode of GPUs; a processor has fp32 and bf16.")
    seconds = QUICK_SECONDS if quick else SECONDS
    if ranks.launched():
        if processes is not None:
            raise SpecError("--procs is for processes started here; torchrun has started its own.")
        measured = ranks.measure_launched(Plan(chosen, quick, seconds, domain=0), say)
        return None if measured is None else calibration_of(measured)
    count = ranks.default_processes(kind, devices) if processes is None else processes
    if kind != "cpu" and count > devices:
        raise SpecError(f"--procs {count} is more than the {devices} GPUs of this machine: each process needs its own.")
    return calibration_of(ranks.measure_here(count, Plan(chosen, quick, seconds, domain=count), say))


def calibration_of(measured: Measurements) -> Calibration:
    """What measured seconds say about a machine. The peaks of an accelerator that the catalogue does not know, such as
    a processor, are the fastest products that were measured."""
    facts = measured.facts
    known = _in_catalogue(facts["name"]) if facts["kind"] != "cpu" else None
    speeds = {
        (precision, kind, shape, product): _flops(kind, shape) / seconds
        for precision, kind, shape, product, seconds in measured.products
    }
    peaks = {precision: max(v for key, v in speeds.items() if key[0] == precision) for precision, *_ in speeds}
    if known is not None:
        peaks |= {name: peak for name, peak in gpu_named(known).peak_flops.items() if name in peaks}
    peaks = {name: _rounded(peak) for name, peak in peaks.items()}
    rates: dict[str, list[list[float]]] = {}
    for (precision, kind, shape, product), speed in speeds.items():
        row = [*map(float, shape), _rounded(speed / peaks[precision])]
        rates.setdefault(f"{kind}_{precision}_{product}", []).append(row)
    for precision, kind, shape, way, seconds in measured.modules:
        work = _norm_bytes(precision, shape, way) if kind == "norm" else _module_flops(kind, shape, way)
        speed = work / seconds if kind == "norm" else work / seconds / peaks[precision]
        rates.setdefault(f"{kind}_{precision}_{way}", []).append([*map(float, shape), _rounded(speed)])
    for what, size, seconds in measured.copies:
        rates.setdefault(what, []).append([float(size), _rounded(size / seconds)])
    rates["launch"] = [[_rounded(measured.launch_seconds)]]
    rates |= _lines(measured)
    for size, members, message, products, both in measured.overlaps:
        row = [float(size), float(members), _rounded(message), _rounded(products), _rounded(both)]
        rates.setdefault("overlap", []).append(row)
    rates = {name: sorted(rates[name]) for name in RATE_COLUMNS if name in rates}
    notes = [f"Skipped for want of time: {what}." for what in measured.skipped]
    if facts["core_share"] < _CROWDED:
        notes.append(
            f"Other work had {1 - facts['core_share']:.0%} of the cores meanwhile, so products are slower than they "
            "could be: measure an idle machine for figures to plan with."
        )
    tables = _tables(facts, known, peaks, rates)
    if known is None and not facts["native_bf16"] and "fp32" in peaks and "bf16" not in peaks:
        # Products of bf16 are then computed in fp32 (model.kernels).
        tables["gpu"]["peak_tflops"]["bf16"] = tables["gpu"]["peak_tflops"]["fp32"]
        tables["sources"]["peak_tflops"] += "; bf16 through fp32"
    return Calibration(tables, rates, peaks, notes)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of the line seconds = latency + bytes/bandwidth that has the least sum of
    squared relative errors. Relative, so that small messages count as much as large ones; neither is below 0.

    Raises:
        ValueError: no sizes, or sizes and times that are not all positive.
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(x) == 0 or len(x) != len(t) or (x <= 0).any() or (t <= 0).any():
        raise ValueError("a line needs positive sizes and as many positive times")
    if len(set(x.tolist())) > 1:
        # Divided by t, both sides of t = latency + x·slope: 1 = latency/t + slope·x/t.
        (latency, slope), *_ = np.linalg.lstsq(np.stack([1 / t, x / t], axis=1), np.ones_like(t), rcond=None)
        if latency >= 0 and slope > 0:
            return float(latency), float(1 / slope)
        if slope <= 0:
            # Larger messages take no longer than small ones: latency is all there is to see below the largest.
            largest = int(np.argmax(x))
            flat = float(np.sum(1 / t) / np.sum(1 / t**2))
            return flat, float(x[largest] / t[largest])
    return 0.0, float(np.sum((x / t) ** 2) / np.sum(x / t))


def _lines(measured: Measurements) -> dict[str, list[list[float]]]:
    points: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for name, size, members, sent, seconds in measured.messages:
        points.setdefault((name, size, members), []).append((sent, seconds))
    rates: dict[str, list[list[float]]] = {}
    for (name, size, members), pairs in points.items():
        latency, bandwidth = fit_line(*zip(*pairs, strict=True))
        rates.setdefault(name, []).append([float(size), float(members), _rounded(latency), _rounded(bandwidth)])
    return rates


def _tables(
    facts: dict[str, Any], known: str | None, peaks: dict[str, float], rates: dict[str, list[list[float]]]
) -> dict[str, dict[str, Any]]:
    world, domain = facts["world"], facts["domain"]
    cluster = {"gpu": known, "gpus": world}
    how = f"measured by moesaic calibrate with torch {facts['torch']}"
    if known is not None:
        return {"cluster": cluster, "sources": {}}
    lines = [row for name in COLLECTIVES for row in rates.get(name, [])]
    inside = max((bandwidth for size, members, _, bandwidth in lines if members == size), default=0.0)
    # One rank of each machine: what they send goes over the network, and nothing else does.
    outside = max((bandwidth for size, members, _, bandwidth in lines if members == 1 < size), default=0.0)
    # The largest tensor, since small ones fit into caches.
    _, memory = max(rates["memory"])
    # A process alone has no link but the memory that it would share with others: half is read, half written.
    link = inside or memory / 2
    gib = facts["memory_bytes"] / 2**30 / (domain if facts["kind"] == "cpu" else 1)
    _, host = max(rates.get("host", [[0.0, memory / 2]]))
    threads = f", {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}" if facts["kind"] == "cpu" else ""
    gpu = {
        "name": f"{facts['name']}{threads}",
        "vendor": "",
        **({"architecture": "cpu"} if facts["kind"] == "cpu" else {}),
        "peak_tflops": {name: peak / 1e12 for name, peak in peaks.items()},
        "memory_gib": _rounded(gib),
        "memory_gb_per_s": _rounded(memory / 1e9),
        "link_gb_per_s": _rounded(link / 1e9),
        "domain": domain,
        "gpus_per_node": domain,
        "nic_gbps": _rounded((outside or link) * 8 / 1e9),
        "host_gb_per_s": _rounded(host / 1e9),
    }
    of_all = {
        "peak_tflops": f"{how}: fastest of the products below",
        "memory_gib": "available when it was measured" + (", over its processes" if facts["kind"] == "cpu" else ""),
        "memory_gb_per_s": f"{how}: copy of the largest tensor, reads and writes",
        "link_gb_per_s": f"{how}: fastest fitted collective inside a machine"
        if inside
        else "half of the memory's bandwidth, for want of a second process",
        "domain": "processes of one machine when it was measured",
        "gpus_per_node": "processes of one machine when it was measured",
        "nic_gbps": f"{how}: fastest fitted collective of one process per machine"
        if outside
        else "as the link inside the machine, for want of a second one",
        "host_gb_per_s": f"{how}: largest copy from the host" if "host" in rates else "its memory is the host's",
    }
    return {"cluster": cluster, "gpu": gpu, "sources": of_all}


def _in_catalogue(name: str) -> str | None:
    try:
        return find(name)
    except SpecError:
        return None


def _usual_precisions(kind: str) -> tuple[str, ...]:
    from moesaic.mesh.device import bf16_is_native

    if kind != "cpu":
        return ("bf16", "fp32")
    return ("fp32", "bf16") if bf16_is_native() else ("fp32",)


def _flops(kind: str, shape: tuple[int, ...]) -> float:
    """2·m·n·k, times the groups."""
    assert len(shape) == (3 if kind == "matmul" else 4)
    return 2.0 * float(np.prod(shape))


def _module_flops(kind: str, shape: tuple[int, ...], way: str) -> float:
    """As `spec.gpus.tables.RATE_COLUMNS` counts them."""
    if kind == "experts":
        return 6.0 * float(np.prod(shape)) * (2.0 if way == "backward" else 1.0)
    positions, heads, width = shape
    return 2.0 * heads * width * positions * (positions + 1) * (2.5 if way == "backward" else 1.0)


def _norm_bytes(precision: str, shape: tuple[int, ...], way: str) -> float:
    return (3.0 if way == "backward" else 2.0) * (2 if precision == "bf16" else 4) * float(np.prod(shape))


def _rounded(value: float) -> float:
    """Four digits: more than a measurement tells."""
    return float(f"{value:.4g}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
