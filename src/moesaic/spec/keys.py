"""The keys of a run file: looking one up, explaining it, and saying what is wrong with a value."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from .errors import SpecError, nearest
from .tables import TABLES


@dataclass(frozen=True)
class KeyHelp:
    """What `moesaic explain` says about one key."""

    key: str
    type: str
    unit: str
    default: str
    help: str


def all_keys() -> list[str]:
    """Every key as `table.key`, in the order of the tables."""
    return [f"{table}.{name}" for table, fields in TABLES.items() for name in fields.model_fields]


def explain(key: str | None = None) -> list[KeyHelp]:
    """Help for `table.key`, for every key of a table, for a key named without its table, or for all keys.

    Raises:
        SpecError: no such key; the sentence names the nearest.
    """
    known = all_keys()
    if key is None:
        return [_help_of(name) for name in known]
    if key in TABLES:
        return [_help_of(name) for name in known if name.startswith(f"{key}.")]
    found = [name for name in known if name == key or name.split(".")[1] == key]
    if not found:
        raise SpecError(f"unknown key {key!r}: {_nearest_key(key)}")
    return [_help_of(name) for name in found]


def describe(error: ValidationError) -> str:
    """All that pydantic found wrong with a run file, as one sentence with the values in it and the way out."""
    said: dict[str, str] = {}
    for detail in error.errors():
        location = [str(part) for part in detail["loc"] if not _is_branch(part)]
        said.setdefault(".".join(location[:2]), _sentence(location, dict(detail)))
    sentence = "; ".join(said.values())
    return sentence if sentence.endswith("?") else sentence + "."


def unknown_table(name: str) -> str:
    """The sentence about a table (or a key outside any table) that a run file cannot have."""
    homes = [key for key in all_keys() if key.split(".")[1] == name]
    if homes:
        return f"{name!r} stands outside a table: write it as {homes[0]!r}, under [{homes[0].split('.')[0]}]"
    return f"unknown table [{name}]: {nearest(name, TABLES)}"


def takes_only_text(path: list[str]) -> bool:
    """Whether a key holds text and nothing else, so that `--set run.name=7` means the text "7"."""
    field = TABLES[path[0]].model_fields.get(path[1]) if len(path) == 2 and path[0] in TABLES else None
    return field is not None and set(_branches(field.annotation)) <= {str, type(None)}


def _help_of(name: str) -> KeyHelp:
    table, key = name.split(".")
    field = TABLES[table].model_fields[key]
    extra: Any = field.json_schema_extra
    default = extra["derived"] or ("not set" if field.default is None else _shown(field.default))
    kind = _type_text(field.annotation) + _limits_text(field.metadata)
    return KeyHelp(name, kind, extra["unit"], default, field.description or "")


def _branches(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _type_text(annotation: Any) -> str:
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    parts: list[str] = []
    for branch in _branches(annotation):
        if branch is type(None):
            continue
        if get_origin(branch) is Literal:
            parts += [f'"{choice}"' for choice in get_args(branch)]
        elif get_origin(branch) is list:
            parts.append("list of " + _type_text(get_args(branch)[0]))
        else:
            parts.append(names[branch])
    return " | ".join(parts)


def _limits_text(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    shown = []
    for limit in metadata:
        for name, sign in signs.items():
            bound = getattr(limit, name, None)
            if bound is not None:
                shown.append(f"{sign} {'2^63' if bound == 2**63 else _shown(bound)}")
    return " " + ", ".join(shown) if shown else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _is_branch(part: int | str) -> bool:
    """Whether a part of a pydantic location names a branch of a union or a list index instead of a key."""
    return isinstance(part, int) or "[" in part or part in ("int", "float", "bool", "str")


def _nearest_key(key: str) -> str:
    """The nearest `table.key`, whether or not the word names a table."""
    known = all_keys()
    table, _, name = key.rpartition(".")
    elsewhere = [k for k in known if k.split(".")[1] == name]
    if elsewhere:
        return "did you mean " + " or ".join(repr(k) for k in elsewhere) + "?"
    if table in TABLES:
        return nearest(name, TABLES[table].model_fields)
    if table:
        return nearest(key, known)
    return nearest(name, [*(k.split(".")[1] for k in known), *TABLES])


def _sentence(location: list[str], detail: dict[str, Any]) -> str:
    name, kind, value, context = ".".join(location), detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_table(name) if len(location) == 1 else f"unknown key {name!r}: {_nearest_key(name)}"
    if len(location) == 1 and location[0] in TABLES:
        return f"{name!r} is {value!r}, but it is a table: write [{name}] and keys below it"
    if name in all_keys():
        entry = _help_of(name)
        said = f"{name} is {_said(value)}, but must be {entry.type.replace(' | ', ' or ')}" + (
            f" ({entry.unit})" if entry.unit else ""
        )
        if isinstance(value, str) and '"' in entry.type:
            close = nearest(value, [c.strip('"') for c in entry.type.split(" | ") if c.startswith('"')])
            said += f"; {close}" if close.endswith("?") else ""
        if kind == "string_too_short":
            said += " of at least one letter"
        return said
    return f"{name}: {detail['msg']}" + (f" ({context})" if context else "")


def _said(value: Any) -> str:
    return repr(value) if isinstance(value, str) else _shown(value) if not isinstance(value, dict) else "a table"
