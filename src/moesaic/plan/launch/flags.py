"""Megatron-LM's options as its parser knows them, and a check of arguments against them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

from moesaic.spec.errors import nearest

_PATTERN = re.compile(r"[\[\]()0-9+*,\s]+")
_WHOLE = re.compile(r"[-+]?[0-9]+")


@dataclass(frozen=True)
class Flag:
    """One option of the parser."""

    kind: str | None
    """The parser's type; None for an option that takes no value."""
    nargs: str | int | None
    """`+` (one or more), `*` (any number), a number of values, or None (one)."""
    choices: tuple[str, ...]


@lru_cache(maxsize=1)
def known_flags() -> dict[str, Flag]:
    """Every option by name, as read from the parser of the commit that the data file names."""
    text = (files("moesaic.plan.launch") / "data" / "megatron-flags.json").read_text(encoding="utf-8")
    return {
        name: Flag(row.get("type"), row.get("nargs"), tuple(str(choice) for choice in row.get("choices", ())))
        for row in json.loads(text)["options"]
        for name in row["flags"]
    }


def check_flags(args: Sequence[str]) -> list[str]:
    """What Megatron-LM's parser would refuse in a command line: unknown options, and values of a wrong number, type or
    choice. One sentence each; none if all is well."""
    problems: list[str] = []
    flags = known_flags()
    words = list(args)
    if words and not words[0].startswith("--"):
        problems.append(f"{words[0]!r} stands before any option.")
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    seen: set[str] = set()
    for start, stop in pairwise([*starts, len(words)]):
        name, values = words[start], words[start + 1 : stop]
        if name not in flags:
            problems.append(f"{name} is no option of Megatron-LM: {nearest(name, flags)}")
            continue
        if name in seen:
            problems.append(f"{name} is given twice.")
        seen.add(name)
        problems += _values(name, flags[name], values)
    return problems


def _values(name: str, flag: Flag, values: list[str]) -> list[str]:
    if flag.kind is None:
        return [f"{name} takes no value, but has {' '.join(values)}."] if values else []
    wanted = {"None": "one value", "+": "at least one value"}.get(str(flag.nargs), f"{flag.nargs} values")
    counts = {"None": len(values) == 1, "+": len(values) >= 1, "*": True}
    right = counts.get(str(flag.nargs), len(values) == flag.nargs)
    if not right:
        return [f"{name} takes {wanted}, but has {len(values)}."]
    problems = []
    for value in values:
        if not _is(flag.kind, value):
            problems.append(f"{name} takes values of type {flag.kind}, but has {value!r}.")
        elif flag.choices and value not in flag.choices and not any(c.endswith(f".{value}") for c in flag.choices):
            problems.append(f"{name} takes {', '.join(flag.choices)}, but has {value!r}.")
    return problems


def _is(kind: str, value: str) -> bool:
    if kind == "int":
        return _WHOLE.fullmatch(value) is not None
    if kind == "float":
        try:
            float(value)
        except ValueError:
            return False
        return True
    if kind in ("moe_freq_type", "la_freq_type", "no_rope_freq_type"):
        return _WHOLE.fullmatch(value) is not None or ("[" in value and _PATTERN.fullmatch(value) is not None)
    if kind == "tuple_type":
        return all(_WHOLE.fullmatch(part.strip()) for part in value.strip("()").split(","))
    return value != ""
