"""Published models by name, each a dictionary of the keys of a Hugging Face config with its `source`.

`PRESETS` maps a name to its keys. Names are found whatever their case and punctuation, with or without the owner
before a slash, and under a few other names that the models are known by.
"""

from __future__ import annotations

import re
from typing import Any

from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.presets.deepseek import DEEPSEEK
from moesaic.spec.presets.dense import DENSE
from moesaic.spec.presets.mixtral import MIXTRAL
from moesaic.spec.presets.more import MORE
from moesaic.spec.presets.papers import PAPERS
from moesaic.spec.presets.qwen import QWEN

PRESETS: dict[str, dict[str, Any]] = {**DEEPSEEK, **QWEN, **MIXTRAL, **MORE, **PAPERS, **DENSE}

ALIASES: dict[str, str] = {
    "Kimi-K2-Instruct": "Kimi-K2",
    "Kimi-K2-Base": "Kimi-K2",
    "DeepSeek-V3-Base": "DeepSeek-V3",
    "DeepSeek-R1": "DeepSeek-V3",
    "Moonlight": "Moonlight-16B-A3B",
    "Moonlight-16B": "Moonlight-16B-A3B",
    "Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
    "Mixtral-8x22B-v0.1": "Mixtral-8x22B",
    "Qwen1.5-MoE": "Qwen1.5-MoE-A2.7B",
    "Qwen2-57B": "Qwen2-57B-A14B",
    "Qwen2-57B-A14B-Instruct": "Qwen2-57B-A14B",
    "Qwen3-30B": "Qwen3-30B-A3B",
    "Qwen3-235B": "Qwen3-235B-A22B",
    "Qwen3-Coder-480B": "Qwen3-Coder-480B-A35B",
    "Qwen3-Coder-480B-A35B-Instruct": "Qwen3-Coder-480B-A35B",
    "MiniMax-M2.5": "MiniMax-M2",
    "OLMoE": "OLMoE-1B-7B",
    "OLMoE-1B-7B-0924": "OLMoE-1B-7B",
    "Llama-4-Scout-17B-16E": "Llama-4-Scout",
    "Llama-4-17Bx16E": "Llama-4-Scout",
    "Llama-4-Maverick-17B-128E": "Llama-4-Maverick",
    "Llama-4-17Bx128E": "Llama-4-Maverick",
    "granite-3.0-1b-a400m-base": "Granite-3.0-1B-A400M",
    "granite-3.0-3b-a800m-base": "Granite-3.0-3B-A800M",
    "ERNIE-4.5-21B": "ERNIE-4.5-21B-A3B",
    "ERNIE-4.5-300B": "ERNIE-4.5-300B-A47B",
    "ERNIE-4.5-21B-A3B-PT": "ERNIE-4.5-21B-A3B",
    "ERNIE-4.5-300B-A47B-PT": "ERNIE-4.5-300B-A47B",
    "Hunyuan-A13B-Instruct": "Hunyuan-A13B",
    "Hunyuan-A52B": "Hunyuan-Large",
    "Tencent-Hunyuan-Large": "Hunyuan-Large",
    "dots.llm1.base": "dots.llm1",
    "dots.llm1.inst": "dots.llm1",
    "Phi-3.5-MoE-instruct": "Phi-3.5-MoE",
    "MegaScale-352B": "MegaScale-MoE-352B",
    "Internal-352B": "MegaScale-MoE-352B",
    "352B": "MegaScale-MoE-352B",
    "Llama-3.1-8B": "Llama3-8B",
    "Llama3.1-8B": "Llama3-8B",
    "Meta-Llama-3.1-8B": "Llama3-8B",
    "Llama-3.1-70B": "Llama3-70B",
    "Llama3.1-70B": "Llama3-70B",
    "Meta-Llama-3.1-70B": "Llama3-70B",
    "Llama3-405B": "Llama3.1-405B",
    "Llama-3.1-405B": "Llama3.1-405B",
    "Llama-2-7b-hf": "Llama2-7B",
    "Llama-2-13b-hf": "Llama2-13B",
    "Llama-2-70b-hf": "Llama2-70B",
    "Mistral-7B-v0.1": "Mistral-7B",
}
"""Other names of presets."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "and"))


_PLAIN = {**{_plain(other): name for other, name in ALIASES.items()}, **{_plain(name): name for name in PRESETS}}


def find(name: str) -> str | None:
    """The preset that `name` means, or None."""
    return _PLAIN.get(_plain(name)) or _PLAIN.get(_plain(name.rsplit("/", 1)[-1]))


def preset_config(name: str) -> dict[str, Any]:
    """The config keys of the preset that `name` means.

    Raises:
        SpecError: there is no such preset; the nearest names are in the message.
    """
    found = find(name)
    if found is None:
        raise SpecError(f"There is no preset {name!r}; {nearest(name, PRESETS)} (`moesaic model --list` shows all).")
    return dict(PRESETS[found])
