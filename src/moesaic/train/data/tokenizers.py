"""Tokenizers: plain bytes, or a Hugging Face `tokenizer.json`.

Text never produces special tokens: a document that spells out "<|endoftext|>" is encoded as ordinary text, so only the
packer writes document ends. What each token covers of the source is counted in UTF-8 bytes, so that a loss can be
given in bits per byte whatever the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.spec.errors import nearest
from moesaic.train.data.errors import DataError

DOCUMENT_END = "<|endoftext|>"
# Names under which published tokenizers keep the token that ends a document, most specific first.
DOCUMENT_END_NAMES = (
    DOCUMENT_END,
    "<|end_of_text|>",
    "<|endofdocument|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "[EOS]",
    "[EOD]",
    "<eod>",
)


class Tokenizer(Protocol):
    """What the trainer, the sampler and the packer need of a tokenizer."""

    name: str
    vocab_size: int
    """One more than the largest id that it can give."""
    document_end: int | None
    """The id that ends a document, None if the tokenizer has none."""
    bytes_table: NDArray[np.uint16] | None
    """UTF-8 bytes that each id stands for, [vocab_size]; None where that depends on the context."""
    fingerprint: str
    """Changes when any text could be encoded differently."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def bytes_of(self, ids: Sequence[int]) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.uint16] | None]]: ...

    def save(self, folder: str | Path) -> None: ...


