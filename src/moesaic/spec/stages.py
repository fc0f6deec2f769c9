"""Which part of a model stands on which pipeline stage, and the string that says so.

A stage string has a letter per part: `E` embedding, `t` decoder layer, `m` multi-token prediction block, `L` final
norm, head and loss. `|` ends a virtual stage, `x*n` and `(xyz)*n` repeat, and commas and spaces only help the eye:
`Et*3|(tt|)*29m|L` is a model of 61 layers in 32 virtual stages. (The notation is Megatron-Core's.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .errors import SpecError

_TOKEN = re.compile(r"[EtmL|()]|\*[ ]*([0-9]{1,6})")
_MOST_LETTERS = 100_000
"""Longer expansions are a slip of the pen: they would only fill memory."""


@dataclass(frozen=True)
class Unit:
    """Decoder layers of a stage that backward treats as one."""

    layers: tuple[int, ...]
    """One, or several of which only the first one's input is kept: the rest is computed again for all of them."""
    words: tuple[str, ...]
    """What is computed again (`spec.options.RECOMPUTE`)."""


@dataclass(frozen=True)
class Recompute:
    """What backward computes again on one virtual stage."""

    units: tuple[Unit, ...]
    """Its decoder layers, each in one of them, in their order."""
    others: tuple[str, ...]
    """The words for prediction blocks, head and loss."""

    @classmethod
    def of(cls, layers: Sequence[int], words: Sequence[str], method: str, count: int) -> Recompute:
        """`words` for all of `layers`, except that `full` recomputes the first `count` with method `block`, and
        `count` at a time with `uniform`. Prediction blocks are recomputed whole by `uniform` with 1 alone, as in
        Megatron-Core."""
        rest = tuple(word for word in words if word != "full")
        if "full" not in words or (method == "uniform" and count == 1):
            return cls(tuple(Unit((layer,), tuple(words)) for layer in layers), tuple(words))
        if method == "block":
            units = tuple(Unit((layer,), tuple(words) if i < count else rest) for i, layer in enumerate(layers))
            return cls(units, rest)
        cuts = range(0, len(layers), count)
        return cls(tuple(Unit(tuple(layers[cut : cut + count]), tuple(words)) for cut in cuts), rest)


@dataclass(frozen=True)
class Stage:
    """One virtual stage. Virtual stage i of a pipeline of `pp` ranks is chunk i // pp of pipeline rank i % pp."""

    embed: bool = False
    """Holds the token embedding."""
    layers: tuple[int, ...] = ()
    """Indices of its decoder layers, ascending and consecutive. None at all is legal: such a stage passes on."""
    mtp: bool = False
    """Holds the multi-token prediction blocks, all of them."""
    head: bool = False
    """Holds the final norm, the head and the loss."""
    recompute: Recompute | None = None
    """What is computed again here; None: on all layers and stages alike, what the layout says."""

    def __str__(self) -> str:
        first, last = (self.layers[0], self.layers[-1]) if self.layers else (0, -1)
        span = [] if last < first else [f"layer {first}"] if first == last else [f"layers {first}–{last}"]
        parts = [
            *(["embedding"] if self.embed else []),
            *span,
            *(["prediction blocks"] if self.mtp else []),
            *(["head and loss"] if self.head else []),
        ]
        return ", ".join(parts) or "nothing"


@lru_cache(maxsize=256)
def default_stages(count: int, layers: int, mtp: int) -> tuple[Stage, ...]:
    """`layers` dealt as evenly as `count` stages allow, earlier stages taking one more; the embedding on the first
    stage, prediction blocks (if `mtp` > 0) and head on the last."""
    base, more = divmod(layers, count)
    stages, start = [], 0
    for index in range(count):
        stop = start + base + (index < more)
        last = index == count - 1
        stages.append(Stage(index == 0, tuple(range(start, stop)), last and mtp > 0, last))
        start = stop
    return tuple(stages)


