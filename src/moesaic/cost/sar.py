"""Activations of MegaScale-MoE's layer, all of them and those left by its selective rematerialisation.

The layer is one explicit list of operators without fused norms, so that every output in the list is kept unless it is
made again: arXiv 2505.11432 section 4 and figure 9. Ulysses attention over n ranks and experts over the same n ranks,
fed by an all-gather. Per rank, in units of b·s·h/n values, all is 2n + 2k + 3kf + 12 + 5/m and what stays is
2kf + 4 + 2/m, with f = expert width / h and m = query heads per key-value head.
"""

from __future__ import annotations

import numpy as np

from moesaic.spec.errors import SpecError
from moesaic.spec.model import LayerSpec, ModelSpec

from .rows import imbalance, tokens_per_rank
from .workload import Columns, Floats, Workload

Row = tuple[str, str, Floats, bool]
"""Module, tensor, bytes [N], and whether it stays."""


def sar_rows(model: ModelSpec, layer: LayerSpec, work: Workload, columns: Columns) -> list[Row]:
    """Every operator output of the layer in the order of figure 9.

    The list counts the layer's output too, which the next layer counts as its input, as the paper's total does.

    Raises:
        SpecError: a layer without experts, or with latent attention: the paper's layer has neither.
    """
    attention, moe = layer.attention, layer.moe
    if moe is None or attention.kind != "gqa":
        raise SpecError(
            f"MegaScale-MoE's layer has grouped-query attention and experts, but a layer of {model.name} has "
            f"{attention.kind} attention and {'a dense block' if moe is None else 'experts'}: use other habits for it."
        )
    tokens = tokens_per_rank(work, columns)
    group = tokens * np.maximum(columns.ep * columns.etp, 1)
    rows = tokens * moe.router.top_k * imbalance(moe, work, columns)
    hidden, width = model.hidden, moe.expert.width
    query = attention.heads * attention.head_dim
    key = attention.kv_heads * attention.head_dim
    out = attention.heads * attention.v_head_dim
    joined = query + key + attention.kv_heads * attention.v_head_dim
    listed = [
        ("residual", "layer input", hidden * tokens, True),
        ("norms", "first norm", hidden * tokens, False),
        ("qkv", "projection", joined * tokens, False),
        ("qkv", "rotated queries", query * tokens, False),
        ("qkv", "rotated keys", key * tokens, False),
        ("qkv", "after the all-to-all", joined * tokens, True),
        ("attention", "core", out * tokens, True),
        ("attention", "after the all-to-all", out * tokens, False),
        ("attention", "output projection", hidden * tokens, False),
        ("residual", "input of the second norm", hidden * tokens, True),
        ("norms", "second norm", hidden * tokens, False),
        ("dispatch", "all-gathered tokens", hidden * group, False),
        ("experts", "rows", hidden * rows, False),
        ("experts", "gate matmul", width * rows, True),
        ("experts", "up matmul", width * rows, True),
        ("experts", "activation, weighted", width * rows, False),
        ("experts", "down matmul", hidden * rows, False),
        ("dispatch", "tokens to be reduced and scattered", hidden * group, False),
        ("dispatch", "experts' output", hidden * tokens, False),
        ("residual", "layer output", hidden * tokens, False),
    ]
    value = 4 if work.precision == "fp32" else 2
    return [(module, tensor, value * values, stays) for module, tensor, values, stays in listed]
