"""Experts chosen by other means than the router: evenly, skewed, or as recorded. For benchmarks and studies.

What a token gets depends on its layer, its step, its sequence's number in the step and its place in the sequence, and
never on the rank that holds it, so that these runs too are the same in every layout. Weights still come from the
router's scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.model.recompute import on_second_pass
from moesaic.model.router import Router, Routing
from moesaic.model.sequences import Sequences
from moesaic.spec.errors import MoesaicError


class Source(Protocol):
    """Where recorded choices come from."""

    def read(self, step: int, layer: int, sequences_B: Tensor, places_S: Tensor) -> Tensor:
        """Expert ids [B, S, K] int64 of these tokens."""
        ...


class Sink(Protocol):
    """Where choices are recorded."""

    def write(self, step: int, layer: int, sequences_B: Tensor, places_S: Tensor, ids_BSK: Tensor) -> None:
        """Keep the expert ids [B, S, K] of these tokens."""
        ...

    def finish(self, step: int) -> None:
        """All ranks have written what they have of `step`."""
        ...


class _Tokens:
    """The tokens of one micro-batch: `sequences_B` by number in the step, and their places `places_S` that are here."""

    def __init__(self, sequences_B: Tensor, places_S: Tensor) -> None:
        self._where = sequences_B, places_S
        self.index_T: Tensor | None = None
        """Numbers of the tokens in the step, once somebody needed them."""

    def seen(self, count: int) -> tuple[Tensor, Tensor]:
        """Sequences and places, for a router that sees `count` tokens."""
        sequences_B, places_S = self._where
        if len(sequences_B) * len(places_S) != count:
            raise MoesaicError(
                f"a router sees {count} tokens, but {len(sequences_B)} sequences with {len(places_S)} places each were "
                f"announced."
            )
        return sequences_B, places_S


class Forced:
    """What chooses in place of the routers of this process, or records what they choose.

    `routers` are the layers that are here, by number. `mode` is `none`, `even` or `skew`; a `source` takes the place of
    both. Active only between `set_tokens` and `clear_tokens`: whatever else runs the model, such as an evaluation, gets
    the routers' own choice.
    """

    def __init__(
        self,
        routers: list[tuple[int, Router]],
        *,
        seq_len: int,
        mode: str = "none",
        std: float = 0.0,
        seed: int = 0,
        source: Source | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.routers = routers
        self.step = 0
        self._seq_len, self._source, self._sink = seq_len, source, sink
        self._tokens: _Tokens | None = None
        self._choosers: dict[int, Callable[[_Tokens, Tensor], Tensor]] = {}
        for layer, router in routers:
            if source is not None:
                self._choosers[layer] = partial(self._replayed, layer)
            elif mode == "even":
                self._choosers[layer] = partial(self._even, layer, router)
            elif mode == "skew":
                bias_E = skew_bias(router.spec.experts, std, seed, layer).to(router.weight.device)
                self._choosers[layer] = partial(_skewed, router, bias_E)
            if sink is not None:
                router.register_forward_hook(partial(self._record, layer))

    def begin_step(self, step: int) -> None:
        """The tokens to come are those of `step`, counted from 1."""
        self.step = step

    def set_tokens(self, sequences_B: Tensor, places_S: Tensor) -> None:
        """The routers are about to see the tokens at `places_S` (0 … seq_len − 1) of the sequences `sequences_B` (their
        numbers in the step, 0 … global_batch − 1), row after row. To be called before each forward pass of a
        micro-batch; where it is run again for its gradients, routers remember how they chose."""
        self._tokens = tokens = _Tokens(sequences_B, places_S)
        for layer, router in self.routers:
            chooser = self._choosers.get(layer)
            router.choose = None if chooser is None else partial(chooser, tokens)

    def see(self, first: int, sequences: Sequences) -> None:
        """As `set_tokens`, for whole rows, the first of them number `first` in the step: their places that are here."""
        every_S = torch.arange(sequences.length, device=sequences.positions.device)
        self.set_tokens(torch.arange(first, first + sequences.batch), sequences.own(every_S[None])[0])

    def clear_tokens(self) -> None:
        """What the routers see from here on is not part of a training step."""
        self._tokens = None
        for _, router in self.routers:
            router.choose = None

    def end_step(self) -> None:
        """The step is done on all ranks."""
        self.clear_tokens()
        if self._sink is not None:
            self._sink.finish(self.step)

    def _even(self, layer: int, router: Router, tokens: _Tokens, choice_TE: Tensor) -> Tensor:
        if tokens.index_T is None:
            sequences_B, places_S = tokens.seen(len(choice_TE))
            where = choice_TE.device
            index_BS = sequences_B.to(where)[:, None] * self._seq_len + places_S.to(where)[None, :]
            tokens.index_T = index_BS.flatten()
        return even(tokens.index_T, router.spec.experts, router.spec.top_k, shift=layer + self.step)

    def _replayed(self, layer: int, tokens: _Tokens, choice_TE: Tensor) -> Tensor:
        assert self._source is not None
        sequences_B, places_S = tokens.seen(len(choice_TE))
        ids_BSK = self._source.read(self.step, layer, sequences_B, places_S)
        return ids_BSK.flatten(0, 1).to(choice_TE.device)

    def _record(self, layer: int, router: Any, inputs: Any, routing: Routing) -> None:
        # What is run again for its gradients has been written, and other tokens may have been announced since.
        if self._tokens is None or not router.training or on_second_pass():
            return
        assert self._sink is not None
        sequences_B, places_S = self._tokens.seen(len(routing.ids_TK))
        ids_BSK = routing.ids_TK.unflatten(0, (len(sequences_B), len(places_S)))
        self._sink.write(self.step, layer, sequences_B, places_S, ids_BSK)


def even(index_T: Tensor, experts: int, top_k: int, shift: int = 0) -> Tensor:
    """Expert ids [T, K] such that the tokens of any range of indices load all experts equally, to within one choice.

    Token t takes places t·K … t·K + K − 1 of an endless round over the experts, in an order that puts its K experts far
    from each other: place p is expert (stride·p + shift) mod E, with a stride near E / K that shares no divisor with E.
    """
    stride = min(
        (s for s in range(1, experts + 1) if math.gcd(s, experts) == 1), key=lambda s: abs(s - experts / top_k)
    )
    place_TK = index_T[:, None] * top_k + torch.arange(top_k, device=index_T.device)
    return (place_TK % experts * stride + shift) % experts


def skew_bias(experts: int, std: float, seed: int, layer: int) -> Tensor:
    """The bias [E] of a layer's experts, normal with standard deviation `std`, in logits."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)
    return std * torch.randn(experts, generator=generator)


def _skewed(router: Router, bias_E: Tensor, tokens: _Tokens, choice_TE: Tensor) -> Tensor:
    return skewed(router, bias_E, choice_TE)


@torch.no_grad()
def skewed(router: Router, bias_E: Tensor, choice_TE: Tensor) -> Tensor:
    """The experts [T, K] that a router would choose if `bias_E` were added to its logits.

    choice_TE is what the router chooses by: scores plus selection bias, or logits. Scores are turned back into logits.
    """
    spec = router.spec
    biased_TE = choice_TE if router.select_bias is None else choice_TE - router.select_bias
    if spec.score == "sparsemixer" or spec.when == "post":
        biased_TE = biased_TE + bias_E
    elif spec.score == "sigmoid":
        biased_TE = (torch.logit(biased_TE, eps=1e-7) + bias_E).sigmoid()
    else:
        tiny = torch.finfo(biased_TE.dtype).tiny
        biased_TE = (biased_TE.clamp(min=tiny).log() + bias_E).softmax(-1)
    if router.select_bias is not None:
        biased_TE = biased_TE + router.select_bias
    if spec.groups > 1:
        biased_TE = router.keep_groups(biased_TE)
    return biased_TE.topk(spec.top_k, dim=-1).indices
