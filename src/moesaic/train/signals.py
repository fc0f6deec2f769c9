"""SIGTERM and Ctrl-C ask the loop to stop after the step it is in; a second one leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Inside `with StopRequest(say) as stop`, `stop.requested` is the name of the first signal that came, else None.

    `say` gets one sentence for the user. Outside the main thread, where Python takes no signals, it never fires.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested: str | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT:
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            # The signal may have come in the middle of a write to the same file; then there is nothing to say it with.
            with contextlib.suppress(RuntimeError):
                self._say(f"{name}: finishing this step and saving; once more leaves at once.")
            return
        # Nothing may hold up the second request, so no clean-up runs; only the terminal gets its cursor back.
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
        os._exit(1)
