"""TOML as run files use it: reading with errors that say where, writing, and `--set table.key=value`."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from .errors import SpecError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        SpecError: the file is missing, unreadable, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; the folder has {', '.join(beside[:5])}" if beside else ""
        raise SpecError(f"run file {str(path)!r} does not exist{hint}.") from None
    except IsADirectoryError:
        raise SpecError(f"{str(path)!r} is a folder; name a run file, such as {str(path / 'run.toml')!r}.") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{str(path)!r} is not UTF-8 text (byte {error.start}), so it is not a run file.") from None
    except OSError as error:
        raise SpecError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{str(path)!r} is not valid TOML: {error}.") from None


def parse_override(text: str) -> tuple[list[str], Any, str]:
    """`table.key=value` as (key path, value, the value's own text). The value is TOML; what is not TOML is a string.

    Raises:
        SpecError: there is no `=`, or the key has no table.
    """
    key, equals, raw = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or len(path) < 2 or not all(path):
        raise SpecError(f"--set {text!r} is not of the form table.key=value, such as --set train.steps=100.")
    raw = raw.strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return path, raw, raw
    value = parsed.get("value")
    if parsed.keys() != {"value"} or isinstance(value, datetime.date | datetime.time):
        return path, raw, raw
    return path, value, raw


def set_in(tables: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets `tables[path[0]][path[1]]…` to `value`, making the tables on the way."""
    for name in path[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SpecError(f"--set {'.'.join(path)}: {name!r} is a value, not a table.")
        tables = inner
    tables[path[-1]] = value


def write_toml(tables: dict[str, Any]) -> str:
    """TOML text of nested tables. None is left out, since TOML has no such value (inside lists it is refused)."""
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None), ""]
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are a subset of TOML's basic strings, but JSON leaves DEL as it is and TOML does not allow it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    raise SpecError(f"a run file cannot hold {value!r} ({type(value).__name__}).")
