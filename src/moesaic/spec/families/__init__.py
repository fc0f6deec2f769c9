"""Model families: a Hugging Face config, a preset name, or this project's own keys become a `ModelSpec`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moesaic.spec import presets
from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.families import dense, native, sigmoid, softmax
from moesaic.spec.families.reading import Config
from moesaic.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen3": dense.qwen3,
    "mixtral": softmax.mixtral,
    "phimoe": softmax.phimoe,
    "olmoe": softmax.olmoe,
    "granitemoe": softmax.granitemoe,
    "gpt_oss": softmax.gpt_oss,
    "qwen2_moe": softmax.qwen2_moe,
    "qwen3_moe": softmax.qwen3_moe,
    "ernie4_5_moe": softmax.ernie4_5_moe,
    "hunyuan_v1_moe": softmax.hunyuan_v1_moe,
    "deepseek_v2": sigmoid.deepseek_v2,
    "deepseek_v3": sigmoid.deepseek_v3,
    "glm4_moe": sigmoid.glm4_moe,
    "dots1": sigmoid.dots1,
    "minimax_m2": sigmoid.minimax_m2,
    "llama4_text": sigmoid.llama4_text,
    "moesaic": native.moesaic,
}
"""Every family by its `model_type`."""

SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
"""Other values of `model_type` whose architecture is another family's."""


def load_model_spec(
    source: str | Path | Mapping[str, Any], *, strict: bool | Collection[str] = False, name: str | None = None
) -> ModelSpec:
    """A `ModelSpec` from a preset name, a config.json, a folder that holds one, or a dictionary of its keys.

    A string without a slash that names a preset (whatever its case) is that preset; else it is a path if there is
    something there; else a preset with its owner in front, as in "Qwen/Qwen3-30B-A3B".

    Files carry many keys that do not matter here, and those are ignored. `strict` refuses keys that the family does
    not know, which catches a typo in keys written by hand: all of them (True), or those named.

    Raises:
        SpecError: unknown preset, file, `model_type` or key, missing keys, or numbers that do not fit together.
    """
    if isinstance(source, Mapping):
        checked = set(source) if strict is True else set(strict or ())
        return _read(source, name or str(source.get("name") or source.get("model_type") or "model"), checked)
    if strict is not False:
        raise TypeError("strict is for a dictionary of keys")
    path, text = Path(source), source if isinstance(source, str) else ""
    if text and ("/" not in text or not path.exists()):
        preset = presets.find(text)
        if preset is not None:
            return _read(presets.PRESETS[preset], name or preset, set())
    if not path.exists():
        raise SpecError(
            f"There is no preset and no file named {str(source)!r}; {nearest(str(source), presets.PRESETS)} "
            f"(`moesaic model --list` shows all)."
        )
    return _read(_load(path), name or _name_of(path), set())


def _load(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise SpecError(
            f"The folder {str(path)!r} has no config.json; give a folder that Hugging Face saved, or a preset."
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SpecError(f"{file} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise SpecError(f"{file} holds a {type(found).__name__}, not the keys of a config.")
    return found


def _name_of(path: Path) -> str:
    path = path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def _read(raw: Mapping[str, Any], name: str, checked: set[str]) -> ModelSpec:
    kind = raw.get("model_type")
    if kind == "llama4" or (kind is None and isinstance(raw.get("text_config"), Mapping)):
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise SpecError(f"{name}: a llama4 config needs its text_config table; give it, or model_type llama4_text.")
        checked = set(text) if "text_config" in checked else set()
        note = "only the text model of a text-and-image config"
        return _read({"model_type": "llama4_text", **text, "notes": [note]}, name, checked)
    if kind is None:
        raise SpecError(f"{name}: the config has no model_type; add one of {', '.join(sorted(FAMILIES))}.")
    if kind == "moesaic" and "spec" in raw:
        return _whole(raw, name)
    family = SAME_FAMILY.get(str(kind), str(kind))
    if family not in FAMILIES:
        raise SpecError(
            f"{name}: model_type {kind!r} is not supported; {nearest(str(kind), [*FAMILIES, *SAME_FAMILY])}"
        )
    return FAMILIES[family](Config(raw, family, name, checked))


def _whole(raw: Mapping[str, Any], name: str) -> ModelSpec:
    """A config of ours that holds a whole specification, written for models that the other keys cannot say."""
    try:
        spec = ModelSpec.model_validate(raw["spec"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{name}: spec.{where} of the config is wrong: {first['msg']}.") from None
    return spec.model_copy(update={"family": "moesaic", "hf_config": dict(raw)})
