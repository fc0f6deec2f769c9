"""The processes that measure: started here on one machine, or those that torchrun started on several.

Own processes leave nothing behind: they end with this one, however it ends, and meet in a temporary folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from moesaic.spec.cluster import gpu_named
from moesaic.spec.errors import MoesaicError, SpecError

if TYPE_CHECKING:
    from .bench import Measurements, Plan, Say

_TIMEOUT_SECONDS = 120.0


class CalibrationError(MoesaicError):
    """A process that measures failed or was lost."""

    exit_code = 1


def default_processes(kind: str, devices: int) -> int:
    """One per GPU; on a processor two or four, as its cores allow, so that links are measured too."""
    if kind != "cpu":
        return devices
    from moesaic.train.process import physical_cores

    return 4 if physical_cores() >= 8 else 2


def devices() -> tuple[str, int]:
    """("cpu" or "cuda", how many accelerators there are)."""
    import torch

    from moesaic.mesh.device import device

    kind = device().kind
    return kind, torch.accelerator.device_count() if kind != "cpu" else 0


def measure_here(processes: int, plan: Plan, say: Say) -> Measurements:
    """Start so many processes on this machine and let them measure.

    Raises:
        CalibrationError: one of them failed, with what it said.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the processes are gone.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moesaic-calibrate-") as folder, _sigterm_interrupts():
        pipes = [context.Pipe(duplex=False) for _ in range(processes)]
        team = [
            context.Process(
                target=_rank, args=(rank, processes, f"{folder}/store", plan, ours_and_theirs[1]), daemon=True
            )
            for rank, ours_and_theirs in enumerate(pipes)
        ]
        try:
            for process in team:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            return _listen([ours for ours, _ in pipes], say)
        finally:
            for process in team:
                if process.pid is not None:
                    process.kill()
            for process in team:
                if process.pid is not None:
                    process.join()


def measure_launched(plan: Plan, say: Say) -> Measurements | None:
    """Measure among the processes that torchrun started; the result on rank 0, None on the others."""
    import torch.distributed as dist

    from moesaic.mesh.group import forget_connections
    from moesaic.train.launch import Place

    place = Place.here()
    _join(place.rank, place.world, place.local_world, None)
    plan = replace(plan, domain=min(_rack() or place.local_world, place.world))
    result = _measure(place.rank, place.world, plan, say if place.rank == 0 else lambda _: None)
    dist.destroy_process_group()
    forget_connections()
    return result if place.rank == 0 else None


def _listen(pipes: list[Connection], say: Say) -> Measurements:
    """Passes on what the processes say until the first one has measured, or any has failed."""
    lost: list[int] = []
    while True:
        # Who is lost first says so by its own message or not at all, so messages are read before that counts.
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in lost]):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                lost.append(rank)
                if rank == 0 or len(lost) == len(pipes):
                    raise CalibrationError(f"process {rank} ended before it had measured; memory may be out.") from None
                continue
            if kind == "done" and rank == 0:
                return value  # type: ignore[no-any-return]
            if kind == "failed":
                raise CalibrationError(f"process {rank}: {value}")
            if kind == "say":
                say(value)


def _rank(rank: int, world: int, store: str, plan: Plan, pipe: Connection) -> None:
    # A terminal sends Ctrl-C to all; the process that started these ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        _join(rank, world, world, store)
        result = _measure(rank, world, plan, lambda text: pipe.send(("say", text)))
        pipe.send(("done", result if rank == 0 else None))
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
    # Until it is ended: others may still be talking to it.
    threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _join(rank: int, world: int, local_world: int, store: str | None) -> None:
    """Threads, allocator and default group as a training process has them. Without a store, as torchrun says."""
    import torch
    import torch.distributed as dist

    from moesaic.mesh.device import device
    from moesaic.train import process

    process.tune_malloc()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, process.physical_cores() // local_world)
    process.set_threads(int(asked) if asked.isdecimal() and int(asked) > 0 else share)
    here = device()
    if here.kind != "cpu":
        torch.accelerator.set_device_index(here.torch_device)
    if world == 1:
        return
    dist.init_process_group(
        "gloo" if here.kind == "cpu" else "nccl",
        store=None if store is None else dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )


def _rack() -> int:
    """GPUs that the fast link joins over several machines, as in an NVL72 rack; 0 where it stays within one."""
    from moesaic.mesh.device import device

    try:
        gpu = gpu_named(device().name)
    except SpecError:
        return 0
    return gpu.domain if gpu.domain > gpu.gpus_per_node else 0


def _measure(rank: int, world: int, plan: Plan, say: Say) -> Measurements:
    from moesaic.mesh.group import Group

    from .bench import Bench

    group = Group.create("world", [tuple(range(world))], _TIMEOUT_SECONDS) if world > 1 else Group.single("world")
    return Bench(group, plan, say if rank == 0 else lambda _: None).run()


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that it too ends the processes and removes the folder."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launched() -> bool:
    """Whether a launcher made this process one of several.

    Raises:
        SpecError: its environment names several processes but not this one's place.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return False
    if "RANK" not in os.environ:
        raise SpecError("WORLD_SIZE is set, but RANK is not: start with torchrun, or unset WORLD_SIZE.")
    return True


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return not launched() or os.environ.get("RANK", "0") == "0"
