"""Several ranks of one peer under torchrun, given one task after another, and rounds over many such teams.

A team imports its peer once; each turn forks a child in every rank, which build the workload together, take a few
iterations between barriers and are ended, so that only one workload at a time holds memory and processors.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import PORT, Cluster
from benchmarks.peers.parallel.registry import Degrees, ParallelPeer, interpreter
from benchmarks.peers.workload import LayerShape, StepShape, as_json
from benchmarks.rounds import MALLOC, ROOT, Row

IMPORT_SECONDS, BUILD_SECONDS = 300.0, 240.0


class TeamError(Exception):
    """A peer whose ranks could not do what they were told, with the reason of the first that says one."""


class Team:
    """`ranks` processes under one torchrun, each of which has imported the peer's adapter.

    With `hosts`, a cluster that is up, there is a torchrun on each of its hosts, which meet at `port`.
    """

    def __init__(
        self,
        python: Path,
        adapter: str,
        ranks: int,
        malloc: str,
        threads: int,
        log: Path,
        hosts: Cluster | None = None,
        port: int = PORT,
    ) -> None:
        known = {name for setting in MALLOC.values() for name in setting}
        environment = {name: value for name, value in os.environ.items() if name not in known}
        environment |= MALLOC[malloc]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment["OMP_NUM_THREADS"] = str(threads)
        self.ranks, self.log = ranks, log
        self._folder = tempfile.TemporaryDirectory(prefix="moesaic-team-", ignore_cleanup_errors=True)
        # A child that is ended while it compiles must not leave half a library to others.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(self._folder.name) / "inductor")
        path = Path(self._folder.name) / "link"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        run = [str(python), "-W", "ignore", "-m", "torch.distributed.run"]
        run += ["--standalone", "--nproc-per-node", str(ranks)]
        rank = ["-m", "benchmarks.peers.parallel.rank", adapter, str(path)]
        commands = [([*run, *rank], environment)]
        if hosts is not None:
            command = hosts.torchrun_command(rank, str(python), port)
            commands = [
                (["ip", "netns", "exec", name, *command], environment | hosts.environment(host))
                for host, name in enumerate(hosts.names)
            ]
        with log.open("ab") as sink:
            self.processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    cwd=ROOT,
                    env=told,
                    start_new_session=True,
                )
                for command, told in commands
            ]
        self._links: list[socket.socket] = []
        self._buffers: list[bytes] = [b""] * ranks
        self._children: list[int] = []

    def wait_for_imports(self) -> None:
        """Returns when every rank has imported the peer; raises TeamError if one cannot."""
        if self._links:
            return
        deadline = time.monotonic() + IMPORT_SECONDS
        found: dict[int, socket.socket] = {}
        while len(found) < self.ranks:
            self._listener.settimeout(1.0)
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                ended = any(process.poll() is not None for process in self.processes)
                if ended or time.monotonic() > deadline:
                    reason = "ended" if ended else f"took over {IMPORT_SECONDS:.0f} s"
                    raise TeamError(f"its ranks' start {reason}; see {self.log}") from None
                continue
            link.settimeout(IMPORT_SECONDS)
            answer = json.loads(link.makefile().readline() or '{"rank": 0, "error": "it ended at its imports"}')
            if "error" in answer:
                raise TeamError(answer["error"])
            found[answer["rank"]] = link
        self._links = [found[rank] for rank in range(self.ranks)]

    def begin(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """A new child in every rank; what they say of the workload that they have built and checked."""
        self.send(task)
        self._children = [answer["pid"] for answer in self.gather(60.0)]
        return self.gather(BUILD_SECONDS)

    def send(self, command: dict[str, Any]) -> None:
        for link in self._links:
            try:
                link.sendall(json.dumps(command).encode() + b"\n")
            except OSError:
                pass  # its end is noticed by `gather`

    def gather(self, seconds: float) -> list[dict[str, Any]]:
        """The next answer of every rank, in the order of the ranks; raises TeamError at the first error, and
        TimeoutError when not all have answered within `seconds`."""
        deadline = time.monotonic() + seconds
        answers: list[dict[str, Any] | None] = [None] * self.ranks
        with selectors.DefaultSelector() as waiting:
            for rank, link in enumerate(self._links):
                waiting.register(link, selectors.EVENT_READ, rank)
            while True:
                for rank in range(self.ranks):
                    if answers[rank] is None and b"\n" in self._buffers[rank]:
                        line, self._buffers[rank] = self._buffers[rank].split(b"\n", 1)
                        answers[rank] = json.loads(line)
                        if "error" in answers[rank]:  # type: ignore[operator]
                            raise TeamError(f"rank {rank}: {answers[rank]['error']}")  # type: ignore[index]
                        if "ended" in answers[rank] and self._children:  # type: ignore[operator]
                            raise TeamError(f"rank {rank} was ended from outside; see {self.log}")
                if all(answer is not None for answer in answers):
                    return [answer for answer in answers if answer is not None]
                left = deadline - time.monotonic()
                ready = waiting.select(max(0.0, left))
                if not ready and left <= 0:
                    raise TimeoutError
                for key, _ in ready:
                    data = self._links[key.data].recv(65536)
                    if not data:
                        raise TeamError(f"rank {key.data} ended; see {self.log}")
                    self._buffers[key.data] += data

    def end(self) -> bool:
        """Ends the children of the task, whatever they are doing; whether all ranks are ready for another."""
        children, self._children = self._children, []
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return bool(children) and all(self._skip_to_end(rank, link) for rank, link in enumerate(self._links))

    def _skip_to_end(self, rank: int, link: socket.socket) -> bool:
        link.settimeout(60.0)
        while True:
            while b"\n" in self._buffers[rank]:
                line, self._buffers[rank] = self._buffers[rank].split(b"\n", 1)
                if "ended" in json.loads(line):
                    return True
            try:
                data = link.recv(65536)
            except OSError:
                return False
            if not data:
                return False
            self._buffers[rank] += data

    def stop(self) -> None:
        """Ends everything: the ranks leave when their links close, and torchrun after them."""
        self.end()
        for link in (*self._links, self._listener):
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            link.close()
        for process in self.processes:
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # torchrun passes it on to its ranks
                try:
                    process.wait(30.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._folder.cleanup()


@dataclass
class Plan:
    """How long and how often."""

    rounds: int = 3
    iters: int = 5
    """Most iterations in a turn, after one that warms up."""
    turn_seconds: float = 6.0
    limit_seconds: float = 120.0
    threads: int = 1
    """Threads of each rank."""
    malloc: str = "tuned"
    envs: Path = Path()
    logs: Path = Path()


@dataclass
class ParallelCell:
    """One workload on one layout, with what each peer made of it."""

    work: str
    shape: LayerShape | StepShape
    degrees: Degrees
    rows: list[Row] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    """Peers that do not run on this layout, with the reason; they are not failures."""

    @property
    def tokens(self) -> int:
        """Of the whole job, in one iteration: a layer's are counted per rank, a step's are the global batch."""
        return self.shape.tokens * (self.degrees.world if self.work == "layer" else 1)

    def row(self, peer: str) -> Row | None:
        return next((row for row in self.rows if row.peer == peer), None)

    def speed(self, row: Row | None, by: str = "best") -> float:
        """Tokens per second of the best iteration of all rounds, or of the median of the rounds' own bests."""
        if row is None or row.error or not row.times:
            return math.nan
        return self.tokens / (row.best if by == "best" else median(min(turn) for turn in row.times))

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "shape": as_json(self.shape),
            "degrees": self.degrees.as_json(),
            "layout": self.degrees.text(),
            "tokens": self.tokens,
            "misfits": self.misfits,
            "rows": [
                {**asdict(row), "tokens_per_second": self.speed(row), "median": self.speed(row, "median")}
                for row in self.rows
            ],
        }


