"""Hugging Face folders to checkpoints of ours, and back."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moesaic.hf import Exported, Source, WeightsError, export_tensors, load_decoder
from moesaic.hf.export import SHARD_BYTES, side_files
from moesaic.hf.load import Progress
from moesaic.train.checkpoint import find, save_model_checkpoint, tokenizer_folder
from moesaic.train.stored import StoredModel

SIDE_FOLDER = "tokenizer"
"""Folder of an imported checkpoint that keeps the source's tokenizer and generation files."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ImportedFolder:
    """What `import_folder` did."""

    name: str
    parameters: int
    tensors: int
    bytes: int
    notes: list[str] = field(default_factory=list)


def import_folder(
    source: Path, out: Path, dtype: str = "fp32", *, overwrite: bool = False, progress: Progress | None = None
) -> ImportedFolder:
    """Writes the checkpoint `out` from the Hugging Face folder `source`.

    Raises:
        MoesaicError: `out` is not empty, or `source` cannot be read; `out` is then as it was.
    """
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f"{out} exists and is not empty; choose another folder or allow overwriting (--overwrite).")
    notes: list[str] = []
    seen = [0, 0]

    def watch(done: int, total: int) -> None:
        seen[0], seen[1] = seen[0] + 1, done
        if progress is not None:
            progress(done, total)

    decoder = load_decoder(source, _DTYPES[dtype], progress=watch, note=notes.append)
    save_model_checkpoint(decoder, decoder.spec, out)
    files = side_files(source)
    if files:
        (out / SIDE_FOLDER).mkdir(exist_ok=True)
        for name, path in files.items():
            shutil.copyfile(path, out / SIDE_FOLDER / name)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    return ImportedFolder(decoder.spec.name, parameters, seen[0], seen[1], [*decoder.spec.notes, *notes])


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes a checkpoint (a `step-N` folder, or the newest of a run) as a Hugging Face folder.

    Whichever ranks wrote it, weights go from file to file one by one: memory holds at most the largest twice. Weights
    that a bf16 run keeps in fp32 are rounded to bf16 unless `dtype` is wider.

    The tokenizer's files come from `tokenizer`, else from where the checkpoint was imported or trained.

    Raises:
        MoesaicError: no such checkpoint, no tokenizer where one is named, or `out` cannot be written; nothing is left
            behind.
    """
    if tokenizer is not None and not side_files(tokenizer):
        raise WeightsError(f"{tokenizer} holds no tokenizer files; give a tokenizer.json or its folder.")
    path = find(checkpoint)
    model = StoredModel(path)
    return export_tensors(
        model.spec,
        Source(model.outlines, model.read),
        out,
        family=family,
        dtype=_DTYPES[dtype or model.dtype],
        max_shard_bytes=max_shard_bytes,
        side_from=tokenizer or _tokenizer_of(path),
        overwrite=overwrite,
        progress=progress,
    )


def _tokenizer_of(checkpoint: Path) -> Path | None:
    """Where a checkpoint's tokenizer is: beside its weights, in its run's folder, or where its run file says."""
    saved = tokenizer_folder(checkpoint)
    if saved is not None:
        return saved
    run_file = checkpoint / "run.toml"
    if not run_file.is_file():
        return None
    named = tomllib.loads(run_file.read_text()).get("data", {}).get("tokenizer", "bytes")
    path = Path(named)
    return None if named == "bytes" or not path.exists() else path
