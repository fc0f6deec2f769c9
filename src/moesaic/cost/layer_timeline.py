"""Layers on streams: forward and backward of a micro-batch, or of two at once, with what overlaps.

The pieces of a layer become a graph of parts that wait for each other. Overlap only removes waits: between chunks of a
piece, between branches, between gradients of weights and what comes after them. The streams then take what is ready,
the one with most to come after it first, as hand-tuned orders do (MegaScale-MoE, arXiv 2505.11432, section 4.1;
DualPipe, DeepSeek-V3, arXiv 2412.19437, figure 4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.spec.errors import SpecError, nearest

from .timeline import ALONE, Contention, Piece, Stream, Task, Timeline, run
from .workload import OVERLAP

What = Literal["forward", "backward", "both", "pair"]

GATE_UP_SHARE = 2 / 3
"""Of a gated MLP's work, the part before its activation: two of three equal matrices."""


class Chunk(NamedTuple):
    """What one chunk has of pieces that are cut."""

    compute: float
    """Share of the work."""
    travels: float
    """Share of what is sent; 0 for what stays on its rank."""


Chunks = int | Sequence[Chunk]
"""How many equal chunks, or what each has; shares add up to 1."""
ChunkSeconds = float | Mapping[str, tuple[float, float]]
"""What every chunk after the first costs more: of any piece, or by a piece's name what a pass of it costs however small
it is, and what its gradients of weights do."""


@dataclass(frozen=True)
class StageSeconds:
    """How long one micro-batch keeps a virtual stage, for `simulate_step`."""

    forward: float
    backward: float
    """All of backward."""
    backward_input: float
    """Backward without gradients of weights."""
    backward_weight: float
    """Gradients of weights on their own."""
    pair: float
    """Forward of one micro-batch and backward of another together, as `experts` overlaps them."""


def simulate_layers(
    layers: Sequence[Sequence[Piece]],
    overlap: Collection[str] = (),
    *,
    what: What | None = None,
    chunks: Chunks = 4,
    chunk_seconds: ChunkSeconds = 0.0,
    contention: Contention = ALONE,
    weights: bool = True,
    rank: int = 0,
) -> Timeline:
    """One rank's streams while micro-batches pass through `layers`, in order of forward.

    `what`: `forward` or `backward` of one micro-batch, `both` one after the other, or `pair`, the forward of one beside
    the backward of another; by default `pair` when `experts` overlap, else `both`.

    `overlap` is of workload.OVERLAP. `inside` cuts all from dispatch to combine into `chunks`, each of which goes ahead
    on its own (and `context` exchange with the matmul beside it); `tensor` does the same to tensor-parallel
    communication and the matmul beside it. `shared_experts` makes the shared expert a branch beside all from dispatch
    to combine, in two halves that fill gaps. `between` lets recomputation and gradients of weights run under
    communication of the same layer (MegaScale-MoE, section 4.1, figure 8b), `weight_gradients` those of weights under
    any that follows. `gradients` and `parameters` are of a step, not of a layer, and change nothing here. Every chunk
    after the first costs `chunk_seconds` more, for launches and worse matmul shapes. `weights` False leaves gradients
    of weights out. Communication that is neither dispatch nor combine nor cut into chunks is waited for: compute stands
    still, of both micro-batches, except that `between` lets the rest of the layer go on.

    Raises:
        SpecError: an unknown overlap, fewer than one chunk, or times that are not finite or below zero.
    """
    for word in overlap:
        if word not in OVERLAP:
            raise SpecError(f"unknown overlap {word!r}: {nearest(word, OVERLAP)}")
    cuts = [Chunk(1 / chunks, 1 / chunks)] * chunks if isinstance(chunks, int) and chunks > 0 else chunks
    if isinstance(cuts, int) or not cuts:
        raise SpecError(f"overlap `inside` cuts pieces into {chunks} chunks: it needs at least 1")
    what = what or ("pair" if "experts" in overlap else "both")
    graph = _Graph(frozenset(overlap), cuts, chunk_seconds, weights, rank)
    nodes = [graph.nodes(pieces) for pieces in layers]
    done: tuple[int, ...] = ()
    if what != "backward":
        done = graph.forward(nodes)
    if what != "forward":
        graph.backward(nodes, done if what == "both" else ())
    return run(graph.urgent(), contention)


