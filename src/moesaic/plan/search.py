"""Which layout to run: every legal one priced, those that fit ranked by the seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from moesaic.cost.rates import Stack
from moesaic.cost.workload import SHARDING, Bools, Columns, Floats, Workload
from moesaic.spec.cluster import ClusterSpec, GpuSpec, gpu_named, gpu_names
from moesaic.spec.errors import SpecError
from moesaic.spec.legal import Sizes, divisors
from moesaic.spec.nearest import nearest_worlds
from moesaic.spec.tables import LayoutTable

from .price import Pricer
from .result import GIB, PlanResult
from .space import Choices, Stages, base_columns, choices_of, degrees_of, joined, most_degrees, with_options

_SHOWN_FRONT = 12
_SHORTEST = 128
"""Tokens of the shortest sequence that is offered as a way out of too little memory."""
_KEPT = 4096
"""Fastest layouts, with an all-to-all and all the overlap they allow, that get every dispatcher and overlap."""
_SCALED = 64
"""Fastest layouts whose corrections by published runs scale the seconds of all."""
_SAVED = 64
"""Of the fastest layouts, those that are also looked at with less memory than they need to fit, beside the ones that no
other both outruns and undercuts."""


@dataclass(frozen=True)
class Question:
    """What is asked."""

    work: Workload
    cluster: ClusterSpec
    stack: Stack = field(default_factory=Stack)
    headroom: float = 0.05
    """Share of an accelerator's memory that stays free."""
    top: int = 10
    only: dict[str, int] = field(default_factory=dict)
    """Degrees, micro_batch or virtual_stages that are given and not searched."""

    @property
    def limit_bytes(self) -> float:
        return self.cluster.gpu.memory_bytes * (1 - self.headroom)


def search(question: Question, progress: Callable[[str], None] = lambda line: None) -> PlanResult:
    """The best layouts of the question's cluster.

    Raises:
        SpecError: no layout is legal for that many accelerators, or none fits in memory; with the way out.
    """
    start = time.perf_counter()
    pricer = Pricer(question.work, question.cluster, question.stack)
    choices = choices_of(question.stack, question.work.model, question.cluster)
    base = _legal(question)
    progress(f"{len(base):,} legal combinations of degrees, micro-batch and virtual stages")
    fitting = fitting_columns(base, pricer, choices, question.limit_bytes)
    if len(fitting) == 0:
        raise SpecError(nothing_fits(question, base, pricer, choices))
    progress(f"{len(fitting):,} fit in memory")
    columns = _promising(fitting, pricer, choices)
    held = pricer.memory_bytes(columns)
    good = held <= question.limit_bytes
    columns, held = columns.take(good), held[good]
    if len(columns) == 0:  # buffers of every dispatcher tried took what was left
        raise SpecError(nothing_fits(question, base, pricer, choices))
    seconds = pricer.timed(columns)
    order = np.argsort(seconds, kind="stable")
    columns, seconds, held = columns.take(order), seconds[order], held[order]
    scale = pricer.scale_of(columns.take(slice(_SCALED)))
    best = pricer.candidates(columns.take(_distinct(columns, question.top)), scale)
    front = pricer.candidates(columns.take(_spread(pareto(seconds, held), _SHOWN_FRONT)), scale)
    best.sort(key=lambda each: each.step_seconds)
    return PlanResult(
        question.work,
        question.cluster,
        question.stack,
        tuple(best),
        tuple(front),
        searched=pricer.priced,
        fitting=len(fitting),
        seconds=time.perf_counter() - start,
        notes=_notes(question),
    )


def _legal(question: Question) -> Columns:
    work, cluster = question.work, question.cluster
    most = most_degrees(cluster, work.seq_len, question.stack)
    fixed = {name: value for name, value in question.only.items() if name not in ("micro_batch", "virtual_stages")}
    degrees = degrees_of(work, cluster.gpus, most, fixed)
    sets = {}
    for name in ("micro_batch", "virtual_stages"):
        if name in question.only:
            sets[f"{name}es" if name == "micro_batch" else name] = (question.only[name],)
    base = base_columns(work, degrees, ladder=Stages(work), **sets) if degrees else None
    if base is None or len(base) == 0:
        raise SpecError(_nothing_legal(question))
    return base


