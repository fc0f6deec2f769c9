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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moesaic.cost.corrections import Traits
from moesaic.cost.counts import flops_per_token
from moesaic.cost.rates import Stack
from moesaic.cost.workload import Workload
from moesaic.spec.cluster import ClusterSpec, load_cluster
from moesaic.spec.errors import MoesaicError, SpecError, nearest
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec

from . import published_words as words
from .published_layout import count_in, layout_of, usual_of
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
        SpecError: there is no such file, it is empty, it is no CSV, or it lacks a column that is needed.
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
    gpus = count_in(row, "n_gpus")
    if gpus is None:
        raise SpecError("column n_gpus is empty, and the degrees do not tell the data-parallel one without it.")
    software = words.software_of(row.get("software", ""))
    graphs, routing = words.graphs_of(notes), words.routing_of(notes)
    usual = usual_of(row, software, hardware, work)
    if graphs == "none" and usual.graphs != "none" and "graph" not in notes.lower():
        graphs = usual.graphs
        assumed.append(
            f"CUDA graphs over {'the step' if graphs == 'full' else 'parts'}, as this release's recipes have"
        )
    work, layout = layout_of(row, work, gpus, software, usual, assumed)
    flops = flops_per_token(model, work.seq_len, mtp=work.mtp and bool(model.mtp)).total
    return Run(
        id=row.get("id", ""),
        source=row.get("source", ""),
        model=model.name,
        hardware=hardware,
        precision=work.precision,
        work=work,
        layout=layout,
        cluster=load_cluster(hardware, gpus, network=network),
        stack=Stack(
            software.framework,
            software.release,
            graphs != "none",
            routing != "natural",
            routing == "dropped",
            words.fused_of(notes),
        ),
        traits=Traits(
            year=_year(row, software),
            graphs=graphs,
            routing=routing,
            network=network,
            backend=words.backend_of(row.get("dispatcher", "")),
            granularity=words.precision_of(row.get("precision", ""))[1],
            printed=bool(row.get("dispatcher")) or "recipe" in notes or layout.ep * layout.etp == 1,
            tuned=words.tuned_of(notes) is not False,
            assumptions=len(assumed),
        ),
        measured=measured,
        flops_per_token=words.flops_convention(notes) or flops,
        assumed=tuple(assumed),
    )


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


def _year(row: Mapping[str, str], software: words.Software) -> float | None:
    for text, pattern in ((row.get("date", ""), r"(20\d\d)-(\d\d)"), (software.release, r"^(2\d)\.(\d\d)")):
        match = re.search(pattern, text)
        if match:
            year = int(match[1])
            return (year if year > 100 else 2000 + year) + (int(match[2]) - 0.5) / 12
    return None


def _workload(row: Mapping[str, str], model: ModelSpec, notes: str, assumed: list[str]) -> Workload:
    text = f"{row.get('model', '')} {notes}".lower()
    cell = row.get("precision", "")
    precision, _ = words.precision_of(cell)
    if precision is None:
        precision = "bf16"
        assumed.append(f"precision bf16, as column precision holds {cell!r}")
    seq_len = count_in(row, "seq_len")
    if seq_len is None:
        match = re.search(r"\bseq(?:uence)?[ _]?len(?:gth)? (\d+)", text)
        seq_len = int(match[1]) if match else SEQ_ASSUMED
        if not match:
            assumed.append(f"sequences of {SEQ_ASSUMED} tokens, as column seq_len is empty")
    batch = count_in(row, "global_batch")
    return Workload(
        model=model,
        seq_len=seq_len,
        global_batch=batch or 0,
        precision=precision,
        mtp=bool(model.mtp) and not re.search(r"no mtp|w/o mtp|without mtp", text),
        moment_bytes=2 if "bf16 adam" in text else 4,
    )
