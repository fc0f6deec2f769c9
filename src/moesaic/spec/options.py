"""The words of the layout's options: what runs at once, is computed again, waits in host memory, travels smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moesaic.spec.errors import SpecError, nearest

if TYPE_CHECKING:
    from moesaic.spec.tables import LayoutTable

RECOMPUTE = (
    "layernorm", "core_attn", "moe_act", "mlp", "shared_experts", "mla_up_proj", "moe", "loss", "full",
)  # fmt: skip
"""Modules that backward may compute again instead of keeping what they made; `full` is whole layers."""
RECOMPUTE_SETS = {"sar": ("layernorm", "moe_act")}
"""Named sets. `sar` is MegaScale-MoE's selective activation rematerialisation (arXiv 2505.11432, Fig. 9)."""
OVERLAP = ("gradients", "parameters", "tensor", "shared_experts", "between", "inside", "experts", "weight_gradients")
"""What runs at the same time. `gradients`: their reduction under backward. `parameters`: their gathering under
forward. `tensor`: tensor-parallel communication under its matmuls. `shared_experts`: the shared expert under dispatch.
`between`: independent operators of one micro-batch's backward under its communication. `inside`: communication of
chunks under the matmul of others. `experts`: one micro-batch's forward under another's backward, so that each hides
the other's dispatch. `weight_gradients`: computed in the gaps that dispatch leaves."""
OFFLOAD = ("optimizer", "activations")
"""What waits in host memory."""
OFFLOAD_BLOCKS = ("norms", "attention", "mlp", "moe")
"""Parts of a layer whose kept activations may wait in host memory: each tensor belongs to the part that reads it for
its backward. `norms`: the layer's input and what attention has added to it. `attention`: from the first norm's output
to the output projection's input. `mlp`, `moe`: from the second norm's output on, of dense layers and of layers with
experts (their shared expert included)."""
COMPRESSION = ("dispatch", "gradients")
"""What travels with fewer bits, which changes results a little. `dispatch`: rows to experts in fp8 (e4m3) with a scale
per token. `gradients`: data-parallel sums of gradients sent in bf16 and added in fp32."""
FLEX_LIBRARIES = ("deepep", "hybridep")
"""Dispatchers over libraries for NVIDIA GPUs."""
FLEX_BACKENDS = ("portable", *FLEX_LIBRARIES)
"""What the `flex` dispatcher runs on; `portable` is the hierarchical dispatcher."""

INSIDE_CHUNKS = 2
"""In how many chunks rows travel with overlap `inside` where nothing says how many: the fewest of which one can hide
another."""


def words(
    given: str | Sequence[str], known: Sequence[str], sets: Mapping[str, Sequence[str]] | None = None
) -> tuple[str, ...]:
    """The words of an option in the order of `known`, named sets replaced by what is in them; none for "none" and
    "auto"."""
    if isinstance(given, str):
        return ()
    meant = {word for each in given for word in (sets or {}).get(each, (each,))}
    return tuple(word for word in known if word in meant)


def recompute_words(table: LayoutTable) -> tuple[str, ...]:
    """All words of `recompute` and `recompute_stages`."""
    given = [word for each in table.recompute_stages for word in each]
    return words(given or table.recompute, RECOMPUTE, RECOMPUTE_SETS)


def recompute_instead(table: LayoutTable, chosen: Sequence[str]) -> dict[str, object]:
    """The keys with which a table recomputes `chosen` everywhere: nothing to change where these are its words."""
    if tuple(chosen) == recompute_words(table) and table.recompute != "auto":
        return {}
    plain = {"recompute": list(chosen), "recompute_stages": [], "recompute_method": "uniform", "recompute_layers": None}
    return {key: to for key, to in plain.items() if key == "recompute" or getattr(table, key) != to}


def words_rules(table: LayoutTable) -> Iterator[str]:
    """What is wrong with the words of a layout's options, whatever its degrees."""
    flex = table.dispatcher_backend if table.dispatcher == "flex" else table.dispatcher
    if flex in FLEX_LIBRARIES and "dispatch" in table.compression:
        yield f"layout.compression 'dispatch' does not go with {flex}, which packs rows itself: leave out one of them"
    if flex in FLEX_LIBRARIES and "inside" in table.overlap:
        yield (
            f"layout.overlap 'inside' does not go with {flex}, which takes the tokens of a rank whole and not in "
            "chunks: leave out one of them"
        )
    if table.inside_chunks != "auto" and table.inside_chunks < 1:
        yield f'layout.inside_chunks is {table.inside_chunks}; give 1 (rows travel whole), more, or "auto"'
    for name, given, known in _options(table):
        for word in () if isinstance(given, str) else given:
            if word not in known:
                yield f"layout.{name} has {word!r}: {nearest(word, known)}"
    yield from _recompute_rules(table)
    yield from _offload_rules(table)


def _recompute_rules(table: LayoutTable) -> Iterator[str]:
    """What does not go together of the keys of recompute."""
    method, count = table.recompute_method, table.recompute_layers
    if table.recompute_stages and table.recompute not in ("none", []):
        yield "layout.recompute and layout.recompute_stages both say what is recomputed: leave out one of them"
        return
    if table.recompute == "auto":
        if method != "uniform" or count is not None:
            yield (
                'layout.recompute is "auto", which chooses among sets for all layers: leave out '
                "layout.recompute_method and layout.recompute_layers, or name the modules"
            )
        return
    if method == "block" and count is None:
        yield (
            'layout.recompute_method is "block" and layout.recompute_layers is not set: say how many layers of each '
            "virtual stage are recomputed whole"
        )
    if (method == "block" or count is not None) and "full" not in recompute_words(table):
        key = "layout.recompute_method" if method == "block" else "layout.recompute_layers"
        yield f'{key} is about whole layers, and layout.recompute does not have "full": add it or leave {key} out'


def _offload_rules(table: LayoutTable) -> Iterator[str]:
    """What does not go with host memory."""
    if "activations" in table.offload and "full" in recompute_words(table):
        yield (
            'layout.offload has "activations" and layout.recompute "full", but recomputed layers keep nothing that '
            "could wait: leave out one of them"
        )
    if "activations" in table.offload and not table.offload_modules:
        yield 'layout.offload has "activations" and layout.offload_modules is empty: name modules or leave it out'
    if "optimizer" in table.offload and table.offload_fraction == 0:
        yield 'layout.offload has "optimizer" and layout.offload_fraction is 0: give a fraction or leave it out'


def refuse_cut_experts_with_libraries(table: LayoutTable) -> None:
    """What the planner prices and the trainer does not run.

    Raises:
        SpecError: tokens are to come to pieces of experts by a library that brings them to whole ones.
    """
    flex = table.dispatcher_backend if table.dispatcher == "flex" else table.dispatcher
    if flex in FLEX_LIBRARIES and table.etp > 1:
        raise SpecError(
            f"{flex} brings tokens to whole experts, and layout.etp is {table.etp}: use etp 1 or hierarchical."
        )


def _options(table: LayoutTable) -> tuple[tuple[str, str | list[str], tuple[str, ...]], ...]:
    return (
        ("overlap", table.overlap, OVERLAP),
        ("recompute", table.recompute, (*RECOMPUTE, *RECOMPUTE_SETS)),
        ("recompute_stages", [word for each in table.recompute_stages for word in each], (*RECOMPUTE, *RECOMPUTE_SETS)),
        ("offload", table.offload, OFFLOAD),
        ("offload_modules", table.offload_modules, OFFLOAD_BLOCKS),
        ("compression", table.compression, COMPRESSION),
    )
