"""Which layout to run: every legal one priced, those that fit ranked by the seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.cost.rates import Stack
from moesaic.cost.workload import Bools, Columns, Floats, Workload
from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.legal import Sizes, divisors
from moesaic.spec.nearest import nearest_worlds
from moesaic.spec.tables import LayoutTable

from .price import Pricer
from .result import GIB, Candidate, PlanResult
from .space import Choices, Stages, base_columns, choices_of, degrees_of, joined, most_degrees, with_options

_SHOWN_FRONT = 12
_KEPT = 4096
"""Fastest layouts, with an all-to-all and all the overlap they allow, that get every dispatcher and overlap; and of
these the fastest whose memory is checked again."""


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
    fitting, free = fitting_columns(base, pricer, choices, question.limit_bytes)
    if len(fitting) == 0:
        raise SpecError(nothing_fits(question, base, pricer, choices))
    progress(f"{len(fitting):,} fit in memory")
    first = _fullest(fitting, choices)
    kept = np.argsort(pricer.timed(first), kind="stable")[:_KEPT]
    columns = _every_option(fitting.take(kept), choices)
    seconds = pricer.timed(columns)
    order = np.argsort(seconds, kind="stable")[:_KEPT]
    columns = columns.take(order)
    seconds = pricer.corrected(columns).seconds
    order = np.argsort(seconds, kind="stable")
    columns, seconds = columns.take(order), seconds[order]
    held = pricer.memory_bytes(columns)
    good = held <= question.limit_bytes
    columns, seconds, held = columns.take(good), seconds[good], held[good]
    if len(columns) == 0:  # buffers of every dispatcher tried took what was left
        raise SpecError(nothing_fits(question, base, pricer, choices))
    best = pricer.candidates(columns.take(_distinct(columns, question.top)))
    front = pricer.candidates(columns.take(pareto(seconds, held)[:_SHOWN_FRONT]))
    best.sort(key=lambda each: each.step_seconds)
    return PlanResult(
        question.work,
        question.cluster,
        question.stack,
        tuple(best),
        tuple(front),
        searched=pricer.priced,
        fitting=int(free),
        seconds=time.perf_counter() - start,
        notes=_notes(question),
    )


def _legal(question: Question) -> Columns:
    work, cluster = question.work, question.cluster
    most = most_degrees(cluster, work.seq_len)
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


def fitting_columns(base: Columns, pricer: Pricer, choices: Choices, limit: float) -> tuple[Columns, int]:
    """Each layout of `base`, for each way to shard, with the first set of modules to recompute that makes it fit (and
    only then with offload); and how many fit as they are."""
    found: list[Columns] = []
    plain = 0
    for sharding in choices.sharding:
        leanest = with_options(base, sharding=sharding, recompute=choices.recompute[-1], offload=choices.offload[-1])
        left = with_options(base.take(pricer.fits(leanest, limit)), sharding=sharding)
        for offload in choices.offload:
            for number, recompute in enumerate(choices.recompute):
                if len(left) == 0:
                    break
                tried = with_options(left, recompute=recompute, offload=offload)
                fits = pricer.fits(tried, limit)
                plain += int(fits.sum()) if number == 0 and not offload else 0
                if fits.any():
                    found.append(tried.take(fits))
                    left = left.take(~fits)
    empty = np.zeros(0, np.int64)
    columns = joined(found) if found else base.take(empty)
    return columns, len(columns)


def _fullest(columns: Columns, choices: Choices) -> Columns:
    """Each layout with the last set of overlap that it allows, and the second dispatcher of the stack (an all-to-all
    in each of them)."""
    columns = with_options(columns, dispatcher=choices.dispatchers[min(1, len(choices.dispatchers) - 1)])
    best = with_options(columns, overlap=choices.overlaps[0])
    for overlap in choices.overlaps[1:]:
        more = with_options(columns, overlap=overlap)
        best = replace(best, overlap=np.where(works_together(more), more.overlap, best.overlap))
    return best


def _every_option(columns: Columns, choices: Choices) -> Columns:
    """Every dispatcher and overlap with every layout, where they go together."""
    parts = []
    for dispatcher in choices.dispatchers:
        spread = columns.ep * columns.etp > 1
        rows = columns if dispatcher == choices.dispatchers[0] else columns.take(spread)
        for overlap in choices.overlaps:
            tried = with_options(rows, dispatcher=dispatcher, overlap=overlap)
            parts.append(tried.take(works_together(tried)))
    return joined([part for part in parts if len(part)])


def works_together(columns: Columns) -> Bools:
    """Which layouts have overlap that their dispatcher, pipeline and recompute allow (Megatron-Core's constraints:
    overlap of experts wants expert parallelism, all-to-all or flex, virtual stages in a pipeline, and no recompute of
    whole expert layers or of shared experts; a shared expert under dispatch wants the same dispatchers)."""
    spread = columns.ep * columns.etp > 1
    sends = columns.dispatches("alltoall", "deepep", "hybridep", "hierarchical")
    experts = columns.overlaps("experts")
    good = ~experts | (
        spread
        & sends
        & ((columns.pp == 1) | (columns.virtual_stages > 1))
        & ~columns.recomputes("moe")
        & ~columns.recomputes("shared_experts")
    )
    shared = columns.overlaps("shared_experts")
    return good & (~shared | (spread & sends & ~columns.recomputes("shared_experts")))


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


def nothing_fits(question: Question, base: Columns, pricer: Pricer, choices: Choices) -> str:
    """What is missing, by how much, and the cheapest ways out."""
    leanest = with_options(
        base, sharding=choices.sharding[-1], recompute=choices.recompute[-1], offload=choices.offload[-1]
    )
    held = pricer.memory_bytes(leanest)
    row = int(held.argmin())
    least = pricer.candidates(leanest.take([row]))[0]
    lack = held[row] - question.limit_bytes
    parts = sorted(least.memory.items(), key=lambda item: -item[1])[:3]
    ways = []
    more = fewest_gpus(question, most=question.cluster.gpus * 16, above=question.cluster.gpus)
    if more is not None:
        ways.append(f"--gpus {more}")
    bigger = [gpu for gpu in larger_gpus(question) if held[row] <= gpu.memory_bytes * (1 - question.headroom)]
    if bigger:
        ways.append(f"--gpu {bigger[0].name} ({bigger[0].memory_bytes / GIB:.0f} GiB)")
    if question.headroom > 0 and held[row] <= question.cluster.gpu.memory_bytes:
        ways.append("--memory-headroom 0")
    if question.work.moment_bytes == 4:
        ways.append("bf16 moments (--moments bf16)")
    shorter = question.work.seq_len // 2
    if len(ways) < 3:
        ways.append(f"--seq-len {shorter}")
    return (
        f"Nothing fits: of {len(base):,} layouts the leanest, {least.layout}, needs {held[row] / GIB:.1f} GiB of the "
        f"{question.limit_bytes / GIB:.1f} GiB that --memory-headroom {question.headroom:g} leaves of "
        f"{question.cluster.gpu.name}, {lack / GIB:.1f} GiB too many, most of it "
        f"{', '.join(f'{name} {size / GIB:.1f}' for name, size in parts)}: try {', or '.join(ways[:3])}."
    )


def larger_gpus(question: Question) -> list:  # type: ignore[type-arg]
    """Accelerators of the catalogue with more memory, the least of it first."""
    from moesaic.spec.cluster import gpu_named, gpu_names

    all_of_them = [gpu_named(name) for name in gpu_names()]
    mine = question.cluster.gpu.memory_bytes
    return sorted((gpu for gpu in all_of_them if gpu.memory_bytes > mine), key=lambda gpu: gpu.memory_bytes)


def fewest_gpus(question: Question, most: int, above: int = 0) -> int | None:
    """The smallest number of accelerators, up to `most`, on which some layout fits; None if there is none. Whole nodes
    are tried, and within one node the divisors of it."""
    node = question.cluster.gpu.gpus_per_node
    worlds = divisors(node) + [node * nodes for nodes in _counts(most // node)]
    choices = choices_of(question.stack, question.work.model, question.cluster)
    for world in sorted(set(worlds)):
        if world <= above or world > most:
            continue
        smaller = replace(question, cluster=question.cluster.model_copy(update={"gpus": world}))
        try:
            base = _legal(replace(smaller, only={**question.only, "micro_batch": 1, "virtual_stages": 1}))
        except SpecError:
            continue
        pricer = Pricer(smaller.work, smaller.cluster, smaller.stack)
        for sharding in choices.sharding[-1:]:
            lean = with_options(base, sharding=sharding, recompute=choices.recompute[-1], offload=choices.offload[-1])
            if pricer.fits(lean, smaller.limit_bytes).any():
                return world
    return None


def _counts(most: int) -> list[int]:
    """Numbers of nodes to try: all up to 16, then steps of about a sixteenth."""
    counts, nodes = [], 1
    while nodes <= most:
        counts.append(nodes)
        nodes += max(1, 2 ** max(0, nodes.bit_length() - 5))
    return counts


def _notes(question: Question) -> tuple[str, ...]:
    most = most_degrees(question.cluster, question.work.seq_len)
    return (
        f"tensor parallelism is tried inside the fast domain only (tp and etp up to {most['tp']})",
        f"context parallelism is tried up to {most['cp']} (pieces of 1,024 tokens)",
        "layers are dealt to stages by their FLOPs",
        f"every dispatcher and overlap is tried with the {_KEPT:,} layouts that are fastest with an all-to-all",
    )


def priced_in_full(question: Question, layout_columns: Columns) -> list[Candidate]:
    """Given layouts in full, fit or not."""
    return Pricer(question.work, question.cluster, question.stack).candidates(layout_columns)
