"""The config.json of an export: what the model was read from, brought up to date."""

from __future__ import annotations

from typing import Any

import torch

from moesaic.hf.mapping import OWN_FAMILY, naming_of
from moesaic.spec.model import ModelSpec

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export_config(spec: ModelSpec, dtype: torch.dtype, family: str | None = None) -> dict[str, Any]:
    """The config to write next to weights of `dtype`.

    A text model that came inside a multimodal config is written as the text model. Quantisation is dropped, because
    the exported weights have none. `architectures` is filled in when it is absent.
    """
    family = family or spec.family
    config = dict(spec.hf_config)
    if "text_config" in config and config.get("model_type") != family:
        config = {**config["text_config"]}
    config.pop("quantization_config", None)
    if family == OWN_FAMILY:
        return config
    config.setdefault("model_type", family)
    if not config.get("architectures"):
        config["architectures"] = [naming_of(family).architecture]
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = _DTYPE_NAMES[dtype]
    return config
