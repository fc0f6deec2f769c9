"""Rotary position embeddings: the old spelling (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`)."""

from __future__ import annotations

import math
from typing import Any, cast

from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.families.reading import Config
from moesaic.spec.model import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "ntk_alpha")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "ntk_alpha": ("alpha",),
}


def rope_numbers(config: Config) -> dict[str, Any]:
    """`rope_scaling`, or `rope_parameters` where there is none, as one dictionary; empty if neither is given."""
    found = config.raw.get("rope_scaling") or config.raw.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise SpecError(f"{config.name}: rope_scaling must be a table of numbers, but is {found!r}.")
    if any(isinstance(item, dict) for item in found.values()):
        raise SpecError(
            f"{config.name}: rope_parameters differ by layer type, which {config.family} does not know; give one table."
        )
    return dict(found)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention with the stretch `factor`: 0.1·weight·ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def rope(config: Config, head_dim: int, *, interleaved: bool = False, partial: bool = False) -> RopeSpec:
    """The rotary embedding of heads of width `head_dim`; `partial` where the family rotates only a part of them."""
    numbers = rope_numbers(config)
    theta = numbers.pop("rope_theta", None)
    if theta is None:
        theta = config.value("rope_theta")
    if theta is None:
        theta = config.defaults["default_theta"]
    dim = head_dim
    share = numbers.pop("partial_rotary_factor", None)
    if share is None:
        share = config.raw.get("partial_rotary_factor")
    if share is None and partial:
        rotary_dim = config.value("rotary_dim")
        share = config.value("partial_rotary_factor")
        if rotary_dim is not None:
            share = config.integer("rotary_dim") / head_dim
    _check_numbers(config, {**numbers, "rope_theta": theta, "partial_rotary_factor": share})
    if share is not None:
        if share != 1.0 and not partial:
            raise SpecError(f"{config.name}: {config.family} rotates whole heads; remove partial_rotary_factor.")
        dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise SpecError(
            f"{config.name}: the rotary embedding would turn {dim} of {head_dim} dimensions of a head; "
            f"it needs an even number from 2 to {head_dim - head_dim % 2}."
        )
    kind = numbers.pop("rope_type", None) or numbers.get("type") or "default"
    numbers.pop("type", None)
    if kind == "dynamic" and numbers.get("alpha"):
        kind = "ntk_alpha"
    if kind == "su":
        kind = "longrope"
    if kind not in KINDS:
        raise SpecError(f"{config.name}: rope scaling {kind!r} is not supported; {nearest(str(kind), KINDS)}")
    missing = [key for key in _NEEDED.get(kind, ()) if numbers.get(key) is None]
    if missing:
        raise SpecError(f"{config.name}: rope scaling {kind!r} needs {', '.join(missing)}. Add it to rope_scaling.")
    params = {} if kind == "default" else _derive(config, kind, numbers)
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(numbers[key]) != dim // 2:
            raise SpecError(
                f"{config.name}: {key} has {len(numbers[key])} factors, but a head turns {dim} dimensions; it needs "
                f"{dim // 2}."
            )
    return RopeSpec(dim=dim, theta=float(theta), kind=cast(Any, kind), params=params, interleaved=interleaved)


_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "alpha",
    "short_mscale",
    "long_mscale",
    "mscale",
    "mscale_all_dim",
)
_LISTS = ("short_factor", "long_factor")


def _check_numbers(config: Config, numbers: dict[str, Any]) -> None:
    """Refuses what is not a number above zero: logarithms and quotients of them follow."""
    for key in (*_NUMBERS, *_LISTS):
        found = numbers.get(key)
        if found is None:
            continue
        least = 0.0 if key.startswith("mscale") else 1e-300
        items = (found if isinstance(found, list) else [None]) if key in _LISTS else [found]
        if any(isinstance(x, bool) or not isinstance(x, (int, float)) or not least <= x < 1e300 for x in items):
            wanted = "a list of numbers above 0" if key in _LISTS else "a number above 0"
            raise SpecError(f"{config.name}: {key} of the rotary embedding must be {wanted}, but is {found!r}.")


def _derive(config: Config, kind: str, numbers: dict[str, Any]) -> dict[str, Any]:
    """Fills in what follows from other keys, with the rules of `transformers`' modeling_rope_utils."""
    if kind not in ("llama3", "yarn", "longrope"):
        return numbers
    longest = config.integer("max_position_embeddings")
    stated = config.optional_integer("original_max_position_embeddings")
    original = stated or numbers.get("original_max_position_embeddings") or longest
    numbers["original_max_position_embeddings"] = original
    if kind == "llama3":
        return numbers
    if numbers.get("factor") is None:
        numbers["factor"] = longest / original
    factor = float(numbers["factor"])
    if numbers.get("attention_factor") is None:
        if kind == "longrope":
            numbers["attention_factor"] = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        elif numbers.get("mscale") and numbers.get("mscale_all_dim"):
            numbers["attention_factor"] = yarn_magnitude(factor, numbers["mscale"]) / yarn_magnitude(
                factor, numbers["mscale_all_dim"]
            )
        else:
            numbers["attention_factor"] = yarn_magnitude(factor)
    if kind == "yarn":
        numbers["beta_fast"] = numbers.get("beta_fast") or 32.0
        numbers["beta_slow"] = numbers.get("beta_slow") or 1.0
        numbers.setdefault("truncate", True)
    return numbers
