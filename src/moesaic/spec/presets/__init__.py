"""Published models by name."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}


def find(name: str) -> str | None:
    """The preset that `name` means, or None."""
    return {key.lower(): key for key in PRESETS}.get(name.lower())