class Teams:
    """One team per adapter and number of ranks, kept from cell to cell."""

    def __init__(self, plan: Plan, hosts: Cluster | None = None) -> None:
        self.plan, self.hosts = plan, hosts
        self._port = PORT
        self._teams: dict[tuple[str, str, int], Team] = {}

    def __enter__(self) -> Teams:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a terminated benchmark ends its teams too
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        for key in list(self._teams):
            self._teams.pop(key).stop()

    def get(self, peer: ParallelPeer, ranks: int) -> Team:
        """The peer's team, started if it is not there yet; raises TeamError where its environment is missing."""
        key = (peer.env, peer.adapter, ranks)
        if key not in self._teams:
            python = interpreter(peer, self.plan.envs)
            if not python.exists():
                raise TeamError(f"no environment at {python}: benchmarks/peers/make_envs.py --envs {self.plan.envs}")
            log = self.plan.logs / f"{peer.adapter}-{ranks}.log"
            self._port += 1
            plan = self.plan
            self._teams[key] = Team(python, peer.adapter, ranks, plan.malloc, plan.threads, log, self.hosts, self._port)
        return self._teams[key]

    def mend(self, peer: ParallelPeer, ranks: int) -> None:
        """Ends a team's failed task, and the team itself if it cannot take another."""
        team = self._teams.get((peer.env, peer.adapter, ranks))
        if team is not None and not team.end():
            self.drop(peer, ranks)

    def drop(self, peer: ParallelPeer, ranks: int) -> None:
        """Stops a team that is broken; the next `get` starts another."""
        team = self._teams.pop((peer.env, peer.adapter, ranks), None)
        if team is not None:
            team.stop()


