"""`moesaic calibrate`: what this machine can do, as a cluster file for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from moesaic.tune.calibrate import Calibration


def calibrate(
    out: Annotated[Path, typer.Option(help="Cluster file (TOML) to write; an existing one is replaced.")] = Path(
        "cluster.toml"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and sizes: about 30 s instead of a minute.")] = (
        False
    ),
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Precisions of products: fp32, tf32, bf16 [default: what the device has instructions for]",
        ),
    ] = None,
    procs: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Processes to start here [default: one per GPU; on a CPU 2, or 4 from 8 cores]"
        ),
    ] = None,
) -> None:
    """Measure products of matrices, memory and collectives on this machine, and write a cluster file.

    Under torchrun its processes measure together, over all their machines, and rank 0 writes the file.
    """
    import sys

    from moesaic.spec.errors import SpecError
    from moesaic.tune.calibrate import calibrate as measure

    # Before anything is measured, since that takes a while.
    if out.is_dir():
        raise SpecError(f"--out {str(out)!r} is a folder; name a file in it, such as {str(out / 'cluster.toml')!r}.")
    if not out.absolute().parent.is_dir():
        raise SpecError(f"--out {str(out)!r}: the folder {str(out.absolute().parent)!r} does not exist.")
    replaced = out.exists()

    def say(text: str) -> None:
        print(f"measuring {text}", file=sys.stderr, flush=True)

    found = measure(
        precisions=None if dtype is None else [name.strip() for name in dtype.split(",")],
        processes=procs,
        quick=quick,
        say=say,
    )
    if found is None:
        return
    found.write(out)
    _show(found)
    for note in found.notes:
        print(note)
    print(f"{'Replaced' if replaced else 'Wrote'} {out}: load_cluster reads it, as does cluster.gpu of a run file.")


def _show(found: Calibration) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    cluster, gpu = found.tables["cluster"], found.tables.get("gpu", {})
    console.print(Text(f"{cluster['gpus']} × {gpu.get('name') or cluster['gpu']}", style="bold"))
    unit = "GFLOP/s, and share of the fastest" if gpu else "TFLOP/s, and share of the maker's peak"
    parts = (
        (f"Products of matrices: {unit}", _products(found, "matmul", bool(gpu))),
        (f"One product per group: {unit}", _products(found, "grouped", bool(gpu))),
        ("Copies: bytes read and written", _copies(found)),
        ("Collectives: seconds = latency + bytes sent / bandwidth", _messages(found)),
        ("All-to-all under products: ms, and the share lost of what could hide", _overlaps(found)),
    )
    for title, table in parts:
        if table.row_count:
            console.print()
            console.print(Text(title))
            console.print(table)
    console.print()


def _products(found: Calibration, kind: str, own_peak: bool) -> Table:
    """Speed of each shape, forward and both gradients."""
    names = ("m", "n", "k") if kind == "matmul" else ("groups", "m", "n", "k")
    table = _table(["precision", *names, "forward", "gradient of x", "gradient of W"])
    scale = 1e9 if own_peak else 1e12
    for precision, peak in found.peaks.items():
        shapes: dict[tuple[float, ...], dict[str, float]] = {}
        for product in ("forward", "input", "weight"):
            for *shape, share in found.rates.get(f"{kind}_{precision}_{product}", []):
                shapes.setdefault(tuple(shape), {})[product] = share
        for sizes, shares in sorted(shapes.items()):
            speeds = [f"{share * peak / scale:,.1f} ({share:.0%})" for share in shares.values()]
            table.add_row(precision, *(f"{size:g}" for size in sizes), *speeds)
    return table


def _copies(found: Calibration) -> Table:
    table = _table(["of", "MiB", "GB/s"])
    for name in ("memory", "host"):
        for size, speed in found.rates.get(name, []):
            table.add_row(name, f"{size / 2**20:g}", f"{speed / 1e9:,.2f}")
    return table


def _messages(found: Calibration) -> Table:
    from moesaic.spec.gpus.tables import COLLECTIVES

    table = _table(["collective", "ranks", "in a domain", "latency µs", "GB/s"])
    for name in COLLECTIVES:
        for size, members, latency, speed in found.rates.get(name, []):
            table.add_row(name, f"{size:g}", f"{members:g}", f"{latency * 1e6:,.1f}", f"{speed / 1e9:,.3f}")
    return table


def _overlaps(found: Calibration) -> Table:
    from moesaic.cost.measured import lost_share

    table = _table(["ranks", "in a domain", "message", "products", "both", "lost"])
    for size, members, *seconds in found.rates.get("overlap", []):
        times = (f"{each * 1e3:,.2f}" for each in seconds)
        table.add_row(f"{size:g}", f"{members:g}", *times, f"{lost_share(*seconds):.0%}")
    return table


def _table(headers: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place == 0 else "right")
    return table