def _nothing_legal(question: Question) -> str:
    work, gpus = question.work, question.cluster.gpus
    given = "".join(f" with {name} {value}" for name, value in question.only.items())
    near = nearest_worlds(LayoutTable(), Sizes.of(work.model), gpus, work.seq_len, work.global_batch)
    worlds = sorted({degrees.world for degrees in near} - {gpus})
    way = f"try --gpus {' or '.join(map(str, worlds))}" if worlds and not given else "give fewer degrees"
    return (
        f"No layout of {gpus} accelerators{given} is legal for {work.model.name} with sequences of {work.seq_len} "
        f"tokens and {work.global_batch} of them in a step: {way}, or another --global-batch (a multiple of the "
        f"data-parallel degree and at least pp micro-batches for each of its ranks)."
    )


def fitting_columns(base: Columns, pricer: Pricer, choices: Choices, limit: float) -> Columns:
    """The layouts of `base` that fit, for each way to shard: each with the first set of modules to recompute that makes
    it fit, and again with each offload that saves it recomputation."""
    found: list[Columns] = []
    for sharding in choices.sharding:
        rows = with_options(base, sharding=sharding)
        rows = rows.take(_could_fit(rows, pricer, choices, limit))
        least = np.full(len(rows), len(choices.recompute))  # the first set with which each fits so far
        for offload in choices.offload:
            before = least.copy()
            for number, recompute in enumerate(choices.recompute):
                open_rows = np.flatnonzero((number < before) & (least == before))
                if len(open_rows) == 0:
                    continue
                tried = with_options(rows.take(open_rows), recompute=recompute, offload=offload)
                fits = pricer.fits(tried, limit)
                found.append(tried.take(fits))
                least[open_rows[fits]] = number
    return joined(found) if found else base.take(np.zeros(0, np.int64))


def _could_fit(rows: Columns, pricer: Pricer, choices: Choices, limit: float) -> Bools:
    """Which rows some choice of recompute and offload makes fit. Whole layers are not always the leanest to recompute:
    where few micro-batches wait, one layer's tensors in backward weigh more than what is kept of all of them."""
    could = np.zeros(len(rows), bool)
    for recompute in (choices.recompute[-1], choices.recompute[max(0, len(choices.recompute) - 2)]):
        left = np.flatnonzero(~could)
        lean = with_options(rows.take(left), recompute=recompute, offload=choices.offload[-1])
        could[left] = pricer.fits(lean, limit)
    return could


def _promising(fitting: Columns, pricer: Pricer, choices: Choices) -> Columns:
    """The fastest layouts with every option, and of the very fastest the ways to need less memory that nothing faster
    undercuts."""
    seconds = pricer.timed(_fullest(fitting, choices))
    order = np.argsort(seconds, kind="stable")
    fast = every_option(fitting.take(order[:_KEPT]), choices)
    fast = fast.take(np.argsort(pricer.timed(fast), kind="stable")[:_KEPT])
    leaner = pareto(seconds, pricer.memory_bytes(fitting))
    saved = np.unique(np.concatenate([order[:_SAVED], np.array(leaner, np.int64)]))
    lean = _fullest(_every_saving(fitting.take(saved), choices), choices)
    lean = lean.take(pareto(pricer.timed(lean), pricer.memory_bytes(lean)))
    return joined([fast, every_option(lean, choices)])


def _every_saving(columns: Columns, choices: Choices) -> Columns:
    """Every set to recompute and to offload with every layout, once each."""
    names = [name for name in vars(columns) if name not in ("stage_lists", "recompute", "offload")]
    keys = np.stack([getattr(columns, name) for name in names], axis=1)
    rows = columns.take(np.sort(np.unique(keys, axis=0, return_index=True)[1]))
    return joined(
        [
            with_options(rows, recompute=recompute, offload=offload)
            for recompute in choices.recompute
            for offload in choices.offload
        ]
    )


def _fullest(columns: Columns, choices: Choices) -> Columns:
    """Each layout with the last set of overlap that it allows, and the second dispatcher of the stack (an all-to-all
    in each of them)."""
    columns = with_options(columns, dispatcher=choices.dispatchers[min(1, len(choices.dispatchers) - 1)])
    best = with_options(columns, overlap=choices.overlaps[0])
    for overlap in choices.overlaps[1:]:
        more = with_options(columns, overlap=overlap)
        best = replace(best, overlap=np.where(works_together(more), more.overlap, best.overlap))
    return best


