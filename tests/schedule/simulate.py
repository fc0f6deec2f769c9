"""A pipeline on paper: when each action starts, given how long actions take, messages taking no time.

Messages behave as in the strictest transport: a receive is posted when the one before it on its link was taken (a
gradient's not before its forward, which knows its shape), a message arrives when it is both sent and awaited, and a
rank has at most `unread` messages of a link that have not arrived when it goes on to its next action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moesaic.schedule.orders import Action, Kind, received, sent


class DeadlockError(AssertionError):
    """No rank can go on."""


@dataclass
class Times:
    """Start and end of every action, and when the last rank is done."""

    starts: dict[Action, float] = field(default_factory=dict)
    ends: dict[Action, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return max(self.ends.values())


def simulate(orders: list[list[Action]], stages: int, seconds: Callable[[Action], float], unread: int) -> Times:
    """Run the orders of all ranks to the end. Raises DeadlockError when that is impossible."""
    pp = len(orders)
    times = Times()
    receives: dict[tuple[int, Kind], list[tuple[int, int]]] = {}
    sends: dict[tuple[int, Kind], list[tuple[int, int]]] = {}
    place_of: dict[tuple[int, Kind], dict[tuple[int, int], int]] = {}  # the same on both ends; here the reader's
    for rank, order in enumerate(orders):
        for kind in ("F", "B"):
            receives[rank, kind] = received(order, kind, stages)
            sends[rank, kind] = sent(order, kind, stages)
            place_of[rank, kind] = {message: place for place, message in enumerate(receives[rank, kind])}

    def reader(rank: int, kind: Kind) -> int:
        return (rank + (1 if kind == "F" else -1)) % pp

    def posted(rank: int, kind: Kind, place: int) -> float | None:
        """When `rank` awaits message `place` of its incoming link."""
        after: list[Action] = []
        if place > 0:
            micro, stage = receives[rank, kind][place - 1]
            after.append(Action(kind, micro, stage + (1 if kind == "F" else -1)))
        micro, stage = receives[rank, kind][place]
        when = [times.starts.get(action) for action in after]
        if kind == "B":
            when.append(times.ends.get(Action("F", micro, stage - 1)))
        return None if None in when else max((w for w in when if w is not None), default=0.0)

    def arrived(rank: int, kind: Kind, place: int) -> float | None:
        """When message `place` that `rank` sends has been read."""
        micro, stage = sends[rank, kind][place]
        issued, awaited = times.ends.get(Action(kind, micro, stage)), posted(reader(rank, kind), kind, place)
        return None if issued is None or awaited is None else max(issued, awaited)

    def start(rank: int, place: int) -> float | None:
        """When the action at `place` can start, None while that is not known."""
        order, needs = orders[rank], []
        action = order[place]
        if place:
            previous = order[place - 1]
            needs.append(times.ends.get(previous))
            message = (previous.micro, previous.stage)
            if previous.kind != "W":
                old = place_of[reader(rank, previous.kind), previous.kind].get(message, -1) - unread
                if old >= 0:
                    needs.append(arrived(rank, previous.kind, old))
        if action.kind == "W":
            needs.append(times.ends.get(Action("B", action.micro, action.stage)))
        else:
            source = (action.micro, action.stage + (-1 if action.kind == "F" else 1))
            if source in place_of[rank, action.kind]:
                sender = (rank + (-1 if action.kind == "F" else 1)) % pp
                needs.append(arrived(sender, action.kind, place_of[rank, action.kind][source]))
            if action.kind == "B":
                needs.append(times.ends.get(Action("F", action.micro, action.stage)))
        return None if None in needs else max((n for n in needs if n is not None), default=0.0)

    at = [0] * pp
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                begin = start(rank, at[rank])
                if begin is None:
                    break
                action = order[at[rank]]
                times.starts[action], times.ends[action] = begin, begin + seconds(action)
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [
                f"rank {r} at {order[p]}" for r, (p, order) in enumerate(zip(at, orders, strict=True)) if p < len(order)
            ]
            raise DeadlockError("; ".join(stuck))
    return times
