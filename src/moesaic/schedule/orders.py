"""What each rank of a pipeline does, and in which order.

A pipeline of `pp` ranks and `v` virtual stages per rank has pp · v stages; stage i lives on rank i % pp. An order is a
list of actions, worked off one by one: a rank waits when the input of its next action has not arrived. Orders need no
clock, so they are the same on any hardware. Pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from moesaic.spec.errors import SpecError, nearest

Kind = Literal["F", "B", "W"]

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}


class Action(NamedTuple):
    """One piece of work on one micro-batch in one virtual stage.

    F is forward. B is backward; in an order that has W for the same micro-batch and stage, B gives the gradient of the
    input only, and W those weight gradients that B left.
    """

    kind: Kind
    micro: int
    stage: int

    def __str__(self) -> str:
        return f"{NAMES[self.kind]} of micro-batch {self.micro} in virtual stage {self.stage}"


def one_forward_one_backward(rank: int, pp: int, micros: int) -> list[Action]:
    """1F1B (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, figure 4 top) for one stage per rank.

    At most min(micros, pp − rank) micro-batches are between forward and backward. Ranks are idle for (pp − 1) / micros
    of the time they compute.
    """
    warm_up = min(micros, pp - rank - 1)
    forwards = [Action("F", micro, rank) for micro in range(micros)]
    backwards = [Action("B", micro, rank) for micro in range(micros)]
    return _alternate(forwards, backwards, warm_up)


def interleaved(rank: int, pp: int, virtual_stages: int, micros: int) -> list[Action]:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): `virtual_stages` stages per rank, `micros` a multiple of pp.

    Micro-batches go in rounds of pp through each stage of the rank in turn, forward from the first, backward from the
    last. At most min(v · micros, 2 (pp − rank − 1) + (v − 1) pp + 1) pairs of micro-batch and stage are between forward
    and backward. Ranks are idle for (pp − 1) / (v · micros) of the time they compute. One stage per rank is 1F1B.

    Raises SpecError when `micros` is not a multiple of pp.
    """
    if virtual_stages == 1:
        return one_forward_one_backward(rank, pp, micros)
    if micros % pp:
        raise SpecError(
            f"an interleaved pipeline takes micro-batches in rounds of pp = {pp}, but a step has {micros}; make the "
            f"micro-batches per step a multiple of {pp}, or set layout.virtual_stages = 1"
        )
    rounds = [range(first, first + pp) for first in range(0, micros, pp)]
    chunks = range(virtual_stages)
    forwards = [Action("F", micro, chunk * pp + rank) for each in rounds for chunk in chunks for micro in each]
    backwards = [Action("B", micro, chunk * pp + rank) for each in rounds for chunk in chunks[::-1] for micro in each]
    return _alternate(forwards, backwards, min(len(forwards), _interleaved_warm_up(rank, pp, virtual_stages)))


