"""Rotary position embedding (arXiv 2104.09864) and the scalings that published models use.

Frequencies are computed in fp32 in the order of operations that the models were trained with: at position 100,000 a
last-bit difference of a frequency already turns a head by 0.01 rad.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moesaic.spec.errors import SpecError
from moesaic.spec.model import RopeSpec


def _number(spec: RopeSpec, key: str, default: float | None = None) -> float:
    value = spec.params.get(key)
    if value is None:
        value = default
    if value is None:
        raise SpecError(
            f"rope scaling {spec.kind!r} needs the number {key!r}, and rope_parameters has only "
            f"{sorted(spec.params)}; add it there"
        )
    return float(value)


def inverse_frequencies(
    spec: RopeSpec, device: torch.device | str = "cpu", *, long: bool = False
) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair, [R/2] in fp32, and the factor on cosine and sine.

    The factor is 1 except for YaRN (arXiv 2309.00071, section 3.4) and LongRoPE (arXiv 2402.13753), which has a second
    set of frequencies for sequences that are `long`, beyond the original context. Raises `SpecError` when a scaling
    lacks a number.
    """
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32, device=device) / spec.dim
    if spec.kind == "yarn":
        return _yarn(spec, exponent)
    if spec.kind == "longrope":
        return _longrope(spec, exponent, long)
    theta = spec.theta
    if spec.kind == "ntk_alpha":
        theta = theta * _number(spec, "alpha") ** (spec.dim / (spec.dim - 2))
    frequencies = 1.0 / theta**exponent
    if spec.kind == "linear":
        frequencies = frequencies / _number(spec, "factor")
    elif spec.kind == "llama3":
        frequencies = _llama3(spec, frequencies)
    return frequencies, 1.0


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor = _number(spec, "factor")
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    original = _number(spec, "original_max_position_embeddings")
    turns = original / (2 * math.pi / frequencies)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(turns < low, frequencies / factor, frequencies)
    return torch.where((turns >= low) & (turns <= high), between, scaled)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature 0.1 · weight · ln(factor) + 1, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(spec: RopeSpec, exponent: Tensor) -> tuple[Tensor, float]:
    factor = _number(spec, "factor")
    original = _number(spec, "original_max_position_embeddings")
    magnitude = spec.params.get("attention_factor")
    if magnitude is None:
        over, under = spec.params.get("mscale"), spec.params.get("mscale_all_dim")
        if over and under:
            magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
        else:
            magnitude = yarn_magnitude(factor)

    def pair_with_turns(turns: float) -> float:
        """Index of the pair that turns this often within the original context."""
        return spec.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first = pair_with_turns(float(spec.params.get("beta_fast") or 32))
    last = pair_with_turns(float(spec.params.get("beta_slow") or 1))
    if spec.params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(spec.dim // 2, dtype=torch.float32, device=exponent.device)
    kept = 1 - ((pairs - first) / width).clamp(0, 1)
    period = spec.theta**exponent
    return 1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept, float(magnitude)


def _longrope(spec: RopeSpec, exponent: Tensor, long: bool) -> tuple[Tensor, float]:
    """Each pair has its own stretch. Phi-3.5-MoE names the magnitude of either set, others give one for both.

    Long sequences take the long set, as Phi-3's and Phi-3.5-MoE's published code does; transformers 5.24's phimoe keeps
    the short one at any length.
    """
    which = "long" if long else "short"
    stretch = spec.params.get(f"{which}_factor")
    if stretch is None:
        raise SpecError(f"rope scaling 'longrope' needs the list '{which}_factor'; add it to rope_parameters")
    magnitude = spec.params.get(f"{which}_mscale")
    if magnitude is None:
        magnitude = _number(spec, "attention_factor")
    factors = torch.tensor(stretch, dtype=torch.float32, device=exponent.device)
    return 1.0 / (factors * spec.theta**exponent), float(magnitude)


class _Rotate(torch.autograd.Function):
    """Rotates pairs of R dimensions of x_BSHd; its backward rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offset: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = interleaved, offset
        return _rotated(x, cos, sin, interleaved, offset, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        interleaved, offset = ctx.layout
        return _rotated(grads[0], cos, sin, interleaved, offset, -1.0), None, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offset: int, direction: float) -> Tensor:
    """x · cos + partner(x) · (± sin): every operation runs over whole heads, not over halves of them."""
    width = cos.shape[-1]
    turned = x[..., offset : offset + width]
    if interleaved:
        partner = turned.unflatten(-1, (width // 2, 2)).flip(-1).flatten(-2)
    else:
        partner = turned.roll(width // 2, -1)
    y = (turned * cos).addcmul_(partner, sin, value=direction).to(x.dtype)
    if width == x.shape[-1]:
        return y
    return torch.cat((x[..., :offset], y, x[..., offset + width :]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """Rotate queries or keys by their positions.

    x [B, S, H, d]; cos and sin [1 or B, S, 1, R] from `rope_table`. Dimensions `offset` to `offset + R` of each head
    are rotated, the others pass through (partial rotary embedding). Pairs are (i, i + R/2), or (2i, 2i + 1) when
    `interleaved`.
    """
    return _Rotate.apply(x, cos, sin, interleaved, offset)  # type: ignore[no-any-return]


def rope_table(spec: RopeSpec, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for positions [1 or B, S], each [1 or B, S, 1, R] in fp32.

    Each pair's cosine stands at both of its dimensions; its sine is negative at the first and positive at the second.
    `lengths`, of the same shape as the positions, tells the length of each token's document; LongRoPE needs it.
    """
    frequencies, magnitude = inverse_frequencies(spec, positions.device)
    scale: Tensor | float = magnitude
    if spec.kind == "longrope":
        if lengths is None:
            lengths = positions.amax(1, keepdim=True) + 1
        is_long = (lengths > _number(spec, "original_max_position_embeddings"))[:, :, None, None]
        long_frequencies, long_magnitude = inverse_frequencies(spec, positions.device, long=True)
        frequencies = torch.where(is_long, long_frequencies, frequencies)
        scale = torch.where(is_long, long_magnitude, magnitude)
    angles = positions[:, :, None, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if spec.interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
