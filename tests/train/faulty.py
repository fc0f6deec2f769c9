"""`moesaic` with a fault in it: at the K-th collective of step S, rank R is killed, stopped, or raises.

FAULT is `kind rank step collective`, as in `kill 1 7 3`; the fault happens on the first start of a job only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from moesaic.cli.main import run
from moesaic.mesh.group import Group, progress


def install(kind: str, rank: int, step: int, collective: int) -> None:
    if rank != int(os.environ["RANK"]) or int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        return
    real = Group.naming
    seen = 0

    @contextmanager
    def naming(self: Group, what: str) -> Iterator[None]:
        nonlocal seen
        if progress.step == step:
            seen += 1
            if seen == collective:
                if kind == "raise":
                    raise ZeroDivisionError("by hand")
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        with real(self, what):
            yield

    Group.naming = naming  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, *numbers = os.environ["FAULT"].split()
    install(kind, *map(int, numbers))
    run()
