"""One layout as the planner writes it: read back, and what it leaves out filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from moesaic.cost.workload import DISPATCHERS, OFFLOAD, OVERLAP, RECOMPUTE, SCHEDULES, SHARDING, Columns, bits
from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.layout import DENSE, EXPERT, Layout, parse_degrees, resolve_layout
from moesaic.spec.legal import Degrees
from moesaic.spec.tables import LayoutTable

from .price import Pricer
from .result import ALWAYS_OVERLAPPED
from .search import Question, every_option
from .space import (
    MICRO_BATCHES,
    VIRTUAL_STAGES,
    WITHOUT_ETP,
    Choices,
    base_columns,
    choices_of,
    degrees_of,
    joined,
    layouts_of,
    most_degrees,
    with_options,
)

_WORD = re.compile(r"(mb|vpp)([0-9]{1,6})")
_DEGREE = re.compile(r"[a-z]+[0-9]+")
_SETS = {"recompute": RECOMPUTE, "overlap": OVERLAP, "offload": OFFLOAD}
_SINGLE = {
    **dict.fromkeys(DISPATCHERS, "dispatcher"), "ulysses": "cp_kind", "ring": "cp_kind", "zero_bubble": "schedule",
}  # fmt: skip
"""Words that stand alone, and the option that they give."""


def parse_choice(text: str) -> tuple[dict[str, int], dict[str, object]]:
    """The degrees and the options of a layout written as the planner prints it, such as
    `pp4 dp8 tp2 / ep8 mb2, vpp4, deepep, recompute moe_act+layernorm`.

    Raises:
        SpecError: a word that is none of these, or an option given twice.
    """
    words = iter(re.sub(r"\s*\+\s*", "+", text).replace("/", " / ").replace(",", " ").split())
    degrees: list[str] = []
    options: dict[str, object] = {}
    for word in words:
        if word == "/" or (_DEGREE.fullmatch(word) and not _WORD.fullmatch(word)):
            degrees.append(word)
            continue
        name, value = _option(word, words, text)
        if options.setdefault(name, value) != value:
            raise SpecError(f"layout {text!r} gives {name} twice, as {options[name]} and as {value}.")
    if not degrees and not options:
        raise SpecError("the layout is empty: write degrees, such as pp4 tp2 ep8.")
    return _degrees(degrees), options


def _degrees(words: list[str]) -> dict[str, int]:
    """As `parse_degrees`, but no name stands in both meshes, so that the slash may be left out."""
    if "/" not in words:
        expert = [word for word in words if word.rstrip("0123456789") in EXPERT]
        words = [*(word for word in words if word not in expert), "/", *expert]
    return parse_degrees(" ".join(words))


def _option(word: str, rest: Iterator[str], text: str) -> tuple[str, object]:
    """The option that `word` names, and its value, which for some is the next of the words."""
    match = _WORD.fullmatch(word)
    if match:
        name = {"mb": "micro_batch", "vpp": "virtual_stages"}[match[1]]
        if int(match[2]) < 1:
            raise SpecError(f"{word!r} in layout {text!r}: {name} is at least 1.")
        return name, int(match[2])
    if word in _SINGLE:
        return _SINGLE[word], word
    if word == "shard":
        value = next(rest, "")
        if value not in SHARDING:
            raise SpecError(f"'shard {value}' in layout {text!r}: {nearest(value, SHARDING)}")
        return "sharding", value
    if word in _SETS:
        value = next(rest, "")
        chosen = () if value == "none" else tuple(value.split("+"))
        for each in chosen:
            if each not in _SETS[word]:
                raise SpecError(f"{each!r} after {word} in layout {text!r}: {nearest(each, _SETS[word])}")
        return word, chosen
    known = (*_SINGLE, "shard", *_SETS, "mb1", "vpp2", *DENSE, *EXPERT)
    raise SpecError(f"{word!r} in layout {text!r}: {nearest(word, known)}")


def legal_choice(question: Question, degrees: dict[str, int], options: dict[str, object]) -> Layout:
    """The layout of these degrees and options, with what is left out filled in as `why` says. Where nothing fits, it is
    the fastest without recompute and offload.

    Raises:
        SpecError: it is not legal, the stack lacks an option, or options do not go together.
    """
    plain = _plain(question, degrees, options)
    choices = _narrowed(question, plain, options)
    rows = _ways(question, plain, options, choices)
    if len(rows) == 0:
        raise SpecError(_clash(plain, options))
    pricer = Pricer(question.work, question.cluster, question.stack)
    fits = pricer.fits(rows, question.limit_bytes)
    if fits.any():
        rows = rows.take(fits)
    else:
        lean = (bits(RECOMPUTE, choices.recompute[0]), bits(OFFLOAD, choices.offload[0]))
        rows = rows.take((rows.recompute == lean[0]) & (rows.offload == lean[1]))
    best = int(pricer.timed(rows).argmin())
    return next(layouts_of(rows.take([best]), question.work.model))


def _plain(question: Question, degrees: dict[str, int], options: dict[str, object]) -> Layout:
    """The degrees filled in and found legal with the options that a run file knows."""
    work, gpus = question.work, question.cluster.gpus
    asked: dict[str, object] = {
        name: options[name] for name in ("micro_batch", "virtual_stages", "cp_kind") if name in options
    }
    if options.get("dispatcher") in ("local", "allgather", "alltoall"):
        asked["dispatcher"] = options["dispatcher"]
    keys = {name: value for name, value in degrees.items() if name not in ("edp", "dp")} | asked
    if degrees.get("dp", 1) > 1:
        keys["dp"] = degrees["dp"]
    sizes = {"seq_len": work.seq_len, "global_batch": work.global_batch}
    try:
        plain = resolve_layout(LayoutTable.model_validate(keys), work.model, gpus, **sizes)  # type: ignore[arg-type]
    except SpecError:
        if "cp_kind" in options or degrees["cp"] == 1:
            raise
        try:  # what ulysses cannot do, a ring may
            plain = resolve_layout(LayoutTable.model_validate(keys | {"cp_kind": "ring"}), work.model, gpus, **sizes)  # type: ignore[arg-type]
        except SpecError as error:
            raise error from None
    given = degrees.get("edp")
    if given is not None and given != plain.edp:
        raise SpecError(f"edp{given} is given, but world / (pp·etp·ep) makes it edp{plain.edp}: {plain}.")
    return plain


def _narrowed(question: Question, plain: Layout, options: dict[str, object]) -> Choices:
    """What the stack can do, without what the options rule out."""
    choices = choices_of(question.stack, question.work.model, question.cluster)
    here = f"{question.stack.framework} on {question.cluster.gpu.name}"
    if plain.etp > 1 and question.stack.framework in WITHOUT_ETP:
        raise SpecError(f"{here} has no tensor parallelism inside experts: leave etp{plain.etp} out.")
    dispatcher = options.get("dispatcher")
    if dispatcher not in (None, "local", *choices.dispatchers):
        raise SpecError(f"{here} has no dispatcher {dispatcher!r}, but {', '.join(choices.dispatchers)}.")
    if dispatcher is not None and dispatcher != "local" and plain.ep * plain.etp == 1:
        raise SpecError(f"dispatcher {dispatcher!r} is given, but ep·etp = 1, so that no token travels: leave it out.")
    if options.get("schedule") == "zero_bubble" and not choices.zero_bubble:
        raise SpecError(f"{here} has no zero_bubble schedule: leave it out.")
    base = tuple(word for word in choices.overlaps[0] if word in ALWAYS_OVERLAPPED)
    chosen: dict[str, object] = {}
    if "micro_batch" in options:  # a whole row
        chosen = {"sharding": "optimizer" if "optimizer" in choices.sharding else choices.sharding[0]}
        chosen |= {"recompute": (), "overlap": (), "offload": ()}
    chosen |= options
    narrowed: dict[str, object] = {}
    for name, field in (("sharding",) * 2, ("recompute",) * 2, ("offload",) * 2, ("dispatcher", "dispatchers")):
        if name in chosen and chosen[name] != "local":
            narrowed[field] = (chosen[name],)
    if "overlap" in chosen:
        narrowed["overlaps"] = ((*base, *(word for word in chosen["overlap"] if word not in base)),)  # type: ignore[attr-defined]
    return replace(choices, **narrowed)  # type: ignore[arg-type]


def _ways(question: Question, plain: Layout, options: dict[str, object], choices: Choices) -> Columns:
    """Every way to run the degrees of `plain` that `options` and `choices` leave open."""
    work = question.work
    most = most_degrees(question.cluster, work.seq_len, question.stack)
    only = {name: getattr(plain, name) for name in Degrees._fields}
    kinds = ("ulysses", "ring") if plain.cp == 1 or "cp_kind" not in options else (options["cp_kind"],)
    found = [pair for pair in degrees_of(work, plain.world, most, only) if ("ulysses", "ring")[pair[1]] in kinds]
    whole = "micro_batch" in options
    micro = (plain.micro_batch,) if whole else MICRO_BATCHES
    virtual = (plain.virtual_stages,) if whole or "virtual_stages" in options else VIRTUAL_STAGES
    base = base_columns(work, found, micro, virtual)
    rows = joined(
        [
            with_options(base, sharding=sharding, recompute=recompute, offload=offload)
            for sharding in choices.sharding
            for recompute in choices.recompute
            for offload in choices.offload
        ]
    )
    rows = every_option(rows, choices)
    delayed = rows.schedule == SCHEDULES.index("zero_bubble")
    if options.get("schedule") == "zero_bubble":
        return rows.take(delayed)
    return rows.take(~delayed) if whole else rows


def _clash(plain: Layout, options: dict[str, object]) -> str:
    """Which options of a layout do not go together, in a sentence; the constraints of `works_together`."""
    overlap, recompute = options.get("overlap", ()), options.get("recompute", ())
    assert isinstance(overlap, tuple) and isinstance(recompute, tuple)
    again = [word for word in recompute if word in ("moe", "full", "shared_experts")]
    sends = options.get("dispatcher") != "allgather" and plain.ep * plain.etp > 1
    rules = [
        ("experts", plain.ep == 1, "ep is 1: no dispatch is there to hide"),
        ("experts", plain.pp > 1 and plain.virtual_stages == 1, f"pp is {plain.pp} without virtual stages: add vpp2"),
        ("experts", bool(again), f"{' and '.join(again)} {'is' if len(again) == 1 else 'are'} recomputed"),
        ("experts", not sends, "it wants a dispatcher that sends to single ranks: alltoall, deepep or hybridep"),
        ("shared_experts", not sends, "it wants a dispatcher that sends to single ranks: alltoall, deepep or hybridep"),
        ("shared_experts", "experts" in overlap, "overlap experts already runs them beside another micro-batch"),
        ("shared_experts", bool(again), f"{' and '.join(again)} {'is' if len(again) == 1 else 'are'} recomputed"),
        ("weight_gradients", "experts" not in overlap, "they fill gaps that only overlap experts leaves"),
    ]
    for word, broken, reason in rules:
        if word in overlap and broken:
            return f"overlap {word} does not work here: {reason}."
    if options.get("schedule") == "zero_bubble":
        return (
            "schedule zero_bubble wants pp above 1 and shard none: sharding sums weight gradients before it has them."
        )
    return f"the options of {plain} do not go together: leave some of {', '.join(options)} out."
