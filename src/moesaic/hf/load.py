"""Hugging Face weights into a decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.hf.blocks import Block, blocks_of, whole_block
from moesaic.hf.errors import WeightsError
from moesaic.hf.layout import Layout, Piece, Rule
from moesaic.hf.mapping import OWN_FAMILY, rules
from moesaic.hf.naming import NAMINGS
from moesaic.hf.quantized import (
    MXFP4_SUFFIXES,
    SCALE_SUFFIX,
    check_quantization,
    check_scales,
    is_fp8,
    read_fp8_into,
    read_mxfp4_into,
)
from moesaic.hf.safetensors_io import Weights
from moesaic.mesh.cut import Cut
from moesaic.spec.errors import nearest
from moesaic.spec.model import ModelSpec

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
"""Where multimodal checkpoints keep the text model: prefix on disk, prefix in a text-only checkpoint."""
_IGNORED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$")
_SHOWN = 5


@dataclass
class Imported:
    """What an import did."""

    tensors: int = 0
    """Tensors read from disk, in whole or in part."""
    bytes: int = 0
    """Their size on disk, or that of the parts that were wanted."""
    notes: list[str] = field(default_factory=list)
    """Sentences about everything that was not read or not filled."""
    left: list[str] = field(default_factory=list)
    """Our tensors that the checkpoint does not hold: multi-token prediction blocks, and selection biases of families
    without them."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder.

    Raises:
        WeightsError: there is no folder, no config.json, or it is not JSON.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder; give the folder that holds config.json and *.safetensors.")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightsError(f"{folder} holds no config.json, so its architecture is unknown.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{path} should hold a JSON object and holds a {type(config).__name__}.")
    return config


