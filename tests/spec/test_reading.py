"""Numbers of a config.json that no model can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.spec.errors import SpecError
from moesaic.spec.families import load_model_spec

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("family", "key", "value", "part"),
    [
        ("mixtral", "vocab_size", 1e300, "vocab_size is 1e+300; at most 1,099,511,627,776 works"),
        ("mixtral", "num_experts_per_tok", 10**400, "num_experts_per_tok is 1e+300; at most"),
        ("mixtral", "initializer_range", -1, "initializer_range must be a number of at least 0, but is -1"),
        ("llama", "rms_norm_eps", -1e-6, "rms_norm_eps must be a number of at least 0"),
        ("mixtral", "router_aux_loss_coef", -0.1, "router_aux_loss_coef must be a number of at least 0"),
        ("mixtral", "initializer_range", 1e39, "initializer_range must be a number, but is 1e+39"),
        ("granitemoe", "logits_scaling", 0, "logits_scaling must be a number above 0, but is 0"),
        ("olmoe", "clip_qkv", 0.0, "clip_qkv must be a number above 0"),
    ],
)
def test_impossible_numbers_are_refused(family: str, key: str, value: Any, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_model_spec({"model_type": family, **SIZES, key: value})
    assert part in str(caught.value)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"vocab_size": ' + "9" * 5000 + "}", "{", "[]", "\ufeff{}"])
def test_files_that_are_no_config_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=r"config\.json (is not JSON|cannot be read|holds a list)"):
        load_model_spec(tmp_path)
