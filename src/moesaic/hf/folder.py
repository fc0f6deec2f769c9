"""Whole models: a Hugging Face folder to a decoder, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch

from moesaic.hf import export, load
from moesaic.hf.errors import WeightsError
from moesaic.hf.export import SHARD_BYTES, Exported
from moesaic.hf.load import Imported, Progress
from moesaic.hf.mapping import rules
from moesaic.mesh.device import free_host_memory_bytes
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import ModelSpec

INIT_SEED = 0
"""Seed of what a checkpoint does not hold (multi-token prediction blocks)."""


def import_weights(folder: str | Path, decoder: Decoder, progress: Progress | None = None) -> Imported:
    """Fills `decoder` from a Hugging Face checkpoint, converting to the decoder's dtypes.

    Tensors stream from the files into the parameters, so memory stays near the model's own size. A decoder that is
    this rank's share of a model reads its share: the experts it holds, the rows it holds; no rank waits for another.
    Parameters that the checkpoint does not hold are named in the result and left as they are.

    Raises:
        WeightsError: a checkpoint that is damaged or of another model; the decoder is unchanged then.
    """
    return load.import_tensors(Path(folder), decoder.spec, decoder.state_dict(), progress, decoder.cuts)


def load_decoder(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Decoder:
    """Builds the model that `folder/config.json` describes and fills it.

    Parameters that the checkpoint does not hold get their usual initial values. `note` receives a sentence about
    everything that was not read or not filled; by default they go to stderr.

    Raises:
        SpecError: a config that is not understood.
        WeightsError: weights that are missing, damaged or of another model.
    """
    folder = Path(folder)
    load.read_config(folder)
    spec = load_model_spec(folder)
    plan = load.plan_import(folder, spec)
    _check_memory(spec, dtype)
    decoder = Decoder(spec, dtype=dtype)
    if plan.report.left:
        decoder.init_weights(INIT_SEED)
    for sentence in plan.fill(decoder.state_dict(), progress).notes:
        (note or _to_stderr)(sentence)
    return decoder


def _check_memory(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Refuses a model that this machine has no room for, where it says how much it has (Linux)."""
    free = free_host_memory_bytes()
    needed = sum(prod(rule.shape) for rule in rules(spec)) * dtype.itemsize
    if free is not None and needed > free:
        raise WeightsError(
            f"{spec.name} takes {needed / 2**30:.1f} GiB as {str(dtype).removeprefix('torch.')} and {free / 2**30:.1f} "
            "GiB of memory are free; use bf16, or a machine with more memory."
        )


def _to_stderr(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


def export_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    side_from: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes a whole `decoder` as a Hugging Face folder; see `export.export_tensors` for the arguments and errors."""
    return export.export_tensors(
        decoder.spec,
        decoder.state_dict(),
        Path(folder),
        family=family,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        side_from=side_from,
        overwrite=overwrite,
        progress=progress,
    )
