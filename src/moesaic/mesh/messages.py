"""Plain messages between all ranks of a group, for back-ends on the host (gloo).

A rank of gloo sends once the other has said that it is ready to receive, and says so itself in the same stream as its
data. So receives are posted before sends: otherwise that word stands behind the first message's data, and only one
direction of a link is used at a time, as in gloo's own all-to-all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moesaic.mesh.group import Group


def exchange(pieces: Sequence[Tensor], places: Sequence[Tensor], group: Group) -> Exchange:
    """Begin to send `pieces[i]` to rank i of the group and to receive its into `places[i]`; empty ones do not travel.

    Both must be contiguous, and the pieces may not change before the end.
    """
    n, me = group.size, group.rank
    works = [
        dist.irecv(places[source], group.ranks[source], group=group.handle)
        for source in ((me - step) % n for step in range(1, n))
        if places[source].numel()
    ]
    works += [
        dist.isend(pieces[to], group.ranks[to], group=group.handle)
        for to in ((me + step) % n for step in range(1, n))
        if pieces[to].numel()
    ]
    places[me].copy_(pieces[me])
    return Exchange(works, group.name)


class Exchange:
    """Several messages under way, as one."""

    def __init__(self, works: list[Any], group: str = "") -> None:
        self._works = works
        self._group = group
        self._ended: threading.Event | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until all have arrived and left."""
        if self._ended is None:
            for work in self._works:
                work.wait()
            return
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. From the first such question on a thread of the group waits, because
        plain messages of gloo cannot tell."""
        return self.watched().is_set()

    def watched(self, at_end: Callable[[], None] | None = None) -> threading.Event:
        """What is set at the end by a thread that waits for it; it calls `at_end` first."""
        if self._ended is None:
            self._ended = ended = threading.Event()

            def wait_here() -> None:
                try:
                    for work in self._works:
                        work.wait()
                except BaseException as error:  # raised again where it is waited for
                    self._error = error
                if at_end is not None:
                    at_end()
                ended.set()

            _waiter(self._group).put(wait_here)
        return self._ended


_waiters: dict[str, SimpleQueue[Callable[[], None]]] = {}


def _waiter(group: str) -> SimpleQueue[Callable[[], None]]:
    """The jobs of a group's thread. One thread each: messages of a group end in the order in which they began."""
    if group not in _waiters:
        _waiters[group] = jobs = SimpleQueue[Callable[[], None]]()

        def serve() -> None:
            while True:
                jobs.get()()

        threading.Thread(target=serve, name=f"messages of {group}", daemon=True).start()
    return _waiters[group]
