"""Dequantising the block formats in which some checkpoints are published, while they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.hf.errors import WeightsError
from moesaic.hf.safetensors_io import Weights

SCALE_SUFFIX = "_scale_inv"
"""DeepSeek-V3's fp8 weights have their scales under the same key with this suffix."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
    """Whether the tensor is stored in fp8.

    Raises:
        WeightsError: fp8 without the scales that go with it.
    """
    if weights.entry(key).dtype not in _FP8:
        return False
    if key + SCALE_SUFFIX not in weights:
        raise WeightsError(f"{key} is stored in fp8 and its scales, {key + SCALE_SUFFIX}, are missing.")
    return True


def read_fp8_into(weights: Weights, key: str, view: Tensor, block: tuple[int, int]) -> None:
    """Copies value · scale of its block into `view` [rows, columns] (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Raises:
        WeightsError: the scales do not have one entry per block.
    """
    values, scales = weights.read(key), weights.read(key + SCALE_SUFFIX).float()
    expected = tuple(-(-size // width) for size, width in zip(values.shape, block, strict=False))
    if values.dim() != 2 or tuple(scales.shape) != expected:
        raise WeightsError(
            f"{key + SCALE_SUFFIX} has shape {list(scales.shape)}, and {key} of shape {list(values.shape)} in blocks "
            f"of {block[0]} × {block[1]} needs {list(expected)}."
        )
    for i, row_scales in enumerate(scales):
        rows = slice(i * block[0], (i + 1) * block[0])
        widened = row_scales.repeat_interleave(block[1])[: values.shape[1]]
        view[rows].copy_(values[rows].float() * widened)


MXFP4_SUFFIXES = ("_blocks", "_scales")
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_mxfp4_into(weights: Weights, key: str, view: Tensor) -> None:
    """Copies packed four-bit numbers into `view` [E, …], expert by expert.

    Block [..., 16] bytes hold 32 numbers, the low half of each byte first: sign, then an index into 0, ½, 1, 1½, 2, 3,
    4, 6; each block is multiplied by 2^(scale − 127) (OCP Microscaling Formats 1.0, section 5.3).

    Raises:
        WeightsError: there are no scales, or not one per block.
    """
    scales_key = key.removesuffix(MXFP4_SUFFIXES[0]) + MXFP4_SUFFIXES[1]
    if scales_key not in weights:
        raise WeightsError(f"{key} is stored as MXFP4 blocks and its scales, {scales_key}, are missing.")
    shape, scales = weights.entry(key).shape, weights.read(scales_key)
    if tuple(scales.shape) != shape[:-1]:
        raise WeightsError(
            f"{scales_key} has shape {list(scales.shape)}, and {key} of shape {list(shape)} needs {list(shape[:-1])}."
        )
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    for expert in range(shape[0]):
        packed = weights.read_entry(key, expert)
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        exponents = scales[expert].to(torch.int32) - 127
        values = torch.ldexp(table[pairs.int()], exponents.unsqueeze(-1))
        view[expert].copy_(values.view(view[expert].shape))
