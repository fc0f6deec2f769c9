"""`moesaic train`: the run that a file describes."""

from __future__ import annotations

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
    """Train a model into the folder run.dir: metrics, checkpoints, and a copy of the resolved run file.

    SIGTERM and Ctrl-C finish the step, save, and exit with code 3; the same command with --resume goes on bit for bit.
    """
    from moesaic.spec.run import load_run, require_single_process

    run = load_run(file, overrides or [])
    require_single_process(run)

    from moesaic.train.loop import train as train_run

    return train_run(run, resume=resume)
