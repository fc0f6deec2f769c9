"""`moesaic import` and `moesaic export`: Hugging Face checkpoints to ours and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="HF_FOLDER")],
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="OUT")],
    dtype: Annotated[str, typer.Option(help="Precision of the weights: fp32 or bf16.")] = "fp32",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
) -> None:
    """Turn a Hugging Face checkpoint into one that train, generate and export read."""
    from moesaic.train.exchange import import_folder

    with _bar(f"reading {source}") as progress:
        result = import_folder(source, out, _dtype(dtype, ("fp32", "bf16")), overwrite=overwrite, progress=progress)
    _notes(result.notes)
    print(
        f"{result.name}: {result.parameters / 1e6:,.1f} M parameters, {result.tensors} tensors, "
        f"{result.bytes / 2**20:,.1f} MiB read; checkpoint in {out}"
    )


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A step-N folder, or a run's folder.", metavar="CHECKPOINT")],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="HF_FOLDER")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; empty: as trained.")] = "",
    family: Annotated[str, typer.Option(help="model_type to write as; 'moesaic' keeps our names.")] = "",
    max_shard_gb: Annotated[float, typer.Option(min=1e-9, max=1e9, help="Largest file, in 10^9 bytes.")] = 5.0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder whose tokenizer files to copy.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace HF_FOLDER if it exists.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder that transformers loads."""
    from moesaic.train.exchange import export_checkpoint

    with _bar(f"writing {out}") as progress:
        result = export_checkpoint(
            checkpoint,
            out,
            family=family or None,
            dtype=_dtype(dtype, ("fp32", "bf16", "fp16")) if dtype else None,
            max_shard_bytes=int(max_shard_gb * 1e9),
            tokenizer=tokenizer,
            overwrite=overwrite,
            progress=progress,
        )
    _notes(result.notes)
    print(f"{result.tensors} tensors, {result.bytes / 2**20:,.1f} MiB in {out}: {', '.join(result.files)}")


def _dtype(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise typer.BadParameter(f"the precision is one of {', '.join(known)}, not {name!r}.")
    return name


def _notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}")


@contextmanager
def _bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over bytes, shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
