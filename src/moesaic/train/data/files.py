"""Which files a data path means, and what format they are in."""

from __future__ import annotations

import glob as globbing
import os
from collections import Counter
from pathlib import Path

from moesaic.spec.errors import nearest
from moesaic.train.data.errors import DataError

FORMATS = ("text", "jsonl", "parquet", "arrow", "megatron")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
    ".bin": "megatron",
}
DATASET_FILES = ("dataset_dict.json", "state.json")


def suffix_format(path: Path) -> str:
    """The format that a file's name announces; text when it announces none."""
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "text")


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder written by `datasets`' save_to_disk."""
    return path.is_dir() and any((path / name).is_file() for name in DATASET_FILES)


def megatron_prefix(path: Path) -> Path | None:
    """The common prefix of a Megatron pair, whether `path` is the .bin, the .idx or the prefix; None if neither."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if Path(f"{path}.idx").is_file() or Path(f"{path}.bin").is_file():
        return path
    return None


def list_folder(folder: Path) -> list[Path]:
    """All regular files under `folder`, sorted by their path in it; hidden ones and `__pycache__` are left out."""
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        paths = (Path(root) / name for name in names if not name.startswith("."))
        found.extend(path for path in paths if path.is_file())
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def find_files(path: str | Path) -> list[Path]:
    """The files that `path` (a file, a folder, or a glob such as "src/**/*.py") stands for, in a fixed order.

    Raises DataError if there are none.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        files = list_folder(given)
        if not files:
            raise DataError(f"the data folder {given} has no files; put text, JSONL or parquet files there.")
        return files
    if given.is_file():
        return [given]
    if given.exists():
        raise DataError(f"the data path {given} is neither a file nor a folder; save its contents to a file first.")
    if globbing.has_magic(str(given)):
        matches = [Path(name) for name in globbing.glob(str(given), recursive=True)]
        files = sorted((match for match in matches if match.is_file()), key=lambda match: match.as_posix())
        if not files:
            raise DataError(f"no file matches the data path {given}; try the pattern in `ls` first.")
        return files
    hint = ""
    if given.parent.is_dir():
        names = [entry.name for entry in given.parent.iterdir() if not entry.name.startswith(".")]
        hint = f" In {given.parent}: {nearest(given.name, names)}" if names else f" {given.parent} is empty."
    raise DataError(f"the data path {given} does not exist.{hint}")


def resolve(path: str | Path, kind: str = "auto") -> tuple[str, list[Path]]:
    """The format (one of FORMATS) and the files of a data path.

    `kind` "auto" goes by the names: a folder takes the structured format (JSONL, parquet, Arrow) that makes up most of
    its bytes, and is a folder of texts otherwise. For Megatron the one path returned is the prefix of the pair; for a
    dataset saved by `datasets` it is the folder. Raises DataError for an unknown format or a path with no files.
    """
    if kind not in (*FORMATS, "auto"):
        raise DataError(f"unknown data.format {kind!r}; {nearest(kind, (*FORMATS, 'auto'))}")
    given = Path(path).expanduser()
    if kind in ("auto", "arrow") and is_saved_dataset(given):
        return "arrow", [given]
    if kind in ("auto", "megatron"):
        prefix = megatron_prefix(given)
        if prefix is not None:
            return "megatron", [prefix]
        if kind == "megatron":
            raise DataError(f"there is no Megatron pair {given}.bin and {given}.idx; give their common prefix.")
    files = find_files(given)
    if kind == "auto":
        size: Counter[str] = Counter()
        for file in files:
            size[suffix_format(file)] += max(1, file.stat().st_size)
        kind = size.most_common(1)[0][0]
        if kind == "megatron":
            pairs = sorted({str(file.with_suffix("")) for file in files if file.suffix == ".idx"})
            shown = ", ".join(pairs[:3]) or "none complete"
            raise DataError(f"{given} holds Megatron pairs ({shown}); set data.path to the prefix of one of them.")
    if kind != "text" and given.is_dir():
        files = [file for file in files if suffix_format(file) == kind]
        if not files:
            raise DataError(f"the data folder {given} has no {kind} files; check data.path and data.format.")
    return kind, files
