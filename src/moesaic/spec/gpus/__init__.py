"""The catalogue of accelerators: one TOML file each, in the format of one's own cluster files, every figure with its
source. What is found here are tables; `spec.cluster` makes specs of them."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

from ..errors import SpecError
from .tables import ClusterFile, read_cluster_file

_FOLDER = Path(__file__).parent
_FILLER = re.compile(
    r"nvidia|amd|instinct|tensor\s*core|superchip|accelerators?|\d+\s*-?\s*gpus?\b|gpus?|\bnodes?\b|dgx|hgx|sxm\d*|oam"
    r"|nvl72|\befa\b|\b\d+\s*[x×](?=\s|[a-z])|\b[x×]\s*\d+\b"
)
"""What people write around a name that does not tell one accelerator of the catalogue from another."""
_VARIANT = re.compile(r"pcie|nvl|hbm\w*|\d+gb(?!/)")
"""What does tell them apart, also in brackets."""


@functools.cache
def catalogue() -> dict[str, ClusterFile]:
    """Every accelerator by its short name."""
    files = sorted(_FOLDER.glob("*.toml"), key=lambda file: _natural(file.stem))
    return {file.stem: read_cluster_file(file) for file in files}


def names() -> list[str]:
    """Short names, such as "h100"."""
    return list(catalogue())


def find(name: str) -> str:
    """The short name of the accelerator that `name` means: upper or lower case, with or without the maker, the form
    factor or a remark in brackets, as in "NVIDIA H100-SXM", "DGX-GB300", "GB200 NVL72" or "H100 (Eos)".

    Raises:
        SpecError: it is not in the catalogue; the sentence has the nearest names.
    """
    known = _by_alias()
    text = name.casefold()
    outside = re.sub(r"\([^)]*\)?", " ", text)
    inside = " ".join(re.findall(r"\(([^)]*)\)?", text))
    # A remark in brackets is dropped, but never what would make it another accelerator.
    for candidate in (text, " ".join([outside, *_VARIANT.findall(inside)])):
        short = known.get(_compact(candidate))
        if short is not None:
            return short
    word = re.sub(r"[^a-z0-9]+", "-", _FILLER.sub(" ", outside)).strip("-") or text
    close = difflib.get_close_matches(word, [alias.casefold() for alias in known], n=9, cutoff=0.5)
    shorts = list(dict.fromkeys(known[alias] for alias in close))[:3]
    hint = f"did you mean {' or '.join(map(repr, shorts))}? " if shorts else ""
    raise SpecError(
        f"no accelerator {name!r} in the catalogue: {hint}It has {', '.join(names())}; describe another in a TOML file "
        f"(docs/hardware.md)."
    )


def _compact(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "", _FILLER.sub(" ", text))


def _aliases(short: str, file: ClusterFile) -> list[str]:
    return [short, *([file.gpu.name] if file.gpu.name else []), *file.gpu.aliases]


@functools.cache
def _by_alias() -> dict[str, str]:
    found: dict[str, str] = {}
    for short, file in catalogue().items():
        for alias in _aliases(short, file):
            other = found.setdefault(_compact(alias.casefold()), short)
            assert other == short, f"{alias!r} names both {other} and {short}"
    return found


def _natural(stem: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", stem) if part]
