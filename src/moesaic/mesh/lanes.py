"""Two lanes: work that runs in the other's waits, such as one micro-batch's forward and another's backward.

Lanes are two threads of which only the one with the baton runs. A lane hands it over where it is about to wait for a
bulk message (rows to experts and back, gathers of tokens, and the gradients of these), never by timing: all ranks start
collectives in the same order, and results do not depend on who is fast. With forward F: attention, dispatch, experts,
combine, and backward B: combine', experts', dispatch', attention', the order is

    B starts combine' · F attention, starts dispatch · B experts', starts dispatch' · F experts, starts combine · …

so each message travels under computation of the other lane (as DualPipe pairs them, arXiv 2412.19437, section 3.2.1).

What can be done at any time, such as weight gradients, may fill what remains of a wait: see `filling`.

On an accelerator autograd runs backward functions on threads of its own. Whoever is about to wait acts for the lane
that has the baton, whatever its thread, which is right as long as one lane at most runs backward.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from moesaic.mesh.device import device
from moesaic.spec.errors import MoesaicError

Filler = Callable[[], bool]
"""Does one piece of work that was left; False when there is none."""


class LaneStopped(MoesaicError):
    """Raised in a lane whose other lane has failed."""


class _Lane:
    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.away = 0.0
        self.done = False


class _Pair:
    """Two lanes under way and who has the baton."""

    def __init__(self) -> None:
        self.lanes = (_Lane(), _Lane())
        self.current = 0
        self.error: BaseException | None = None

    @property
    def lane(self) -> _Lane:
        return self.lanes[self.current]

    def switch(self) -> None:
        """Let the other lane run until it is this one's turn again."""
        if self.error is not None:
            raise LaneStopped("the other lane has failed")
        mine, other = self.lane, self.lanes[1 - self.current]
        if other.done:
            return
        began = time.perf_counter()
        self.current = 1 - self.current
        other.turn.release()
        try:
            mine.turn.acquire()
        except BaseException as error:  # an interrupt: the other lane stops where it would hand over
            self.error = self.error or error
            raise
        mine.away += time.perf_counter() - began
        if self.error is not None:
            raise LaneStopped("the other lane has failed")

    def run(self, number: int, work: Callable[[], None]) -> None:
        """Be lane `number`, which has the baton, and hand it over for good at the end."""
        try:
            if self.error is None:
                work()
        except BaseException as error:
            self.error = self.error or error
        self.lanes[number].done = True
        self.current = 1 - number
        self.lanes[1 - number].turn.release()


class _Thread:
    """A thread that stays, so that what modules keep per thread is kept."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="lane", daemon=True).start()

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._jobs.get()()


class _State:
    pair: _Pair | None = None
    thread: _Thread | None = None
    filler: tuple[Filler, int] | None = None
    """What fills waits, and the lane that said so."""


_state = _State()


def together(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both, each in the other's waits for bulk messages; `first` begins, on this thread.

    Raises what the first lane to fail raised; the other is stopped at its next wait, or not begun.
    """
    if _state.pair is not None:
        raise MoesaicError("lanes are under way already: a lane cannot be split in two")
    if _state.thread is None:
        _state.thread = _Thread()
    pair = _Pair()
    modes = _modes()
    ended = threading.Event()

    def other() -> None:
        pair.lanes[1].turn.acquire()
        with modes():
            pair.run(1, second)
        ended.set()

    _state.pair = pair
    try:
        _state.thread.start(other)
        pair.run(0, first)
        ended.wait()
    finally:
        _state.pair = None
    if pair.error is not None:
        raise pair.error


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What torch keeps per thread, as it is on this one."""
    grad, inference, threads = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        device().take_thread()
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return enter


@contextlib.contextmanager
def filling(filler: Filler | None) -> Iterator[None]:
    """Inside, waits for bulk messages that are not there yet do `filler`'s work meanwhile, piece by piece."""
    before = _state.filler
    _state.filler = None if filler is None else (filler, _current())
    try:
        yield
    finally:
        _state.filler = before


def before_wait(work: Any, result: Tensor) -> None:
    """To be called before a wait for `work`, a bulk message that fills `result`."""
    if _state.pair is not None:
        _state.pair.switch()
    if _state.filler is None:
        return
    filler, owner = _state.filler
    # The accelerator's backward thread may be held by the lane that waits in it; another cannot run backward then.
    if result.is_cuda and owner != _current():
        return
    arrived = getattr(work, "is_completed", None)
    if arrived is None:  # plain messages of gloo cannot tell
        filler()
        return
    while not arrived() and filler():
        pass


def own_seconds() -> float:
    """A clock that stands still while this lane is in another's wait."""
    pair = _state.pair
    return time.perf_counter() - (pair.lane.away if pair is not None else 0.0)


def _current() -> int:
    return _state.pair.current if _state.pair is not None else 0
