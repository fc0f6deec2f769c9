"""Several processes that talk over gloo, for tests: started once, given one function after another.

A test says `ranks(4).run(function, …)`; `function(rank, …)` is defined at the top of a module and runs in each process.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_SECONDS = 600.0
"""How long one function may take; groups have a shorter limit, so that a hang is named by the rank that sees it."""
GROUP_SECONDS = 120.0


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        if task is None:
            break
        function, args = task
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException as error:  # whatever it is, the test should see it
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


def _end_with_parent() -> None:
    """A killed test run leaves nobody to end its ranks, which may wait for each other in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class RankError(AssertionError):
    """What a function raised on a rank."""


class Ranks:
    """`size` processes with a default process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, f"{self._folder.name}/store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for process in self._processes:
            process.start()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        for _, theirs in pairs:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, *args) on every rank; the results in rank order. Raises RankError with the first failure."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) + len(failures) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, LIMIT_SECONDS)
            if not ready:
                self.stop()
                raise RankError(f"no answer from {len(waiting)} ranks within {LIMIT_SECONDS:g} s; {failures}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    fine, value = pipe.recv()
                except EOFError:
                    fine, value = False, "the process ended"
                results[rank] = value
                if not fine:
                    # The others may be waiting for this one: the pool cannot be used again.
                    self.stop()
                    raise RankError(f"rank {rank} of {self.size}: {value}")
        return [results[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        """Whether the pool can still be used."""
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()


@functools.cache
def _pool(size: int) -> list[Ranks]:
    return []


def ranks(size: int) -> Ranks:
    """The pool of `size` processes, started when first asked for and again after a failure."""
    pool = _pool(size)
    if not pool or not pool[-1].alive:
        pool[:] = [Ranks(size)]
        atexit.register(pool[-1].stop)
    return pool[-1]