@dataclass
class Plan:
    """An import of which everything but the decoder has been checked."""

    spec: ModelSpec
    weights: Weights
    keys: dict[str, str]
    """Names as in a text-only checkpoint, each with its key on disk."""
    todo: list[tuple[Rule, Layout]]
    block: tuple[int, int]
    report: Imported

    def fill(
        self,
        tensors: Mapping[str, Tensor],
        progress: Progress | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> Imported:
        """Copies the weights into `tensors`: our names to preallocated tensors of any dtype.

        Args:
            tensors: all of the model's, or with `cuts` those that this rank holds.
            cuts: which piece of the whole each tensor is; tensors that are not named here are whole. Of a tensor on
                disk no more is read than the piece needs, to the next megabyte.

        Raises:
            WeightsError: `tensors` are not those of the checkpoint's model; none has been touched then.
        """
        held = {name: (cuts or {}).get(name, Cut(tuple(tensor.shape))) for name, tensor in tensors.items()}
        report = Imported(notes=[*self.report.notes], left=[*self.report.left])
        _check_targets(self.spec, tensors, held, self.todo, report, partial=cuts is not None)
        reads = [
            read
            for rule, layout in self.todo
            if rule.name in held
            for read in _reads(rule, layout, tensors[rule.name], held[rule.name])
        ]
        sizes = [self._wanted_bytes(read) for read in reads]
        total = sum(sizes)
        for read, size in zip(reads, sizes, strict=True):
            self._fill_one(read)
            report.tensors += 1
            report.bytes += size
            if progress is not None:
                progress(report.bytes, total)
        return report

    @property
    def names(self) -> set[str]:
        """Our names of the tensors that the checkpoint holds."""
        return {rule.name for rule, _ in self.todo}

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A whole tensor of the model by our name.

        Raises:
            WeightsError: the checkpoint does not hold it.
        """
        rule = next((rule for rule, _ in self.todo if rule.name == name), None)
        if rule is None:
            raise WeightsError(f"{self.weights.folder} does not fill {name}.")
        tensor = torch.empty(rule.shape, dtype=dtype)
        self.fill({name: tensor}, cuts={})
        return tensor

    def _wanted_bytes(self, read: _Read) -> int:
        """The share of a disk tensor that is wanted."""
        wanted = sum(block.target.numel() for block in read.blocks)
        return self.weights.entry(self.keys[read.piece.key]).bytes * wanted // max(1, prod(read.shape))

    def _fill_one(self, read: _Read) -> None:
        key = self.keys[read.piece.key]
        if read.piece.mxfp4:
            read_mxfp4_into(self.weights, key, read.shape, read.blocks)
        elif is_fp8(self.weights, key):
            read_fp8_into(self.weights, key, read.blocks, self.block)
        elif read.whole is not None:
            self.weights.read_into(key, read.whole)
        else:
            self.weights.read_blocks(key, read.shape, read.blocks)


@dataclass
class _Read:
    """What is wanted of one tensor on disk."""

    piece: Piece
    shape: tuple[int, ...]
    """Of the piece's view of ours: the disk tensor with the axes that a rule keeps apart."""
    blocks: list[Block]
    whole: Tensor | None = None
    """The view to fill where everything is wanted."""


def _reads(rule: Rule, layout: Layout, tensor: Tensor, cut: Cut) -> Iterator[_Read]:
    """What is wanted of the tensors of a layout, by one that holds `cut` of ours."""
    if cut.is_whole:
        for piece in layout:
            view = piece.view(tensor)
            yield _Read(piece, tuple(view.shape), [whole_block(view)], view)
        return
    boxes = cut.boxes()
    for piece in layout:
        shape, blocks = blocks_of(piece, rule.shape, tensor, boxes)
        if blocks:
            yield _Read(piece, shape, blocks)


def plan_import(folder: Path, spec: ModelSpec) -> Plan:
    """Checks the checkpoint in `folder` against `spec` and chooses how to read each tensor.

    Raises:
        WeightsError: tensors that are missing, unexpected, of another shape, or in a format that cannot be read.
    """
    config = read_config(folder)
    block = check_quantization(config, folder)
    weights = Weights(folder)
    family = OWN_FAMILY if config.get("model_type") == OWN_FAMILY else spec.family
    report = Imported()
    keys = _text_keys(weights, report)
    todo = _choose_layouts(rules(spec, family), keys, folder, report)
    _check_unexpected(spec, family, keys, todo, folder, report)
    _check_shapes(todo, keys, weights, block)
    return Plan(spec, weights, keys, todo, block, report)


def import_tensors(
    folder: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    progress: Progress | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> Imported:
    """Fills `tensors` from the checkpoint in `folder`: `plan_import`, then `Plan.fill`, with the errors of both."""
    return plan_import(folder, spec).fill(tensors, progress, cuts)


def _text_keys(weights: Weights, report: Imported) -> dict[str, str]:
    """Names as in a text-only checkpoint, each with its key on disk."""
    for prefix, replacement in _PREFIXES:
        if any(key.startswith(prefix) for key in weights):
            keys = {replacement + key.removeprefix(prefix): key for key in weights if key.startswith(prefix)}
            keys |= {key: key for key in weights if key.startswith("lm_head.")}
            rest = sum(key not in keys.values() for key in weights)
            if rest:
                report.notes.append(f"{rest} tensors outside the text model ({prefix}*) were not read.")
            return keys
    return {key: key for key in weights}


def _choose_layouts(
    all_rules: list[Rule], keys: Mapping[str, str], folder: Path, report: Imported
) -> list[tuple[Rule, Layout]]:
    chosen: list[tuple[Rule, Layout]] = []
    missing: list[str] = []
    with_mtp = any(key in keys for rule in all_rules if rule.mtp for key in rule.keys())
    for rule in all_rules:
        if rule.mtp and not with_mtp:
            report.left.append(rule.name)
            continue
        layout = next((layout for layout in rule.layouts if all(piece.key in keys for piece in layout)), None)
        if layout is not None:
            chosen.append((rule, layout))
            continue
        best = max(rule.layouts, key=lambda layout: sum(piece.key in keys for piece in layout))
        missing += [piece.key for piece in best if piece.key not in keys]
    if missing:
        raise WeightsError(
            f"{folder} lacks {_listed(missing, 'tensor')} that config.json asks for; {nearest(missing[0], keys)}"
        )
    if report.left:
        report.notes.append(
            f"{folder} holds no multi-token prediction block: {len(report.left)} tensors under mtp. keep their "
            "initial values."
        )
    return chosen


def _check_targets(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    todo: list[tuple[Rule, Layout]],
    report: Imported,
    *,
    partial: bool,
) -> None:
    """The model's tensors and the rules' must be the same, but for selection biases that training adds, and for those
    that a rank with a part of the model does not hold."""
    for rule, _ in todo:
        if rule.name in tensors and cuts[rule.name].shape != rule.shape:
            raise WeightsError(
                f"{rule.name} of the model has shape {list(cuts[rule.name].shape)}, and the checkpoint's config asks "
                f"for {list(rule.shape)}."
            )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != cuts[name].local_shape:
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)} here, and its cut of {list(cuts[name].shape)} has "
                f"{list(cuts[name].local_shape)}."
            )
    named = {rule.name for rule, _ in todo} | set(report.left)
    unknown = sorted(named - set(tensors))
    if unknown and not partial:
        raise WeightsError(f"{spec.name} has no {_listed(unknown, 'tensor')} to fill; is it the model of this config?")
    report.left = [name for name in report.left if name in tensors]
    extra = sorted(set(tensors) - named)
    added = [name for name in extra if name.endswith(".select_bias")]
    if len(added) < len(extra):
        rest = [name for name in extra if name not in added]
        raise WeightsError(f"a {spec.family} checkpoint does not fill {_listed(rest, 'tensor')} of this model.")
    if added:
        report.left += added
        report.notes.append(f"{len(added)} selection biases are not in the checkpoint and keep their initial values.")


