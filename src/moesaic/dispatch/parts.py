"""One layer's tokens in parts, so that one part travels while experts work on another.

The own part, tokens whose experts are on their own rank, does not travel. Its first half is computed while the first
rows from other ranks arrive, its second half while the last results go back (cf. MegaScale-MoE, arXiv 2505.11432, §5,
and Comet, arXiv 2502.19811). What travels is cut by token. Nothing travels twice: all parts together send the rows that
one dispatch sends.

Backward has the same gaps. Autograd runs nodes in the reverse order of their making: the finishing of combines, made
last, sends all gradients off; each part then waits for its own, while later ones are still on their way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moesaic.dispatch.exchange import ExchangeRoute
from moesaic.dispatch.route import Arrival, Here, Route, Then
from moesaic.mesh import collectives
from moesaic.mesh.dry import Expected, expected
from moesaic.mesh.group import Group


class _Cuts(threading.local):
    wanted = True


_cuts = _Cuts()


@contextlib.contextmanager
def cutting(wanted: bool) -> Iterator[None]:
    """Whether layers inside, on this thread, may cut their tokens in parts. Not where another micro-batch runs in the
    waits anyway, forward and backward. Every rank must say the same."""
    before, _cuts.wanted = _cuts.wanted, wanted
    try:
        yield
    finally:
        _cuts.wanted = before


def cuts_wanted() -> bool:
    """What `cutting` said; True outside."""
    return _cuts.wanted


@dataclass(frozen=True)
class OwnRoute:
    """Of `tokens` own tokens those numbered `tokens_N`, each once, to this rank itself."""

    tokens: int
    tokens_N: Tensor

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """The tokens."""
        return Here(x_TW.index_select(0, self.tokens_N))

    def start_collect(self, y_NW: Tensor, what: str) -> Arrival:
        """The rows at their tokens' places, zeros elsewhere."""
        return Here(y_NW.new_zeros(self.tokens, y_NW.shape[1]).index_copy_(0, self.tokens_N, y_NW))


@dataclass(frozen=True)
class ChunkRoute:
    """The `route` of own tokens `first` … `last` − 1 of `tokens`."""

    route: Route
    first: int
    last: int
    tokens: int

    def start_spread(self, x_TW: Tensor, what: str) -> Arrival:
        """Begin to spread the chunk."""
        return self.route.start_spread(x_TW[self.first : self.last], what)

    def start_collect(self, y_RW: Tensor, what: str) -> Arrival:
        """Begin to collect the chunk, zeros elsewhere."""
        around = (0, 0, self.first, self.tokens - self.last)
        return Then(self.route.start_collect(y_RW, what), lambda y_CW: F.pad(y_CW, around))


def chunk_bounds(tokens: int, chunks: int) -> list[tuple[int, int]]:
    """`tokens` in `chunks` ranges of nearly the same length, perhaps empty."""
    return [(tokens * i // chunks, tokens * (i + 1) // chunks) for i in range(chunks)]


@dataclass(frozen=True)
class PartRoutes:
    """Routes of one layer's tokens; `first` and `last` do not travel over the group, `remote` only do."""

    first: OwnRoute
    remote: list[ExchangeRoute]
    last: OwnRoute


def part_routes(goes_nT: Tensor, group: Group, chunks: int, most: int) -> PartRoutes:
    """Routes of T tokens of which `goes_nT` says to which ranks of the group they go, each to at most `most`.

    The own ones in two halves, the others in `chunks` by token. Ranks' counts are one message.
    """
    tokens = goes_nT.shape[1]
    if (counts := expected()) is not None:
        return _expected_routes(goes_nT, group, chunks, most, counts)
    own_M = goes_nT[group.rank].nonzero()[:, 0]
    away_nT = goes_nT.clone()
    away_nT[group.rank] = False
    chunks_T = torch.empty(tokens, dtype=torch.int64, device=goes_nT.device)
    for chunk, (a, b) in enumerate(chunk_bounds(tokens, chunks)):
        chunks_T[a:b] = chunk
    ranks_N, tokens_N = away_nT.nonzero().unbind(1)
    keys_N = chunks_T[tokens_N] * group.size + ranks_N
    tokens_N = tokens_N[keys_N.argsort(stable=True)]  # by chunk, then by rank, then in the order of tokens
    sent = torch.bincount(keys_N, minlength=chunks * group.size).view(chunks, group.size).tolist()
    received = collectives.exchange_count_lists(sent, group)
    remote = [
        ExchangeRoute(group, tokens, part_N, sent[chunk], received[chunk])
        for chunk, part_N in enumerate(tokens_N.split([sum(each) for each in sent]))
    ]
    half = len(own_M) // 2
    return PartRoutes(OwnRoute(tokens, own_M[:half]), remote, OwnRoute(tokens, own_M[half:]))


def _expected_routes(goes_nT: Tensor, group: Group, chunks: int, most: int, counts: Expected) -> PartRoutes:
    """`part_routes` of a dry run."""
    tokens, here = goes_nT.shape[1], group.rank
    sent, received = (count(tokens, most, group.size) for count in (counts.sent, counts.received))
    own, sent[here], received[here] = sent[here], 0, 0

    def numbers(count: int) -> Tensor:
        return goes_nT.new_empty(count, dtype=torch.int64)

    def chunk_of(each: list[int], chunk: int) -> list[int]:
        return [count * (chunk + 1) // chunks - count * chunk // chunks for count in each]

    remote = []
    for chunk in range(chunks):
        out, back = chunk_of(sent, chunk), chunk_of(received, chunk)
        remote.append(ExchangeRoute(group, tokens, numbers(sum(out)), out, back))
    return PartRoutes(OwnRoute(tokens, numbers(own // 2)), remote, OwnRoute(tokens, numbers(own - own // 2)))


class _Sum(Function):
    """Sum of tensors in order, in fp32 for narrower floats; its gradient is everybody's, uncopied."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        ctx.count = len(parts)
        return total.to(parts[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return (grads[0],) * ctx.count


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts of one shape, y_TD."""
    return parts[0] if len(parts) == 1 else _Sum.apply(*parts)  # type: ignore[no-any-return]
