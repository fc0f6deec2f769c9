"""Rows of a published table of measurements as what the planner prices: workload, layout, cluster and stack.

The columns are those of `benchmarks/published/measurements.csv`. A cell that does not follow from the others, and
without which a step has no time, makes its row unusable; the reason names the column. What is assumed is listed with
each row, and widens its interval.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moesaic.cost.counts import flops_per_token
from moesaic.cost.rates import Stack
from moesaic.cost.workload import Workload
from moesaic.spec.cluster import ClusterSpec, load_cluster
from moesaic.spec.errors import MoesaicError, SpecError, nearest
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.stages import Stage, default_stages, parse_stages

from . import published_words as words
from .published_models import model_named

COLUMNS = (
    "id", "source", "date", "software", "model", "total_params_B", "hardware", "n_gpus", "precision", "seq_len",
    "global_batch", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "etp", "dispatcher", "recompute", "other_notes",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s",
)  # fmt: skip
"""Columns of the table, all cells text."""
VALUES = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
"""Columns that hold what was measured."""
NEEDED = ("id", "model", "hardware", "n_gpus")
"""Columns without which no row can be priced."""
SEQ_ASSUMED = 4096


@dataclass(frozen=True)
class Traits:
    """What is known of a run beside workload, layout, cluster and stack, for the corrections."""

    year: float | None = None
    """When it was measured or released, as a year with a fraction; None if not printed."""
    graphs: str = "none"
    """`none`, `part` or `full`."""
    routing: str = ""
    """`forced`, `natural`, `dropped`, or empty where not printed."""
    network: str = ""
    """`efa`, or empty for what the accelerator's maker has."""
    granularity: str = ""
    """Of low-precision scales: `tensor` or `block`."""
    tuned: bool = True
    """A run for speed, not one that checks that a recipe works."""
    assumptions: int = 0
    """How many cells were assumed."""


@dataclass(frozen=True)
class Run:
    """One row that can be priced."""

    id: str
    source: str
    model: str
    hardware: str
    """The accelerator as priced."""
    precision: str
    work: Workload
    layout: Layout
    cluster: ClusterSpec
    stack: Stack
    traits: Traits
    measured: dict[str, float]
    """By quantity: step_time_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu, memory_gib."""
    flops_per_token: float
    """By the source's way of counting: turns tokens/s into its TFLOP/s."""
    assumed: tuple[str, ...] = ()
    """What was filled in or guessed, each a phrase."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, from what is printed: the step itself, else tokens/s, else TFLOP/s, else MFU."""
        per_gpu = self.work.tokens / self.cluster.gpus
        if "tokens_per_s_per_gpu" in self.measured:
            return per_gpu / self.measured["tokens_per_s_per_gpu"]
        if "step_time_s" in self.measured:
            return self.measured["step_time_s"]
        if "tflops_per_gpu" in self.measured:
            return per_gpu * self.flops_per_token / (self.measured["tflops_per_gpu"] * 1e12)
        return per_gpu * self.flops_per_token / (self.measured["mfu"] / 100 * self.peak)

    @property
    def peak(self) -> float:
        """FLOP/s that a printed MFU is relative to: bf16 peak."""
        return self.cluster.gpu.peak_flops["bf16"]

    def quantities(self, seconds: float) -> dict[str, float]:
        """What a step of `seconds` means in every quantity that the row prints but memory."""
        rate = self.work.tokens / self.cluster.gpus / seconds
        flops = rate * self.flops_per_token
        all_of_them = {
            "step_time_s": seconds,
            "tokens_per_s_per_gpu": rate,
            "tflops_per_gpu": flops / 1e12,
            "mfu": 100 * flops / self.peak,
        }
        return {name: value for name, value in all_of_them.items() if name in self.measured}


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be priced."""

    id: str
    reason: str


@dataclass(frozen=True)
class Published:
    """A table as read."""

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]
    remarks: tuple[str, ...] = field(default=())
    """About the table as a whole: columns that it lacks or that are not known, rows that stand twice."""


def read_published(path: Path) -> Published:
    """Every row of the table at `path` as a run, or the reason why not.

    Raises:
        SpecError: there is no such file, it is empty, it is no CSV, or it lacks a column of `NEEDED` or all of `VALUES`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise SpecError(f"There is no file {str(path)!r}; give a CSV with the columns of a published table.") from error
    except IsADirectoryError as error:
        raise SpecError(f"{str(path)!r} is a folder; give the CSV itself.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{str(path)!r} is not UTF-8 text (byte {error.start}), so it is no CSV.") from error
    return read_rows(text, str(path))