def _check_unexpected(
    spec: ModelSpec,
    family: str,
    keys: Mapping[str, str],
    todo: list[tuple[Rule, Layout]],
    folder: Path,
    report: Imported,
) -> None:
    used = {piece.key for _, layout in todo for piece in layout} | {copy for rule, _ in todo for copy in rule.copies}
    blocks, scales = MXFP4_SUFFIXES
    used |= {key + SCALE_SUFFIX for key in used} | {key.removesuffix(blocks) + scales for key in used}
    ignored = [re.compile(pattern) for pattern in (*_IGNORED, *getattr(NAMINGS.get(family), "ignored", ()))]
    rest = [key for key in keys if key not in used and not any(pattern.search(key) for pattern in ignored)]
    if spec.tied_embeddings and "lm_head.weight" in rest:
        rest.remove("lm_head.weight")
        report.notes.append("lm_head.weight was not read: the config ties it to the embedding.")
    after = [key for key in rest if (match := re.match(r"model\.layers\.(\d+)\.", key)) and _is_mtp(spec, match)]
    if after:
        report.notes.append(
            f"{len(after)} tensors of multi-token prediction blocks (layers from {len(spec.layers)}) were not read: "
            "the model has none."
        )
        rest = sorted(set(rest) - set(after))
    if rest:
        known = {key for rule, _ in todo for key in rule.keys()} - set(keys)
        hint = f"; {nearest(rest[0], known)}" if known else ""
        raise WeightsError(f"{folder} holds {_listed(rest, 'tensor')} that config.json does not ask for{hint}.")


def _is_mtp(spec: ModelSpec, match: re.Match[str]) -> bool:
    naming = NAMINGS.get(spec.family)
    return naming is not None and naming.mtp and not spec.mtp and int(match[1]) >= len(spec.layers)


def _check_shapes(
    todo: Iterable[tuple[Rule, Layout]], keys: Mapping[str, str], weights: Weights, block: tuple[int, int]
) -> None:
    for _, layout in todo:
        for piece in layout:
            entry = weights.entry(keys[piece.key])
            if entry.shape != piece.shape:
                raise WeightsError(
                    f"{piece.key} has shape {list(entry.shape)} in {entry.path}, and config.json asks for "
                    f"{list(piece.shape)}."
                )
            if not entry.dtype.is_floating_point and not (piece.mxfp4 and entry.dtype == torch.uint8):
                name = str(entry.dtype).removeprefix("torch.")
                raise WeightsError(
                    f"{piece.key} is stored as {name} in {entry.path}; quantised weights have to be converted to bf16 "
                    "first."
                )
            if piece.mxfp4 or is_fp8(weights, keys[piece.key]):
                check_scales(weights, keys[piece.key], block)


def _listed(names: list[str], noun: str) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''} ({shown}{more})"
