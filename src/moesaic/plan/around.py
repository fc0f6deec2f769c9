"""One layout looked at closely: whether it is legal, what it costs, what single changes would bring."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.workload import DISPATCHERS, OFFLOAD, OVERLAP, RECOMPUTE, SHARDING, Columns, Workload
from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.layout import Layout, parse_degrees, resolve_layout
from moesaic.spec.legal import Degrees
from moesaic.spec.tables import LayoutTable

from .price import Pricer
from .result import GIB, Candidate
from .search import Question, search, works_together
from .space import MICRO_BATCHES, VIRTUAL_STAGES, Choices, Stages, choices_of, degrees_of, most_degrees

_WORD = re.compile(r"(mb|vpp)([0-9]{1,6})")
_SETS = {"recompute": RECOMPUTE, "overlap": OVERLAP, "offload": OFFLOAD}


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


def parse_choice(text: str) -> tuple[dict[str, int], dict[str, object]]:
    """The degrees and the options of a layout written as the planner prints it, such as
    `pp4 dp8 tp2 / ep8 mb2, vpp4, deepep, recompute moe_act+layernorm`.

    Raises:
        SpecError: a word that is none of these.
    """
    first, *others = (part.strip() for part in text.split(","))
    words = first.split()
    options: dict[str, object] = {}
    for word in list(words):
        if _WORD.fullmatch(word):
            words.remove(word)
            others.append(word)
    for part in filter(None, others):
        options |= _option(part, text)
    return parse_degrees(" ".join(words)), options


def _option(part: str, text: str) -> dict[str, object]:
    match = _WORD.fullmatch(part)
    if match:
        return {{"mb": "micro_batch", "vpp": "virtual_stages"}[match[1]]: int(match[2])}
    if part in DISPATCHERS:
        return {"dispatcher": part}
    if part in ("ulysses", "ring"):
        return {"cp_kind": part}
    name, _, rest = part.partition(" ")
    if name == "shard" and rest in SHARDING:
        return {"sharding": rest}
    if name in _SETS:
        chosen = tuple(filter(None, rest.replace(" ", "").split("+")))
        for word in chosen:
            if word not in _SETS[name]:
                raise SpecError(f"{word!r} in layout {text!r}: {nearest(word, _SETS[name])}")
        return {name: chosen}
    known = (*DISPATCHERS, "ulysses", "ring", "shard", *_SETS, "mb1", "vpp2")
    raise SpecError(f"{part!r} in layout {text!r}: {nearest(part, known)}")


def why(question: Question, text: str, count: int = 6) -> Why:
    """Everything about the layout that `text` describes, also where it is illegal or does not fit. Options that the
    text leaves out are those that make it fastest.

    Raises:
        SpecError: the text cannot be read.
    """
    degrees, options = parse_choice(text)
    try:
        layout = _legal(question, degrees, options)
    except SpecError as error:
        return Why(text, str(error), None, _best(question), False, ())
    candidate = Pricer(question.work, question.cluster, question.stack).candidates(Columns.of([layout]))[0]
    fits = candidate.memory_bytes <= question.limit_bytes
    found = changes(question, candidate)
    if not fits:
        found = [change for change in found if change.fits]
    return Why(text, "", candidate, _best(question), fits, tuple(found[:count]))


def _best(question: Question) -> Candidate | None:
    try:
        return search(replace(question, only={})).layouts[0]
    except SpecError:
        return None


def _legal(question: Question, degrees: dict[str, int], options: dict[str, object]) -> Layout:
    """The layout with what is left out filled in.

    Raises:
        SpecError: it is not legal.
    """
    given = {name: value for name, value in degrees.items() if name not in ("edp", "dp")}
    asked_dp = degrees.get("dp", 1)
    table = LayoutTable.model_validate(
        {
            **given,
            **{name: options[name] for name in ("micro_batch", "virtual_stages", "cp_kind") if name in options},
            "dp": asked_dp if asked_dp > 1 else "auto",
        }
    )
    work, gpus = question.work, question.cluster.gpus
    plain = resolve_layout(table, work.model, gpus, seq_len=work.seq_len, global_batch=work.global_batch)
    asked_edp = degrees.get("edp")
    if asked_edp is not None and asked_edp != plain.edp:
        raise SpecError(f"edp{asked_edp} is given, but world / (pp·etp·ep) makes it edp{plain.edp}: {plain}.")
    only = {name: getattr(plain, name) for name in Degrees._fields}
    only |= {name: int(options[name]) for name in ("micro_batch", "virtual_stages") if name in options}  # type: ignore[call-overload]
    rest = {name: value for name, value in options.items() if name not in ("micro_batch", "virtual_stages")}
    try:
        best = search(replace(question, only=only, top=1)).layouts[0].layout
    except SpecError:  # it does not fit: as it stands, without recompute
        best = _restaged(replace(plain, sharding="optimizer"), question)
    return replace(best, **rest)  # type: ignore[arg-type]


def changes(question: Question, candidate: Candidate) -> list[Change]:
    """Every single change to a layout, fastest first: degrees moved by a factor of two, micro-batch, virtual stages,
    dispatcher, overlap, modules to recompute, offload, sharding. This answers which knob to turn next."""
    pairs = list(_neighbours(question, candidate.layout))
    if not pairs:
        return []
    columns = Columns.of([layout for _, layout in pairs])
    good = works_together(columns)
    pricer = Pricer(question.work, question.cluster, question.stack)
    kept = [pair for pair, fine in zip(pairs, good, strict=True) if fine]
    found = [
        Change(
            what,
            other,
            candidate.step_seconds / other.step_seconds - 1,
            other.memory_bytes <= question.limit_bytes,
        )
        for (what, _), other in zip(kept, pricer.candidates(columns.take(np.flatnonzero(good))), strict=True)
    ]
    return sorted(found, key=lambda change: -change.gain)


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
            changed = replace(layout, virtual_stages=virtual, schedule="interleaved" if virtual > 1 else "1f1b")
            yield f"virtual stages {layout.virtual_stages} → {virtual}", _restaged(changed, question)
    yield from _other_options(layout, choices)


def _other_degrees(question: Question, layout: Layout) -> Iterator[tuple[str, Layout]]:
    work = question.work
    legal = {
        (degrees, ring)
        for degrees, ring in degrees_of(work, layout.world, most_degrees(question.cluster, work.seq_len))
    }
    mine = Degrees(*(getattr(layout, name) for name in Degrees._fields))
    for degrees, ring in legal:
        moved = [name for name in ("pp", "cp", "tp", "ep", "etp") if getattr(degrees, name) != getattr(mine, name)]
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
            virtual_stages=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b",
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
    for sharding in choices.sharding:
        if sharding != layout.sharding:
            yield f"sharding {layout.sharding} → {sharding}", replace(layout, sharding=sharding)


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