def stage_seconds(
    layers: Sequence[Sequence[Piece]],
    overlap: Collection[str] = (),
    *,
    chunks: Chunks = 4,
    chunk_seconds: ChunkSeconds = 0.0,
    contention: Contention = ALONE,
) -> StageSeconds:
    """What `simulate_layers` says about one virtual stage; arguments as there."""

    def seconds(what: What, weights: bool = True) -> float:
        return simulate_layers(
            layers,
            overlap,
            what=what,
            chunks=chunks,
            chunk_seconds=chunk_seconds,
            contention=contention,
            weights=weights,
        ).makespan

    forward, backward, inputs = seconds("forward"), seconds("backward"), seconds("backward", weights=False)
    weights = sum(piece.backward_weight for pieces in layers for piece in pieces)
    backward = min(backward, inputs + weights)  # nothing forces an overlap that does not pay
    return StageSeconds(forward, backward, inputs, weights, min(seconds("pair"), forward + backward))


@dataclass(frozen=True)
class _Node:
    """A share of a piece, and the nodes (of the same layer) whose output it reads."""

    piece: Piece
    after: tuple[int, ...]
    whole: bool = True
    """Not one of several chunks."""


class _Graph:
    """Collects tasks: `forward` and `backward` add those of all layers."""

    def __init__(
        self, overlap: frozenset[str], chunks: Sequence[Chunk], chunk_seconds: ChunkSeconds, weights: bool, rank: int
    ) -> None:
        self.overlap, self.chunks, self.chunk_seconds = overlap, chunks, chunk_seconds
        self.weights, self.rank = weights, rank
        self.tasks: list[Task] = []
        self.backwards: list[bool] = []
        """Of each task, whether it belongs to backward."""

    def nodes(self, pieces: Sequence[Piece]) -> list[_Node]:
        """The graph of one layer's forward. The first node has no `after`; what nobody reads is the layer's output."""
        beside = [p for p in pieces if "shared_experts" in p.name] if "shared_experts" in self.overlap else []
        main = [piece for piece in pieces if piece not in beside]
        parts = [piece.part for piece in main]
        if "dispatch" not in parts or "combine" not in parts:
            beside, main = [], list(pieces)
            parts = [piece.part for piece in main]
        first = parts.index("dispatch") if beside else -1
        last = len(parts) - 1 - parts[::-1].index("combine") if beside else -1
        runs = self._runs(main)
        nodes: list[_Node] = []
        ends: tuple[int, ...] = ()  # of the piece before, one per chunk
        branch: tuple[int, ...] = ()
        for place, piece in enumerate(main):
            if place == first:
                branch = self._branch(nodes, beside, ends)
            run_of = runs[place]
            cut = run_of is not None
            follows = cut and place > 0 and runs[place - 1] == run_of
            count = len(self.chunks) if cut else 1
            begin = len(nodes)
            for chunk in range(count):
                after = (ends[chunk],) if follows else ends
                nodes.append(_Node(self._share(piece, count, chunk), after, not cut))
            ends = tuple(range(begin, len(nodes)))
            if place == last:
                ends += branch
        return nodes

    def forward(self, layers: list[list[_Node]]) -> tuple[int, ...]:
        """Add forward of all layers; what it ends with."""
        ends: tuple[int, ...] = ()
        for number, nodes in enumerate(layers):
            made: list[int] = []
            for node in nodes:
                after = tuple(made[index] for index in node.after) if node.after else ends
                made.append(self._add(node, "forward", node.piece.forward, after, number))
            ends = tuple(made[index] for index in _outputs(nodes)) or ends
        return ends

    def backward(self, layers: list[list[_Node]], start: tuple[int, ...]) -> None:
        """Add backward of all layers, the last one first, after the tasks `start`."""
        free = bool(self.overlap & {"weight_gradients", "between"})
        ends = start
        for number in reversed(range(len(layers))):
            nodes = layers[number]
            readers: list[list[int]] = [[] for _ in nodes]
            for index, node in enumerate(nodes):
                for before in node.after:
                    readers[before].append(index)
            again = self._again(nodes)
            exits: list[tuple[int, ...]] = [()] * len(nodes)
            remade: dict[int, int] = {}
            entry, begin = ends, len(self.tasks)
            for index in reversed(range(len(nodes))):
                piece = nodes[index].piece
                gradient = tuple(t for reader in readers[index] for t in exits[reader]) or entry
                # A group of pieces that are computed again starts with its first, when its last one's turn has come.
                for member in again.get(index, ()):
                    from_before = tuple(remade[n] for n in nodes[member].after if n in remade)
                    ready = entry if "between" in self.overlap else gradient
                    remade[member] = self._add(
                        nodes[member], "again", nodes[member].piece.recompute, from_before or ready, number
                    )
                after = gradient + ((remade[index],) if index in remade else ())
                made = self._add(nodes[index], "backward", piece.backward_input, after, number)
                exits[index] = (made,)
                if piece.backward_weight and self.weights:
                    weight = self._add(nodes[index], "weights", piece.backward_weight, (made,), number)
                    exits[index] = (made,) if free else (weight,)
            inputs = tuple(t for index, node in enumerate(nodes) if not node.after for t in exits[index])
            ends = inputs or ends
            if "between" in self.overlap and "weight_gradients" not in self.overlap:
                ends = tuple(range(begin, len(self.tasks))) or ends

    def urgent(self) -> list[Task]:
        """The tasks with their priorities: what has most to come after it goes first (Jackson's rule), as a share of
        the longest way of its own micro-batch, so that two of them get ahead together. Nothing comes after gradients
        of weights, which so fill gaps."""
        tail = [0.0] * len(self.tasks)
        whole = dict.fromkeys(self.backwards, 0.0)
        for index in reversed(range(len(self.tasks))):
            way = self.tasks[index].seconds + tail[index]
            for before in self.tasks[index].after:
                tail[before] = max(tail[before], way)
            whole[self.backwards[index]] = max(whole[self.backwards[index]], way)
        return [
            task._replace(priority=-way / (whole[backward] or 1.0))
            for task, way, backward in zip(self.tasks, tail, self.backwards, strict=True)
        ]

    def _add(self, node: _Node, word: str, seconds: float, after: tuple[int, ...], layer: int) -> int:
        """Communication that nothing is meant to run under is waited for, as libraries issue it by default."""
        piece = node.piece
        hidden = not node.whole or piece.part in ("dispatch", "combine") or "between" in self.overlap
        holds: Stream | None = None if piece.stream == "compute" or hidden else "compute"
        name = f"{word} {piece.name} · layer {layer}"
        self.tasks.append(Task(self.rank, piece.stream, name, seconds, after, holds=holds))
        self.backwards.append(word != "forward")
        return len(self.tasks) - 1

    def _share(self, piece: Piece, count: int, chunk: int) -> Piece:
        """One of `count` chunks of a piece."""
        if count == 1:
            return piece
        share = self.chunks[chunk].compute if piece.stream == "compute" else self.chunks[chunk].travels
        if isinstance(self.chunk_seconds, Mapping):
            more, of_weights = (once * (1 - share) for once in self.chunk_seconds.get(piece.name, (0.0, 0.0)))
        else:
            more = of_weights = self.chunk_seconds if chunk else 0.0

        def part(seconds: float, more: float = more) -> float:
            return seconds * share + more if seconds and share else 0.0

        return Piece(
            f"{piece.name} {chunk + 1}/{count}",
            piece.stream if share else "compute",  # what stays here does not wait for what travels
            part(piece.forward),
            part(piece.backward_input),
            part(piece.backward_weight, of_weights),
            part(piece.recompute),
        )

    def _branch(self, nodes: list[_Node], beside: Sequence[Piece], after: tuple[int, ...]) -> tuple[int, ...]:
        """Add the shared expert as a branch of its own, in two halves if it is one piece; what it ends with."""
        if len(beside) == 1:
            beside = [
                _scaled(beside[0], "gate_up", GATE_UP_SHARE),
                _scaled(beside[0], "down", 1 - GATE_UP_SHARE),
            ]
        for piece in beside:
            nodes.append(_Node(piece, after))
            after = (len(nodes) - 1,)
        return after

    def _runs(self, pieces: Sequence[Piece]) -> list[int | None]:
        """Of each piece, which run of pieces it is cut into chunks with, if any."""
        joined = [False] * len(pieces)  # with the next one
        parts = [piece.part for piece in pieces]
        if "inside" in self.overlap and "dispatch" in parts and "combine" in parts:
            for place in range(parts.index("dispatch"), len(parts) - 1 - parts[::-1].index("combine")):
                joined[place] = True
        parts_cut = [part for word, part in (("tensor", "tensor"), ("inside", "context")) if word in self.overlap]
        for place, piece in enumerate(pieces):
            if piece.part in parts_cut:
                for left in _beside(pieces, place):
                    joined[left] = True
        runs: list[int | None] = []
        number = 0
        for place in range(len(pieces)):
            before = place > 0 and joined[place - 1]
            number += not before
            runs.append(number if before or joined[place] else None)
        return runs

    def _again(self, nodes: Sequence[_Node]) -> dict[int, list[int]]:
        """Neighbours that are computed again together, under the last of them."""
        groups: dict[int, list[int]] = {}
        group: list[int] = []
        for index, node in enumerate(nodes):
            if node.piece.recompute:
                group.append(index)
            elif group:
                groups[group[-1]] = group
                group = []
        if group:
            groups[group[-1]] = group
        return groups


