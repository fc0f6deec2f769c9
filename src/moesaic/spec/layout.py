"""A layout: two meshes over the same ranks (parallel folding), and what stands where.

Dense mesh pp × dp × cp × tp: attention, norms, embeddings, head, routers, shared experts. Expert mesh pp × edp × ep ×
etp: routed experts. Both cover the same ranks of a pipeline stage, so tp·cp·dp = etp·ep·edp = world / pp. The written
form is `pp2 dp4 cp1 tp2 / edp1 ep8 etp1`, dense mesh before the slash, expert mesh after.

Ranks count with tp (etp) fastest and pp slowest, so that a dense rank is ((pp·DP + dp)·CP + cp)·TP + tp and an expert
rank ((pp·EDP + edp)·EP + ep)·ETP + etp. The order "dp-outer" makes dp (edp) slowest and pp second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import SpecError, nearest
from .legal import Degrees, Sizes, expert_mesh_sentence, legal_degrees, option_rules, stages_of
from .model import ModelSpec
from .nearest import refuse
from .options import (
    COMPRESSION,
    INSIDE_CHUNKS,
    OFFLOAD,
    OFFLOAD_BLOCKS,
    OVERLAP,
    RECOMPUTE,
    RECOMPUTE_SETS,
    recompute_words,
    words,
)
from .stages import Stage
from .tables import LayoutTable

__all__ = [
    "DENSE",
    "EXPERT",
    "EXPERT_GROUPS",
    "GROUPS",
    "Layout",
    "Stage",
    "legal_layouts",
    "parse_degrees",
    "parse_layout",
    "resolve_layout",
    "single",
    "written",
]

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("edp", "ep", "etp")
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "data": ("dp", "cp"),
    "sequence": ("cp", "tp"),
    "stage": ("dp", "cp", "tp"),
}
"""Groups of the dense mesh and the axes along which their ranks differ. `data` holds the same dense parameters,
`sequence` the same rows of tokens, `stage` the same layers."""
EXPERT_GROUPS: dict[str, tuple[str, ...]] = {"ep": ("ep",), "etp": ("etp",), "edp": ("edp",), "ep_etp": ("ep", "etp")}
"""Groups of the expert mesh. `ep_etp` holds all pieces of a layer's experts once, `edp` the same piece."""
_DEGREE = re.compile(r"([a-z]+)([0-9]{1,9})")
_ALL_TO_ALL_EFFICIENCY = 0.75
"""Bandwidth an all-to-all reaches over that of an all-gather (MegaScale-MoE, arXiv 2505.11432, Fig. 7)."""

Digits = tuple[tuple[str, int], ...]
"""Axes and sizes that a rank is a mixed-radix number of, slowest first. A name may stand twice: its coordinate is then
the number that both digits make."""


