"""Numbers of 8 bits: float8_e4m3fn, a sign, 4 bits of exponent and 3 of mantissa, with fp32 scales.

A scale brings the largest of the numbers that share it to 448, the largest that e4m3 has. What comes back differs from
x by at most 2⁻⁴·|x|, or by 2⁻¹⁰ of the scale where x is less than 2⁻⁶ of it, which is e4m3's subnormal range.
Numbers share a scale by token or by channel of a group of tokens, as in MegaScale-MoE (arXiv 2505.11432): a token or a
channel with outliers then costs no other one its precision.

What is infinite or not a number makes everything with its scale not a number, so that it is noticed where it arrives.

Letters: T tokens, D channels, G groups of consecutive tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 number."""
GROUP_TOKENS = 128
"""Consecutive tokens whose channels share scales (MegaScale-MoE's example)."""


def quantize_per_token(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, D] as the bytes of e4m3 numbers, uint8 [T, D], and a scale of each token, fp32 [T]."""
    wide_TD = x_TD.float()
    scale_T = _scale(wide_TD.abs().amax(1)) if wide_TD.numel() else wide_TD.new_ones(len(x_TD))
    return _bytes(wide_TD / scale_T[:, None]), scale_T


def dequantize_per_token(codes_TD: Tensor, scale_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize_per_token` made of x, as [T, D] of `dtype`."""
    return (codes_TD.view(E4M3).float() * scale_T[:, None]).to(dtype)


def quantize_per_channel(x_TD: Tensor, group_tokens: int = GROUP_TOKENS) -> tuple[Tensor, Tensor]:
    """x [T, D] as the bytes of e4m3 numbers, uint8 [T, D], and a scale of each channel for every `group_tokens`
    consecutive tokens, fp32 [G, D]; the last group may be shorter."""
    wide_TD = x_TD.float()
    groups = [_scale(group.abs().amax(0)) for group in wide_TD.split(group_tokens) if len(group)]
    scale_GD = torch.stack(groups) if groups else wide_TD.new_ones(0, x_TD.shape[1])
    return _bytes(wide_TD / scale_GD[group_of(x_TD, group_tokens)]), scale_GD


def dequantize_per_channel(codes_TD: Tensor, scale_GD: Tensor, group_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize_per_channel` made of tokens of which each was in group `group_T`, as [T, D] of `dtype`."""
    return (codes_TD.view(E4M3).float() * scale_GD[group_T]).to(dtype)


def group_of(x_TD: Tensor, group_tokens: int = GROUP_TOKENS) -> Tensor:
    """The group of each token of x, int64 [T]."""
    return torch.arange(len(x_TD), device=x_TD.device) // group_tokens


def groups_of(tokens: int, group_tokens: int = GROUP_TOKENS) -> int:
    """How many groups `tokens` tokens make."""
    return -(-tokens // group_tokens)


def _scale(largest: Tensor) -> Tensor:
    # Not below the smallest normal number: division by a subnormal one overflows, by zero it makes zeros NaN.
    return (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)


def _bytes(scaled_TD: Tensor) -> Tensor:
    return scaled_TD.to(E4M3).view(torch.uint8)
