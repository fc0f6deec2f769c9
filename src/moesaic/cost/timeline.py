"""Work on explicit streams: what a layer is made of, and what happened when.

A layer is a sequence of pieces, a piece is work on one stream. Streams of one rank run at the same time and slow each
other down while they do; see `Contention`. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "fast", "network", "host", "send"]
STREAMS: tuple[Stream, ...] = ("compute", "fast", "network", "host", "send")
"""`compute`: kernels. `fast`: collectives inside the domain (NVLink, xGMI). `network`: collectives that leave it.
`host`: copies to and from host memory, and work there. `send`: what pipeline ranks hand on to each other."""


@dataclass(frozen=True)
class Piece:
    """One step of a layer, and how long it takes alone.

    Pieces of a layer come in the order of forward; backward goes through them in reverse, and a collective's
    `backward_input` is that of its opposite (dispatch's is a combine). What stands before the first dot of a name is
    the `part`, by which overlap knows what a piece is: `attention`, `router`, `dispatch`, `experts`, `combine`,
    `shared_experts`, `tensor` and `context` (their communication), `mlp`, and any other word.
    """

    name: str
    """`part` or `part.detail`, such as `dispatch.network` or `experts.gate_up`."""
    stream: Stream
    forward: float
    backward_input: float
    """Of the gradient of the input; of all of backward where nothing has weights of its own."""
    backward_weight: float = 0.0
    """Of the gradients of weights."""
    recompute: float = 0.0
    """Of forward again before backward, for what recomputation does not keep."""

    @property
    def part(self) -> str:
        """What the piece belongs to: its name up to the first dot."""
        return self.name.partition(".")[0]