class BytesTokenizer:
    """Ids 0…255 are the bytes of UTF-8, 256 ends a document."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.vocab_size = 257
        self.document_end: int | None = 256
        self.bytes_table: NDArray[np.uint16] | None = np.array([1] * 256 + [0], dtype=np.uint16)
        self.fingerprint = "bytes-1"

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; document ends are left out and broken characters become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def bytes_of(self, ids: Sequence[int]) -> int:
        """Number of UTF-8 bytes that `ids` stand for."""
        return sum(1 for i in ids if 0 <= i < 256)

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.uint16] | None]]:
        """Ids of each text; the second item is None, because `bytes_table` says what each id covers."""
        return [(np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32), None) for text in texts]

    def save(self, folder: str | Path) -> None:
        """Nothing to write: the tokenizer is its name."""


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    Truncation, padding and templates stored in the file are switched off: they belong to inference, and would cut
    documents short. Raises DataError if the file is missing or not a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.path = find_tokenizer_file(Path(path).expanduser())
        try:
            raw = self.path.read_bytes()
            config = json.loads(raw)
            self.backend = Backend.from_str(raw.decode("utf-8"))
        except OSError as error:
            raise DataError(f"the tokenizer {self.path} cannot be read: {error.strerror}.") from error
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot parse
            raise DataError(
                f"{self.path} is not a Hugging Face tokenizer.json ({one_line(error)}); "
                'give the file that transformers\' save_pretrained writes, or tokenizer = "bytes".'
            ) from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"the tokenizer {self.path} has an empty vocabulary; train or download it again.")
        self.name = str(self.path)
        self.vocab_size = max(vocabulary.values()) + 1
        self.document_end = find_document_end(self.path, config, vocabulary)
        self.bytes_table = byte_level_table(config, vocabulary, self.vocab_size)
        self.fingerprint = hashlib.sha256(raw).hexdigest()[:24] + f"-end{self.document_end}"

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the special tokens of a template."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def bytes_of(self, ids: Sequence[int]) -> int:
        """UTF-8 bytes that `ids` stand for: exact for byte-level tokenizers, else of the decoded text."""
        if self.bytes_table is not None:
            return int(self.bytes_table[np.asarray(ids, dtype=np.int64)].sum())
        return len(self.decode(ids).encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.uint16] | None]]:
        """Ids of each text and, where the ids alone do not tell, the source bytes that each token covers."""
        if self.bytes_table is not None:
            return [
                (np.array(encoding.ids, dtype=np.uint32), None)
                for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        return [
            (np.array(encoding.ids, dtype=np.uint32), bytes_from_offsets(text, encoding.offsets))
            for text, encoding in zip(
                texts, self.backend.encode_batch(list(texts), add_special_tokens=False), strict=True
            )
        ]

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and the name of the document end into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": self.path.read_bytes()}
        if self.document_end is not None:
            token = self.backend.id_to_token(self.document_end)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
            files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        for name, content in files.items():
            part = folder / f"{name}.part"
            part.write_bytes(content)
            os.replace(part, folder / name)


def load_tokenizer(source: str | Path) -> BytesTokenizer | JsonTokenizer:
    """The tokenizer named in a run file: "bytes", a tokenizer.json, or a folder that has one.

    Raises DataError with the way out when there is none.
    """
    if str(source) == "bytes":
        return BytesTokenizer()
    return JsonTokenizer(source)


def find_tokenizer_file(path: Path) -> Path:
    """`path` itself, or the tokenizer.json in the folder `path`. Raises DataError if there is none."""
    if path.is_dir():
        inside = path / "tokenizer.json"
        if inside.is_file():
            return inside
        names = sorted(entry.name for entry in path.iterdir())
        hint = ""
        if any(name in ("tokenizer.model", "spiece.model", "merges.txt", "tiktoken.model") for name in names):
            hint = (
                " It holds an older kind; transformers' AutoTokenizer converts it (from_pretrained, save_pretrained)."
            )
        raise DataError(f"there is no tokenizer.json in {path} ({len(names)} files).{hint}")
    if not path.exists():
        close = ""
        if path.parent.is_dir():
            names = [entry.name for entry in path.parent.iterdir()]
            if names:
                close = f" In {path.parent}: {nearest(path.name, names)}"
        elif str(path) in ("byte", "utf-8", "utf8", "Bytes"):
            close = ' Did you mean "bytes"?'
        raise DataError(f'there is no tokenizer at {path}; give "bytes", a tokenizer.json or its folder.{close}')
    return path


def find_document_end(path: Path, config: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    """The id that ends a document: the eos_token of tokenizer_config.json, else a known special token."""
    beside = path.parent / "tokenizer_config.json"
    if beside.is_file():
        try:
            named = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{beside} is not readable JSON ({one_line(error)}); repair or remove it.") from error
        token = named.get("content") if isinstance(named, dict) else named
        if token in vocabulary:
            return vocabulary[token]
    special = {entry["content"] for entry in config.get("added_tokens", []) if entry.get("special")}
    for name in DOCUMENT_END_NAMES:
        if name in special:
            return vocabulary[name]
    return None


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE vocabularies (GPT-2's encoder.py).

    Printable Latin-1 bytes stand for themselves, the other 68 are numbered upwards from U+0100.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def byte_level_table(config: dict[str, Any], vocabulary: dict[str, int], vocab_size: int) -> NDArray[np.uint16] | None:
    """Bytes per id of a tokenizer in which every id is a fixed string of bytes, else None.

    True for byte-level BPE that changes nothing before splitting. Special tokens cover no bytes: text never gives them.
    """
    if config.get("normalizer") is not None or (config.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    splitter = config.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and step.get("add_prefix_space", True):
            return None
        if kind not in ("ByteLevel", "Digits", "Split") or step.get("behavior") == "Removed":
            return None
    alphabet = byte_level_alphabet()
    table = np.zeros(vocab_size, dtype=np.uint16)
    added = {entry["content"]: entry for entry in config.get("added_tokens", [])}
    for token, index in vocabulary.items():
        if token in added:
            entry = added[token]
            if entry.get("special"):
                continue
            if entry.get("lstrip") or entry.get("rstrip"):
                return None
            table[index] = len(token.encode("utf-8"))
        elif all(char in alphabet for char in token):
            table[index] = len(token)
        else:
            return None
    return table


def bytes_from_offsets(text: str, offsets: Iterable[tuple[int, int]]) -> NDArray[np.uint16]:
    """UTF-8 bytes of `text` that each token covers, from character offsets; the sum is the size of `text`.

    A token covers what lies between the furthest end before it and its own end, so text that the tokenizer drops
    counts for the token after it, and what follows the last token for the last.
    """
    ends = np.array([end for _, end in offsets], dtype=np.int64)
    if ends.size == 0:
        return np.zeros(0, dtype=np.uint16)
    ends = np.maximum.accumulate(ends)
    ends[-1] = len(text)
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (code_points > 0x7F).astype(np.int64) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    size_before = np.concatenate([[0], np.cumsum(width)])
    covered = np.diff(size_before[ends], prepend=0)
    for index in np.flatnonzero(covered > 0xFFFF):
        # More than 64 KiB under one token (dropped text): the excess moves on to its neighbours.
        excess = int(covered[index]) - 0xFFFF
        covered[index] = 0xFFFF
        for other in range(covered.size):
            room = min(excess, 0xFFFF - int(covered[other]))
            covered[other] += room
            excess -= room
            if excess == 0:
                break
    return covered.astype(np.uint16)


def one_line(error: BaseException) -> str:
    """The first line of an error's text, for use inside a sentence."""
    text = str(error).strip().splitlines()
    return text[0][:160] if text else type(error).__name__
