"""`moesaic check`: whether a run file can be run, and what it would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.spec.errors import SpecError


def check(
    file: Annotated[Path, typer.Argument(help="Run file (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
) -> None:
    """Check a run file: the keys, the model, that the data is there, and what a training step amounts to."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from moesaic.cost.counts import flops_per_token, parameters
    from moesaic.spec.run import load_run, resolve_balance

    run = load_run(file, overrides or [])
    spec = run.model_spec()
    run, notes = resolve_balance(run, spec)
    _paths_exist({"data.path": run.data.path, "data.validation_path": run.data.validation_path})
    _paths_exist({"data.tokenizer": None if run.data.tokenizer == "bytes" else run.data.tokenizer})
    _paths_exist({"model.hf": run.model.hf, "model.upcycle_from": run.model.upcycle_from})

    train, counts = run.train, parameters(spec)
    flops = flops_per_token(spec, train.seq_len).total
    tokens = run.tokens_per_step
    moe = spec.moe_layers
    rows = {
        "model": f"{spec.name} ({spec.family}), {len(spec.layers)} layers, {len(moe)} of them with experts",
        "parameters": f"{counts.total:,} in all, {counts.active:,} active per token",
        "step": f"{train.global_batch} sequences of {train.seq_len} = {tokens:,} tokens, "
        f"{train.global_batch // run.layout.micro_batch} micro-batches of {run.layout.micro_batch}",
        "training": f"{train.steps:,} steps = {tokens * train.steps:,} tokens, {train.dtype}",
        "work": f"{flops / 1e9:.3g} GFLOP per token, {flops * tokens / 1e12:.3g} TFLOP per step, "
        f"{flops * tokens * train.steps / 1e15:.3g} PFLOP in all",
        "data": f"{run.data.path or 'none: set data.path before training'}, tokenizer {run.data.tokenizer}",
        "results": run.run.dir,
    }
    table = Table(box=None, show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    console = Console()
    console.print(table)
    for note in (*notes, *spec.notes):
        console.print(Text(f"note: {note}"))


def _paths_exist(paths: dict[str, str | None]) -> None:
    for key, path in paths.items():
        if path is None:
            continue
        where = Path(path)
        if not where.exists():
            raise SpecError(f"{key} is {path!r}, which does not exist (looked in {Path.cwd()}).")
        if where.is_dir() and not any(where.iterdir()):
            raise SpecError(f"{key} is {path!r}, a folder with nothing in it.")
        if where.is_file() and where.stat().st_size == 0:
            raise SpecError(f"{key} is {path!r}, an empty file.")