@dataclass(frozen=True)
class Layout:
    """A layout that was found legal for a model and a number of ranks, with nothing left to derive."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int
    cp_kind: str
    """`ulysses` or `ring`."""
    virtual_stages: int
    sharding: str
    """`none`, `optimizer`, `gradients` or `parameters`."""
    replicas: int
    """Copies of the sharded state; divides dp·cp and edp."""
    micro_batch: int
    """Sequences in one forward pass of one data-parallel rank."""
    dispatcher: str
    """`local`, `allgather`, `alltoall`, `hierarchical`, `deepep` or `hybridep`."""
    schedule: str
    """`1f1b`, `interleaved` or `zero_bubble`."""
    order: str
    """`pp-outer` or `dp-outer`."""
    stages: tuple[Stage, ...]
    """pp·virtual_stages of them; stage i is on pipeline rank i % pp."""
    experts_ep: tuple[tuple[int, int], ...]
    """(experts, expert-parallel degree) of every expert count that the model's layers have."""
    recompute: tuple[str, ...] = ()
    """Modules computed again in backward instead of kept (the names of `cost.workload.RECOMPUTE`). Where layers or
    stages differ, all that any of them does; `Stage.recompute` says which does what."""
    recompute_stages: tuple[tuple[str, ...], ...] = ()
    """The same by pipeline rank, where those differ."""
    recompute_method: str = "uniform"
    """`uniform` or `block`: which layers `full` recomputes."""
    recompute_layers: int = 1
    """Layers recomputed together (`uniform`), or recomputed at all on each virtual stage (`block`)."""
    overlap: tuple[str, ...] = ()
    """What runs at the same time (the names of `cost.workload.OVERLAP`)."""
    offload: tuple[str, ...] = ()
    """What waits in host memory: `optimizer`, `activations`."""
    offload_fraction: float = 1.0
    """Share of the optimizer's state that waits there with `optimizer`."""
    offload_modules: tuple[str, ...] = OFFLOAD_BLOCKS
    """Parts of a layer whose activations wait there with `activations`."""
    compression: tuple[str, ...] = ()
    """What travels with fewer bits (`spec.options.COMPRESSION`)."""
    inside_chunks: tuple[tuple[int, int], ...] = ()
    """(experts, chunks in which rows travel with overlap `inside`) of every expert count; 1 is a layer not cut."""
    heads_in: int = 1
    """Groups of heads, at most, that travel one after another with overlap `inside` and cp_kind `ulysses`."""

    @property
    def compressed(self) -> tuple[str, ...]:
        """`compression` without `dispatch` where all experts are on every rank, so that no rows travel, and without
        `gradients` where every rank has parameters of its own."""
        travels = {
            "dispatch": self.etp > 1 or any(ep > 1 for _, ep in self.experts_ep),
            "gradients": self.dp * self.cp > 1
            or any(self.dp * self.cp * self.tp > ep * self.etp for _, ep in self.experts_ep),
        }
        return tuple(word for word in self.compression if travels[word])

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dense_digits(self) -> Digits:
        """The dense axes with their sizes, slowest first."""
        pp, dp = ("pp", self.pp), ("dp", self.dp)
        return (*((dp, pp) if self.order == "dp-outer" else (pp, dp)), ("cp", self.cp), ("tp", self.tp))

    def expert_digits(self, experts: int | None = None) -> Digits:
        """The expert axes with their sizes, slowest first, for layers of that many experts. Where such a layer has an
        ep smaller than the layout's, the ranks that it leaves over are data-parallel ones of its experts."""
        ep = self.ep if experts is None else self.layer_ep(experts)
        pp, edp = ("pp", self.pp), ("edp", self.edp)
        outer = (edp, pp) if self.order == "dp-outer" else (pp, edp)
        return (*outer, *((("edp", self.ep // ep),) if ep != self.ep else ()), ("ep", ep), ("etp", self.etp))

    def layer_ep(self, experts: int) -> int:
        """Expert-parallel degree of layers with that many experts: gcd(ep, experts), which is ep itself unless expert
        counts differ (DeepSpeed-MoE, arXiv 2201.05596, where a layer takes one rank per expert)."""
        return math.gcd(self.ep, experts)

    def chunks(self, experts: int) -> int:
        """Chunks in which rows of layers with that many experts travel: 1, all at once, without overlap `inside`."""
        return dict(self.inside_chunks).get(experts, INSIDE_CHUNKS) if "inside" in self.overlap else 1

    def head_groups(self, kv_heads: int) -> int:
        """In how many groups `kv_heads` key heads of a tensor-parallel rank travel with cp_kind `ulysses`: as many that
        every rank of cp gets equally many heads of each, and 1, all at once, without overlap `inside`."""
        if "inside" not in self.overlap or self.cp == 1 or self.cp_kind != "ulysses" or kv_heads % self.cp:
            return 1
        each = kv_heads // self.cp
        return max(n for n in range(1, min(self.heads_in, each) + 1) if each % n == 0)

    def layer_edp(self, experts: int) -> int:
        """Ranks that hold the same experts, in layers with that many: edp·ep / layer_ep."""
        return self.edp * self.ep // self.layer_ep(experts)

    def dense_coords(self, rank: int) -> dict[str, int]:
        """pp, dp, cp and tp of a rank."""
        return self._coords(rank, self.dense_digits)

    def expert_coords(self, rank: int, experts: int | None = None) -> dict[str, int]:
        """pp, edp, ep and etp of a rank, in layers with that many experts."""
        return self._coords(rank, self.expert_digits(experts))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in the given dense axes only, each ascending, ordered by their first rank.

        Raises:
            SpecError: an axis that the dense mesh does not have.
        """
        return self._groups(axes, self.dense_digits)

    def expert_groups(self, *axes: str, experts: int | None = None) -> list[tuple[int, ...]]:
        """As `groups` on the expert mesh (pp, edp, ep, etp) of layers with that many experts."""
        return self._groups(axes, self.expert_digits(experts))

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches that one rank works through in a step of `global_batch` sequences."""
        return global_batch // (self.micro_batch * self.dp)

    def stages_of(self, pp: int) -> tuple[Stage, ...]:
        """The virtual stages of one pipeline rank, in the order of its chunks."""
        return self.stages[pp :: self.pp]

    def __str__(self) -> str:
        """The written form."""
        return str(Degrees(self.pp, self.dp, self.cp, self.tp, self.edp, self.ep, self.etp))

    def _coords(self, rank: int, digits: Digits) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise SpecError(f"rank {rank} is not one of the {self.world} ranks of {self}.")
        coords, weights = dict.fromkeys((name for name, _ in digits), 0), dict.fromkeys((n for n, _ in digits), 1)
        for name, size in reversed(digits):
            rank, digit = divmod(rank, size)
            coords[name] += digit * weights[name]
            weights[name] *= size
        return coords

    def _groups(self, axes: tuple[str, ...], digits: Digits) -> list[tuple[int, ...]]:
        names = dict.fromkeys(name for name, _ in digits)
        for axis in axes:
            if axis not in names:
                raise SpecError(f"{axis!r} is not an axis of this mesh of {self}: {nearest(axis, names)}")
        # A group is the ranks of its axes' coordinates, moved by the rank of the other coordinates.
        inside, outside, stride = [0], [0], self.world
        for name, size in digits:
            stride //= size
            ranks = inside if name in axes else outside
            ranks[:] = [rank + stride * digit for rank in ranks for digit in range(size)]
        return [tuple(start + rank for rank in inside) for start in outside]


def resolve_layout(
    table: LayoutTable, model: ModelSpec, world: int, *, seq_len: int | None, global_batch: int | None
) -> Layout:
    """The layout that a table of a run file gives `world` ranks: dp, edp, stages, schedule and dispatcher filled in.

    `seq_len` is in tokens and `global_batch` in sequences; None leaves out what depends on it.

    Raises:
        SpecError: it is not legal. The sentence has the equation with its numbers and the nearest legal layouts.
    """
    sizes = Sizes.of(model)
    if world < 1:
        raise SpecError(f"a layout needs at least 1 process, not {world}.")
    refuse(table, sizes, world, seq_len, global_batch)
    dp = world // (table.pp * table.cp * table.tp)
    edp = world // (table.pp * table.etp * table.ep)
    return _layout(Degrees(table.pp, dp, table.cp, table.tp, edp, table.ep, table.etp), table, sizes)


def single(model: ModelSpec, micro_batch: int = 1) -> Layout:
    """The layout of one process."""
    return _layout(Degrees(), LayoutTable(micro_batch=micro_batch), Sizes.of(model))


def legal_layouts(
    model: ModelSpec,
    world: int,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    table: LayoutTable | None = None,
    **limits: int,
) -> Iterator[Layout]:
    """Every legal layout of `world` ranks, lazily; pp slowest, then tp, cp, etp, ep, each ascending.

    `table` gives everything but the degrees (cp_kind, virtual stages, micro-batch, …). `limits` are the largest
    degrees to consider, as in `tp=8`.

    Raises:
        SpecError: a limit that is no degree, a key of `table` that no degrees can make legal, or a stage string that
            does not fit the model.
    """
    for name in limits:
        if name not in Degrees._fields:
            raise SpecError(f"{name!r} is not a degree of a layout: {nearest(name, Degrees._fields)}")
    table, sizes = table or LayoutTable(), Sizes.of(model)
    option = next(option_rules(table), None)
    if option is not None:
        raise SpecError(f"{option}.")
    for degrees in legal_degrees(sizes, world, table, seq_len, global_batch, limits):
        yield _layout(degrees, table, sizes)


def _layout(degrees: Degrees, table: LayoutTable, sizes: Sizes) -> Layout:
    chunks = INSIDE_CHUNKS if table.inside_chunks == "auto" else table.inside_chunks
    return Layout(
        *degrees,
        cp_kind=table.cp_kind,
        virtual_stages=table.virtual_stages,
        sharding=table.sharding,
        replicas=table.replicas,
        micro_batch=table.micro_batch,
        dispatcher=_dispatcher(table, degrees.ep, degrees.etp, sizes.top_k),
        schedule=table.schedule
        if table.schedule != "auto"
        else ("interleaved" if table.virtual_stages > 1 else "1f1b"),
        order=table.order,
        stages=stages_of(degrees.pp, table, sizes),
        experts_ep=tuple((count, math.gcd(degrees.ep, count)) for count in sizes.experts),
        recompute=recompute_words(table),
        recompute_stages=tuple(words(each, RECOMPUTE, RECOMPUTE_SETS) for each in table.recompute_stages),
        recompute_method=table.recompute_method,
        recompute_layers=table.recompute_layers or 1,
        overlap=words(table.overlap, OVERLAP),
        offload=words(table.offload, OFFLOAD),
        offload_fraction=table.offload_fraction,
        offload_modules=words(table.offload_modules, OFFLOAD_BLOCKS),
        compression=words(table.compression, COMPRESSION),
        inside_chunks=tuple((count, chunks) for count in sizes.experts),
        heads_in=chunks,
    )


def _dispatcher(table: LayoutTable, ep: int, etp: int, top_k: int) -> str:
    """What is asked for, `flex` by its back-end. Left open: an all-to-all moves k/ep of what an all-gather moves, at a
    lower bandwidth, so it is faster where k < 0.75·ep (MegaScale-MoE, arXiv 2505.11432, Eqs. 3 and 4)."""
    if table.dispatcher == "flex":
        return "hierarchical" if table.dispatcher_backend == "portable" else table.dispatcher_backend
    if table.dispatcher != "auto":
        return table.dispatcher
    if ep * etp == 1:
        return "local"
    return "alltoall" if top_k < _ALL_TO_ALL_EFFICIENCY * ep else "allgather"


def written(layout: LayoutTable, dp: int | None = None) -> str:
    """The written form. `dp` stands in for `layout.dp = "auto"`.

    Raises:
        SpecError: dp is not known, or the two meshes do not cover the same processes.
    """
    degree = layout.dp if layout.dp != "auto" else dp
    if degree is None:
        raise SpecError('layout.dp is "auto": its degree is known once the number of processes is.')
    edp = _expert_data_degree(layout.tp, layout.cp, degree, layout.ep, layout.etp)
    return str(Degrees(layout.pp, degree, layout.cp, layout.tp, edp, layout.ep, layout.etp))


def parse_layout(text: str) -> LayoutTable:
    """The degrees that a written form gives; those left out are 1, edp follows from the others and is checked if given.

    Raises:
        SpecError: an unknown or repeated name, a degree of 0, or two meshes of different size.
    """
    degrees = parse_degrees(text)
    given = degrees.pop("edp", None)
    layout = LayoutTable.model_validate(degrees)
    assert layout.dp != "auto"
    edp = _expert_data_degree(layout.tp, layout.cp, layout.dp, layout.ep, layout.etp)
    if given is not None and given != edp:
        raise SpecError(
            f"layout {text!r} gives edp{given}, but tp·cp·dp = {layout.tp}·{layout.cp}·{layout.dp} and etp·ep = "
            f"{layout.etp}·{layout.ep} make it edp{edp}."
        )
    return layout


def parse_degrees(text: str) -> dict[str, int]:
    """The degrees of a written form by name, without a look at whether they fit together: all of them but edp, which is
    there only if the text gives it.

    Raises:
        SpecError: an unknown or repeated name, or a degree of 0.
    """
    degrees: dict[str, int] = {}
    for side, names in zip(_sides(text), (DENSE, EXPERT), strict=True):
        for word in side.split():
            match = _DEGREE.fullmatch(word)
            name = match[1] if match else word
            if match is None or name not in names:
                raise SpecError(f"{word!r} in layout {text!r}: {nearest(name, names)}")
            if name in degrees:
                raise SpecError(f"layout {text!r} gives {name} twice.")
            if int(match[2]) < 1:
                raise SpecError(f"{word!r} in layout {text!r}: a degree is at least 1.")
            degrees[name] = int(match[2])
    return dict.fromkeys((*DENSE, "ep", "etp"), 1) | degrees


def _sides(text: str) -> tuple[str, str]:
    dense, _, expert = text.partition("/")
    if "/" in expert:
        raise SpecError(f"layout {text!r} has more than one slash; write it like 'pp2 dp4 cp1 tp2 / edp1 ep8 etp1'.")
    return dense, expert


def _expert_data_degree(tp: int, cp: int, dp: int, ep: int, etp: int) -> int:
    if tp * cp * dp % (ep * etp):
        raise SpecError(f"{expert_mesh_sentence(tp, cp, dp, ep, etp)}.")
    return tp * cp * dp // (ep * etp)
