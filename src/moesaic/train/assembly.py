"""How the processes of one job find each other, agree, and learn of each other's errors before they have groups.

They meet in the key-value store that torchrun (or rank 0) keeps. Nothing here is a collective: a rank that fails can
still say why, and a rank that waits notices when the one it waits for has stopped, however long honest work takes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from moesaic.mesh.group import CommunicationError, progress
from moesaic.spec.errors import MoesaicError

T = TypeVar("T")
Facts = dict[str, Any]
"""What must be the same on all ranks, by a name that can stand in a sentence. Values are plain JSON data."""

_POLL_SECONDS = 0.5
_READ_SECONDS = 5.0
_SHOWN = 4
_ANSWERED = 8
_LINES = 16
"""How many ranks of a large job say why it ends: the first ones know best."""


class JobError(MoesaicError):
    """What keeps the whole job from going on, raised on every rank in the same words.

    `everywhere` says that the ranks know the same, so that one of them is enough to print it.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.everywhere = True


@dataclass(frozen=True)
class Sign:
    """A rank's last sign of life: how long ago, in seconds, and its step then."""

    age: float
    step: int | None


class Assembly:
    """The processes of one job, as a table of keys that all of them see.

    `session` sets the keys of this start apart from those of earlier starts, which the store may still hold.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        leader: bool = True,
        start_seconds: float | None = None,
    ) -> None:
        self.rank, self.size, self.leader = rank, size, leader
        self.timeout_seconds = timeout_seconds
        self.session = _meet(store, rank, size, start_seconds or timeout_seconds)
        self.store = dist.PrefixStore(self.session, store)
        self._phase = 0
        # A connection of its own: the main thread may be waiting on the other.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._beat = _Heart(dist.PrefixStore(self.session, own), rank, timeout_seconds)

    def settle(self, what: str, function: Callable[[], T]) -> T:
        """function() of this rank, once all ranks have come back from theirs.

        Raises:
            MoesaicError: function raised one on some rank. Where all ranks raised the same, each gets its own; else
                all get a JobError that names the ranks. Either has a true `everywhere`.
            CommunicationError: a rank showed no sign of life for the time limit.
        """
        try:
            value, error = function(), None
        except MoesaicError as caught:
            error = caught
        except Exception as caught:  # the others should hear of a defect too
            self._tell(what, {"error": f"{type(caught).__name__}: {caught}", "code": 1})
            raise
        said = None if error is None else {"error": str(error), "code": error.exit_code}
        verdict = self._tell(what, said or {"error": None})
        if not verdict:
            return value
        if error is not None and verdict["error"] == str(error):
            error.everywhere = True  # type: ignore[attr-defined]
            raise error
        raise JobError(verdict["error"], verdict["code"])

    def first(self, what: str, function: Callable[[], T]) -> T:
        """function() of rank 0, which alone runs it; errors as in `settle`. The value must be picklable."""
        value = self.settle(what, function if self.rank == 0 else lambda: None)
        key = f"value/{self._phase}"
        if self.rank == 0:
            self.store.set(key, base64.b64encode(pickle.dumps(value)).decode())
            return value  # type: ignore[return-value]
        return pickle.loads(base64.b64decode(self._get(key, 0)))  # type: ignore[no-any-return]

    def leaders_first(self, what: str, function: Callable[[], T]) -> T:
        """function() of this rank, called on the first rank of each node before the others, so that those find made
        what it makes on the node's disk."""
        mine = self.settle(what, function if self.leader else lambda: None)
        others = self.settle(what, function if not self.leader else lambda: None)
        return mine if self.leader else others  # type: ignore[return-value]

    def agree(self, facts: Facts) -> None:
        """Raises JobError, naming the first differing fact, the ranks and both values, unless all ranks have the same
        facts."""

        def judge(by_rank: dict[int, Facts]) -> dict[str, Any] | None:
            sentence = difference(list(by_rank.values()))
            return None if sentence is None else {"error": sentence, "code": JobError.exit_code}

        verdict = self._exchange("facts", facts, judge)
        if verdict:
            raise JobError(verdict["error"], verdict["code"])

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks bring."""
        verdict = self._exchange("the ranks", number, lambda by_rank: {"value": max(by_rank.values())})
        if "error" in verdict:
            raise JobError(verdict["error"], verdict["code"])
        return int(verdict["value"])

    @property
    def interval(self) -> float:
        """Seconds between two signs of life."""
        return self._beat.interval

    def signs(self) -> dict[int, Sign]:
        """The last sign of life of every rank that has given one, as far as the store still answers.

        Only a few ranks get an answer: when a large job falls, all ask at once.
        """
        return self._beat.read(range(self.size)) if self._count("asked") <= _ANSWERED else {}

    def say_once(self, message: str) -> bool:
        """Whether this rank should print the message: it is the first with it, and few others have printed one."""
        return self._count(f"said/{hash_text(message)}") <= 1 and self._count("lines") <= _LINES

    def _count(self, name: str) -> int:
        """How often ranks have asked for that count, this time included; 0 if the store is gone."""
        try:
            return int(self.store.add(f"count/{name}", 1))
        except (RuntimeError, ValueError):
            return 0

    def close(self) -> None:
        """Give no more signs of life."""
        self._beat.stop()

    # ---------------------------------------------------------------- how it works

    def _tell(self, what: str, said: dict[str, Any]) -> dict[str, Any] | None:
        def judge(by_rank: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
            failed = {rank: each for rank, each in by_rank.items() if each["error"] is not None}
            if not failed:
                return None
            code = max(each["code"] for each in failed.values())
            sentences: dict[str, list[int]] = {}
            for rank, each in failed.items():
                sentences.setdefault(each["error"], []).append(rank)
            if len(failed) == self.size and len(sentences) == 1:
                return {"error": next(iter(sentences)), "code": code}
            parts = [f"{_ranks(ranks)}: {sentence}" for sentence, ranks in sentences.items()]
            return {"error": " ".join(parts), "code": code}

        return self._exchange(what, said, judge)

    def _exchange(self, what: str, mine: Any, judge: Callable[[dict[int, Any]], Any]) -> Any:
        """Rank 0 sees what all ranks brought and judges; all get the verdict."""
        self._phase += 1
        key = f"phase/{self._phase}"
        if self.rank != 0:
            self.store.set(f"{key}/{self.rank}", json.dumps(mine))
            verdict = json.loads(self._get(f"{key}/verdict", 0))
            if verdict and "error" in verdict:
                self.store.set(f"{key}/read/{self.rank}", "1")
            return verdict
        by_rank = {0: mine}
        for rank in range(1, self.size):
            try:
                by_rank[rank] = json.loads(self._get(f"{key}/{rank}", rank))
            except CommunicationError as error:
                lost = f"{error} All ranks wait for {what}."
                self._publish(key, {"error": lost, "code": error.exit_code})
                raise JobError(lost, error.exit_code) from error
        verdict = judge(by_rank)
        self._publish(key, verdict)
        return verdict

    def _publish(self, key: str, verdict: Any) -> None:
        """Give all ranks the verdict. Where it is the end, wait a little until they have it: the store may end too."""
        self.store.set(f"{key}/verdict", json.dumps(verdict))
        if verdict and "error" in verdict:
            deadline = time.monotonic() + _READ_SECONDS
            readers = [f"{key}/read/{rank}" for rank in range(1, self.size)]
            for _ in _pauses():
                if self.store.check(readers) or time.monotonic() > deadline:
                    return

    def _get(self, key: str, rank: int) -> bytes:
        """The value that `rank` sets. Waits as long as that rank lives."""
        last: object = None
        since = time.monotonic()
        # A little longer than the rank waited for waits itself, so that it can still tell whom it misses.
        limit = self.timeout_seconds + 3 * self.interval
        for _ in _pauses():
            try:
                if self.store.check([key]):
                    return self.store.get(key)
            except (RuntimeError, ValueError) as error:
                raise CommunicationError(
                    f"Rank {self.rank}: the store at which the ranks meet is gone while waiting for rank {rank}: "
                    f"torchrun or rank 0 has ended ({str(error).splitlines()[0]})."
                ) from None
            # Changes of the sign count, not its age: clocks of machines differ.
            sign = self._beat.raw(rank)
            if sign != last:
                last, since = sign, time.monotonic()
            silent = time.monotonic() - since
            if silent > limit:
                raise CommunicationError(
                    f"Rank {self.rank}: rank {rank} has shown no sign of life for {silent:.0f} s, longer than "
                    f"run.timeout_seconds = {self.timeout_seconds:g} allows."
                )
        raise AssertionError("pauses do not end")


def difference(facts: list[Facts]) -> str | None:
    """A sentence about the first fact (in the order of rank 0's) in which a rank differs from rank 0, or None."""
    names = dict.fromkeys(name for each in facts for name in each)
    for name in names:
        values = [each.get(name, "absent") for each in facts]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            same = [rank for rank in others if values[rank] == values[others[0]]]
            more = (
                ""
                if len(same) == len(others)
                else f" (and differs again on {_ranks(sorted({*others} - {*same})).lower()})"
            )
            return (
                f"The ranks disagree on {name}: it is {values[0]!r} on rank 0 and {values[others[0]]!r} on "
                f"{_ranks(same).lower()}{more}. Start every rank with the same run file, code, software and data."
            )
    return None


def hash_text(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + ("" if len(ranks) <= _SHOWN else ", …")
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" ({len(ranks)})" if len(ranks) > _SHOWN else "")


class _Heart:
    """Writes, from a thread of its own, when this process last lived and in which step."""

    def __init__(self, store: dist.Store, rank: int, timeout_seconds: float) -> None:
        self._store, self._rank = store, rank
        self.interval = min(10.0, max(0.5, timeout_seconds / 10))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._store.set(f"beat/{self._rank}", json.dumps([time.time(), progress.step]))
            except (RuntimeError, ValueError):
                return  # the store is gone, and with it everybody who could look
            if self._stop.wait(self.interval):
                return

    def raw(self, rank: int) -> bytes | None:
        """What a rank last wrote; None if nothing, or if the store is gone."""
        try:
            with self._lock:
                key = f"beat/{rank}"
                return self._store.get(key) if self._store.check([key]) else None
        except (RuntimeError, ValueError):
            return None

    def read(self, ranks: Iterable[int]) -> dict[int, Sign]:
        now = time.time()
        found = ((rank, self.raw(rank)) for rank in ranks)
        signs = {rank: json.loads(text) for rank, text in found if text is not None}
        return {rank: Sign(max(0.0, now - when), step) for rank, (when, step) in signs.items()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(self.interval)


def _meet(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """A name that all ranks of this start share and no earlier start had.

    The store of torchrun outlives a restart, and with it the keys of ranks that are gone. So every rank shows a fresh
    token, rank 0 answers it with the session's name, and answers again if the token was an old one and changes.
    """
    token = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_seconds
    store.set(f"hello/{rank}", token)
    if rank == 0:
        return _welcome(store, size, f"session-{token}", deadline, timeout_seconds)
    for _ in _pauses():
        if store.check([f"welcome/{rank}"]):
            shown, _, session = store.get(f"welcome/{rank}").decode().partition(" ")
            if shown == token:
                store.set(f"{session}/here/{rank}", "1")
                return session
        if time.monotonic() > deadline:
            break
    raise CommunicationError(f"Rank {rank}: rank 0 did not start within {timeout_seconds:g} s: look at its log.")


def _welcome(store: dist.Store, size: int, session: str, deadline: float, timeout_seconds: float) -> str:
    """Rank 0's side of `_meet`: returns when all ranks know the session."""
    answered: dict[int, str] = {}
    missing = list(range(1, size))
    for _ in _pauses():
        for other in missing:
            if store.check([f"hello/{other}"]):
                shown = store.get(f"hello/{other}").decode()
                if answered.get(other) != shown:
                    answered[other] = shown
                    store.set(f"welcome/{other}", f"{shown} {session}")
        missing = [other for other in missing if not store.check([f"{session}/here/{other}"])]
        if not missing:
            return session
        if time.monotonic() > deadline:
            break
    sentence = (
        f"{_ranks(missing)} of {size} did not start within {timeout_seconds:g} s: look at the logs of their machines."
    )
    lost = JobError(sentence, CommunicationError.exit_code)
    # Those that are here wait for the first verdict.
    store.set(f"{session}/phase/1/verdict", json.dumps({"error": sentence, "code": lost.exit_code}))
    raise lost


def _pauses() -> Iterator[None]:
    """Waits a little longer each time, from 10 ms up to half a second."""
    pause = 0.01
    while True:
        yield
        time.sleep(pause)
        pause = min(_POLL_SECONDS, pause * 1.3)
