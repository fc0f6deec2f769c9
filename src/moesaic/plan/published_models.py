"""Models as published tables name them: a preset, a dense decoder whose sizes are known, or a sentence why not."""

from __future__ import annotations

import re
from functools import cache

from moesaic.spec import presets
from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

ALIASES = {
    "moe352b": "MegaScale-MoE-352B",
    "dsv3": "DeepSeek-V3",
    "dsv2": "DeepSeek-V2",
    "gptoss120b": "GPT-OSS-120B",
    "gptoss20b": "GPT-OSS-20B",
    "deepseekv3proxy": "DeepSeek-V3-proxy",
}
"""Names that tables use and presets do not, without case and punctuation."""

DENSE: dict[str, tuple[int, int, int, int, int, int, bool, Activation]] = {
    "gpt35b": (24, 4096, 16384, 32, 32, 51200, False, "gelu"),
    "gpt320b": (44, 6144, 24576, 48, 48, 51200, False, "gelu"),
    "gpt3175b": (96, 12288, 49152, 96, 96, 51200, False, "gelu"),
    "nemotron8b": (32, 4096, 16384, 32, 32, 256000, False, "relu2"),
    "nemotron22b": (40, 6144, 24576, 48, 48, 256000, False, "relu2"),
    "nemotron340b": (96, 18432, 73728, 96, 8, 256000, False, "relu2"),
    "qwen2514b": (48, 5120, 13824, 40, 8, 152064, True, "silu"),
    "qwen257b": (28, 3584, 18944, 28, 4, 152064, True, "silu"),
    "qwen2532b": (64, 5120, 27648, 40, 8, 152064, True, "silu"),
}
"""Layers, hidden, width, heads, key-value heads, vocabulary, gated, activation. Sources: NeMo's published recipes of
GPT-3 and Nemotron-4 (arXiv 2402.16819, 2406.11704), Qwen2.5 (arXiv 2412.15115 table 1)."""

_YET = "which no model description here can say yet"
UNKNOWN_KINDS = (
    (r"nemotron-?3\b|nemotron-?3[-.]|nemotron-?h\b", f"its layers mix Mamba-2, attention and experts, {_YET}"),
    (r"qwen3-?next|qwen3\.[5-9]", f"three of four layers are Gated DeltaNet, {_YET}"),
    (r"deepseek-?v4", f"its attention is compressed and sparse, with hyper-connections, {_YET}"),
    (r"glm-?5", f"its attention is sparse behind an indexer, {_YET}"),
    (r"kimi-?k3|minimax-?m3", f"its attention is linear or block-sparse, {_YET}"),
    (r"-vl-|\bvl\b|omni|gemma", f"it has parts beside a text decoder, or attention, {_YET}"),
)
"""Patterns of names and why such a model cannot be described."""


def plain(name: str) -> str:
    """Lower-case letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def model_named(name: str, notes: str = "") -> ModelSpec:
    """The model that a table's cell means; remarks in brackets, as in "Llama3-70B (SFT)", play no part.

    A dense GPT whose sizes stand in `notes` ("heads 16, hidden 2048, layers 24, … vocab 131072") is built from them.

    Raises:
        SpecError: no such model is known, or it is of a kind that `ModelSpec` cannot describe.
    """
    bare = re.sub(r"\(.*?\)", "", name).split("+")[0].strip()
    if not bare:
        raise SpecError("column model is empty.")
    found = ALIASES.get(plain(bare)) or presets.find(bare)
    if found is None:
        found = presets.find(re.sub(r"[-_ ](base|instruct|it|chat|thinking|hf)$", "", bare, flags=re.IGNORECASE))
    if found is not None:
        return _preset(found)
    if plain(bare) in DENSE:
        return _dense(bare, *DENSE[plain(bare)])
    for pattern, reason in UNKNOWN_KINDS:
        if re.search(pattern, bare.lower()):
            raise SpecError(f"{bare}: {reason}.")
    sizes = _sizes_in(f"{name} {notes}")
    if {"hidden", "layers"} <= sizes.keys():
        hidden = sizes["hidden"]
        heads = sizes.get("heads", max(1, hidden // 128))
        vocab = sizes.get("vocab", 51200)
        return _dense(bare, sizes["layers"], hidden, 4 * hidden, heads, heads, vocab, False, "gelu")
    raise SpecError(f"column model holds {name!r}, which is no model known here; {nearest(bare, presets.PRESETS)}")


@cache
def _preset(name: str) -> ModelSpec:
    return load_model_spec(name)


def _sizes_in(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for key in ("heads", "hidden", "layers", "vocab"):
        match = re.search(rf"\b{key} (\d+)", text) or re.search(rf"\b(\d+) {key}", text)
        if match:
            sizes[key] = int(match[1])
    return sizes


def _dense(
    name: str,
    layers: int,
    hidden: int,
    width: int,
    heads: int,
    kv: int,
    vocab: int,
    gated: bool,
    activation: Activation,
) -> ModelSpec:
    head = hidden // heads
    attention = AttentionSpec(
        heads=heads, kv_heads=kv, head_dim=head, v_head_dim=head, rope=RopeSpec(dim=head), scale=head**-0.5
    )
    layer = LayerSpec(attention=attention, mlp=MlpSpec(width=width, activation=activation, gated=gated))
    return ModelSpec(
        name=name, family="moesaic", vocab=vocab, hidden=hidden, layers=(layer,) * layers, max_positions=2**20
    )
