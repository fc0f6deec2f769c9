"""Dense controls: llama, mistral, qwen3."""

from __future__ import annotations

from moesaic.spec.families import parts
from moesaic.spec.families.reading import Config
from moesaic.spec.model import ModelSpec


def llama(config: Config) -> ModelSpec:
    """Llama 1 to 3."""
    layers = config.integer("num_hidden_layers")
    attention = parts.gqa(config, bias=config.flag("attention_bias"))
    dense = parts.mlp(config, config.integer("intermediate_size"), bias=config.flag("mlp_bias"))
    return parts.model(config, parts.mixed(attention, dense, None, [False] * layers))


def mistral(config: Config) -> ModelSpec:
    """Mistral: a sliding window on every layer where the config has one."""
    layers = config.integer("num_hidden_layers")
    attention = parts.gqa(config, window=config.optional_integer("sliding_window"))
    dense = parts.mlp(config, config.integer("intermediate_size"))
    return parts.model(config, parts.mixed(attention, dense, None, [False] * layers))


def qwen3(config: Config) -> ModelSpec:
    """Qwen3: norms on query and key heads; if windows are used at all, on layers from `max_window_layers` on."""
    layers = config.integer("num_hidden_layers")
    used, first = config.flag("use_sliding_window"), config.integer("max_window_layers", least=0)
    spans = parts.windows(config, layers, [used and i >= first for i in range(layers)])
    attention = parts.gqa(config, bias=config.flag("attention_bias"), qk_norm="head")
    dense = parts.mlp(config, config.integer("intermediate_size"))
    return parts.model(config, parts.mixed(parts.windowed(attention, spans), dense, None, [False] * layers))
