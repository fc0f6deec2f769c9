"""Documents from files: text, JSONL, parquet, and Arrow (also as saved by Hugging Face `datasets`).

Every source yields the same thing, pieces of text in a fixed order, so that the same documents give the same tokens
in whichever format they come. Nothing is normalised: line ends and byte-order marks stay what they are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.spec.errors import nearest
from moesaic.train.data.errors import DataError
from moesaic.train.data.files import resolve
from moesaic.train.data.tokenizers import one_line

BLOCK = 16 << 20
"""Bytes of a text file that are tokenised at once; longer files are cut after a line."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    read: int
    """Bytes of the input that are done with after this piece, for progress."""


@dataclass
class Source:
    """Documents of one data path.

    `notices` fills while reading: what was left out, and why.
    """

    kind: str
    files: list[Path]
    text_key: str = "text"
    notices: list[str] = field(default_factory=list)

    def all_files(self) -> list[Path]:
        """The files on disk, those inside a saved dataset included."""
        out: list[Path] = []
        for path in self.files:
            out.extend(sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path])
        return out

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.all_files())

    def describe(self) -> str:
        """One line for the console: what was found where."""
        files = self.all_files()
        where = files[0] if len(files) == 1 else Path(*common_parts(files))
        count = "1 file" if len(files) == 1 else f"{len(files):,} files"
        return f"{self.kind}, {count}, {human_bytes(self.size())} in {where}"

    def pieces(self) -> Iterator[Piece]:
        """All documents in order. Raises DataError for a file that cannot be read as its format."""
        readers = {"text": self.text, "jsonl": self.jsonl, "parquet": self.parquet, "arrow": self.arrow}
        return readers[self.kind]()

    def text(self) -> Iterator[Piece]:
        """Each file is one document. Among several files, those that are not UTF-8 text are left out and counted."""
        done, skipped = 0, []
        for path in self.files:
            try:
                yield from text_pieces(path, done)
            except NotText as error:
                if len(self.files) == 1 or error.started:
                    raise DataError(
                        f"the data file {path} is not UTF-8 text (byte {error.position:,} is {error.reason}); "
                        "convert it, or set data.format if it is in another format."
                    ) from error
                skipped.append(path)
            done += path.stat().st_size
        if skipped:
            first = f"the first is {skipped[0]}"
            if len(skipped) == len(self.files):
                raise DataError(f"none of the {len(self.files):,} data files is UTF-8 text, {first}; set data.format.")
            self.notices.append(f"{len(skipped):,} of {len(self.files):,} files are not UTF-8 text: left out, {first}")

    def jsonl(self) -> Iterator[Piece]:
        """Each line is an object whose `text_key` holds a document."""
        done = broken = 0
        for path in self.files:
            with open_or_fail(path) as raw:
                stream = gzip.open(raw) if path.name.endswith(".gz") else raw
                try:
                    for number, line in enumerate(stream, start=1):
                        if not line.strip():
                            continue
                        text = self.json_text(path, number, line)
                        if b"\\ud" in line.lower() and not encodable(text):
                            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                            broken += 1
                        yield Piece(text, True, done + raw.tell())
                except (OSError, EOFError) as error:
                    raise DataError(f"the data file {path} cannot be read to its end: {one_line(error)}.") from error
            done += path.stat().st_size
        if broken:
            self.notices.append(f"{broken:,} documents had half surrogate pairs, which became U+FFFD")

    def json_text(self, path: Path, number: int, line: bytes) -> str:
        """The document on one line of a JSONL file."""
        where = f"line {number:,} of {path}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {one_line(error)}; JSONL has one object per line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is a JSON {type(row).__name__}, not an object with a {self.text_key!r} key.")
        if self.text_key not in row:
            raise DataError(missing_key(where, self.text_key, list(row)))
        text = row[self.text_key]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise DataError(f"{self.text_key!r} in {where} is a {type(text).__name__}, not text; set data.text_key.")
        return text

    def parquet(self) -> Iterator[Piece]:
        """Each row's `text_key` column is a document."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        done = 0
        for path in self.files:
            size = path.stat().st_size
            try:
                file = pq.ParquetFile(path)
                self.check_column(path, file.schema_arrow)
                rows, seen = max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(batch_size=1024, columns=[self.text_key]):
                    seen += batch.num_rows
                    yield from column_pieces(batch.column(0), done + size * seen // rows)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is not a readable parquet file: {one_line(error)}.") from error
            done += size

    def arrow(self) -> Iterator[Piece]:
        """Rows of Arrow files, or of a folder from `datasets`' save_to_disk (its "train" split if it has splits)."""
        done = 0
        for path in self.files:
            if path.is_dir():
                dataset = load_saved_dataset(path)
                self.check_column(path, dataset.features.arrow_schema)
                size, rows, seen = self.size(), max(1, len(dataset)), 0
                for table in dataset.with_format("arrow").iter(batch_size=1024):
                    seen += table.num_rows
                    yield from column_pieces(table.column(self.text_key), done + size * seen // rows)
                continue
            yield from self.arrow_file(path, done)
            done += path.stat().st_size

    def arrow_file(self, path: Path, done: int) -> Iterator[Piece]:
        """Rows of one Arrow IPC file, in the stream or the file form."""
        import pyarrow as pa

        try:
            with pa.memory_map(str(path)) as mapped:
                try:
                    reader = pa.ipc.open_stream(mapped)
                    batches = iter(reader)
                except pa.ArrowInvalid:
                    reader = pa.ipc.open_file(mapped)
                    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                self.check_column(path, reader.schema)
                for batch in batches:
                    yield from column_pieces(batch.column(batch.schema.get_field_index(self.text_key)), done)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable Arrow file: {one_line(error)}.") from error

    def check_column(self, path: Path, schema: Any) -> None:
        """Raises DataError unless the Arrow schema has `text_key` as a column of strings."""
        if self.text_key not in schema.names:
            raise DataError(missing_key(str(path), self.text_key, schema.names))
        kind = schema.field(self.text_key).type
        if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
            raise DataError(f"column {self.text_key!r} of {path} is {kind}, not text; set data.text_key.")


def open_source(path: str | Path, kind: str = "auto", text_key: str = "text") -> Source:
    """The documents at `path`; see `files.resolve` for how `kind` "auto" is decided.

    Raises DataError for paths that do not exist, are empty or cannot be opened. Not for Megatron pairs, which hold
    tokens and not text.
    """
    found, files = resolve(path, kind)
    source = Source(found, files, text_key)
    if found == "megatron":
        return source
    for file in source.all_files()[:1]:
        open_or_fail(file).close()
    if source.size() == 0:
        raise DataError(f"the data at {path} is empty: {len(source.all_files())} files of 0 bytes.")
    return source


def encodable(text: str) -> bool:
    """Whether `text` has a UTF-8 form; half of a surrogate pair, which JSON can spell, has none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class NotText(Exception):
    """A file that is not UTF-8 text; `started` if part of it was already given out."""

    def __init__(self, position: int, reason: str, started: bool) -> None:
        super().__init__(reason)
        self.position, self.reason, self.started = position, reason, started


def text_pieces(path: Path, done: int) -> Iterator[Piece]:
    """A text file as one document, in pieces of about BLOCK bytes that end after a line. Raises NotText."""
    size = path.stat().st_size
    position, rest = 0, b""
    with open_or_fail(path) as stream:
        while True:
            block = rest + stream.read(BLOCK)
            last = position + len(block) >= size or len(block) == len(rest)
            cut = len(block) if last else (block.rfind(b"\n") + 1 or character_boundary(block))
            chunk, rest = block[:cut], block[cut:]
            if (zero := chunk.find(b"\0")) >= 0:
                raise NotText(position + zero, "0x00", position > 0)
            try:
                text = chunk.decode("utf-8")
            except UnicodeDecodeError as error:
                raise NotText(position + error.start, f"0x{chunk[error.start]:02X}", position > 0) from error
            position += cut
            yield Piece(text, last, done + position)
            if last:
                return


def character_boundary(block: bytes) -> int:
    """The largest prefix of `block` that does not end inside a UTF-8 character."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte < 0x80:
            return len(block)
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) if back >= length else len(block) - back
    return len(block)