def _scaled(piece: Piece, detail: str, share: float) -> Piece:
    return Piece(
        f"{piece.part}.{detail}",
        piece.stream,
        piece.forward * share,
        piece.backward_input * share,
        piece.backward_weight * share,
        piece.recompute * share,
    )


def _beside(pieces: Sequence[Piece], place: int) -> range:
    """The joints between a piece of communication and the matmul that it can flow into (after a gather, `…_in`) or out
    of (before a scatter, `…_out`); other names take what follows, or else what is before.

    What stands between the two, such as a cast, comes along. Attention's core needs all of a sequence, so it cannot.
    """
    detail = pieces[place].name.partition(".")[2]
    ahead, behind = _reach(pieces, place, 1), _reach(pieces, place, -1)
    if "scatter" in detail or detail.endswith("_out"):
        return range(place - behind, place)
    if ahead or "gather" in detail or detail.endswith("_in"):
        return range(place, place + ahead)
    return range(place - behind, place)


def _reach(pieces: Sequence[Piece], place: int, step: int) -> int:
    """How many pieces away the nearest matmul with weights is; 1 if there is other compute only, 0 if there is none."""
    distance = 0
    while 0 <= (other := place + (distance + 1) * step) < len(pieces):
        piece = pieces[other]
        if piece.stream != "compute" or piece.name.endswith(".core"):
            break
        distance += 1
        if piece.backward_weight:
            return distance
    return min(distance, 1)


def _outputs(nodes: Sequence[_Node]) -> list[int]:
    """Nodes whose output no other node of the layer reads."""
    read = {before for node in nodes for before in node.after}
    return [index for index in range(len(nodes)) if index not in read]
