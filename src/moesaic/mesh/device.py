"""The device a process runs on: the only place that talks to `torch.cuda` or to the operating system about memory.

A CPU does the same as a GPU, with nothing to wait for; so everything above runs on a laptop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this processor as the kernel names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def cpu_name() -> str:
    """The processor's name for reports."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Side:
    """Work beside the computation, in the order in which it is asked for: a stream of the accelerator, or a thread."""

    def __init__(self, here: Device) -> None:
        self._here = here
        self._stream = torch.cuda.Stream(here.torch_device) if here.kind == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "side") if self._stream is None else None

    def run(self, work: Callable[[], None]) -> Done:
        """Start `work` once what the computation has queued so far is done. Returns at once."""
        if self._thread is not None:
            return Done(self._thread.submit(work))
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._here.torch_device))
        with torch.cuda.stream(self._stream):
            work()
            return Done(self._stream.record_event())


class Done:
    """The end of a piece of work of a `Side`."""

    def __init__(self, mark: Future[None] | torch.cuda.Event) -> None:
        self._mark = mark

    def wait(self) -> None:
        """What the computation does from here on comes after the work. Raises what the work raised."""
        if isinstance(self._mark, Future):
            self._mark.result()
        else:
            torch.cuda.current_stream().wait_event(self._mark)

    def finish(self) -> None:
        """Wait until the work is done, as whoever reads its result on the host must."""
        if isinstance(self._mark, Future):
            self._mark.result()
        else:
            self._mark.synchronize()


@dataclass
class Beside:
    """Work of `Device.beside`."""

    event: torch.cuda.Event | None = None

    def current_stream_wait(self) -> None:
        """What is queued from here on begins after it."""
        if self.event is not None:
            self.event.wait()


@functools.cache
def _second_stream(where: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(where)


@dataclass(frozen=True)
class Device:
    """One accelerator, or this machine's processor.

    `kind` is `cpu` or `cuda`, and `meta` in a dry run; `torch_device` is what tensors are made on.
    """

    kind: str
    torch_device: torch.device

    @property
    def name(self) -> str:
        """The hardware's own name."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        return cpu_name()

    def synchronize(self) -> None:
        """Wait until the computation queued on the device is done. Nothing to wait for on a CPU.

        Only the stream that computes: a message that was asked for ahead may still be on its way.
        """
        if self.kind == "cuda":
            torch.cuda.current_stream(self.torch_device).synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[Beside]:
        """Queue what is done inside after what is queued so far, and beside what will be queued outside.

        Tensors that it reads must live until `current_stream_wait` of what this gives has been called. On a CPU it is
        done at once.
        """
        here = Beside()
        if self.kind != "cuda":
            yield here
            return
        stream = _second_stream(self.torch_device)
        # Memory of results given back by now may be taken again: by work that begins after all that has read them.
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            yield here
            here.event = stream.record_event()

    def take_thread(self) -> None:
        """Have this thread, which the process has just started, work on the device too."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch_device)

    def side(self) -> Side:
        """A new lane for copies beside the computation."""
        return Side(self)

    def memory_bytes(self) -> int:
        """Bytes in use now: allocated tensors on CUDA, resident set of the process on a CPU."""
        if self.kind == "cuda":
            return int(torch.cuda.memory_allocated(self.torch_device))
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return self.peak_memory_bytes()
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int:
        """Highest `memory_bytes` since the process began (CPU) or since the allocator's peak was reset (CUDA)."""
        if self.kind == "cuda":
            return int(torch.cuda.max_memory_allocated(self.torch_device))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def allocator_peak_bytes(self) -> int | None:
        """Most bytes of tensors at once since `restart_peak`, as the device's allocator counts; None on a CPU."""
        return self.peak_memory_bytes() if self.kind == "cuda" else None

    def restart_peak(self) -> None:
        """Begin to look for the allocator's peak anew."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def total_memory_bytes(self) -> int | None:
        """Bytes that there are in all, for this process: the device's, or main memory within the limit that the
        process has been given; None where the system does not say."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info(self.torch_device)[1])
        limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        found = [limit for limit in limits if limit != resource.RLIM_INFINITY]
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return min(found, default=None)

    def free_memory_bytes(self) -> int | None:
        """Bytes that new tensors could still take; None where the system does not say."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        return free_host_memory_bytes()

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of the CPU and of the device."""
        torch.manual_seed(seed)
        if self.kind == "cuda":
            torch.cuda.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """State of the generators that `manual_seed` seeds."""
        state = {"cpu": torch.get_rng_state()}
        if self.kind == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.torch_device)
        return state

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what `rng_state` returned."""
        torch.set_rng_state(state["cpu"])
        if self.kind == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that the device's memory ran out."""
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
            return True
        return isinstance(error, RuntimeError) and "allocate memory" in str(error)

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of a plain square matmul on this device with the present number of threads, measured once.

        On a processor without bf16 instructions bf16 products run through fp32 (see `model.kernels`), so there the
        fp32 rate is the machine's rate for bf16 too.
        """
        if self.kind == "cpu" and dtype == torch.bfloat16 and not bf16_is_native():
            dtype = torch.float32
        return _measure_matmul(self.kind, str(self.torch_device), dtype, torch.get_num_threads())


def free_host_memory_bytes() -> int | None:
    """Bytes of main memory and swap that are available; None where the system does not say (all but Linux)."""
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return None
    return sum(int(line[1]) for line in lines if line[0] in ("MemAvailable:", "SwapFree:")) * 1024


@functools.cache
def _measure_matmul(kind: str, where: str, dtype: torch.dtype, threads: int) -> float:
    n = 1024 if kind == "cpu" else 8192
    here = device()
    a = torch.randn(n, n, device=where).to(dtype)
    b = torch.randn(n, n, device=where).to(dtype)
    out = torch.empty(n, n, device=where, dtype=dtype)
    best = float("inf")
    for _ in range(7):
        here.synchronize()
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        here.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


@functools.cache
def bf16_is_native() -> bool:
    """Whether this processor multiplies bf16 in hardware (AMX or AVX-512 BF16 on x86, the bf16 extension on Arm)."""
    flags = cpu_flags()
    if not flags:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def device() -> Device:
    """The device of this process: the local rank's GPU if there is one, else the processor; none in a dry run."""
    return _pretended[-1] if _pretended else _found()


_pretended: list[Device] = []


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Inside, tensors have shapes and types but no memory (torch's `meta` device)."""
    _pretended.append(Device("meta", torch.device("meta")))
    try:
        yield
    finally:
        _pretended.pop()


@functools.cache
def _found() -> Device:
    if torch.cuda.is_available():
        # Some launchers show each process its own device only, as number 0.
        index = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0
        return Device("cuda", torch.device("cuda", index))
    return Device("cpu", torch.device("cpu"))


def describe() -> dict[str, Any]:
    """What a report says about the machine."""
    here = device()
    return {
        "device": here.name,
        "kind": here.kind,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bf16": here.kind == "cuda" or bf16_is_native(),
    }
