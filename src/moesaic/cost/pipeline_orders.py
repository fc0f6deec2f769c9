"""In which order each rank of a pipeline works, for the timeline.

Stage i of a model in pp · v virtual stages lives on rank i % pp, except under DualPipe, where the way through the ranks
turns back: see `stages_of`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from moesaic.spec.errors import SpecError, nearest

from .workload import SCHEDULES

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """Work on one micro-batch in one virtual stage: forward (F), all of backward (B), backward of inputs only (I) and
    the gradients of weights (W) that an I leaves."""

    kind: Kind
    micro: int
    stage: int


Work = tuple[Action, ...]
"""One action, or a forward and a backward that run at the same time."""


def pipeline_works(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, paired: bool = False
) -> list[list[Work]]:
    """The order of every rank under a schedule of workload.SCHEDULES.

    `paired`: a forward and the backward that follows it in the steady state run together, which takes one more forward
    before the first backward (so that they are of different micro-batches).

    1f1b and interleaved: Narayanan et al., arXiv 2104.04473. zero_bubble: ZB-H1 of Qi et al., arXiv 2401.10241, whose
    memory is that of 1F1B. dualpipe: DeepSeek-V3, arXiv 2412.19437, section 3.2.1; with two virtual stages DualPipeV
    (github.com/deepseek-ai/DualPipe).

    Raises:
        SpecError: an unknown schedule, numbers below 1, or numbers that the schedule cannot use.
    """
    if schedule not in SCHEDULES:
        raise SpecError(f"unknown schedule {schedule!r}: {nearest(schedule, SCHEDULES)}")
    if min(pp, virtual_stages, micro_batches) < 1:
        raise SpecError(
            f"a pipeline has at least one rank, virtual stage and micro-batch, not {pp}, {virtual_stages} and "
            f"{micro_batches}"
        )
    if schedule == "dualpipe":
        return _dualpipe(pp, virtual_stages, micro_batches, paired)
    if schedule == "1f1b" and virtual_stages > 1:
        raise SpecError(f"1f1b has one virtual stage per rank, not {virtual_stages}: use interleaved")
    if virtual_stages > 1 and micro_batches % pp:
        raise SpecError(
            f"an interleaved pipeline takes micro-batches in rounds of pp = {pp}, but a step has {micro_batches}: "
            f"use a multiple of {pp}, or one virtual stage"
        )
    return [
        _alternating(rank, pp, virtual_stages, micro_batches, schedule == "zero_bubble", paired) for rank in range(pp)
    ]


def stages_of(schedule: str, pp: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """The virtual stages on a rank. DualPipe sends half the micro-batches from each end, so rank r holds stages r and
    pp − 1 − r (every stage exists twice); DualPipeV folds 2 pp stages, r and 2 pp − 1 − r."""
    if schedule == "dualpipe":
        return (rank, pp * virtual_stages - 1 - rank)
    return tuple(range(rank, pp * virtual_stages, pp))


def _alternating(rank: int, pp: int, v: int, micros: int, split: bool, paired: bool) -> list[Work]:
    """Forwards, then one forward and one backward in turn, then backwards; `split` leaves weights for later."""
    size = micros if v == 1 else pp
    rounds = [range(first, first + size) for first in range(0, micros, size)]
    forwards = [Action("F", m, chunk * pp + rank) for each in rounds for chunk in range(v) for m in each]
    backwards = [Action("B", m, chunk * pp + rank) for each in rounds for chunk in reversed(range(v)) for m in each]
    # Forwards before the first one that a backward follows.
    first = min(len(forwards), (pp - rank - 1 if v == 1 else 2 * (pp - rank - 1) + (v - 1) * pp) + paired)
    both = len(forwards) - first
    works: list[Work] = [(action,) for action in forwards[:first]]
    for forward, backward in zip(forwards[first:], backwards[:both], strict=True):
        works += [(forward, backward)] if paired else [(forward,), (backward,)]
    works += [(action,) for action in backwards[both:]]
    return _weights_later(works, rank if v == 1 else 2 * rank) if split else works


def _weights_later(works: Sequence[Work], behind: int) -> list[Work]:
    """Split backwards. Up to `behind` gradients of weights stay open, which is what fills memory up to that of rank 0;
    they are what ranks do while they would wait at the end."""
    forwards = sum(action.kind == "F" for work in works for action in work)
    result: list[Work] = []
    left: deque[Action] = deque()
    for work in works:
        if work[0].kind == "F":
            while len(left) > behind:
                result.append((left.popleft(),))
            forwards -= 1
        elif not forwards and len(left) > behind:
            result.append((left.popleft(),))
        result.append(tuple(action._replace(kind="I") if action.kind == "B" else action for action in work))
        left.extend(action._replace(kind="W") for action in work if action.kind == "B")
    return result + [(action,) for action in left]


def _dualpipe(pp: int, v: int, micros: int, paired: bool) -> list[list[Work]]:
    """Orders of ranks between two ends of the pipeline: those of DualPipe, whose second half mirrors the first, and of
    DualPipeV, which is the first half alone."""
    if v > 2 or (v == 1 and pp % 2):
        raise SpecError(
            f"dualpipe has an even number of ranks with one virtual stage each, or two virtual stages (DualPipeV), not "
            f"pp = {pp} with {v}"
        )
    if micros < 2 * pp or (v == 1 and micros % 2):
        even = "an even number of " if v == 1 else ""
        raise SpecError(f"dualpipe over pp = {pp} takes {even}micro-batches, at least {2 * pp}, not {micros}")
    if v == 2:
        return [_from_end(rank, pp, (rank, 2 * pp - 1 - rank), (0, 0), micros, paired) for rank in range(pp)]
    half = micros // 2
    orders = []
    for rank in range(pp):
        near = rank < pp // 2
        stages, starts = ((rank, pp - 1 - rank), (0, half)) if near else ((pp - 1 - rank, rank), (half, 0))
        orders.append(_from_end(min(rank, pp - 1 - rank), pp // 2, stages, starts, half, paired))
    return orders


def _from_end(
    place: int, depth: int, stages: tuple[int, int], starts: tuple[int, int], micros: int, paired: bool
) -> list[Work]:
    """The order of the rank at `place` of `depth` from its end: micro-batches of way 0 come from there, of way 1 from
    the turn or the other end. A way has `micros` micro-batches, numbered from `starts`, and passes here at `stages`."""
    works: list[Work] = []
    done = {(kind, way): 0 for kind in "FB" for way in (0, 1)}
    open_weights: deque[Action] = deque()

    def forward(way: int) -> Action:
        done["F", way] += 1
        return Action("F", starts[way] + done["F", way] - 1, stages[way])

    def backward(way: int, split: bool = False) -> Action:
        done["B", way] += 1
        action = Action("I" if split else "B", starts[way] + done["B", way] - 1, stages[way])
        if split:
            open_weights.append(action._replace(kind="W"))
        return action

    def weights() -> Work:
        return (open_weights.popleft(),)

    def both(way: int, together: bool = True) -> list[Work]:
        first, second = forward(way), backward(1 - way)
        return [(first, second)] if together and paired else [(first,), (second,)]

    inner = depth - place - 1  # ranks between this one and the turn
    for _ in range(2 * inner):
        works.append((forward(0),))
    for _ in range(place + 1):
        works += [(forward(0),), (forward(1),)]
    for _ in range(inner):
        works += [(backward(1, split=True),), weights(), (forward(1),)]
    for count in range(micros - 2 * depth + place + 1):
        # At the turn nothing is there yet to run beside the first forward.
        works += both(0, together=bool(count or inner))
        works += both(1)
    for _ in range(inner):
        works += [(backward(1),), *both(1)]
    whole = place + 1  # as many again leave their weights for the end
    for count in range(2 * (place + 1)):
        works.append((backward(1 - count % 2, split=count >= whole),))
    for _ in range(inner):
        works += [weights(), (backward(0, split=True),)]
    works += [weights() for _ in range(place + 1)]
    return works
