"""The layouts that a search looks at: every legal choice of degrees, and what a software stack can do with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moesaic.cost.rates import Stack
from moesaic.cost.workload import (
    DISPATCHERS,
    OFFLOAD,
    OFFLOAD_BLOCKS,
    OVERLAP,
    RECOMPUTE,
    SCHEDULES,
    SHARDING,
    Columns,
    Ints,
    Workload,
)
from moesaic.cost.workload import bits as bits_of
from moesaic.cost.workload import chosen as words_of
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout
from moesaic.spec.legal import Degrees, Sizes, legal_degrees
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import INSIDE_CHUNKS
from moesaic.spec.stages import Stage
from moesaic.spec.tables import LayoutTable

from .stage_balance import balanced_stages, layer_costs

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8)
WITHOUT_ETP = ("torchtitan",)
"""Frameworks that have no tensor parallelism inside experts."""
_SHORTEST_PIECE = 1024
"""Tokens below which no sequence is cut by context parallelism: shorter pieces only add communication."""


@dataclass(frozen=True)
class Choices:
    """What a stack can do besides the degrees; each entry is tried with each other where they fit together."""

    sharding: tuple[str, ...]
    dispatchers: tuple[str, ...]
    overlaps: tuple[tuple[str, ...], ...]
    """Sets of OVERLAP, cheapest in memory first."""
    recompute: tuple[tuple[str, ...], ...]
    """Sets of RECOMPUTE in the order in which they are tried until one fits: each keeps less than the ones before."""
    offload: tuple[tuple[str, ...], ...]
    zero_bubble: bool = False
    """Whether pipelines without sharding may also leave weight gradients for later to fill their bubble."""


def choices_of(stack: Stack, model: ModelSpec, cluster: ClusterSpec) -> Choices:
    """What `stack` can do for this model on this cluster.

    Megatron-Core has all dispatchers (DeepEP and HybridEP on NVIDIA accelerators), its distributed optimizer and
    overlap of expert communication between micro-batches; torchtitan shards with FSDP2 and has no overlap of dispatch;
    MegaScale-MoE (arXiv 2505.11432) overlaps within a micro-batch and recomputes by its own policy.
    """
    nvidia = cluster.gpu.vendor.lower() == "nvidia"
    shared = any(layer.moe is not None and layer.moe.shared is not None for layer in model.layers)
    base = ("gradients", "parameters", "tensor")
    recompute = recompute_ladder(model)
    if stack.framework == "megascale":
        overlaps: tuple[tuple[str, ...], ...] = ((*base, "between", "inside"),)
        return Choices(("optimizer",), ("allgather", "alltoall"), overlaps, recompute, ((),))
    if stack.framework == "torchtitan":
        dispatchers: tuple[str, ...] = ("alltoall", "deepep") if nvidia else ("alltoall",)
        full = ((), ("full",))
        return Choices(("parameters",), dispatchers, (("gradients", "parameters"),), full, ((),))
    if stack.framework == "moesaic":
        sharding = ("none", "optimizer", "gradients", "parameters")
        return Choices(sharding, ("allgather", "alltoall"), ((),), ((),), ((),), zero_bubble=True)
    dispatchers = ("allgather", "alltoall", "deepep", "hybridep") if nvidia else ("allgather", "alltoall")
    overlaps = (base, *([(*base, "shared_experts")] if shared else []))
    if len(model.mtp) <= 1:
        overlaps = (*overlaps, (*base, "experts", "weight_gradients"))
    return Choices(("optimizer",), dispatchers, overlaps, recompute, ((), ("optimizer",)))


def recompute_ladder(model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Sets of modules to recompute, each a superset of the one before, in the order of Megatron-Core's advice for
    expert models (moe_act, norms, MLA's up-projection, dense parts), then whole expert layers, then everything. Shared
    experts come after what overlap of expert communication allows."""
    layers = (*model.layers, *model.mtp)
    moes = [layer.moe for layer in layers if layer.moe is not None]
    steps = [
        ("moe_act", bool(moes)),
        ("layernorm", True),
        ("mla_up_proj", any(layer.attention.kind == "mla" for layer in layers)),
        ("mlp", any(layer.mlp is not None for layer in layers)),
        ("shared_experts", any(moe.shared is not None for moe in moes)),
    ]
    ladder: list[tuple[str, ...]] = [()]
    for name, there in steps:
        if there:
            ladder.append((*ladder[-1], name))
    if moes:
        parts = [name for name in ladder[-1] if name not in ("moe_act", "shared_experts")]
        ladder.append((*parts, "moe"))
    return (*ladder, ("full",))