def run_cell(cell: ParallelCell, peers: Sequence[ParallelPeer], teams: Teams, say: Callable[[str], None]) -> None:
    """Fills `cell` with rows of `peers`; those that do not run on its layout get the reason, in `misfits` too."""
    cell.rows = [Row(peer.name, peer.title, note=peer.note) for peer in peers]
    pairs = list(zip(peers, cell.rows, strict=True))
    for peer, row in pairs:
        row.error = peer.misfit(cell.degrees) if cell.work == "step" else ""
        if row.error:
            cell.misfits[peer.name] = row.error
    for act in (lambda team: None, Team.wait_for_imports):  # all start, then none imports beside a measurement
        for peer, row in pairs:
            if not row.error:
                try:
                    act(teams.get(peer, cell.degrees.world))
                except TeamError as error:
                    row.error = str(error)
                    teams.drop(peer, cell.degrees.world)
    for _ in range(teams.plan.rounds):
        for peer, row in pairs:
            if not row.error and row.over_limit is None:
                _turn(cell, peer, row, teams, say)


def _turn(cell: ParallelCell, peer: ParallelPeer, row: Row, teams: Teams, say: Callable[[str], None]) -> None:
    plan = teams.plan
    task = {
        "work": cell.work,
        "shape": as_json(cell.shape),
        "degrees": cell.degrees.as_json(),
        "variant": peer.variant,
        "fp32_is_bf16": peer.fp32_is_bf16,
        "threads": plan.threads,
    }
    try:
        team = teams.get(peer, cell.degrees.world)
        team.wait_for_imports()
        facts = team.begin(task)
        warm = iterations(team, 1, plan.limit_seconds, None)
        team.gather(30.0)
        count = max(1, min(plan.iters, int(plan.turn_seconds / warm[0])))
        times = iterations(team, count, plan.limit_seconds, row)
        for fact, peak in zip(facts, team.gather(30.0), strict=True):
            fact |= peak
        team.end()
    except TimeoutError:
        row.over_limit = plan.limit_seconds
        row.error = f"not done after {plan.limit_seconds:.0f} s"
    except TeamError as error:
        row.error = str(error).splitlines()[0][:300]
    if row.error:
        say(f"  {row.title}: {row.error}")
        return teams.mend(peer, cell.degrees.world)
    row.times.append(times)
    full = max(facts, key=lambda fact: fact["peak_mb"] - fact["idle_mb"])
    if math.isnan(row.extra_mb) or full["peak_mb"] - full["idle_mb"] > row.extra_mb:
        row.idle_mb, row.peak_mb = full["idle_mb"], full["peak_mb"]
    row.detail, row.torch = facts[0]["detail"], facts[0]["torch"]
    row.parameters = max(fact["parameters"] for fact in facts)
    row.output_error = max((fact["output_error"] for fact in facts if "output_error" in fact), default=None)
    say(f"  {row.title}: " + " ".join(f"{seconds:.3f}" for seconds in times) + " s")
    return None


def iterations(team: Team, count: int, limit: float, row: Row | None) -> list[float]:
    """Seconds of `count` iterations, each that of the slowest rank; notes the rest in `row`."""
    team.send({"iterations": count})
    times = []
    for _ in range(count):
        answers = team.gather(limit)
        seconds = max(answer["seconds"] for answer in answers)
        times.append(seconds)
        if row is not None:
            cpu = sum(answer["cpu"] for answer in answers)
            row.cpu.append(cpu)
            row.others.append(max(0.0, (max(answer["busy"] for answer in answers) - cpu) / seconds))
            losses = [answer["loss"] for answer in answers if answer["loss"] == answer["loss"]]
            row.losses.append(sum(losses) / len(losses) if losses else math.nan)
    return times
