"""Which kept activations wait in host memory: those of the parts of a layer that a layout names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moesaic.spec.options import OFFLOAD_BLOCKS

from .activations import Kept
from .workload import Columns, Floats, bits

_OF_MODULE = {"residual": "norms", "latents": "attention", "qkv": "attention", "attention": "attention", "mlp": "mlp"}


def block_of(row: Kept, has_experts: bool) -> str:
    """The part of a layer, of `spec.options.OFFLOAD_BLOCKS`, that a kept tensor belongs to: the one that reads it.
    A norm's output belongs to what follows the norm."""
    behind = "moe" if has_experts else "mlp"
    if row.module == "norms":
        if row.tensor.startswith("first norm"):
            return "attention"
        return "norms" if row.tensor.startswith("one fp32 statistic") else behind
    return _OF_MODULE.get(row.module, behind)


def offloaded(rows: Iterable[Kept], has_experts: bool, columns: Columns) -> Floats:
    """Bytes [N] of `rows` that wait in host memory. The row numbers that dispatch and experts hold themselves stay."""
    away = np.zeros(len(columns))
    for row in rows:
        if row.module == "dispatch" and row.tensor.endswith("int64"):
            continue
        named = columns.offload_modules & bits(OFFLOAD_BLOCKS, (block_of(row, has_experts),)) != 0
        away += np.where(columns.offloads("activations") & named, row.left(columns), 0.0)
    return away
