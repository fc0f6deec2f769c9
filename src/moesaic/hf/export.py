"""A decoder's weights into a Hugging Face folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moesaic.hf.config import export_config
from moesaic.hf.errors import WeightsError
from moesaic.hf.layout import Piece, Rule
from moesaic.hf.mapping import OWN_FAMILY, rules
from moesaic.hf.safetensors_io import Planned, ShardPlan, write_header, write_tensor
from moesaic.spec.model import ModelSpec

Progress = Callable[[int, int], None]

SHARD_BYTES = 5 * 10**9
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a checkpoint that describe its tokenizer and its generation, copied as they are."""
_SIDE_PATTERNS = ("*.tiktoken", "tiktoken.model")


@dataclass(frozen=True)
class Source:
    """Tensors that are read when they are needed, each for as long as it is needed."""

    outlines: Mapping[str, Tensor]
    """Shape and dtype of each tensor by name, on the meta device."""
    read: Callable[[str], Tensor]
    """The whole tensor of that name."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Source:
        """Tensors that are in memory."""
        return cls(tensors, tensors.__getitem__)


@dataclass
class Exported:
    """What an export wrote."""

    folder: Path
    tensors: int = 0
    bytes: int = 0
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def side_files(source: Path) -> dict[str, Path]:
    """The tokenizer and generation files of a Hugging Face folder by name; a file alone is a tokenizer.json."""
    if source.is_file():
        return {"tokenizer.json": source}
    found = [source / name for name in SIDE_FILES if (source / name).is_file()]
    found += sorted(path for pattern in _SIDE_PATTERNS for path in source.glob(pattern))
    return {path.name: path for path in found}


def export_tensors(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor] | Source,
    folder: Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    side_from: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes `tensors` (our names) as a Hugging Face folder: config.json, safetensors, and the source's side files.

    The folder appears whole or not at all: it is written beside its place and renamed. Of a `Source` one tensor is
    held at a time, and each is read once.

    Args:
        family: whose format; the spec's own by default, `moesaic` for our names verbatim.
        dtype: of the weights on disk; by default that of the embedding. Selection biases stay fp32.
        side_from: folder whose tokenizer and generation files are copied, or a tokenizer.json.
        overwrite: replaces an existing folder, after the new one is complete.

    Raises:
        WeightsError: the folder exists and is not empty, a tensor is missing or has no place in the format, or the
            disk is full; nothing is left behind.
    """
    source = tensors if isinstance(tensors, Source) else Source.of(tensors)
    result = Exported(folder)
    if (family or spec.family) == OWN_FAMILY:
        spec = _with_added_biases(spec, source.outlines)
    wanted = rules(spec, family)
    _check_tensors(spec, wanted, source)
    dtype = dtype or source.outlines["embed.weight"].dtype
    plan, pieces = _plan(wanted, dtype, max_shard_bytes)
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists and is not empty; choose another folder or allow overwriting.")
    config = export_config(spec, dtype, family)
    _check_space(folder, plan.bytes)

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    held: str | None = None
    tensor: Tensor | None = None
    try:
        partial.mkdir()
        for file_name, shard in plan.shards:
            with (partial / file_name).open("wb") as file:
                write_header(file, shard)
                for planned in shard:
                    name, piece = pieces[planned.name]
                    if name != held:
                        tensor = None  # the last one goes before the next one comes
                        held, tensor = name, source.read(name)
                    assert tensor is not None
                    write_tensor(file, piece.view(tensor), planned.dtype)
                    result.tensors += 1
                    result.bytes += planned.bytes
                    if progress is not None:
                        progress(result.bytes, plan.bytes)
                file.flush()
                os.fsync(file.fileno())
        plan.write_index(partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, path in side_files(side_from).items() if side_from is not None else ():
            shutil.copyfile(path, partial / name)
        _put_in_place(partial, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder.parent).free
            raise WeightsError(
                f"the disk is full: {folder} needs {plan.bytes} bytes and {free} are free; what was written is removed."
            ) from None
        raise WeightsError(f"{folder} cannot be written: {error.strerror}; what was written is removed.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    result.files = sorted(path.name for path in folder.iterdir())
    return result


def _with_added_biases(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> ModelSpec:
    """The spec with the selection biases that training gave to routers without one."""
    layers = []
    for i, layer in enumerate(spec.layers):
        if layer.moe is not None and f"layers.{i}.moe.router.select_bias" in tensors:
            router = layer.moe.router.model_copy(update={"select_bias": True})
            layer = layer.model_copy(update={"moe": layer.moe.model_copy(update={"router": router})})
        layers.append(layer)
    return spec.model_copy(update={"layers": tuple(layers)})


def _put_in_place(partial: Path, folder: Path) -> None:
    """Renames the finished folder to its place; a folder already there goes only after that."""
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_tensors(spec: ModelSpec, wanted: list[Rule], source: Source) -> None:
    tensors = source.outlines
    names = {rule.name for rule in wanted}
    for rule in wanted:
        if rule.name not in tensors:
            raise WeightsError(f"{rule.name} is missing, so {spec.name} cannot be exported.")
        if tuple(tensors[rule.name].shape) != rule.shape:
            raise WeightsError(
                f"{rule.name} has shape {list(tensors[rule.name].shape)}, and {spec.name} asks for {list(rule.shape)}."
            )
    extra = sorted(set(tensors) - names)
    harmless = [name for name in extra if name.endswith("select_bias") and not source.read(name).any()]
    refused = [name for name in extra if name not in harmless]
    if refused:
        raise WeightsError(
            f"a {spec.family} checkpoint has no place for {refused[0]}"
            + (f" and {len(refused) - 1} more tensors" if len(refused) > 1 else "")
            + ", and without it the exported model would compute something else; write our own format instead, with "
            "model_type 'moesaic' (--family moesaic)."
        )


def _plan(
    wanted: list[Rule], dtype: torch.dtype, max_shard_bytes: int
) -> tuple[ShardPlan, dict[str, tuple[str, Piece]]]:
    planned: list[Planned] = []
    pieces: dict[str, tuple[str, Piece]] = {}
    for rule in wanted:
        for piece in rule.layout:
            keys = (piece.key, *rule.copies) if len(rule.layout) == 1 else (piece.key,)
            for key in keys:
                planned.append(Planned(key, piece.shape, torch.float32 if rule.fp32 else dtype))
                pieces[key] = (rule.name, piece)
    return ShardPlan(planned, max_shard_bytes), pieces


def _check_space(folder: Path, needed: int) -> None:
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise WeightsError(f"{folder} needs {needed} bytes and {parent} has {free} free.")