def column_pieces(column: Any, read: int) -> Iterator[Piece]:
    """Documents of one Arrow column; a null is an empty document."""
    for text in column.to_pylist():
        yield Piece(text or "", True, read)


def load_saved_dataset(path: Path) -> Any:
    """A `datasets.Dataset` from disk: the dataset itself, or the "train" split. Raises DataError otherwise."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} was saved by Hugging Face datasets; `pip install datasets` to read it.") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises many kinds for a damaged folder
        raise DataError(f"{path} cannot be loaded by Hugging Face datasets: {one_line(error)}.") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(f"{path} has the splits {', '.join(loaded)} and no 'train'; set data.path to {path}/SPLIT.")
        return loaded["train"]
    return loaded


def open_or_fail(path: Path) -> Any:
    """`path` opened for reading bytes, or DataError with the reason."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}.") from error


def missing_key(where: str, key: str, known: list[str]) -> str:
    """The sentence for a text key that is not there."""
    return f"{where} has no {key!r}: {nearest(key, known)} Set data.text_key." if known else f"{where} has no keys."


def human_bytes(count: int) -> str:
    """A number of bytes in a decimal unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def common_parts(files: list[Path]) -> tuple[str, ...]:
    """Parts of the deepest folder that holds all `files`."""
    parts = files[0].parent.parts
    for path in files[1:]:
        while path.parent.parts[: len(parts)] != parts:
            parts = parts[:-1]
    return parts or (".",)
