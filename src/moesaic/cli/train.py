"""`moesaic train`: the run that a file describes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    file: Annotated[Path, typer.Argument(help="Run file (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in run.dir, if there is one.")
    ] = False,
) -> int:
    """Train a model into the folder run.dir: metrics, checkpoints, a report, and a copy of the resolved run file.

    On several processes, start it with torchrun: torchrun --nproc-per-node 4 -m moesaic train FILE.

    SIGTERM and Ctrl-C finish the step, save, and exit with code 3; the same command with --resume goes on bit for bit.
    """
    from moesaic.spec.run import load_run

    run = load_run(file, overrides or [])

    from moesaic.report import ReportError, write_report
    from moesaic.train.loop import train as train_run

    code = train_run(run, resume=resume)
    if os.environ.get("RANK", "0") != "0":
        return code
    try:
        typer.echo(f"Report: {write_report(Path(run.run.dir))}")
    except ReportError as error:
        typer.echo(f"No report: {error}")
    return code