def every_option(columns: Columns, choices: Choices) -> Columns:
    """Every dispatcher, overlap and schedule with every layout, where they go together."""
    parts = []
    spread = columns.ep * columns.etp > 1
    for dispatcher in choices.dispatchers:
        rows = columns if dispatcher == choices.dispatchers[0] else columns.take(spread)
        for overlap in choices.overlaps:
            tried = with_options(rows, dispatcher=dispatcher, overlap=overlap)
            parts.append(tried.take(works_together(tried)))
    if choices.zero_bubble:
        parts += [_delayed(part) for part in parts]
    return joined([part for part in parts if len(part)] or parts[:1])


def _delayed(columns: Columns) -> Columns:
    """Those layouts that may delay weight gradients into the pipeline's bubble, doing so."""
    rows = columns.take((columns.pp > 1) & (columns.sharding == SHARDING.index("none")))
    return with_options(rows, schedule="zero_bubble")


def works_together(columns: Columns) -> Bools:
    """Which layouts have overlap that their dispatcher, pipeline and recompute allow (Megatron-Core's constraints:
    overlap of experts wants expert parallelism, all-to-all or flex, virtual stages in a pipeline, and no recompute of
    whole expert layers or of shared experts; a shared expert under dispatch wants the same dispatchers, and not both at
    once; delayed weight gradients want overlap of experts)."""
    spread = columns.ep * columns.etp > 1
    sends = columns.dispatches("alltoall", "deepep", "hybridep", "hierarchical")
    experts = columns.overlaps("experts")
    good = ~experts | (
        (columns.ep > 1)
        & sends
        & ((columns.pp == 1) | (columns.virtual_stages > 1))
        & ~columns.recomputes("moe")
        & ~columns.recomputes("shared_experts")
    )
    shared = columns.overlaps("shared_experts")
    good &= ~shared | (spread & sends & ~experts & ~columns.recomputes("shared_experts"))
    return good & (experts | ~columns.overlaps("weight_gradients"))


def _distinct(columns: Columns, count: int) -> list[int]:
    """The first `count` rows that differ in more than dispatcher and overlap: the best of each."""
    names = [name for name in vars(columns) if name not in ("stage_lists", "dispatcher", "overlap", "offload")]
    seen: set[tuple[int, ...]] = set()
    rows = []
    for row in range(len(columns)):
        key = tuple(int(getattr(columns, name)[row]) for name in names)
        if key not in seen:
            seen.add(key)
            rows.append(row)
        if len(rows) == count:
            break
    return rows


def pareto(seconds: Floats, held: Floats) -> list[int]:
    """Rows that no other row beats in both, by rising seconds and so by falling bytes."""
    rows, least = [], np.inf
    for row in np.lexsort((held, seconds)):
        if held[row] < least * 0.995:  # half a percent of memory is no choice
            rows.append(int(row))
            least = held[row]
    return rows


def _spread(rows: list[int], count: int) -> list[int]:
    """At most `count` of `rows`, evenly taken, with both ends."""
    return [rows[place] for place in sorted({round(at) for at in np.linspace(0, len(rows) - 1, count)})]


def nothing_fits(question: Question, base: Columns, pricer: Pricer, choices: Choices) -> str:
    """What is missing, by how much, and the cheapest ways out."""
    lean = _leanest(base, choices)
    held = pricer.memory_bytes(lean)
    row = int(held.argmin())
    least = pricer.candidates(lean.take([row]))[0]
    parts = sorted(least.memory.items(), key=lambda item: -item[1])[:3]
    ways = list(islice(ways_out(question, float(held[row])), 3))
    return (
        f"Nothing fits: of {len(base):,} layouts the leanest, {least.layout}, needs {held[row] / GIB:.1f} GiB of the "
        f"{question.limit_bytes / GIB:.1f} GiB that --memory-headroom {question.headroom:g} leaves of "
        f"{question.cluster.gpu.name}, {(held[row] - question.limit_bytes) / GIB:.1f} GiB too many, most of it "
        f"{', '.join(f'{name} {size / GIB:.1f}' for name, size in parts)}"
        + (f": try {', or '.join(ways)}." if ways else "; no single change of hardware or options makes it fit.")
    )


