"""`moesaic report`: the HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run: the one that holds metrics.jsonl.")],
) -> None:
    """Write RUN_DIR/report.html from a run's metrics; it opens without a network, also while the run goes on."""
    from moesaic.report import write_report

    typer.echo(f"report: {write_report(run_dir).resolve()}")
