"""What each recompute word of a layout frees in this package's trainer, and why some free nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec

from .activations import layer_kept
from .habits import MOESAIC
from .workload import Columns, Workload

_WHY = {
    "moe_act": "experts keep the first product's output and compute their activation again in any case",
    "loss": "the loss makes logits for a part of the tokens at a time and never keeps them",
}


def freed_bytes(layout: Layout, model: ModelSpec, seq_len: int) -> dict[str, float]:
    """Bytes that each word of `layout.recompute` frees beside the others, over all layers and one micro-batch, on a
    rank that held them all and recomputed them alike. Of two words that drop the same, neither frees anything beside
    the other."""
    columns = Columns.of([layout, *(_without(layout, word) for word in layout.recompute)])
    work = Workload(model, seq_len, layout.micro_batch * layout.dp)
    rows = [row for layer in (*model.layers, *model.mtp) for row in layer_kept(model, layer, work, columns, MOESAIC)]
    every = np.sum([row.left(columns) for row in rows], axis=0)
    return {word: float(every[1 + i] - every[0]) for i, word in enumerate(layout.recompute)}


def idle_words(layout: Layout, model: ModelSpec, seq_len: int) -> Iterator[str]:
    """A sentence for each word of `layout.recompute` that frees nothing on any layer."""
    idle: dict[str, str] = {}
    useful: set[str] = set()
    for words in _sets(layout):
        found = dict(_idle(replace(layout, recompute=words), model, seq_len))
        useful |= set(words) - set(found)
        idle = found | idle
    for word in layout.recompute:
        if word in idle and word not in useful:
            yield f"layout.recompute {word!r} frees nothing here: {idle[word]}."


def _idle(layout: Layout, model: ModelSpec, seq_len: int) -> Iterator[tuple[str, str]]:
    """Each word that frees nothing, and why."""
    others = set(layout.recompute)
    for word, size in freed_bytes(layout, model, seq_len).items():
        if size > 0 or word == "full":
            continue
        why = _WHY.get(word, "no layer keeps what it drops")
        if "full" in others:
            why = "full drops everything in a layer"
        elif word == "shared_experts" and "moe" in others:
            why = "moe drops it"
        yield word, why


def _sets(layout: Layout) -> list[tuple[str, ...]]:
    """The different sets of words that layers have."""
    found = dict.fromkeys(
        unit.words for stage in layout.stages if stage.recompute is not None for unit in stage.recompute.units
    )
    return list(found) or [layout.recompute]


def _without(layout: Layout, word: str) -> Layout:
    return replace(layout, recompute=tuple(each for each in layout.recompute if each != word))
