"""The layout of a published row: degrees as printed, the rest from what its stack does where nothing is printed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moesaic.cost.workload import Workload
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout
from moesaic.spec.stages import Stage, default_stages, parse_stages

from . import published_words as words

BLACKWELL = ("GB200", "GB300", "B200", "B300")


def count_in(row: Mapping[str, str], column: str) -> int | None:
    """A cell that holds a count, None if empty.

    Raises:
        SpecError: it holds something else.
    """
    text = row.get(column, "").replace(",", "")
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.0+)?", text) and int(float(text)) >= 1:
        return int(float(text))
    raise SpecError(f"column {column} holds {row[column]!r}, not a whole number of at least 1.")


@dataclass(frozen=True)
class Usual:
    """What a stack does where a table does not say."""

    dispatcher: str = "alltoall"
    graphs: str = "none"
    overlap: bool = False


def usual_of(row: Mapping[str, str], software: words.Software, hardware: str, work: Workload) -> Usual:
    """Habits of Megatron-Bridge's recipes, read off the branches that other rows of its tables print.

    NVL72 machines: HybridEP and graphs of attention and router from 25.11; HybridEP on other Blackwell from 26.02.
    Experts over several nodes of eight with virtual stages: dispatch under another micro-batch's work, by DeepEP until
    26.02. From 26.06 all runs for speed hide dispatch, and with mxfp8 on NVL72 launch the whole step as one graph.
    """
    if software.framework in ("automodel", "hai-llm"):
        return Usual("deepep")
    match = re.match(r"(2\d\.\d\d)", software.release)
    release = float(match[1]) if match and software.framework == "megatron" else 0.0
    rack, notes = hardware in ("GB200", "GB300"), row.get("other_notes", "").lower()
    across = not rack and (count_in(row, "ep") or 1) > 8 and (count_in(row, "vpp") or 1) > 1
    dispatcher = "hybridep" if release >= (25.11 if rack else 26.02) and hardware in BLACKWELL else "alltoall"
    if across and 25.09 <= release < 26.04 and dispatcher == "alltoall":
        dispatcher = "deepep"
    if release >= 26.06 and words.tuned_of(notes):
        return Usual(dispatcher, "full" if rack and work.precision == "mxfp8" else "none", True)
    graphs = "part" if rack and release >= 25.11 and "recipe" not in notes else "none"
    return Usual(dispatcher, graphs, across and release >= 25.09)


def layout_of(
    row: Mapping[str, str],
    work: Workload,
    gpus: int,
    software: words.Software,
    usual: Usual,
    assumed: list[str],
) -> tuple[Workload, Layout]:
    """The layout of `row` on `gpus` accelerators, and the workload with its batch filled in. What was guessed is
    appended to `assumed`.

    Raises:
        SpecError: a degree that the row neither prints nor implies, or degrees that do not fit together.
    """
    notes = row.get("other_notes", "")
    printed = {column: count_in(row, column) for column in ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch")}
    fsdp = software.framework in ("torchtitan", "automodel", "fsdp") or "fsdp" in notes.lower()
    experts = tuple(sorted({layer.moe.router.experts for layer in work.model.layers if layer.moe is not None}))
    told = {column: size for column, size in words.degrees_of(notes).items() if printed[column] is None}
    if told:
        printed |= told
        assumed.append(f"{', '.join(f'{column} {size}' for column, size in told.items())}, from the notes")
    if software.framework == "megascale" and printed["tp"] is None:
        printed |= {"tp": 1, "cp": printed["cp"] or 8, "ep": printed["ep"] or 8}
        assumed.append("sequence and expert parallelism of 8 inside a node, as MegaScale-MoE's paper describes itself")
    for column in ("tp", "pp"):
        if printed[column] is None and fsdp:
            printed[column] = 1
            assumed.append(f"{column} 1, as column {column} is empty and the rest is sharded data parallelism")
    name = row.get("software", "").strip().lower()
    if re.fullmatch(r"(tp|ep|dp|fsdp)(\+(tp|ep|dp|fsdp))*", name):  # a name that lists all degrees there are
        for column in {"pp", "ep"} - set(name.split("+")):
            if printed[column] is None:
                printed[column] = 1
                assumed.append(f"{column} 1, as the software {row['software']!r} names what there is")
    for column in ("tp", "pp") + (("ep",) if experts else ()):
        if printed[column] is None:
            raise SpecError(f"column {column} is empty, and nothing else in the row tells it.")
    tp, pp, cp, ep = printed["tp"] or 1, printed["pp"] or 1, printed["cp"] or 1, printed["ep"] or 1
    etp = printed["etp"]
    if etp is None:
        unfolded = bool(experts) and re.search(r"no folding|tp\+ep\+dp|fsdp", row.get("software", "").lower())
        etp = tp if unfolded else 1
        if unfolded and tp > 1:
            assumed.append(f"etp {tp}, as experts take the dense part's tensor parallelism without folding")
    if gpus % (tp * pp * cp):
        raise SpecError(f"tp·pp·cp = {tp}·{pp}·{cp} = {tp * pp * cp} does not divide the {gpus} of column n_gpus.")
    dp = gpus // (tp * pp * cp)
    said = re.search(r"\bDP ?=?(\d+)\b", notes)
    if said and int(said[1]) != dp:
        raise SpecError(
            f"the notes say DP {said[1]}, but n_gpus/(tp·pp·cp) = {gpus}/({tp}·{pp}·{cp}) = {dp}: the printed "
            f"degrees do not multiply to the GPUs."
        )
    if (tp * cp * dp) % (ep * etp):
        raise SpecError(
            f"ep·etp = {ep}·{etp} does not divide the tp·cp·dp = {tp * cp * dp} ranks of a stage: it is not legal."
        )
    if ep > 1 and (not experts or experts[-1] % ep):
        raise SpecError(f"column ep holds {ep}, which does not divide the {experts[-1] if experts else 0} experts.")
    work, micro = _batches(work, printed["micro_batch"], dp, pp, software, assumed)
    virtual = printed["vpp"] or 1
    if pp == 1:
        virtual = 1
    elif printed["vpp"] is None and re.search(r"megatron-core|mcore", row.get("software", "").lower()):
        virtual = _finest(len(work.model.layers), pp, work.global_batch // (micro * dp))
        assumed.append(f"{virtual} virtual stages, as Megatron-Core interleaves and its report prints no vpp")
    stages, virtual = _stages(work, pp, virtual, notes, assumed)
    dispatcher = "local" if ep * etp == 1 else words.dispatcher_of(row.get("dispatcher", ""))
    if dispatcher is None:
        dispatcher = usual.dispatcher
        assumed.append(f"dispatcher {dispatcher}, as column dispatcher is empty or not known")
    overlap = ["gradients", "parameters", *words.overlap_of(notes)]
    if usual.overlap and "overlap" not in notes.lower() and ep > 1:
        overlap.append("experts")
        assumed.append("dispatch under another micro-batch's work, as this release's recipes have it")
    if not experts and tp > 1 and software.framework == "megatron":
        overlap.append("tensor")
    return work, Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, edp=tp * cp * dp // (ep * etp), ep=ep, etp=etp,
        cp_kind="ulysses" if software.framework == "megascale" else "ring",
        virtual_stages=virtual,
        sharding="parameters" if fsdp else "optimizer",
        replicas=1,
        micro_batch=micro,
        dispatcher=dispatcher,
        schedule=_schedule(notes, virtual),
        order="pp-outer",
        stages=stages,
        experts_ep=tuple((count, math.gcd(ep, count)) for count in experts),
        recompute=words.recompute_of(row.get("recompute", "")),
        overlap=tuple(dict.fromkeys(overlap)),
        offload=words.offload_of(notes),
    )  # fmt: skip


def _batches(
    work: Workload, micro: int | None, dp: int, pp: int, software: words.Software, assumed: list[str]
) -> tuple[Workload, int]:
    if software.framework == "torchtitan" and micro is not None:
        # There a batch is what one rank takes in a step; a pipeline cuts it into single sequences.
        batch = work.global_batch or micro * dp
        micro = 1 if pp > 1 else micro
    else:
        if micro is None:
            micro = 1
            assumed.append("micro-batches of 1 sequence, as column micro_batch is empty")
        batch = work.global_batch
    if not batch:
        raise SpecError("column global_batch is empty, and nothing else in the row tells it.")
    if batch < micro * dp:
        raise SpecError(f"global_batch {batch} is less than micro_batch·dp = {micro}·{dp}.")
    if batch % (micro * dp):
        raise SpecError(f"global_batch {batch} is not a multiple of micro_batch·dp = {micro}·{dp}.")
    return replace(work, global_batch=batch), micro


def _stages(work: Workload, pp: int, virtual: int, notes: str, assumed: list[str]) -> tuple[tuple[Stage, ...], int]:
    layers, mtp = len(work.model.layers), len(work.model.mtp)
    printed = re.search(r"(?:PP )?layout (Et?[EtmL|()*0-9]+)", notes)
    if printed:
        try:
            stages = parse_stages(printed[1], layers, mtp if "m" in printed[1] else 0)
            if len(stages) == pp * virtual:
                return stages, virtual
        except SpecError:
            pass
        assumed.append(f"layers dealt evenly, as the printed stages {printed[1]!r} do not fit")
    count = pp * virtual
    if count > layers + 2:
        virtual = max(1, layers // pp)
        assumed.append(f"{virtual} virtual stages, as pp·vpp = {count} is more than the {layers} layers")
        count = pp * virtual
    if layers % count and (layers + 2) % count == 0:
        each = (layers + 2) // count
        cuts = [0, each - 1, *(each - 1 + each * i for i in range(1, count - 1)), layers]
        return tuple(
            Stage(i == 0, tuple(range(cuts[i], cuts[i + 1])), i == count - 1 and mtp > 0, i == count - 1)
            for i in range(count)
        ), virtual
    if mtp and count > 1 and layers % count:
        assumed.append("layers dealt with the prediction block and head as three, as Megatron-Bridge's recipes do")
        return _light_end(count, layers), virtual
    return default_stages(count, layers, mtp), virtual


def _finest(layers: int, pp: int, micro_batches: int) -> int:
    """The most virtual stages of equally many layers that a tuned run without printed ones may have."""
    return layers // pp if layers % pp == 0 and micro_batches % pp == 0 else 1


def _light_end(count: int, layers: int) -> tuple[Stage, ...]:
    """`count` stages with fewer layers on the last, where a prediction block and the head weigh as much as three: of 61
    layers 4·15 + 1 on 16 stages, 1 + 2·30 + 0 on 32 (Megatron-Bridge's `Et*4|(t*4|)*14tmL` and `Et|(tt|)*30mL`)."""
    last = max(0, -(-(layers + 3) // count) - 3)
    each, more = divmod(layers - last, count - 1)
    sizes = [each] * (count - 1 - more) + [each + 1] * more + [last]
    stops = [sum(sizes[: i + 1]) for i in range(count)]
    return tuple(
        Stage(i == 0, tuple(range(stop - size, stop)), i == count - 1, i == count - 1)
        for i, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )


def _schedule(notes: str, virtual: int) -> str:
    text = notes.lower()
    if "dualpipe" in text:
        return "dualpipe"
    if re.search(r"zero-?bubble", text):
        return "zero_bubble"
    return "interleaved" if virtual > 1 else "1f1b"
