"""Dequantising the block formats in which some checkpoints are published, while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.hf.blocks import Block
from moesaic.hf.errors import WeightsError
from moesaic.hf.safetensors_io import Weights

SCALE_SUFFIX = "_scale_inv"
"""DeepSeek-V3's fp8 weights have their scales under the same key with this suffix."""
MXFP4_SUFFIXES = ("_blocks", "_scales")
"""gpt-oss's packed weights and their scales."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check_quantization(config: dict[str, Any], folder: object) -> tuple[int, int]:
    """The block [rows, columns] that shares one fp8 scale, 128 × 128 where the config does not say.

    Raises:
        WeightsError: a quantisation that cannot be undone here.
    """
    table = config.get("quantization_config") or {}
    method = table.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise WeightsError(
            f"the weights in {folder} are quantised with {method!r}, and only block-wise fp8 and mxfp4 can be read; "
            "get or write a bf16 copy first."
        )
    rows, columns = table.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def is_fp8(weights: Weights, key: str) -> bool:
    """Whether the tensor is stored in fp8."""
    return weights.entry(key).dtype in _FP8


def check_scales(weights: Weights, key: str, block: tuple[int, int]) -> None:
    """Checks that a quantised tensor has one scale per block.

    Raises:
        WeightsError: the scales are missing or of another shape.
    """
    shape = weights.entry(key).shape
    if key.endswith(MXFP4_SUFFIXES[0]):
        scales_key, expected = _mxfp4_scales(key), shape[:-1]
    else:
        expected = tuple(-(-size // width) for size, width in zip(shape, block, strict=False))
        scales_key = key + SCALE_SUFFIX
    if scales_key not in weights:
        raise WeightsError(f"{key} is stored in blocks and its scales, {scales_key}, are missing.")
    found = weights.entry(scales_key).shape
    if found != expected or len(expected) != len(shape) - key.endswith(MXFP4_SUFFIXES[0]):
        raise WeightsError(
            f"{scales_key} has shape {list(found)}, and {key} of shape {list(shape)} needs {list(expected)}."
        )


def read_fp8_into(weights: Weights, key: str, blocks: Sequence[Block], block: tuple[int, int]) -> None:
    """Copies value · scale of its block into parts of [rows, columns] (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
    scales = weights.read(key + SCALE_SUFFIX).float()
    rows, columns = weights.entry(key).shape
    for i, row_scales in enumerate(scales):
        top, bottom = i * block[0], min((i + 1) * block[0], rows)
        active = [part for each in blocks if (part := each.inside(top, bottom)) is not None]
        if not active:
            continue
        start, stop = min(part.ranges[0][0] for part in active), max(part.ranges[0][1] for part in active)
        widened = row_scales.repeat_interleave(block[1])[:columns]
        values = weights.read_rows(key, start, stop).float() * widened
        for part in active:
            (first, last), across = part.ranges[0], part.slices[1]
            part.target.copy_(values[first - start : last - start, across])


def _mxfp4_scales(key: str) -> str:
    return key.removesuffix(MXFP4_SUFFIXES[0]) + MXFP4_SUFFIXES[1]


def read_mxfp4_into(weights: Weights, key: str, shape: tuple[int, ...], blocks: Sequence[Block]) -> None:
    """Copies packed four-bit numbers into parts of `shape` [E, …], expert by expert.

    Block [..., 16] bytes hold 32 numbers, the low half of each byte first: sign, then an index into 0, ½, 1, 1½, 2, 3,
    4, 6; each block is multiplied by 2^(scale − 127) (OCP Microscaling Formats 1.0, section 5.3).
    """
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    for expert in range(shape[0]):
        active = [part for each in blocks if (part := each.inside(expert, expert + 1)) is not None]
        if not active:
            continue
        packed = weights.read_entry(key, expert)
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        exponents = weights.read_entry(_mxfp4_scales(key), expert).to(torch.int32) - 127
        values = torch.ldexp(table[pairs.int()], exponents.unsqueeze(-1)).view(shape[1:])
        for part in active:
            part.target[0].copy_(values[part.slices[1:]])