def read_rows(text: str, name: str = "the table") -> Published:
    """As `read_published`, of text that is already here."""
    if not text.strip():
        raise SpecError(f"{name} is empty: a first line of column names and a row each are expected.")
    if "\0" in text:
        raise SpecError(f"{name} holds NUL bytes: it is no CSV.")
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise SpecError(f"{name} is no CSV: {error}.") from error
    header = [cell.strip() for cell in lines[0]]
    remarks = _check_header(header, name)
    runs: list[Run] = []
    skipped: list[Skipped] = []
    seen: dict[str, int] = {}
    content: dict[tuple[str, ...], str] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        row = {key: cell.strip() for key, cell in zip(header, cells, strict=False)}
        row_id = row.get("id") or f"line {number}"
        try:
            if len(cells) != len(header):
                raise SpecError(f"line {number} has {len(cells)} cells, but there are {len(header)} columns.")
            if row_id in seen:
                raise SpecError(f"the id stands already in line {seen[row_id]}.")
            runs.append(run_of(row))
        except MoesaicError as error:
            skipped.append(Skipped(row_id, str(error)))
        seen.setdefault(row_id, number)
        key = tuple(row.get(column, "") for column in COLUMNS if column != "id")
        if key in content and content[key] != row_id:
            remarks.append(f"{row_id} repeats {content[key]} in every column but the id.")
        content.setdefault(key, row_id)
    return Published(tuple(runs), tuple(skipped), tuple(remarks))


def _check_header(header: list[str], name: str) -> list[str]:
    for column in NEEDED:
        if column not in header:
            raise SpecError(f"{name} has no column {column!r}, which every row needs; {nearest(column, header)}")
    if not set(VALUES) & set(header):
        raise SpecError(f"{name} has none of the columns {', '.join(VALUES)}: there is nothing to compare with.")
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise SpecError(f"{name} has column {twice[0]!r} twice.")
    remarks = [f"column {column!r} is missing: read as empty." for column in COLUMNS if column not in header]
    for column in header:
        if column not in COLUMNS:
            remarks.append(f"column {column!r} is not known and was not read; {nearest(column, COLUMNS)}")
    return remarks


def run_of(row: Mapping[str, str]) -> Run:
    """The run of one row, cells by column.

    Raises:
        SpecError: why the row cannot be priced; the sentence names the column.
    """
    notes = row.get("other_notes", "")
    assumed: list[str] = []
    measured = _measured(row, notes)
    _refuse_kinds(row, notes)
    model = model_named(row.get("model", ""), notes)
    work = _workload(row, model, notes, assumed)
    hardware, network = words.gpu_in(row.get("hardware", ""))
    if hardware is None:
        raise SpecError(
            f"column hardware holds {row.get('hardware', '')!r}, which names none of {', '.join(words.GPUS)}."
        )
    gpus = _count(row, "n_gpus")
    if gpus is None:
        raise SpecError("column n_gpus is empty, and the degrees do not tell the data-parallel one without it.")
    software = words.software_of(row.get("software", ""))
    work, layout = _layout(row, work, gpus, software, hardware, notes, assumed)
    graphs, routing = words.graphs_of(notes), words.routing_of(notes)
    mtp = work.mtp and bool(model.mtp)
    windows = flops_per_token(model, work.seq_len, mtp=mtp).total
    return Run(
        id=row.get("id", ""),
        source=row.get("source", ""),
        model=model.name,
        hardware=hardware,
        precision=work.precision,
        work=work,
        layout=layout,
        cluster=load_cluster(hardware, gpus),
        stack=Stack(software.framework, software.release, graphs != "none", routing != "natural"),
        traits=Traits(
            _year(row, software), graphs, routing, network, words.precision_of(row.get("precision", ""))[1],
            not _is_check(row, notes), len(assumed),
        ),
        measured=measured,
        flops_per_token=words.flops_convention(notes) or windows,
        assumed=tuple(assumed),
    )  # fmt: skip


def _measured(row: Mapping[str, str], notes: str) -> dict[str, float]:
    measured = {}
    for column in VALUES:
        text = row.get(column, "")
        if not text:
            continue
        try:
            value = float(text.replace(",", "").lstrip("~"))
        except ValueError:
            raise SpecError(f"column {column} holds {text!r}, not a number.") from None
        if not (math.isfinite(value) and value > 0):
            raise SpecError(f"column {column} holds {text!r}; a measurement is above 0.")
        measured[column] = value
    if not measured:
        raise SpecError(f"columns {', '.join(VALUES)} are all empty: nothing was measured.")
    memory = words.peak_memory_gib(notes)
    if memory is not None:
        measured["memory_gib"] = memory
    return measured


