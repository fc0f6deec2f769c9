"""Runs peers in turn, round after round, so that a slow minute of the machine hits all of them.

A *cell* is one workload in one dtype under one malloc setting. In a cell each peer has a process of its own, in its own
environment; a round gives each of them a turn of a few iterations; its result is the best iteration of all rounds. A
peer with an iteration that passes the limit is stopped and, if it never finished one, known as "more than N seconds".
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.registry import Peer, interpreter
from benchmarks.peers.workload import LayerShape, StepShape, as_json

ROOT = Path(__file__).resolve().parents[1]

# What glibc's malloc is told under each setting; the names are the variables of `man mallopt`.
MALLOC: dict[str, dict[str, str]] = {
    "stock": {},
    "tuned": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    },
}


@dataclass
class Row:
    """What is known of one peer in one cell."""

    peer: str
    title: str
    times: list[list[float]] = field(default_factory=list)
    """Seconds of each iteration, one list per round."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of processor time of each iteration, of all threads together: what a busy machine distorts least."""
    others: list[float] = field(default_factory=list)
    """Cores that other processes used, by iteration."""
    losses: list[float] = field(default_factory=list)
    over_limit: float | None = None
    """Seconds after which an unfinished iteration was stopped."""
    idle_mb: float = math.nan
    peak_mb: float = math.nan
    detail: str = ""
    note: str = ""
    error: str = ""
    profile: list[tuple[str, float, float]] = field(default_factory=list)
    """(operator, milliseconds, share of the iteration), largest first; only for those that were profiled."""
    output_error: float | None = None
    parameters: int = 0
    torch: str = ""

    @property
    def best(self) -> float:
        """Seconds of the best iteration; NaN if none finished."""
        return min((t for turn in self.times for t in turn), default=math.nan)

    @property
    def best_cpu(self) -> float:
        """Processor seconds of the best iteration; NaN if none finished."""
        return min(self.cpu, default=math.nan)

    @property
    def extra_mb(self) -> float:
        """Peak of the resident set above what the process held before its first iteration."""
        return self.peak_mb - self.idle_mb


@dataclass
class Cell:
    """One workload, dtype and malloc setting, with all its rows."""

    work: str
    shape: LayerShape | StepShape
    dtype: str
    malloc: str
    rows: list[Row] = field(default_factory=list)
    matmul: dict[str, list[float]] = field(default_factory=dict)
    """FLOP/s of the plain product in each dtype, one number a round."""
    matmul_by_cpu: dict[str, list[float]] = field(default_factory=dict)
    """The same by processor time: FLOPs per second of it, times the number of threads."""

    @property
    def reference(self) -> tuple[str, float]:
        """The dtype whose plain product is fastest in this cell's precision (bf16 may be computed through fp32), and
        its best rate in FLOP/s."""
        best = {dtype: max(rates) for dtype, rates in self.matmul.items() if rates}
        return max(best.items(), key=lambda item: item[1]) if best else ("", math.nan)

    def row(self, peer: str) -> Row | None:
        return next((row for row in self.rows if row.peer == peer), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "shape": as_json(self.shape),
            "flops": self.shape.flops(),
            "dtype": self.dtype,
            "malloc": self.malloc,
            "matmul": self.matmul,
            "matmul_by_cpu": self.matmul_by_cpu,
            "rows": [{**asdict(row), "best": row.best, "best_cpu": row.best_cpu} for row in self.rows],
        }


