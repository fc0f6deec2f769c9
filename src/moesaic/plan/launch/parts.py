"""What the writers of launch files share: the files themselves, refusals, and what a model's layers have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from moesaic.spec.options import OFFLOAD_BLOCKS
from moesaic.spec.stages import Stage, stages_text

from .plan import Plan

T = TypeVar("T")
Value = bool | int | float | str | list[str]
"""Of an option: True for one that stands alone, a list for one with several values."""


@dataclass
class Draft:
    """What a writer has found out so far: the environment of the processes, and what the target cannot say."""

    target: str
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lost(self, what: str) -> None:
        """Notes something of the plan that the target has no word for and that does not change the model."""
        self.notes.append(f"not expressed: {what}")

    def remark(self, what: str) -> None:
        """Notes something that the reader of the files should know."""
        self.notes.append(what)

    def refuse(self, what: str) -> SpecError:
        """The error for something without which the run would be another one, or would not start."""
        return SpecError(f"{self.target} cannot run this plan: {what}.")


@dataclass(frozen=True)
class Shape:
    """What all layers of a model agree on. Writers whose target describes one layer for all read this."""

    model: ModelSpec
    attention: AttentionSpec
    """Of the first layer, with the window left out."""
    rope: RopeSpec | None
    """Of the layers that have rotary embeddings."""
    mlp: MlpSpec | None
    moe: MoeSpec | None
    is_moe: tuple[bool, ...]
    """Per decoder layer."""
    no_rope: tuple[bool, ...]
    windows: tuple[int | None, ...]
    """Per decoder layer; None where every earlier token is seen."""


def shape(draft: Draft, plan: Plan) -> Shape:
    """The one attention, MLP and expert block that all layers of the plan's model have.

    Windows and chunks that are at least as long as the sequence change nothing and are left out.

    Raises:
        SpecError: layers differ in more than their window, their rotary embedding and their kind.
    """
    model, seq_len = plan.workload.model, plan.workload.seq_len
    layers = (*model.layers, *(model.mtp if plan.workload.mtp else ()))
    if any(layer.attention.chunk is not None and layer.attention.chunk < seq_len for layer in layers):
        raise draft.refuse(
            f"{model.name} attends within chunks, which are shorter than its {seq_len} tokens, and it has no word for "
            f"that; a seq_len of at most {min(layer.attention.chunk or seq_len for layer in layers)} has no chunks"
        )
    attention = _only(draft, (_plain(layer.attention) for layer in layers), "attention blocks")
    assert attention is not None
    return Shape(
        model,
        attention,
        _only(draft, (layer.attention.rope for layer in layers if layer.attention.rope), "rotary embeddings"),
        _only(draft, (layer.mlp for layer in layers if layer.mlp), "dense MLPs"),
        _only(draft, (layer.moe for layer in layers if layer.moe), "expert blocks"),
        tuple(layer.moe is not None for layer in model.layers),
        tuple(layer.attention.rope is None for layer in model.layers),
        tuple(_window(layer, seq_len) for layer in model.layers),
    )


def _plain(attention: AttentionSpec) -> AttentionSpec:
    return attention.model_copy(update={"window": None, "chunk": None, "rope": None, "temperature": None})


def _window(layer: LayerSpec, seq_len: int) -> int | None:
    window = layer.attention.window
    return window if window is not None and window < seq_len else None


def _only(draft: Draft, found: Iterable[T], what: str) -> T | None:
    kinds: list[T] = []
    for each in found:
        if each not in kinds:
            kinds.append(each)
    if len(kinds) > 1:
        raise draft.refuse(f"the model has {len(kinds)} kinds of {what}, and it describes one for all layers")
    return kinds[0] if kinds else None


def short_stages(stages: Sequence[Stage], mtp: int) -> str:
    """A stage string in which equal neighbours are one bracket with a number: `Et*3|(tt|)*29mL`.

    It has only the letters E, t, m, L, bars, brackets and `*n`, which Megatron-Core and the run file both read.
    """
    pieces = stages_text(stages, mtp).split("|")
    out = []
    runs = [(piece, len(list(same))) for piece, same in groupby(pieces[:-1])]
    for piece, count in runs:
        # A bracket needs a letter in it to be repeated.
        out.append(f"({piece}|)*{count}" if count > 1 and piece else f"{piece}|" * count)
    return "".join(out) + pieces[-1]


def pattern(kinds: Sequence[bool]) -> str:
    """A Python list expression of 0 and 1, one per layer, as Megatron-Core reads it: `([0]*3+[1]*58)`."""
    runs = [(int(kind), len(list(same))) for kind, same in groupby(kinds)]
    return "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"


def heading(plan: Plan, target: str, notes: Sequence[str], usage: Sequence[str] = ()) -> list[str]:
    """The lines at the top of a file, without comment signs: what it is, how it is used, what it does not say."""
    work, layout = plan.workload, plan.layout
    lines = [
        f"{plan.name}: {work.model.name} on {layout.world} x {plan.cluster.gpu.name}, for {target}.",
        f"Layout {layout}, micro-batch {layout.micro_batch}, {work.global_batch} x {work.seq_len} tokens a step.",
        *usage,
    ]
    return [*lines, *(f"NOTE {note}." for note in notes)]


def comment(lines: Iterable[str]) -> str:
    """Lines as a comment of a shell script, TOML, YAML or Python file."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def yaml_text(value: Mapping[str, Any], depth: int = 0) -> str:
    """YAML of nested tables: block style, with lists and scalars written as JSON, which YAML includes."""
    out = []
    for key, inner in value.items():
        pad = "  " * depth
        if isinstance(inner, Mapping) and inner:
            out.append(f"{pad}{key}:\n{yaml_text(inner, depth + 1)}")
        else:
            out.append(f"{pad}{key}: {_scalar(inner)}\n")
    return "".join(out)


def _scalar(value: Any) -> str:
    # YAML 1.1 reads 1e-05 as text, as a number it needs a point.
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    return json.dumps(value)


def refuse_recompute_by_stage(draft: Draft, layout: Layout) -> None:
    """For stacks that recompute the same on all pipeline ranks.

    Raises:
        SpecError: the layout does otherwise.
    """
    if layout.recompute_stages:
        raise draft.refuse("recompute by pipeline stage; name one set of modules for all of them in layout.recompute")


def refuse_uneven_recompute(draft: Draft, layout: Layout) -> None:
    """For stacks that recompute all layers alike, each on its own.

    Raises:
        SpecError: the layout does otherwise.
    """
    refuse_recompute_by_stage(draft, layout)
    if layout.recompute_method == "block" or layout.recompute_layers > 1:
        how = "of each virtual stage" if layout.recompute_method == "block" else "together"
        raise draft.refuse(
            f"recompute of {layout.recompute_layers} layers {how}; leave out layout.recompute_method and "
            f"layout.recompute_layers"
        )


def note_storage(draft: Draft, plan: Plan) -> None:
    """What no other stack than this project's has of a state's storage and of offload."""
    layout = plan.layout
    if plan.workload.master == "split":
        draft.lost("masters that are split in two; they are fp32, 4 bytes")
    if "optimizer" in layout.offload and layout.offload_fraction < 1:
        draft.lost(f"a share of {layout.offload_fraction:g} of the optimizer in host memory; all of it is")
    if "activations" in layout.offload and layout.offload_modules != OFFLOAD_BLOCKS:
        draft.lost(f"activations of {', '.join(layout.offload_modules)} alone in host memory; all that can be are")
