"""Which places of a row the ranks of a context-parallel group hold.

A row of S tokens is shared by cp · tp ranks. The context part of a rank, S/cp places, is what it attends for; its own
part, one of tp equal contiguous pieces of the context part, is what it holds between modules. Two kinds of context
part:

- contiguous (kind `ulysses`): rank r holds the r-th of cp pieces;
- zig-zag (kind `ring`): rank r holds chunks r and 2·cp − 1 − r of 2·cp. Under a causal mask a token at place p costs
  p + 1 scores, so an early chunk and its mirror image cost the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.spec.errors import SpecError


def contiguous(length: int, parts: int, index: int) -> Tensor:
    """Places [length/parts], ascending, of piece `index` of a row. SpecError where the length does not divide."""
    _divides(length, parts, f"a row in {parts} equal pieces")
    size = length // parts
    return torch.arange(index * size, (index + 1) * size)


def zigzag(length: int, parts: int, index: int) -> Tensor:
    """Places [length/parts], ascending, of chunks `index` and 2·parts − 1 − `index` of 2·parts.

    One part is the whole row, whatever its length. Otherwise the length must be a multiple of 2·parts (SpecError).
    """
    if parts == 1:
        return torch.arange(length)
    _divides(length, 2 * parts, f"a row in zig-zag over {parts} ranks")
    return torch.cat([contiguous(length, 2 * parts, chunk) for chunk in (index, 2 * parts - 1 - index)])


def context_places(length: int, cp: int, cp_rank: int, kind: str) -> Tensor:
    """Places [S/cp], ascending, of the context part of rank `cp_rank`; `kind` is `ulysses` or `ring`."""
    if kind == "ring":
        return zigzag(length, cp, cp_rank)
    if kind == "ulysses":
        return contiguous(length, cp, cp_rank)
    raise SpecError(f"layout.cp_kind is {kind!r}; it must be 'ulysses' or 'ring'.")


def own_places(length: int, cp: int, cp_rank: int, tp: int, tp_rank: int, kind: str) -> Tensor:
    """Places [S/(cp·tp)], ascending, of the tokens that rank (`cp_rank`, `tp_rank`) holds between modules."""
    part = context_places(length, cp, cp_rank, kind)
    return part[contiguous(len(part), tp, tp_rank)]


def all_context_places(length: int, cp: int, kind: str) -> Tensor:
    """Context parts [cp, S/cp] of all ranks of the group, in rank order."""
    return torch.stack([context_places(length, cp, rank, kind) for rank in range(cp)])


def _divides(length: int, parts: int, what: str) -> None:
    if length % parts:
        above = -(-length // parts) * parts
        raise SpecError(
            f"{length} tokens do not divide by {parts}, as {what} needs: "
            f"use {above} (rows padded by {above - length})" + (f" or {above - parts}." if above > parts else ".")
        )
