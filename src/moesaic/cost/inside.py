"""In how many chunks a layer's tokens should travel when they travel under their own experts (`inside`).

A chunk hides what another one sends, and costs a start of every kernel and message and another look at every expert's
weights. What that is follows from pricing a layer at two sizes: the seconds that are left when nothing is. Where
`moesaic calibrate` measured products of experts with few and with many rows, and not the trainer's experts whole (which
the price then has), it is at least what these say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout
from moesaic.spec.model import AttentionSpec

from .layer_timeline import Chunk, simulate_layers
from .rates import Rates
from .step import layer_names, layer_pieces
from .timeline import Contention, Piece
from .workload import Workload

TRIED = (1, 2, 3, 4, 6, 8)
"""Numbers of chunks that are priced; 1 is a layer that is not cut."""


@dataclass(frozen=True)
class ChunkChoice:
    """What was found for all layers with one number of experts."""

    experts: int
    seconds: Mapping[int, float]
    """Of one forward and backward of the layer by number of chunks."""
    rows: float
    """Of one expert, in one product of the layer that is not cut."""

    @property
    def chunks(self) -> int:
        """The fastest; of equal ones the fewest."""
        return min(self.seconds, key=lambda chunks: (self.seconds[chunks], chunks))

    def why(self) -> str:
        """A sentence with the predicted times."""
        best, whole = self.chunks, self.seconds[1]
        what = f"layers of {self.experts} experts ({self.rows:.0f} rows each)"
        if best == 1:
            other = min((n for n in self.seconds if n > 1), key=lambda n: self.seconds[n])
            return f"{what} whole: {_ms(whole)} a layer predicted, in {other} chunks {_ms(self.seconds[other])}"
        return f"{what} in {best} chunks: {_ms(self.seconds[best])} a layer predicted, whole {_ms(whole)}"


def choose_chunks(work: Workload, layout: Layout, cluster: ClusterSpec, rates: Rates) -> list[ChunkChoice]:
    """For each number of experts whose layers send rows, the seconds of its layers by number of chunks. Nothing where
    no rows travel or `layout` lacks `inside`."""
    if "inside" not in layout.overlap or layout.dispatcher == "local" or layout.ep * layout.etp == 1:
        return []
    half = replace(work, seq_len=max(1, work.seq_len // 2))
    whole_pieces, half_pieces = (layer_pieces(each, layout, cluster, rates) for each in (work, half))
    contention = Contention(1 + rates.slowdown, 1 + rates.slowdown)
    # Where the trainer's own experts were measured, their price has what few rows cost already.
    known = rates.expert_flop_seconds + rates.expert_byte_seconds > 0
    start = 0.0 if known else start_rows(cluster, "fp32" if work.precision == "fp32" else "bf16")
    seconds: dict[int, dict[int, float]] = {}
    rows: dict[int, float] = {}
    priced: dict[tuple[str, int], float] = {}
    for name, layer in zip(layer_names(work.model), work.model.layers, strict=True):
        if layer.moe is None or layout.layer_ep(layer.moe.router.experts) * layout.etp == 1:
            continue
        experts = layer.moe.router.experts
        pieces = [piece for piece in whole_pieces[name] if piece.part != "context"]
        own = layout.micro_batch * work.seq_len / (layout.cp * layout.tp)
        rows[experts] = own * layout.etp * layer.moe.router.top_k * layout.layer_ep(experts) / experts
        fixed = fixed_seconds(pieces, half_pieces[name], half.seq_len / work.seq_len)
        for piece in pieces:
            if piece.backward_weight and piece.part == "experts":
                share = min(start / rows[experts], 1.0)
                once, of_weights = fixed[piece.name]
                # On a processor the trainer takes the rows of all parts in one product for the weights.
                together = cluster.gpu.architecture == "cpu"
                fixed[piece.name] = (
                    max(once, piece.forward * share),
                    0.0 if together else max(of_weights, piece.backward_weight * share),
                )
        total = seconds.setdefault(experts, dict.fromkeys(TRIED, 0.0))
        for chunks in TRIED:
            if (name, chunks) not in priced:
                # The shared expert always runs under dispatch.
                words = {*layout.overlap, "shared_experts"} - ({"inside"} if chunks == 1 else set())
                timeline = simulate_layers(
                    [pieces],
                    words,
                    chunks=chunks_of(layout, experts, chunks),
                    chunk_seconds=fixed,
                    contention=contention,
                )
                priced[name, chunks] = timeline.makespan
            total[chunks] += priced[name, chunks]
    alike = {n: sum(la.moe is not None and la.moe.router.experts == n for la in work.model.layers) for n in seconds}
    return [
        ChunkChoice(n, {chunks: total / alike[n] for chunks, total in found.items()}, rows[n])
        for n, found in seconds.items()
    ]


def choose_head_groups(work: Workload, layout: Layout, cluster: ClusterSpec, rates: Rates) -> dict[int, float]:
    """Seconds of all layers' attention, from the projection of heads to that of their results, by the most groups in
    which heads travel (`Layout.heads_in`). Nothing where heads do not travel or cannot be cut."""
    grouped = {most: replace(layout, heads_in=most) for most in TRIED}
    specs = [layer.attention for layer in work.model.layers]
    heads = [spec.heads if spec.kind == "mla" else spec.kv_heads for spec in specs]
    groups = [
        {most: 1 if spec.qk_norm == "full" else each.head_groups(count // layout.tp) for most, each in grouped.items()}
        for spec, count in zip(specs, heads, strict=True)
    ]
    if all(number == 1 for found in groups for number in found.values()):
        return {}
    halved = [
        layer.model_copy(
            update={
                "attention": layer.attention.model_copy(
                    update={"heads": layer.attention.heads // 2, "kv_heads": max(layer.attention.kv_heads // 2, 1)}
                )
            }
        )
        for layer in work.model.layers
    ]
    half = replace(work, model=work.model.model_copy(update={"layers": tuple(halved)}))
    whole_pieces, half_pieces = (layer_pieces(each, layout, cluster, rates) for each in (work, half))
    contention = Contention(1 + rates.slowdown, 1 + rates.slowdown)
    total, priced = dict.fromkeys(TRIED, 0.0), {}
    for name, spec, found in zip(layer_names(work.model), specs, groups, strict=True):
        pieces = _of_heads(whole_pieces[name], spec)
        fixed = fixed_seconds(pieces, _of_heads(half_pieces[name], spec), 0.5)
        for most, number in found.items():
            if (name, number) not in priced:
                words = {*layout.overlap} - ({"inside"} if number == 1 else set())
                timeline = simulate_layers([pieces], words, chunks=number, chunk_seconds=fixed, contention=contention)
                priced[name, number] = timeline.makespan
            total[most] += priced[name, number]
    return total


def _of_heads(pieces: Sequence[Piece], spec: AttentionSpec) -> list[Piece]:
    """What can be done for some heads alone, with names by which `inside` cuts all of it: the exchange is one to the
    core and one back, each by its share of the bytes."""
    names = [piece.name for piece in pieces]
    first = next(names.index(name) for name in ("attention.query_up", "attention.qkv") if name in names)
    last, core = names.index("attention.output"), names.index("attention.core")
    out = spec.heads * spec.v_head_dim
    back = out / (spec.heads * spec.head_dim + spec.kv_heads * (spec.head_dim + spec.v_head_dim) + out)
    made: list[Piece] = []
    for place in range(first, last + 1):
        piece = pieces[place]
        part = "dispatch" if place < core else "combine" if place > core else "experts"
        if piece.part == "context":
            made.append(_share_of(piece, "dispatch.heads", 1 - back))
            returned = _share_of(piece, "combine.heads", back)
            continue
        made.append(replace(piece, name=f"{part}.{piece.name}"))
        if place == core:
            made.append(returned)
    return made


def _share_of(piece: Piece, name: str, share: float) -> Piece:
    return Piece(name, piece.stream, piece.forward * share, piece.backward_input * share, 0.0, piece.recompute * share)


def chunks_of(layout: Layout, experts: int, chunks: int) -> list[Chunk]:
    """What each part of a layer has when the trainer sends in `chunks`, in the order in which experts compute them.

    What stays on its rank is two parts, the first and the last. `allgather` cuts by source rank, so into as many chunks
    as there are other ranks at most; where rows go on inside a node or a cut of experts, all parts travel.
    """
    if chunks == 1:
        return [Chunk(1.0, 1.0)]
    ep = layout.layer_ep(experts)
    ranks = ep * layout.etp
    if layout.dispatcher == "hierarchical" or "dispatch" in layout.compressed:
        return [Chunk(1 / chunks, 1 / chunks)] * chunks
    if layout.dispatcher == "allgather" or ep == 1:
        others = ranks - 1
        count = min(chunks, others)
        sizes = [others * (i + 1) // count - others * i // count for i in range(count)]
        own, travels = 1 / ranks, [size / others for size in sizes]
    else:
        own, travels = 1 / ep, [1 / chunks] * chunks
    parts = [Chunk(own / 2, 0.0), *(Chunk((1 - own) * share, share) for share in travels), Chunk(own / 2, 0.0)]
    if layout.dispatcher != "allgather" and layout.etp > 1 and ep > 1:  # they travel over the ranks of the cut
        return [Chunk(part.compute, part.compute) for part in parts]
    return parts


def start_rows(cluster: ClusterSpec, precision: str) -> float:
    """How many rows' time an expert's product takes beside that of its rows, by lines through the products that were
    measured: the median over shapes. 0 where none were."""
    found = []
    for kind in ("forward", "input", "weight"):
        shapes: dict[tuple[float, ...], list[tuple[float, float]]] = {}
        for groups, m, n, k, share in cluster.rates.get(f"grouped_{precision}_{kind}", ()):
            if share > 0:
                shapes.setdefault((groups, n, k), []).append((m, m / share))
        for points in shapes.values():
            (few, low), (many, high) = min(points), max(points)
            if many > few and high > low:
                slope = (high - low) / (many - few)
                found.append(max(low / slope - few, 0.0))
    return median(found) if found else 0.0


def fixed_seconds(whole: Sequence[Piece], half: Sequence[Piece], size: float) -> dict[str, tuple[float, float]]:
    """Seconds of each piece, of a pass and of its gradients of weights, that do not shrink with it, from its price at
    `size` times as much work."""
    smaller = {piece.name: piece for piece in half}

    def fixed(large: float, small: float) -> float:
        return large if size == 1 else min(max((small - size * large) / (1 - size), 0.0), large)

    return {
        piece.name: (
            fixed(piece.forward, smaller[piece.name].forward),
            fixed(piece.backward_weight, smaller[piece.name].backward_weight),
        )
        for piece in whole
        if piece.name in smaller
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
