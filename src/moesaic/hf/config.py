"""The config.json of an export: what the model was read from, brought up to date."""

from __future__ import annotations

from typing import Any

import torch

from moesaic.hf.errors import WeightsError
from moesaic.hf.mapping import OWN_FAMILY, naming_of
from moesaic.spec.model import ModelSpec

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


_OURS = ("notes", "name")
"""Keys that descriptions of ours add to a Hugging Face config."""


def export_config(spec: ModelSpec, dtype: torch.dtype, family: str | None = None) -> dict[str, Any]:
    """The config to write next to weights of `dtype`.

    `architectures` is filled in when it is absent, and quantisation is dropped, because the exported weights have
    none. In the format of another family than the model was read in, or when it was read from nothing, `moesaic`
    configs hold the whole ModelSpec under `spec`.

    Raises:
        WeightsError: a family's format is asked for, and the model was not read from a config of that family.
    """
    family = family or spec.family
    read_from = spec.hf_config.get("model_type")
    if family == OWN_FAMILY:
        if read_from == OWN_FAMILY and "spec" not in spec.hf_config:
            return dict(spec.hf_config)
        return {
            "model_type": OWN_FAMILY,
            "name": spec.name,
            "spec": spec.model_dump(exclude={"hf_config"}, mode="json"),
        }
    if read_from is None or family != spec.family:
        raise WeightsError(
            f"{spec.name} was not read from a {family} config, so its config.json cannot be written; export it with "
            f"model_type {OWN_FAMILY!r}."
        )
    config = {key: value for key, value in spec.hf_config.items() if key not in (*_OURS, "quantization_config")}
    if not config.get("architectures"):
        config["architectures"] = [naming_of(family).architecture]
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = _DTYPE_NAMES[dtype]
    return config