class Worker:
    """A process in a peer's environment that has imported the peer; each task runs in a child that it forks."""

    def __init__(self, python: Path, adapter: str, malloc: str, threads: int, log: Path) -> None:
        known = {name for setting in MALLOC.values() for name in setting}
        environment = {name: value for name, value in os.environ.items() if name not in known}
        environment |= MALLOC[malloc]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment["OMP_NUM_THREADS"] = str(threads)
        self.log = log
        read, write = os.pipe()
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [str(python), "-W", "ignore", "-m", "benchmarks.peers.worker", adapter, str(write)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                pass_fds=(write,),
                cwd=ROOT,
                env=environment,
                text=True,
            )
        os.close(write)
        self._read, self._buffer = read, b""
        self._imported = False
        self._child: int | None = None

    def wait_for_imports(self) -> None:
        """Returns when the peer is imported; raises WorkerError if it cannot be."""
        if not self._imported:
            answer = self.receive(300.0) or {"error": "its imports took longer than 300 s"}
            if "error" in answer:
                raise WorkerError(answer["error"])
            self._imported = True

    def begin(self, task: dict[str, Any]) -> None:
        """Gives a new child `task`; `receive` tells when it is ready."""
        self.send(task)
        answer = self.receive(60.0) or {"error": "it did not start"}
        if "pid" not in answer:
            raise WorkerError(answer["error"])
        self._child = answer["pid"]

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is noticed by `receive`

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next answer, or None if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._read, 65536)
            if not data:
                return {"error": f"its process ended with code {self.process.wait()}; see {self.log}"}
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "ended" in answer:
            return {
                "error": f"its process was ended from outside, as by the system when memory runs out; see {self.log}"
            }
        return answer

    def end(self) -> None:
        """Ends the child, whatever it is doing."""
        if self._child is None:
            return
        try:
            os.kill(self._child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._child = None
        while (answer := self.receive(60.0)) and "ended from outside" not in answer.get("error", ""):
            if self.process.poll() is not None:  # nothing more will come, as after a signal to the whole job
                break

    def stop(self) -> None:
        self.end()
        self.process.kill()
        self.process.wait()
        os.close(self._read)


def memory_is_short() -> bool:
    """Whether less than a quarter of this machine's memory is free, so that no child may keep what it has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kilobytes.get("MemAvailable", 1) < kilobytes.get("MemTotal", 1) / 4


class WorkerError(Exception):
    """A peer that could not be started, with the reason."""


@dataclass
class Plan:
    """How long and how often."""

    rounds: int = 3
    iters: int = 5
    turn_seconds: float = 3.0
    limit_seconds: float = 120.0
    """Longest that one iteration may take."""
    limit_times: float = 0.0
    """If > 0, an iteration may also not take longer than this many times moesaic's best (and 5 s)."""
    threads: int = 2
    alive: bool = True
    """Whether a peer's child lives through all rounds; if not, each turn has a new one (for workloads of many GB)."""
    profile: tuple[str, ...] = ()
    """Names of the peers to profile."""
    envs: Path = Path()
    logs: Path = Path()


class Workers:
    """One `Worker` per peer and malloc setting, kept from cell to cell."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._workers: dict[tuple[str, str], Worker] = {}

    def __enter__(self) -> Workers:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a terminated benchmark ends its workers too
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.stop()

    def forget(self, malloc: str) -> None:
        """Ends the workers of a malloc setting that is done with."""
        for key in [key for key in self._workers if key[1] == malloc]:
            self._workers.pop(key).stop()

    def get(self, name: str, python: Path, adapter: str, malloc: str) -> Worker:
        if not python.exists():
            raise WorkerError(f"no environment at {python}: benchmarks/peers/make_envs.py --envs {self.plan.envs}")
        key = (name, malloc)
        if key not in self._workers:
            log = self.plan.logs / f"{name}.log"
            self._workers[key] = Worker(python, adapter, malloc, self.plan.threads, log)
        return self._workers[key]


def run_cell(cell: Cell, peers: Sequence[Peer], workers: Workers, say: Callable[[str], None]) -> None:
    """Fills `cell` with rows of `peers`, and with plain products where the workload is a layer."""
    cell.rows = [Row(peer.name, peer.title, note=peer.note) for peer in peers]
    pairs = list(zip(peers, cell.rows, strict=True))
    runner = _Runner(cell, workers, say)
    try:
        for peer, row in pairs:
            runner.start(peer, row)
        for peer, row in pairs:
            runner.wait_for_imports(peer, row)  # all of them, so that no import runs beside a measurement
        for _ in range(workers.plan.rounds):
            runner.products()
            for peer, row in pairs:
                if not row.error and row.over_limit is None:
                    runner.turn(peer, row)
            if all(row.error or row.over_limit is not None for row in cell.rows):
                break
        for peer, row in pairs:
            if peer.name in workers.plan.profile and not row.error and row.over_limit is None:
                runner.profile(peer, row)
    finally:
        runner.stop()


class _Runner:
    def __init__(self, cell: Cell, workers: Workers, say: Callable[[str], None]) -> None:
        self.cell, self.workers, self.plan, self.say = cell, workers, workers.plan, say
        self.busy: dict[str, Worker] = {}
        """Workers with a child of this cell, by peer; the plain product's is under ""."""

    def _task(self, **more: Any) -> dict[str, Any]:
        return {"shape": as_json(self.cell.shape), "dtype": self.cell.dtype, "threads": self.plan.threads, **more}

    def _fail(self, row: Row, reason: str) -> None:
        row.error = reason
        self.say(f"  {row.title}: {reason}")

    def _worker(self, peer: Peer) -> Worker:
        return self.workers.get(peer.name, interpreter(peer, self.plan.envs), peer.adapter, self.cell.malloc)

    def start(self, peer: Peer, row: Row) -> None:
        """Starts the peer's process if there is none yet, without waiting for it."""
        try:
            self._worker(peer)
        except WorkerError as error:
            self._fail(row, str(error))

    def wait_for_imports(self, peer: Peer, row: Row) -> None:
        if not row.error:
            try:
                self._worker(peer).wait_for_imports()
            except WorkerError as error:
                self._fail(row, str(error))

    def begin(self, peer: Peer, row: Row) -> None:
        """A child that has built and checked the peer's workload, or the reason why there is none in `row.error`."""
        worker = self._worker(peer)
        task = self._task(
            work=self.cell.work, adapter=peer.adapter, variant=peer.variant, fp32_is_bf16=peer.fp32_is_bf16
        )
        try:
            worker.begin(task)
        except WorkerError as error:
            return self._fail(row, str(error))
        self.busy[peer.name] = worker
        # The first answer covers a check of the output, which in bf16 is slow on some processors.
        answer = worker.receive(300.0) or {"error": "it was not ready after 300 s"}
        if "error" in answer:
            self.busy.pop(peer.name).end()
            return self._fail(row, answer["error"])
        row.idle_mb, row.torch = answer["idle_mb"], answer["torch"]
        row.detail, row.parameters = answer["detail"], answer["parameters"]
        row.output_error = answer.get("output_error")
        return None

    def _limit(self, peer: Peer) -> float:
        limit, ours = self.plan.limit_seconds, self.cell.row("moesaic")
        if self.plan.limit_times and peer.name != "moesaic" and ours is not None and math.isfinite(ours.best):
            limit = min(limit, max(5.0, self.plan.limit_times * ours.best))
        return limit

    def turn(self, peer: Peer, row: Row) -> None:
        new = peer.name not in self.busy
        if new:
            self.begin(peer, row)
            if row.error:
                return
        worker, limit, plan = self.busy[peer.name], self._limit(peer), self.plan
        # A new child is cold: it gets a second iteration even when the first took long.
        worker.send({"least": 2 if new else 1, "most": plan.iters, "seconds": plan.turn_seconds})
        times: list[float] = []
        while (answer := worker.receive(limit)) and "seconds" in answer:
            times.append(answer["seconds"])
            row.cpu.append(answer["cpu"])
            row.others.append(answer["others"])
            row.losses.append(answer["loss"])
        if times:
            row.times.append(times)
            self.say(f"  {peer.title}: " + " ".join(f"{seconds:.3f}" for seconds in times) + " s")
        if answer is None:
            row.over_limit = limit
            self.say(f"  {peer.title}: stopped after {limit:.0f} s")
        elif "error" in answer:
            self._fail(row, answer["error"])
        else:
            row.peak_mb = answer["peak_mb"] if math.isnan(row.peak_mb) else max(row.peak_mb, answer["peak_mb"])
        if not plan.alive or answer is None or "error" in answer or memory_is_short():
            self.busy.pop(peer.name).end()

    def profile(self, peer: Peer, row: Row) -> None:
        """Fills `row.profile`: where one more iteration of this peer spends its time."""
        if peer.name not in self.busy:
            self.begin(peer, row)
            if row.error:
                return
        worker = self.busy[peer.name]
        worker.send({"least": 1, "most": 1, "seconds": 0.0})  # so that a new child is not profiled cold
        while (answer := worker.receive(self.plan.limit_seconds)) and "seconds" in answer:
            pass
        worker.send({"profile": True})
        row.profile = (worker.receive(2 * self.plan.limit_seconds) or {}).get("profile", [])

    def products(self) -> None:
        """The plain product of the same FLOPs, in this cell's dtype and, for bf16, in fp32 too."""
        if not isinstance(self.cell.shape, LayerShape):
            return
        if "" not in self.busy:
            worker = self.workers.get("matmul", Path(sys.executable), "matmul", self.cell.malloc)
            worker.wait_for_imports()
            worker.begin(self._task(work="matmul", adapter="matmul"))
            worker.receive(120.0)
            self.busy[""] = worker
        for dtype in ("fp32", "bf16") if self.cell.dtype == "bf16" else ("fp32",):
            self.busy[""].send({"dtype": dtype, "seconds": 2.0})
            answer = self.busy[""].receive(120.0) or {}
            if "rate" in answer:
                by_clock, by_cpu = answer["rate"]
                self.cell.matmul.setdefault(dtype, []).append(by_clock)
                self.cell.matmul_by_cpu.setdefault(dtype, []).append(by_cpu)
        rates = ", ".join(f"{dtype} {rates[-1] / 1e9:.0f} GFLOP/s" for dtype, rates in self.cell.matmul.items())
        self.say(f"  plain product: {rates}")

    def stop(self) -> None:
        for worker in self.busy.values():
            worker.end()
        self.busy.clear()
