"""`moesaic check`: whether a run file can be run, and what it would do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.spec.errors import SpecError

if TYPE_CHECKING:
    from moesaic.spec.model import ModelSpec
    from moesaic.spec.tables import DataTable


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
    from moesaic.cost.recompute import idle_words
    from moesaic.spec.layout import resolve_layout
    from moesaic.spec.legal import fewest_ranks
    from moesaic.spec.options import refuse_cut_experts_with_libraries
    from moesaic.spec.run import load_run, resolve_balance

    run = load_run(file, overrides or [])
    refuse_cut_experts_with_libraries(run.layout)
    spec = run.model_spec()
    run, notes = resolve_balance(run, spec)
    source = run.model.upcycle_from if run.model.init == "upcycle" else run.model.hf
    if source is not None and not Path(source).exists():
        raise SpecError(f"the model's weights are to come from {source!r}, which does not exist.")
    data = _data(run.data, spec, notes)

    train, counts = run.train, parameters(spec)
    flops = flops_per_token(spec, train.seq_len).total
    tokens = run.tokens_per_step
    moe = spec.moe_layers
    world = run.world or fewest_ranks(run.layout)
    layout = resolve_layout(run.layout, spec, world, seq_len=train.seq_len, global_batch=train.global_batch)
    rows = {
        "model": f"{spec.name} ({spec.family}), {len(spec.layers)} layers, {len(moe)} of them with experts",
        "parameters": f"{counts.total:,} in all, {counts.active:,} active per token",
        "step": f"{train.global_batch} sequences of {train.seq_len} = {tokens:,} tokens, "
        f"{layout.micro_batches(train.global_batch)} micro-batches of {run.layout.micro_batch}",
        "layout": str(layout) + ("" if run.world else ", or more dp with more processes"),
        "training": f"{train.steps:,} steps = {tokens * train.steps:,} tokens, {train.dtype}",
        "work": f"{flops / 1e9:.3g} GFLOP per token, {flops * tokens / 1e12:.3g} TFLOP per step, "
        f"{flops * tokens * train.steps / 1e15:.3g} PFLOP in all",
        "data": data,
        "results": run.run.dir,
    }
    table = Table(box=None, show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    console = Console()
    console.print(table)
    for note in (*notes, *spec.notes, *idle_words(layout, spec, train.seq_len)):
        console.print(Text(f"note: {note}"))


def _data(table: DataTable, spec: ModelSpec, notes: list[str]) -> str:
    """One line about the data, after a look at its files and its tokenizer."""
    if table.path is None:
        notes.append("data.path is not set: there is nothing to train on yet")
        return "none"
    if find_spec("torch") is None:
        notes.append("the data was not looked at: that needs pip install 'moesaic[train]'")
        return table.path

    from moesaic.train.data import load_tokenizer
    from moesaic.train.data.files import resolve

    found = []
    for key, path in (("data.path", table.path), ("data.validation_path", table.validation_path)):
        if path is None:
            continue
        kind, files = resolve(path, table.format)
        size = sum(file.stat().st_size for file in files if file.is_file())
        if kind in ("text", "jsonl", "parquet") and size == 0:
            raise SpecError(f"{key} is {path!r}, where {len(files)} files hold 0 bytes: there is nothing to read.")
        found.append(f"{path} ({kind}, {len(files)} files, {size:,} bytes)")
    learned = table.tokenizer.startswith("bpe:")
    size_text = table.tokenizer.removeprefix("bpe:")
    if learned and not size_text.isdecimal():
        raise SpecError(f'data.tokenizer is {table.tokenizer!r}, but must name a size, as in "bpe:8192".')
    tokens = int(size_text) if learned else load_tokenizer(table.tokenizer).vocab_size
    if tokens > spec.vocab:
        raise SpecError(
            f"the tokenizer {table.tokenizer!r} has {tokens:,} tokens, but the model's vocabulary only {spec.vocab:,}: "
            f"use the model's own tokenizer, or a vocab_size of at least {tokens:,}."
        )
    return f"{', '.join(found)}, tokenizer {table.tokenizer} with {tokens:,} tokens"