@lru_cache(maxsize=256)
def parse_stages(text: str, layers: int, mtp: int) -> tuple[Stage, ...]:
    """The stages that a stage string describes, for a model of `layers` decoder layers and `mtp` prediction blocks.

    Raises:
        SpecError: the string cannot be read, or does not place each part of the model once and in order.
    """
    letters = expand(text)
    shown = f"layout.stages {text!r}"
    for letter, wanted, what in (
        ("E", 1, "embedding"),
        ("t", layers, "decoder layers"),
        ("m", mtp, "multi-token prediction blocks"),
        ("L", 1, "loss"),
    ):
        if letters.count(letter) != wanted:
            raise SpecError(
                f"{shown} places {letters.count(letter)} of {letter!r} ({what}), but the model has {wanted}: "
                f"write each one once."
            )
    order = letters.replace("|", "")
    wanted_order = "E" + "t" * layers + "m" * mtp + "L"
    if order != wanted_order:
        at = next(i for i, (a, b) in enumerate(zip(order, wanted_order, strict=True)) if a != b)
        raise SpecError(
            f"{shown} has {order[at]!r} where {wanted_order[at]!r} must stand (part {at + 1} of {len(order)}): "
            f"the order is E, then t, then m, then L."
        )
    pieces = letters.split("|")
    if "E" not in pieces[0] or "L" not in pieces[-1]:
        raise SpecError(
            f"{shown} has an empty stage before E or after L: the embedding stands on the first stage and the loss "
            f"on the last."
        )
    if sum("m" in piece for piece in pieces) > 1:
        raise SpecError(f"{shown} spreads m over several stages: put the {mtp} prediction blocks on one stage.")
    stages, start = [], 0
    for piece in pieces:
        stop = start + piece.count("t")
        stages.append(Stage("E" in piece, tuple(range(start, stop)), "m" in piece, "L" in piece))
        start = stop
    return tuple(stages)


def stages_text(stages: Sequence[Stage], mtp: int) -> str:
    """The stage string of `stages`, which `parse_stages` reads back."""
    pieces = []
    for stage in stages:
        t = {0: "", 1: "t"}.get(len(stage.layers), f"t*{len(stage.layers)}")
        pieces.append("E" * stage.embed + t + "m" * (mtp if stage.mtp else 0) + "L" * stage.head)
    return "|".join(pieces)


def expand(text: str) -> str:
    """A stage string without brackets, repeats, commas and spaces: only the letters E, t, m, L and `|`.

    Raises:
        SpecError: an unknown letter, a bracket without its partner, or a repeat of nothing.
    """
    shown = f"layout.stages {text!r}"
    levels: list[list[str]] = [[]]
    for token in _tokens(text):
        if token == "(":
            levels.append([])
        elif token == ")":
            if len(levels) == 1:
                raise SpecError(f"{shown} closes a bracket that it never opened.")
            inner = "".join(levels.pop())
            levels[-1].append(inner)
        elif token.startswith("*"):
            times = int(token[1:])
            if not levels[-1] or levels[-1][-1] == "|":
                raise SpecError(f"{shown} repeats nothing with '*{times}': put it after a letter or a bracket.")
            if times < 1 or times * len(levels[-1][-1]) > _MOST_LETTERS:
                raise SpecError(f"{shown} repeats {times} times: a stage string repeats 1 to {_MOST_LETTERS} times.")
            levels[-1][-1] *= times
        else:
            levels[-1].append(token)
    if len(levels) > 1:
        raise SpecError(f"{shown} opens {len(levels) - 1} more brackets than it closes.")
    return "".join(levels[0])


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is not None:
            tokens.append(f"*{match[1]}" if match[1] else match[0])
            at = match.end()
        elif text[at] in ", \t":
            at += 1
        else:
            raise SpecError(
                f"layout.stages {text!r} has {text[at]!r} at position {at + 1}: known are E (embedding), t (layer), "
                f"m (prediction block), L (loss), | (end of stage), brackets and *number."
            )
    return tokens
