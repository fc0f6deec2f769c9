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
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and sizes: about 20 s instead of a minute.")] = (
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
    for what in found.skipped:
        print(f"Skipped for want of time: {what}{'; leave out --quick for more' if quick else ''}.")
    print(f"{'Replaced' if replaced else 'Wrote'} {out}: load_cluster reads it, as does cluster.gpu of a run file.")


def _show(found: Calibration) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    cluster, gpu = found.tables["cluster"], found.tables.get("gpu", {})
    count = cluster["gpus"]
    console.print(Text(f"{count} × {gpu.get('name') or cluster['gpu']}", style="bold"))
    for table in (_products(found, "matmul"), _products(found, "grouped"), _copies(found), _messages(found)):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()


def _products(found: Calibration, kind: str) -> Table:
    """Speed of each shape, forward and both gradients."""
    names = ("m", "n", "k") if kind == "matmul" else ("groups", "m", "n", "k")
    table = _table(
        ["matmul" if kind == "matmul" else "grouped matmul", *names, "forward", "gradient of x", "gradient of W"],
        "GFLOP/s (share of the fastest)" if "gpu" in found.tables else "TFLOP/s (share of the peak)",
    )
    scale = 1e9 if "gpu" in found.tables else 1e12
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
    table = _table(["copy", "MiB", "GB/s"], "reads and writes together")
    for name in ("memory", "host"):
        for size, speed in found.rates.get(name, []):
            table.add_row(name, f"{size / 2**20:g}", f"{speed / 1e9:,.2f}")
    return table


def _messages(found: Calibration) -> Table:
    table = _table(["collective", "ranks", "in a domain", "latency µs", "GB/s"], "latency + bytes sent/bandwidth")
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        for size, members, latency, speed in found.rates.get(name, []):
            table.add_row(name, f"{size:g}", f"{members:g}", f"{latency * 1e6:,.1f}", f"{speed / 1e9:,.3f}")
    return table


def _table(headers: Iterable[str], caption: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, caption=caption, caption_justify="left")
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place == 0 else "right")
    return table
