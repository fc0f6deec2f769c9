"""A cluster as TOML: the tables of the catalogue's files and of one's own, each key with its type, unit and help.

[cluster]
gpu = "h100"        # a name of the catalogue; [gpu] then needs only what differs
gpus = 256
nic_gbps = 200

[gpu]               # figures of an accelerator, per accelerator and, for links, per direction
peak_tflops = { bf16 = 989.4, fp8 = 1978.9 }
memory_gib = 79.6

[sources]           # where the figures of [gpu] are from, by key
memory_gib = "what nvidia-smi prints"

[rates]             # what was measured; columns as in RATE_COLUMNS
all_gather = [[8, 8, 1.9e-05, 3.4e+11]]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from ..errors import SpecError, nearest
from ..tables import Table
from ..toml import read_toml

Peak = Literal["fp32", "tf32", "bf16", "fp8", "fp4"]
PEAKS: tuple[str, ...] = get_args(Peak)
Architecture = Literal["ampere", "hopper", "blackwell", "cdna3", "cdna4", "cpu"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
PRODUCTS = ("forward", "input", "weight")
"""Of a linear layer: y = x Wᵀ, the gradient of x, the gradient of W."""
PASSES = ("forward", "backward")
RATE_COLUMNS: dict[str, tuple[str, ...]] = {
    **{f"matmul_{peak}_{product}": ("m", "n", "k", "efficiency") for peak in PEAKS for product in PRODUCTS},
    **{f"grouped_{peak}_{product}": ("groups", "m", "n", "k", "efficiency") for peak in PEAKS for product in PRODUCTS},
    **{
        f"experts_{peak}_{way}": ("experts", "rows", "width", "hidden", "efficiency")
        for peak in PEAKS
        for way in PASSES
    },
    **{f"attention_{peak}_{way}": ("positions", "heads", "width", "efficiency") for peak in PEAKS for way in PASSES},
    **{f"norm_{peak}_{way}": ("tokens", "hidden", "bytes_per_second") for peak in PEAKS for way in PASSES},
    "memory": ("bytes", "bytes_per_second"),
    "host": ("bytes", "bytes_per_second"),
    "launch": ("seconds",),
    **dict.fromkeys(COLLECTIVES, ("size", "members", "latency_seconds", "bytes_per_second")),
    "overlap": ("size", "members", "message_seconds", "product_seconds", "both_seconds"),
}
"""Columns of each measured rate; every row is one measurement, or one fit.

`matmul_P_forward`: y[m,n] = x[m,k] W[n,k]ᵀ in precision P, `input` and `weight` are the gradients of that x and W, all
three of 2·m·n·k FLOPs; `efficiency` is FLOP/s over the peak of P in the same file. `grouped_P_…` does so for `groups`
matrices W at once, each with its own m rows. `experts_P_…` are the trainer's own gated experts, from tokens to their
sums, with `rows` choices each: 6·experts·rows·width·hidden FLOPs forward, twice that backward. `attention_P_…` is a
causal core of `heads` heads of one width over that many positions: 2·heads·width·positions·(positions + 1) FLOPs
forward, 2.5 times that backward. `norm_P_…` is the trainer's RMS norm, counted as 2·tokens·hidden values read and
written forward, 3·tokens·hidden backward. `memory` moves that many bytes, reads and writes together; `host` copies them
to the accelerator. `launch` is the time of an operation that has nothing to do. A collective over `size` ranks, of
which the fewest that share a fast domain are `members`, takes latency_seconds + bytes/bytes_per_second, where bytes are
those that one rank sends: for B bytes per rank before an all-gather B·(size−1); for B before a reduce-scatter or an
all-to-all B·(size−1)/size; for an all-reduce of B twice that; for `send` B. `overlap` is an all-to-all alone, as many
products as take about as long, and these while the all-to-all is under way."""


def _key(help: str, unit: str = "", **limits: Any) -> Any:
    return Field(None, description=help, json_schema_extra={"unit": unit}, **limits)


class GpuTable(Table):
    """[gpu]: one accelerator. Bandwidths are decimal (GB/s is 10⁹ bytes per second) and one direction."""

    name: str | None = _key("Name in tables and messages.", min_length=1)
    aliases: list[str] = Field(default=[], description="Other names that find it.", json_schema_extra={"unit": ""})
    vendor: str | None = _key("Maker.")
    architecture: Architecture | None = _key("Generation: ampere, hopper, blackwell, cdna3, cdna4 or cpu.")
    superchip: bool | None = _key("Whether one package joins it to the host's processor, as in GB200.")
    peak_tflops: dict[Peak, float] | None = _key("Dense peak by precision, never the sparse one.", "TFLOP/s")
    memory_gib: float | None = _key("Memory that programs can have, in 2³⁰ bytes.", "GiB", gt=0.0)
    memory_gb_per_s: float | None = _key("Bandwidth of that memory.", "GB/s", gt=0.0)
    link_gb_per_s: float | None = _key("Fast link to the others of its domain, one direction.", "GB/s", gt=0.0)
    domain: int | None = _key("Accelerators that the fast link joins.", "accelerators", ge=1)
    gpus_per_node: int | None = _key("Accelerators in one machine.", "accelerators", ge=1)
    nic_gbps: float | None = _key("Network of one accelerator, one direction.", "Gbit/s", gt=0.0)
    host_gb_per_s: float | None = _key("Link to host memory, one direction.", "GB/s", gt=0.0)


class ClusterKeys(Table):
    """[cluster]: which accelerators, how many, and what differs from the maker's reference machine."""

    gpu: str | None = _key("Accelerator of the catalogue whose figures hold where [gpu] gives none.")
    gpus: int | None = _key("Accelerators in all.", "accelerators", ge=1)
    domain: int | None = _key("Accelerators that the fast link joins.", "accelerators", ge=1)
    gpus_per_node: int | None = _key("Accelerators in one machine.", "accelerators", ge=1)
    nic_gbps: float | None = _key("Network of one accelerator, one direction.", "Gbit/s", gt=0.0)


