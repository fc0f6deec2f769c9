"""The tables of docs/hardware.md that follow from data: `python -m tests.spec.hardware_tables` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from moesaic.spec.cluster import gpu_named, gpu_names
from moesaic.spec.gpus import catalogue
from moesaic.spec.gpus.tables import PEAKS, RATE_COLUMNS, file_keys

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "hardware.md"


def accelerators() -> str:
    """One row for each accelerator."""
    columns = ["name", "accelerator", *PEAKS, "GiB", "TB/s", "link GB/s", "domain", "node", "NIC Gbit/s", "host GB/s"]
    lines = [_row(columns), _row(["---", "---", *["--:"] * (len(columns) - 2)])]
    for short in gpu_names():
        gpu = gpu_named(short)
        peaks = [f"{gpu.peak_flops[p] / 1e12:,.6g}" if p in gpu.peak_flops else "" for p in PEAKS]
        links = [gpu.link_bandwidth / 1e9, gpu.domain, gpu.gpus_per_node, gpu.nic_bandwidth * 8 / 1e9]
        figures = [gpu.memory_bytes / 2**30, gpu.memory_bandwidth / 1e12, *links, gpu.host_bandwidth / 1e9]
        lines.append(_row([f"`{short}`", gpu.name, *peaks, *(f"{figure:.4g}" for figure in figures)]))
    return "\n".join(lines)


def sources() -> str:
    """Every figure's source."""
    lines = []
    for short, file in catalogue().items():
        lines.append(f"**`{short}`** ({', '.join(file.gpu.aliases)})\n")
        lines += [f"- {key}: {text}" for key, text in file.sources.items()]
        lines.append("")
    return "\n".join(lines).strip()


def keys() -> str:
    """Every key of a cluster file."""
    lines = [_row(["key", "unit", "meaning"]), _row(["---"] * 3)]
    lines += [_row([f"`{key}`", unit, text]) for key, unit, text in file_keys()]
    return "\n".join(lines)


def rates() -> str:
    """Every rate and its columns; those of precisions and products in one row."""
    by_columns: dict[tuple[str, ...], list[str]] = {}
    for name, columns in RATE_COLUMNS.items():
        by_columns.setdefault(columns, []).append(name)
    lines = [_row(["rate", "columns"]), _row(["---"] * 2)]
    for columns, names in by_columns.items():
        kind = "PASS" if columns[0] in ("experts", "positions", "tokens") else "PRODUCT"
        general = sorted({re.sub(rf"_({'|'.join(PEAKS)})_[a-z]+$", f"_PRECISION_{kind}", name) for name in names})
        lines.append(_row([", ".join(f"`{name}`" for name in general), ", ".join(columns)]))
    return "\n".join(lines)


TABLES = {"accelerators": accelerators, "keys": keys, "rates": rates, "sources": sources}


def with_tables(page: str) -> str:
    """The page with its tables as they follow from the data."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(start)
        _, after = rest.split(end)
        page = f"{before}{start}{table()}\n{end}{after}"
    return page


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
