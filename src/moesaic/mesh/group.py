"""A process group with a name, and what is said when a rank of it cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from moesaic.spec.errors import MoesaicError


class CommunicationError(MoesaicError):
    """Another rank died, hangs, or does something else."""

    exit_code = 1


class Progress:
    """What this process is doing, for messages about lost ranks."""

    step: int | None = None


progress = Progress()


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate. `ranks` are global numbers in ascending order, `rank` is this process's place among them.

    A group of one process has no `handle`, and every collective over it is the identity.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    timeout_seconds: float = 0.0
    needs_device: bool = False
    small: Group | None = field(default=None, repr=False)
    """The same ranks over a connection of their own, for short messages that must not stand behind long ones."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Group:
        """This process alone."""
        return cls(name, (rank,), 0)

    @classmethod
    def create(
        cls,
        name: str,
        partition: list[tuple[int, ...]],
        timeout_seconds: float,
        channel: str = "",
        backend: str | None = None,
        small: bool = False,
    ) -> Group:
        """The group of `partition`, disjoint lists of ranks, that this process is in, or this process alone.

        Every rank must call this, in one order, but only members of a list take part in making its connection, so the
        cost does not grow with the world. Equal partitions share connections, unless their `channel` differs: what must
        never wait for another group's traffic has a channel of its own, as `small` gives to short messages. `backend`
        is that of the default group unless given.
        """
        me = dist.get_rank()
        mine = next((ranks for ranks in partition if me in ranks), (me,))
        if all(len(ranks) == 1 for ranks in partition):
            return cls.single(name, me)
        key = (tuple(partition), channel, timeout_seconds, backend)
        if key not in _connections:
            # torch names a group by its ranks and by how many this process has made, so all make equally many.
            _connections[key] = dist.new_group(
                list(mine),
                timeout=timedelta(seconds=timeout_seconds),
                backend=backend,
                use_local_synchronization=True,
                group_desc=name,
            )
        beside = cls.create(name, partition, timeout_seconds, f"{channel} small", backend) if small else None
        if len(mine) == 1:
            return cls.single(name, me)
        handle = _connections[key]
        on_device = dist.get_backend(handle) != "gloo"
        return cls(name, mine, mine.index(me), handle, timeout_seconds, on_device, beside)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turns what the back-end raises inside into a CommunicationError that names rank, group and step."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not isinstance(error, dist.DistError) and not _is_communication(error):
                raise
            me = self.ranks[self.rank]
            others = ", ".join(str(rank) for rank in self.ranks if rank != me)
            step = "" if progress.step is None else f" in step {progress.step}"
            raise CommunicationError(
                f"Rank {me}: {what} over group {self.name} (with rank{'s' if self.size > 2 else ''} {others}) "
                f"failed{step}: {_reason(error, self.timeout_seconds)}"
            ) from error


_connections: dict[tuple[tuple[tuple[int, ...], ...], str, float, str | None], dist.ProcessGroup] = {}
"""By partition, channel, time limit and back-end. They live as long as the process: gloo cannot meet again under a used
name."""


def forget_connections() -> None:
    """After the process group was destroyed."""
    _connections.clear()


def _is_communication(error: BaseException) -> bool:
    text = str(error)
    return any(
        sign in text for sign in ("gloo", "NCCL", "onnection", "imed out", "imeout", "Socket", "socket", "c10d", "peer")
    )


def _reason(error: BaseException, timeout_seconds: float) -> str:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return (
            f"no answer within {timeout_seconds:g} s: another rank hangs, or is slower than run.timeout_seconds allows."
        )
    if "onnection" in text or "peer" in text:
        return "the connection was closed: another rank has ended; its own message or log says why."
    return text.strip().splitlines()[0][:200]


def byte_count(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
