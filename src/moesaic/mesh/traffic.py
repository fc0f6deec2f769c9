"""How many bytes this rank sends, by collective and group.

A ring or pairwise algorithm of n ranks sends, per rank: all-gather (n − 1) · own bytes; reduce-scatter (n − 1)/n · its
input; all-reduce the sum of both; all-to-all the rows for other ranks; point to point the message.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes sent and number of calls, by (collective, group name)."""

    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, collective: str, group: str, sent_bytes: int) -> None:
        """Count one call."""
        self.bytes[collective, group] += sent_bytes
        self.calls[collective, group] += 1


_meters: list[Traffic] = []


@contextlib.contextmanager
def meter() -> Iterator[Traffic]:
    """Counts what is sent inside, by this process, forward and backward."""
    traffic = Traffic()
    _meters.append(traffic)
    try:
        yield traffic
    finally:
        _meters.remove(traffic)


def count(collective: str, group: str, sent_bytes: int) -> None:
    """Tell all running meters of one call."""
    for traffic in _meters:
        traffic.add(collective, group, sent_bytes)