def ways_out(question: Question, least: float) -> Iterator[str]:
    """Single changes after which something fits where the leanest layout needs `least` bytes, the cheapest first: what
    is free, then more or larger accelerators, then what changes the training."""
    cluster, work = question.cluster, question.work
    if question.headroom > 0 and least <= cluster.gpu.memory_bytes:
        yield "--memory-headroom 0"
    if work.moment_bytes == 4 and anything_fits(replace(question, work=replace(work, moment_bytes=2))):
        yield "--moments bf16"
    more = fewest_gpus(question, most=cluster.gpus * 16, above=cluster.gpus)
    if more is not None:
        yield f"--gpus {more}"
    larger = larger_gpus(question)
    room = [gpu for gpu in larger if least <= gpu.memory_bytes * (1 - question.headroom)]
    if room:
        yield f"--gpu {room[0].name!r} ({room[0].memory_bytes / GIB:.0f} GiB)"
    elif larger:
        gpu = larger[-1]
        other = replace(question, cluster=cluster.model_copy(update={"gpu": gpu, "gpus_per_node": None}))
        count = fewest_gpus(other, most=cluster.gpus * 16, above=cluster.gpus)
        if count is not None:
            yield f"--gpu {gpu.name!r} --gpus {count}"
    length = work.seq_len // 2
    while length >= _SHORTEST:
        if anything_fits(replace(question, work=replace(work, seq_len=length))):
            yield f"--seq-len {length}"
            return
        length //= 2


def anything_fits(question: Question) -> bool:
    """Whether some layout of the question's cluster is legal and fits. One sequence a micro-batch and one chunk a stage
    keep the least, so only they are looked at."""
    choices = choices_of(question.stack, question.work.model, question.cluster)
    try:
        base = _legal(replace(question, only={"micro_batch": 1, "virtual_stages": 1, **question.only}))
    except SpecError:
        return False
    pricer = Pricer(question.work, question.cluster, question.stack)
    return bool(pricer.fits(_leanest(base, choices), question.limit_bytes).any())


def _leanest(base: Columns, choices: Choices) -> Columns:
    """Each layout in the ways that may need the least memory."""
    return joined(
        [
            with_options(base, sharding=choices.sharding[-1], recompute=recompute, offload=choices.offload[-1])
            for recompute in dict.fromkeys(choices.recompute[-2:])
        ]
    )


def larger_gpus(question: Question) -> list[GpuSpec]:
    """Accelerators of the catalogue with more memory, the least of it first."""
    mine = question.cluster.gpu.memory_bytes
    larger = [gpu for gpu in map(gpu_named, gpu_names()) if gpu.memory_bytes > mine]
    return sorted(larger, key=lambda gpu: gpu.memory_bytes)


def fewest_gpus(question: Question, most: int, above: int = 0) -> int | None:
    """The smallest number of accelerators, up to `most`, on which some layout fits; None if there is none. Tried are
    the divisors of a node, and whole nodes: each number up to 32 of them, then 16 of each doubling."""
    node = question.cluster.gpus_per_node or question.cluster.gpu.gpus_per_node
    worlds = {*divisors(node), *(node * nodes for nodes in _counts(most // node))}
    for world in sorted(world for world in worlds if above < world <= most):
        if anything_fits(replace(question, cluster=question.cluster.model_copy(update={"gpus": world}))):
            return world
    return None


def _counts(most: int) -> list[int]:
    """Numbers of nodes to try: all up to 32, then 16 of each doubling."""
    counts, nodes = [], 1
    while nodes <= most:
        counts.append(nodes)
        nodes += max(1, 2 ** max(0, nodes.bit_length() - 5))
    return counts


def _notes(question: Question) -> tuple[str, ...]:
    most = most_degrees(question.cluster, question.work.seq_len, question.stack)
    return (
        f"tensor parallelism is tried inside the fast domain only (tp and etp up to {most['tp']})",
        f"context parallelism is tried up to {most['cp']} (pieces of 1,024 tokens)",
        "layers are dealt to stages by their FLOPs",
        f"every dispatcher and overlap is tried with the {_KEPT:,} layouts that are fastest with an all-to-all",
        "one factor from published runs scales all times; layouts are ranked by the closed form",
    )