def most_degrees(cluster: ClusterSpec, seq_len: int, stack: Stack) -> dict[str, int]:
    """Largest degrees that a search tries: tensor parallelism stays on the fast link, no sequence is cut into pieces
    shorter than 1,024 tokens, and torchtitan cuts no experts."""
    domain = cluster.fast_domain
    etp = 1 if stack.framework in WITHOUT_ETP else domain
    return {"tp": domain, "etp": etp, "cp": max(1, seq_len // _SHORTEST_PIECE)}


def degrees_of(
    work: Workload, world: int, most: dict[str, int], only: dict[str, int] | None = None
) -> list[tuple[Degrees, bool]]:
    """Every legal choice of degrees, each with whether context parallelism is a ring. `only` fixes degrees by name."""
    sizes, found = Sizes.of(work.model), []
    fixed = only or {}
    limits = most | fixed
    for kind in ("ulysses", "ring"):
        table = LayoutTable(cp_kind=kind)  # type: ignore[arg-type]
        for degrees in legal_degrees(sizes, world, table, work.seq_len, work.global_batch, limits):
            if kind == "ring" and degrees.cp == 1:
                continue
            if all(getattr(degrees, name) == value for name, value in fixed.items()):
                found.append((degrees, kind == "ring"))
    return found


def base_columns(
    work: Workload,
    degrees: Sequence[tuple[Degrees, bool]],
    micro_batches: Sequence[int] = MICRO_BATCHES,
    virtual_stages: Sequence[int] = VIRTUAL_STAGES,
    ladder: Stages | None = None,
) -> Columns:
    """Columns of degrees × micro-batches × virtual stages, without recompute, overlap and offload.

    What does not go together is left out: micro-batches that do not divide a rank's sequences, fewer of them than
    stages, interleaving without whole rounds, more stages than layers.
    """
    stages = ladder or Stages(work)
    table = np.array([(*d, ring) for d, ring in degrees], np.int64).reshape(-1, 8)
    rows, micro, virtual = (
        grid.ravel()
        for grid in np.meshgrid(np.arange(len(table)), np.array(micro_batches), np.array(virtual_stages), indexing="ij")
    )
    pp, dp = table[rows, 0], table[rows, 1]
    own = work.global_batch // dp
    count = own // micro
    good = (own % micro == 0) & (count >= np.where(pp > 1, pp, 1)) & (pp * virtual <= len(work.model.layers))
    good &= (virtual == 1) | ((pp > 1) & (count % pp == 0))
    rows, micro, virtual = rows[good], micro[good], virtual[good]
    number = len(rows)
    columns = {name: table[rows, place] for place, name in enumerate(Degrees._fields)}
    zero = np.zeros(number, np.int64)
    interleaved, plain = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")
    index = stages.index(columns["pp"], virtual)
    return Columns(
        **columns,
        virtual_stages=virtual,
        micro_batch=micro,
        replicas=np.ones(number, np.int64),
        sharding=zero,
        dispatcher=np.where(columns["ep"] * columns["etp"] > 1, DISPATCHERS.index("alltoall"), 0),
        schedule=np.where(virtual > 1, interleaved, plain),
        ring=table[rows, 7] == 1,
        dp_outer=np.zeros(number, bool),
        recompute=zero,
        overlap=zero,
        offload=zero,
        offload_fraction=np.ones(number),
        offload_modules=np.full(number, bits_of(OFFLOAD_BLOCKS, OFFLOAD_BLOCKS), np.int64),
        stages=index,
        stage_lists=stages.lists,
    )


class Stages:
    """Stage lists of a workload by (pp, virtual stages), made once each."""

    def __init__(self, work: Workload) -> None:
        self._layers, self._behind = layer_costs(work.model, work.seq_len, work.mtp)
        self._mtp = bool(work.model.mtp)
        self._known: dict[tuple[int, int], int] = {}
        self._lists: list[tuple[Stage, ...]] = []

    @property
    def lists(self) -> tuple[tuple[Stage, ...], ...]:
        return tuple(self._lists)

    def index(self, pp: Ints, virtual: Ints) -> Ints:
        """Which of `lists` each layout has, [N]."""
        keys = pp * 1000 + virtual
        found = np.zeros(len(keys), np.int64)
        for key in np.unique(keys):
            found[keys == key] = self._number(int(key) // 1000, int(key) % 1000)
        return found

    def _number(self, pp: int, virtual: int) -> int:
        if (pp, virtual) not in self._known:
            self._known[pp, virtual] = len(self._lists)
            self._lists.append(balanced_stages(pp * virtual, self._layers, self._behind, self._mtp))
        return self._known[pp, virtual]


def with_options(columns: Columns, **options: Sequence[str] | str) -> Columns:
    """The same layouts with other options: `sharding` and `dispatcher` by word (those without expert parallelism keep
    `local`), `recompute`, `overlap` and `offload` by set."""
    number = len(columns)
    arrays: dict[str, Ints] = {}
    for name, value in options.items():
        words = {"recompute": RECOMPUTE, "overlap": OVERLAP, "offload": OFFLOAD}.get(name)
        code = bits_of(words, value) if words is not None else _code(name, str(value))
        arrays[name] = np.full(number, code, np.int64)
    if "dispatcher" in arrays:
        arrays["dispatcher"] = np.where(columns.ep * columns.etp > 1, arrays["dispatcher"], 0)
    return replace(columns, **arrays)  # type: ignore[arg-type]


def _code(name: str, word: str) -> int:
    words: tuple[str, ...] = {"sharding": SHARDING, "dispatcher": DISPATCHERS, "schedule": SCHEDULES}[name]
    return words.index(word)


def joined(parts: Sequence[Columns]) -> Columns:
    """Several columns of the same stage lists, one after the other."""
    first = parts[0]
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(first) if name != "stage_lists"
    }
    return replace(first, **arrays, stage_lists=max((part.stage_lists for part in parts), key=len))


def layouts_of(columns: Columns, model: ModelSpec) -> Iterator[Layout]:
    """Each row as a Layout."""
    experts = Sizes.of(model).experts
    for row in range(len(columns)):
        degrees: dict[str, Any] = {name: int(getattr(columns, name)[row]) for name in Degrees._fields}
        yield Layout(
            **degrees,
            cp_kind="ring" if columns.ring[row] else "ulysses",
            virtual_stages=int(columns.virtual_stages[row]),
            sharding=SHARDING[columns.sharding[row]],
            replicas=int(columns.replicas[row]),
            micro_batch=int(columns.micro_batch[row]),
            dispatcher=DISPATCHERS[columns.dispatcher[row]],
            schedule=SCHEDULES[columns.schedule[row]],
            order="dp-outer" if columns.dp_outer[row] else "pp-outer",
            stages=columns.stage_lists[columns.stages[row]],
            experts_ep=tuple((count, int(np.gcd(degrees["ep"], count))) for count in experts),
            recompute=words_of(RECOMPUTE, int(columns.recompute[row])),
            overlap=words_of(OVERLAP, int(columns.overlap[row])),
            offload=words_of(OFFLOAD, int(columns.offload[row])),
            offload_fraction=float(columns.offload_fraction[row]),
            offload_modules=words_of(OFFLOAD_BLOCKS, int(columns.offload_modules[row])),
            inside_chunks=tuple((count, INSIDE_CHUNKS) for count in experts),
            heads_in=INSIDE_CHUNKS,
        )