def _refuse_kinds(row: Mapping[str, str], notes: str) -> None:
    text = f"{row.get('model', '')} {notes}".lower()
    if re.search(r"\blora\b|\bpeft\b", text):
        raise SpecError("it trains adapters, whose frozen weights have no gradients: no workload here says so.")
    if "sequence_packing=" in text or re.search(r"(^|[ ;])sft_long_context", notes.lower()):
        raise SpecError(
            "it is fine-tuning on packed examples whose lengths are not printed, so that attention, filling of "
            "sequences and routing are not known."
        )
    if re.search(r"published note: regression", text):
        raise SpecError("its own source says that a bug made it slow.")
    if "offload fraction" in text:
        raise SpecError("a part of the optimizer is offloaded; a layout here offloads all or nothing.")


def _is_check(row: Mapping[str, str], notes: str) -> bool:
    """Verification cards of Megatron-Bridge whose item is not one of performance: recipes that work, not tuned ones."""
    return "model_verification_cards" in row.get("source", "") and not re.match(
        r"pretrain_(performance|weak)", notes.strip()
    )


def _year(row: Mapping[str, str], software: words.Software) -> float | None:
    for text, pattern in ((row.get("date", ""), r"(20\d\d)-(\d\d)"), (software.release, r"^(2\d)\.(\d\d)")):
        match = re.search(pattern, text)
        if match:
            year = int(match[1])
            return (year if year > 100 else 2000 + year) + (int(match[2]) - 0.5) / 12
    return None


def _count(row: Mapping[str, str], column: str) -> int | None:
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


def _workload(row: Mapping[str, str], model: ModelSpec, notes: str, assumed: list[str]) -> Workload:
    text = f"{row.get('model', '')} {notes}".lower()
    cell = row.get("precision", "")
    precision, _ = words.precision_of(cell)
    if precision is None:
        precision = "bf16"
        assumed.append(f"precision bf16, as column precision holds {cell!r}")
    seq_len = _count(row, "seq_len")
    if seq_len is None:
        match = re.search(r"\bseq(?:uence)?[ _]?len(?:gth)? (\d+)", text)
        seq_len = int(match[1]) if match else SEQ_ASSUMED
        if not match:
            assumed.append(f"sequences of {SEQ_ASSUMED} tokens, as column seq_len is empty")
    batch = _count(row, "global_batch")
    return Workload(
        model=model,
        seq_len=seq_len,
        global_batch=batch or 0,
        precision=precision,
        mtp=bool(model.mtp) and not re.search(r"no mtp|w/o mtp|without mtp", text),
        moment_bytes=2 if "bf16 adam" in text else 4,
    )


def _layout(
    row: Mapping[str, str],
    work: Workload,
    gpus: int,
    software: words.Software,
    hardware: str,
    notes: str,
    assumed: list[str],
) -> tuple[Workload, Layout]:
    printed = {column: _count(row, column) for column in ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch")}
    fsdp = software.framework in ("torchtitan", "automodel", "fsdp") or "fsdp" in notes.lower()
    experts = tuple(sorted({layer.moe.router.experts for layer in work.model.layers if layer.moe is not None}))
    if software.framework == "megascale" and printed["tp"] is None:
        printed |= {"tp": 1, "cp": printed["cp"] or 8, "ep": printed["ep"] or 8}
        assumed.append("sequence and expert parallelism of 8 inside a node, as MegaScale-MoE's paper describes itself")
    for column in ("tp", "pp"):
        if printed[column] is None and fsdp:
            printed[column] = 1
            assumed.append(f"{column} 1, as column {column} is empty and the rest is sharded data parallelism")
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
    stages, virtual = _stages(work, pp, virtual, notes, assumed)
    dispatcher = "local" if ep * etp == 1 else words.dispatcher_of(row.get("dispatcher", ""))
    if dispatcher is None:
        dispatcher = _usual_dispatcher(software, hardware)
        assumed.append(f"dispatcher {dispatcher}, as column dispatcher is empty or not known")
    overlap = ["gradients", "parameters", *words.overlap_of(notes)]
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
        # There a batch is what one rank takes in a step, without accumulation; a pipeline cuts it into single sequences.
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
    changed = {"global_batch": batch}
    return Workload(**{**work.__dict__, **changed}), micro


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
    return default_stages(count, layers, mtp), virtual


def _usual_dispatcher(software: words.Software, hardware: str) -> str:
    """What a stack uses where a table does not say: Megatron's recipes take HybridEP on Blackwell from 26.02 on."""
    if software.framework in ("automodel", "hai-llm"):
        return "deepep"
    newer = re.match(r"2[6-9]\.", software.release)
    return "hybridep" if newer and hardware in ("GB200", "GB300", "B200", "B300") else "alltoall"


def _schedule(notes: str, virtual: int) -> str:
    text = notes.lower()
    if "dualpipe" in text:
        return "dualpipe"
    if re.search(r"zero-?bubble", text):
        return "zero_bubble"
    return "interleaved" if virtual > 1 else "1f1b"


def unique(values: Iterable[str]) -> tuple[str, ...]:
    """Values once each, in order."""
    return tuple(dict.fromkeys(values))