class ClusterFile(Table):
    """A whole file."""

    cluster: ClusterKeys = ClusterKeys()
    gpu: GpuTable = GpuTable()
    sources: dict[str, str] = Field(default_factory=dict)
    rates: dict[str, list[list[float]]] = Field(default_factory=dict)


TABLES: dict[str, type[Table]] = {"cluster": ClusterKeys, "gpu": GpuTable}
FREE = {"sources": tuple(GpuTable.model_fields), "rates": tuple(RATE_COLUMNS)}
"""Tables whose keys are names from a list."""


def file_keys() -> list[tuple[str, str, str]]:
    """(table.key, unit, help) of every key with a fixed name."""
    rows = []
    for table, kind in TABLES.items():
        for name, field in kind.model_fields.items():
            extra: Any = field.json_schema_extra
            rows.append((f"{table}.{name}", extra["unit"], field.description or ""))
    return rows


def read_cluster_file(path: Path) -> ClusterFile:
    """The tables of a cluster file.

    Raises:
        SpecError: no such file, not TOML, or a key or value that it cannot have; the sentence names the nearest key.
    """
    content = read_toml(path)
    where = f"cluster file {str(path)!r}"
    for table, value in content.items():
        if table not in ClusterFile.model_fields:
            homes = [home for home, kind in TABLES.items() if table in kind.model_fields]
            outside = homes and not isinstance(value, dict)
            hint = f"write it under [{homes[0]}]." if outside else nearest(table, ClusterFile.model_fields)
            raise SpecError(f"{where} has {table!r}, which is not one of its tables: {hint}")
        if not isinstance(value, dict):
            raise SpecError(f"{where}: {table!r} is a table; write [{table}] and keys below it.")
        known = FREE.get(table) or tuple(TABLES[table].model_fields)
        for key in value:
            if key not in known:
                raise SpecError(f"{where}: unknown key {table + '.' + key!r}: {_nearest(table, key, known)}")
    try:
        file = ClusterFile.model_validate(content)
    except ValidationError as error:
        raise SpecError(f"{where}: {_described(error)}.") from None
    for name, rows in file.rates.items():
        check_rate(where, name, rows)
    return file


def check_rate(where: str, name: str, rows: list[list[float]]) -> None:
    """Nothing for rows that fit their columns.

    Raises:
        SpecError: an unknown rate, a row of another length, or a number that no measurement gives.
    """
    if name not in RATE_COLUMNS:
        raise SpecError(f"{where}: unknown rate {name!r}: {nearest(name, RATE_COLUMNS)}")
    columns = RATE_COLUMNS[name]
    for place, row in enumerate(rows):
        if len(row) != len(columns):
            said = f"{where}: row {place} of rates.{name} has {len(row)} numbers"
            raise SpecError(f"{said}, but the columns are {', '.join(columns)}.")
        for column, value in zip(columns, row, strict=True):
            # A fit may find that there is no latency; all else is a size or a speed.
            if value < 0 or (value == 0 and column != "latency_seconds"):
                raise SpecError(f"{where}: row {place} of rates.{name} has {column} {value:g}, which must be above 0.")


def _nearest(table: str, key: str, known: tuple[str, ...]) -> str:
    elsewhere = [f"{other}.{key}" for other, kind in TABLES.items() if other != table and key in kind.model_fields]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, known)


def _described(error: ValidationError) -> str:
    said = {}
    for detail in error.errors():
        location = [str(part) for part in detail["loc"] if not isinstance(part, int)]
        name = ".".join(part for part in location if part != "[key]")
        if "[key]" in location:
            said[name] = f"{name}: {nearest(str(detail['input']), PEAKS)}"
            continue
        kind = TABLES.get(location[0])
        field = kind.model_fields.get(location[1]) if kind is not None and len(location) > 1 else None
        extra: Any = field.json_schema_extra if field is not None else None
        unit = f", in {extra['unit']}" if extra and extra["unit"] else ""
        said[name] = f"{name} is {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}{unit}"
    return "; ".join(said.values())
