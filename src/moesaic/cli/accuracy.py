"""`moesaic accuracy`: predictions beside published measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def accuracy(
    csv: Annotated[
        Path,
        typer.Argument(help="A CSV with the columns of benchmarks/published/measurements.csv.", metavar="CSV"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the report as Markdown.", metavar="FILE")
    ] = None,
) -> None:
    """Compare predictions with a table of published measurements."""
    from moesaic.plan.accuracy import accuracy as compare
    from moesaic.plan.accuracy_page import markdown, overview
    from moesaic.spec.errors import SpecError

    if out is not None and not out.parent.is_dir():
        raise SpecError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}.")
    report = compare(csv)
    if out is not None:
        out.write_text(markdown(report, csv.name), encoding="utf-8")
    if as_json:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print(overview(report))
        if out is not None:
            print(f"Written to {out}.")