class Pair(NamedTuple):
    """The forward of one micro-batch beside the backward of another, on one rank."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward} beside {self.backward}"


def paired(rank: int, pp: int, virtual_stages: int, micros: int) -> list[Action | Pair]:
    """(Interleaved) 1F1B in which each forward after the warm-up runs beside a backward.

    Warm-up is 2 (pp − rank − 1) + (v − 1) pp + 1 forwards, one more than interleaved 1F1B's, so that no forward of a
    pair is needed by its backward; with one stage per rank that is pp − rank more than 1F1B's. A pair needs the pair of
    the same number of the rank after, which needs that of this rank two before: with pairs alone nobody waits. At most
    min(v · micros, warm-up + 1) pairs of micro-batch and stage are between forward and backward.
    """
    base = interleaved(rank, pp, virtual_stages, micros)
    forwards = [action for action in base if action.kind == "F"]
    backwards = [action for action in base if action.kind == "B"]
    warm_up = min(len(forwards), _interleaved_warm_up(rank, pp, virtual_stages) + 1)
    both = [Pair(f, b) for f, b in zip(forwards[warm_up:], backwards, strict=False)]
    return [*forwards[:warm_up], *both, *backwards[len(both) :]]


def single_actions(work: Iterable[Action | Pair]) -> list[Action]:
    """Pairs as two actions, forward first."""
    return [action for each in work for action in (each if isinstance(each, Pair) else (each,))]


def zero_bubble(rank: int, pp: int, virtual_stages: int, micros: int) -> list[Action]:
    """ZB-H1 (Qi et al., arXiv 2401.10241, section 2.1), for several stages per rank too.

    Backwards come in the order of (interleaved) 1F1B. A rank leaves as many W's behind as bring what it keeps to that
    of rank 0 and no further; they fill the end, where ranks would wait for gradients. With one stage per rank, at most
    min(micros, pp) micro-batches are between forward and W: 1F1B's most. When F, B and W take one unit each and
    micros ≥ pp (with several stages per rank ≥ 2 pp), ranks are idle for (pp − 1) / (3 · v · micros) of the time they
    compute, a third of what 1F1B wastes.
    """
    base = interleaved(rank, pp, virtual_stages, micros)
    if virtual_stages == 1:
        behind = rank
    else:
        behind = _interleaved_warm_up(0, pp, virtual_stages) - _interleaved_warm_up(rank, pp, virtual_stages)
    return _split(base, behind)


def pipeline_orders(schedule: str, pp: int, virtual_stages: int, micros: int) -> list[list[Action]]:
    """The order of every rank for `schedule`: 1f1b, interleaved or zero_bubble.

    Raises SpecError for an unknown schedule, numbers below 1, several stages per rank under 1f1b, and micro-batches
    that do not fill rounds when there are several stages per rank.
    """
    return [pipeline_order(schedule, rank, pp, virtual_stages, micros) for rank in range(pp)]


def pipeline_order(schedule: str, rank: int, pp: int, virtual_stages: int, micros: int) -> list[Action]:
    """The order of one rank; see `pipeline_orders`."""
    if min(pp, virtual_stages, micros) < 1:
        raise SpecError(
            f"a pipeline needs at least one rank, one stage per rank and one micro-batch, not pp = {pp}, "
            f"virtual_stages = {virtual_stages} and {micros} micro-batches"
        )
    if not 0 <= rank < pp:
        raise SpecError(f"pipeline rank {rank} does not exist with pp = {pp}; ranks are 0 to {pp - 1}")
    if schedule == "1f1b":
        if virtual_stages > 1:
            raise SpecError(
                f"1f1b runs one stage per rank, not {virtual_stages}; set layout.schedule to interleaved or "
                "zero_bubble, or layout.virtual_stages = 1"
            )
        return one_forward_one_backward(rank, pp, micros)
    makers: dict[str, Callable[[int, int, int, int], list[Action]]] = {
        "interleaved": interleaved,
        "zero_bubble": zero_bubble,
    }
    if schedule not in makers:
        raise SpecError(f"unknown schedule {schedule!r}: {nearest(schedule, ['1f1b', *makers])}")
    return makers[schedule](rank, pp, virtual_stages, micros)


def splits_backward(actions: Iterable[Action]) -> bool:
    """Whether weight gradients are actions of their own."""
    return any(action.kind == "W" for action in actions)


def received(actions: Iterable[Action], kind: Kind, stages_total: int) -> list[tuple[int, int]]:
    """What a rank receives on a link, in order: (micro, sending stage) of activations for F, of gradients for B."""
    ahead, edge = (-1, 0) if kind == "F" else (1, stages_total - 1)
    return [(a.micro, a.stage + ahead) for a in actions if a.kind == kind and a.stage != edge]


def sent(actions: Iterable[Action], kind: Kind, stages_total: int) -> list[tuple[int, int]]:
    """What a rank sends on a link, in order: (micro, sending stage) of activations for F, of gradients for B."""
    edge = stages_total - 1 if kind == "F" else 0
    return [(a.micro, a.stage) for a in actions if a.kind == kind and a.stage != edge]


def _interleaved_warm_up(rank: int, pp: int, virtual_stages: int) -> int:
    """Forwards before the first F-then-B pair: until the first micro-batch's gradient can be back at this rank's last
    stage, going through the pp − rank − 1 ranks after it there and back while the next round takes their places."""
    return 2 * (pp - rank - 1) + (virtual_stages - 1) * pp


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warm_up :]


def _split(base: list[Action], behind: int) -> list[Action]:
    """Add W's to an order: before each forward all but `behind` of those open, after the last forward one per B."""
    order: list[Action] = []
    left: deque[Action] = deque()
    forwards = sum(action.kind == "F" for action in base)
    for action in base:
        if action.kind == "F":
            while len(left) > behind:
                order.append(left.popleft())
            forwards -= 1
        elif not forwards and len(left) > behind:
            order.append(left.popleft())
        order.append(action)
        if action.kind == "B":
            left.append(action._replace(kind="W"))
    return order + list(left)
