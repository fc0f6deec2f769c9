"""One layout looked at closely: whether it is legal, what it costs, what single changes would bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.workload import Columns, Workload
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.legal import Degrees

from .choice import legal_choice, parse_choice
from .price import Pricer
from .result import GIB, Candidate
from .search import Question, search, works_together
from .space import MICRO_BATCHES, VIRTUAL_STAGES, Choices, Stages, choices_of, degrees_of, most_degrees


@dataclass(frozen=True)
class Change:
    """A single change to a layout and what it brings."""

    what: str
    candidate: Candidate
    gain: float
    """Tokens per second over those of the unchanged layout, − 1."""
    fits: bool


@dataclass(frozen=True)
class Why:
    """What there is to say about one layout."""

    layout: str
    illegal: str
    """The rule that it breaks and the nearest legal layouts; empty for a legal one."""
    candidate: Candidate | None
    best: Candidate | None
    fits: bool
    changes: tuple[Change, ...]
    """Fastest first; where the layout does not fit, only those that do."""


def why(question: Question, text: str, count: int = 6) -> Why:
    """Everything about the layout that `text` describes, also where it is illegal or does not fit.

    A text that names a micro-batch (`mb2`) is a whole row: what it leaves out is off. Of one without, the options left
    out are those that make it fastest.

    Raises:
        SpecError: the text cannot be read.
    """
    degrees, options = parse_choice(text)
    try:
        layout = legal_choice(question, degrees, options)
    except SpecError as error:
        return Why(text, str(error), None, _best(question), False, ())
    best = _best(question)
    pricer = Pricer(question.work, question.cluster, question.stack)
    candidate = pricer.candidates(Columns.of([layout]), best.scale if best else None)[0]
    fits = candidate.memory_bytes <= question.limit_bytes
    found = changes(question, candidate)
    if not fits:
        found = [change for change in found if change.fits]
    return Why(text, "", candidate, best, fits, tuple(found[:count]))


def _best(question: Question) -> Candidate | None:
    try:
        return search(replace(question, only={})).layouts[0]
    except SpecError:
        return None


def changes(question: Question, candidate: Candidate) -> list[Change]:
    """Every single change to a layout, fastest first: degrees moved by a factor of two, micro-batch, virtual stages,
    schedule, dispatcher, overlap, modules to recompute, offload, sharding. This answers which knob to turn next. A
    change that overlap does not go together with is tried without that overlap, and says so."""
    pairs = [_together(what, layout) for what, layout in _neighbours(question, candidate.layout)]
    if not pairs:
        return []
    columns = Columns.of([layout for _, layout in pairs])
    good = works_together(columns)
    pricer = Pricer(question.work, question.cluster, question.stack)
    kept = [pair for pair, fine in zip(pairs, good, strict=True) if fine]
    priced = pricer.candidates(columns.take(np.flatnonzero(good)), candidate.scale)
    found = [
        Change(
            what,
            other,
            candidate.step_seconds / other.step_seconds - 1,
            other.memory_bytes <= question.limit_bytes,
        )
        for (what, _), other in zip(kept, priced, strict=True)
    ]
    return sorted(found, key=lambda change: -change.gain)


def _together(what: str, layout: Layout) -> tuple[str, Layout]:
    """A change without the overlap that it rules out; one of overlap itself stays as it is."""
    if what.startswith("overlap") or works_together(Columns.of([layout])).all():
        return what, layout
    lost = [word for word in layout.overlap if word in ("shared_experts", "experts", "weight_gradients")]
    kept = tuple(word for word in layout.overlap if word not in lost)
    return f"{what}, without overlap {'+'.join(lost)}", replace(layout, overlap=kept)


def _neighbours(question: Question, layout: Layout) -> Iterator[tuple[str, Layout]]:
    choices = choices_of(question.stack, question.work.model, question.cluster)
    yield from _other_degrees(question, layout)
    own = question.work.global_batch // layout.dp
    for micro in MICRO_BATCHES:
        count = own // micro
        rounds = layout.virtual_stages == 1 or count % layout.pp == 0
        if micro != layout.micro_batch and own % micro == 0 and count >= layout.pp and rounds:
            yield f"micro-batch {layout.micro_batch} → {micro}", replace(layout, micro_batch=micro)
    for virtual in VIRTUAL_STAGES:
        fits = layout.pp > 1 and layout.pp * virtual <= len(question.work.model.layers)
        if virtual != layout.virtual_stages and fits and (virtual == 1 or own // layout.micro_batch % layout.pp == 0):
            changed = replace(layout, virtual_stages=virtual, schedule=_schedule(layout, layout.pp, virtual))
            yield f"virtual stages {layout.virtual_stages} → {virtual}", _restaged(changed, question)
    yield from _other_options(layout, choices)


def _other_degrees(question: Question, layout: Layout) -> Iterator[tuple[str, Layout]]:
    work = question.work
    legal = degrees_of(work, layout.world, most_degrees(question.cluster, work.seq_len, question.stack))
    mine = Degrees(*(getattr(layout, name) for name in Degrees._fields))
    for degrees, ring in legal:
        moved = [name for name in ("pp", "cp", "tp", "ep", "etp") if getattr(degrees, name) != getattr(mine, name)]
        if mine.cp > 1 and degrees == mine and ring != (layout.cp_kind == "ring"):
            kind = "ring" if ring else "ulysses"
            yield f"context parallelism {layout.cp_kind} → {kind}", replace(layout, cp_kind=kind)
        if len(moved) != 1 or ring != (layout.cp_kind == "ring" and degrees.cp > 1):
            continue
        name = moved[0]
        factor = getattr(degrees, name) / getattr(mine, name)
        own = work.global_batch // degrees.dp
        count = own // layout.micro_batch
        if factor not in (2, 0.5) or own % layout.micro_batch or count < degrees.pp:
            continue
        virtual = layout.virtual_stages if degrees.pp > 1 else 1
        if virtual > 1 and (count % degrees.pp or degrees.pp * virtual > len(work.model.layers)):
            continue
        dispatcher = layout.dispatcher
        if degrees.ep * degrees.etp == 1:
            dispatcher = "local"
        elif dispatcher == "local":
            dispatcher = "alltoall"
        changed = replace(
            layout,
            **degrees._asdict(),
            cp_kind=layout.cp_kind if degrees.cp > 1 else "ulysses",
            virtual_stages=virtual,
            schedule=_schedule(layout, degrees.pp, virtual),
            dispatcher=dispatcher,
            experts_ep=tuple((count, int(np.gcd(degrees.ep, count))) for count, _ in layout.experts_ep),
        )
        yield f"{name} {getattr(mine, name)} → {getattr(degrees, name)}", _restaged(changed, question)


def _other_options(layout: Layout, choices: Choices) -> Iterator[tuple[str, Layout]]:
    if layout.ep * layout.etp > 1:
        for dispatcher in choices.dispatchers:
            if dispatcher != layout.dispatcher:
                yield f"dispatcher {layout.dispatcher} → {dispatcher}", replace(layout, dispatcher=dispatcher)
    for overlap in choices.overlaps:
        if set(overlap) != set(layout.overlap):
            yield f"overlap {_set(overlap)}", replace(layout, overlap=overlap)
    for recompute in choices.recompute:
        if set(recompute) != set(layout.recompute):
            yield f"recompute {_set(recompute)}", replace(layout, recompute=recompute)
    for offload in choices.offload:
        if offload != layout.offload:
            yield f"offload {_set(offload)}", replace(layout, offload=offload)
    if choices.zero_bubble and layout.pp > 1 and layout.sharding == "none":
        schedule = "interleaved" if layout.virtual_stages > 1 else "1f1b"
        other = schedule if layout.schedule == "zero_bubble" else "zero_bubble"
        yield f"schedule {layout.schedule} → {other}", replace(layout, schedule=other)
    for sharding in choices.sharding:
        if sharding != layout.sharding and layout.schedule != "zero_bubble":
            yield f"sharding {layout.sharding} → {sharding}", replace(layout, sharding=sharding)


def _schedule(layout: Layout, pp: int, virtual_stages: int) -> str:
    if layout.schedule == "zero_bubble" and pp > 1:
        return "zero_bubble"
    return "interleaved" if virtual_stages > 1 else "1f1b"


def _set(words: tuple[str, ...]) -> str:
    return "+".join(words) or "nothing"


def _restaged(layout: Layout, question: Question) -> Layout:
    stages = Stages(question.work)
    index = stages.index(np.array([layout.pp]), np.array([layout.virtual_stages]))
    return replace(layout, stages=stages.lists[int(index[0])])


def lacking_gib(candidate: Candidate, question: Question) -> float:
    """GiB that a layout needs beyond what it may use; negative where it fits."""
    return (candidate.memory_bytes - question.limit_bytes) / GIB


def workload_text(work: Workload) -> str:
    """The workload in a line."""
    return (
        f"{work.model.name}, {work.precision}, {work.global_batch:,} sequences of {work.seq_len:,} tokens a step"
        f"{', with prediction blocks' if work.mtp and work.model.mtp else ''}"
    )
