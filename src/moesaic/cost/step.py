"""The time of one optimizer step in closed form, for many layouts at once.

    step = m · t(slowest rank) + (Σ t(other ranks)) / v + gradients and parameters + optimizer + fixed

with m micro-batches, v virtual stages and t(rank) the seconds of one micro-batch on a pipeline rank: the sum over its
layers of what is exposed, or of what the host takes to launch them where that is longer. Loops go over the few kinds
of layers, never over layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesaic.spec.cluster import ClusterSpec
from moesaic.spec.layout import Layout
from moesaic.spec.model import LayerSpec, ModelSpec
from moesaic.spec.stages import Stage, Unit

from .activations import layer_kept
from .compute import CAUSES, LayerOps, Machine, Op, embedding_ops, head_ops, layer_ops, mtp_ops
from .offload import offloaded
from .rates import Rates
from .traffic import Bytes, Group, Numbers, data_parallel, seconds
from .workload import SCHEDULES, SHARDING, Columns, Floats, Workload

if TYPE_CHECKING:
    from .timeline import Piece, Stream

_LEVEL = {name: place for place, name in enumerate(SHARDING)}
_ZERO_BUBBLE, _DUALPIPE = SCHEDULES.index("zero_bubble"), SCHEDULES.index("dualpipe")
_COMMUNICATION = ("dispatch", "tensor", "context")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by cause, arrays [N]. All but `hidden` are exposed and add up to `total`."""

    total: Floats
    compute: Floats
    """Matmuls and attention cores of the micro-batches."""
    memory_bound: Floats
    """Norms, activations, rows moved, casts: work limited by memory bandwidth."""
    host: Floats
    """What the host takes to launch kernels beyond the device's own time, and a step's fixed cost."""
    dispatch: Floats
    """Moving rows to experts and back."""
    tensor: Floats
    """Tensor-parallel all-gathers and reduce-scatters."""
    context: Floats
    """Context-parallel exchange of keys and values, or of heads."""
    pipeline: Floats
    """Activations sent between pipeline stages."""
    data: Floats
    """Reduction of gradients and gathering of parameters, and waiting for the slowest rank."""
    bubble: Floats
    """Waiting for other pipeline stages."""
    optimizer: Floats
    offload: Floats
    """Copies between device and host memory."""
    hidden: Floats
    """Communication seconds that run under other work."""


class _Kind(NamedTuple):
    """One kind of layer for one micro-batch: seconds [N]."""

    parts: dict[str, Floats]
    """Exposed seconds of both passes by cause, with `host`."""
    forward: Floats
    backward: Floats
    weight: Floats
    """Weight gradients, part of `backward`."""
    hidden: Floats
    dense: Floats
    """Parameters on the dense mesh."""
    expert: Floats


def step_time(work: Workload, columns: Columns, cluster: ClusterSpec, rates: Rates) -> StepTime:
    """Seconds of one optimizer step of `work` on each layout of `columns`.

    Raises:
        SpecError: the accelerator has no matmuls of the workload's precision.
    """
    machine = Machine.of(work, columns, cluster, rates)
    layers, words, counts, times = _model(work, columns)
    machines = _machines(machine, layers, words)
    kinds = [_kind(_ops(layer, here), here) for layer, here in zip(layers, machines, strict=True)]

    def of_rank(name: str) -> Floats:  # [N, ranks]
        return np.einsum("nrk,nk->nr", counts, np.stack([getattr(kind, name) for kind in kinds], 1))

    forward, backward, weight = of_rank("forward"), of_rank("backward"), of_rank("weight")
    per_rank = forward + backward
    slowest = per_rank.argmax(1)
    at = np.arange(len(columns))
    mine = counts[at, slowest]  # [N, kinds]
    micro = columns.micro_batches(work.global_batch).astype(np.float64)

    def spent(name: str) -> Floats:
        return micro * np.einsum("nk,nk->n", mine, np.stack([kind.parts[name] for kind in kinds], 1))

    parts = {name: spent(name) for name in (*CAUSES, "host")}
    hidden = micro * np.einsum("nk,nk->n", mine, np.stack([kind.hidden for kind in kinds], 1))
    bubble = _bubble(columns, times, forward, backward, weight, slowest)
    send = next_stage_seconds(machine)
    plain = columns.virtual_stages == 1
    pipeline = np.where(columns.pp > 1, 2 * send * (np.where(plain, micro, 0.0) + columns.pp - 1), 0.0)
    hidden += np.where(columns.pp > 1, 2 * send * np.where(plain, 0.0, micro * columns.virtual_stages), 0.0)

    dense, expert = (
        np.einsum("nk,nk->n", mine, np.stack([getattr(k, n) for k in kinds], 1)) for n in ("dense", "expert")
    )
    both = np.where(columns.schedule == _DUALPIPE, 2.0, 1.0)  # states of two stages, each half of the micro-batches
    dense, expert = dense * both, expert * both
    blocks = mine @ np.array([0.0 if isinstance(layer, str) else 1.0 for layer in layers])
    data, under = _data(dense, expert, machine, micro, blocks, forward[at, slowest], backward[at, slowest])
    optimizer, offload = _optimizer(dense, expert, machine)
    if columns.offloads("activations").any():
        away = [_activation_copies(*each) for each in zip(layers, kinds, machines, strict=True)]
        offload = offload + micro * np.einsum("nk,nk->n", mine, np.stack(away, 1))
    parts["host"] = parts["host"] + rates.step_seconds
    total = sum(parts.values()) + bubble + pipeline + data + optimizer + offload
    waiting = total * rates.straggler * np.log2(np.maximum(columns.dp * columns.cp / machine.groups.data.inside, 1))
    return StepTime(
        total=total + waiting, **parts, pipeline=pipeline, data=data + waiting, bubble=bubble, optimizer=optimizer,
        offload=offload, hidden=hidden + under,
    )  # fmt: skip


# ---------------------------------------------------------------- the model on its stages


def _signature(layer: LayerSpec) -> tuple[object, ...]:
    """What a layer's cost depends on."""
    attention = tuple(v for k, v in layer.attention if k not in ("rope", "temperature", "scale"))
    return attention, layer.mlp, layer.moe


Words = tuple[str, ...] | None


def _model(work: Workload, columns: Columns) -> tuple[list[LayerSpec | str], list[Words], Floats, Floats]:
    """Kinds of layers and what is computed again of them (None: what the layout says), counts [N, ranks, kinds] of each
    on the distinct ranks of a layout, and how many ranks [N, ranks] are like that."""
    model = work.model
    kinds: dict[tuple[object, Words], int] = {}
    layers: list[LayerSpec | str] = []

    def place(layer: LayerSpec, words: Words) -> int:
        key = _signature(layer), words
        if key not in kinds:
            kinds[key] = len(layers)
            layers.append(layer)
        return kinds[key]

    plain = [place(layer, None) for layer in model.layers]
    of_unit = {
        unit: [place(model.layers[layer], unit.words) for layer in unit.layers]
        for stages in columns.stage_lists
        for stage in stages
        if stage.recompute is not None
        for unit in stage.recompute.units
    }
    words = [of for _, of in kinds]
    layers += ["embedding", "head"]
    if model.mtp and work.mtp:
        layers.append("mtp")
    words += [None] * (len(layers) - len(words))
    # One list of virtual stages may be cut into ranks in several ways: 4·1 and 2·2 ranks and chunks are alike.
    both = columns.schedule == _DUALPIPE
    keys, which = np.unique(np.stack([columns.stages, columns.pp, both], 1), axis=0, return_inverse=True)
    tables = [
        _ranks(columns.stage_lists[index], int(pp), bool(two), plain, of_unit, len(layers), model, work.mtp)
        for index, pp, two in keys.tolist()
    ]
    most = max((len(table) for table, _ in tables), default=1)
    counts, times = np.zeros((len(tables), most, len(layers))), np.zeros((len(tables), most))
    for index, (table, often) in enumerate(tables):
        counts[index, : len(table)], times[index, : len(table)] = table, often
    which = which.reshape(-1)
    return layers, words, counts[which], times[which]


def _ranks(
    stages: tuple[Stage, ...],
    pp: int,
    both: bool,
    place: list[int],
    of_unit: dict[Unit, list[int]],
    kinds: int,
    model: ModelSpec,
    mtp: bool,
) -> tuple[Floats, Floats]:
    """Distinct rows of layers by kind that one micro-batch passes on each of the `pp` ranks, and how often each stands.
    With `both` (DualPipe) a rank has its own stage and the one as far from the other end, and half of the micro-batches
    pass each."""
    rows = np.zeros((pp, kinds))
    decoder = kinds - 2 - (1 if model.mtp and mtp else 0)
    for number, stage in enumerate(stages):
        row = rows[number % pp]
        here = [place[layer] for layer in stage.layers]
        if stage.recompute is not None:
            here = [kind for unit in stage.recompute.units for kind in of_unit[unit]]
        for kind in here:
            row[kind] += 1
        row[decoder] += stage.embed
        row[decoder + 1] += stage.head
        if stage.mtp and model.mtp and mtp:
            row[decoder + 2] += len(model.mtp)
    if both:
        rows = (rows + rows[::-1]) / 2
    unique, often = np.unique(rows, axis=0, return_counts=True)
    return unique, often.astype(np.float64)


def _machines(machine: Machine, layers: list[LayerSpec | str], words: list[Words]) -> list[Machine]:
    """The machine with what each kind computes again."""
    columns = machine.columns
    last = columns.of_the_last()
    here = [
        last if isinstance(layer, str) else columns.recomputing(of) for layer, of in zip(layers, words, strict=True)
    ]
    return [machine if each is columns else replace(machine, columns=each) for each in here]


def _ops(layer: LayerSpec | str, machine: Machine) -> LayerOps:
    if layer == "embedding":
        return embedding_ops(machine)
    if layer == "head":
        return head_ops(machine)
    if isinstance(layer, str):
        return mtp_ops(machine.work.model.mtp[0], machine)
    return layer_ops(layer, machine)


# ---------------------------------------------------------------- one kind of layer


def _kind(layer: LayerOps, machine: Machine) -> _Kind:
    """Sums a layer's operations by cause, repeats what is recomputed, and takes away what is hidden."""
    columns, rates = machine.columns, machine.rates
    zero = np.zeros(len(columns))
    front: dict[str, Numbers] = dict.fromkeys(CAUSES, zero)
    back: dict[str, Numbers] = dict.fromkeys(CAUSES, zero)
    weight, shared, matmuls_front, matmuls_back = zero, zero, zero, zero
    launches_front, launches_back = zero, zero
    masks: dict[str, Numbers] = {}
    for op in layer.ops:
        again = masks.get(op.module)
        if again is None:
            again = masks[op.module] = columns.recomputes(op.module or "full").astype(np.float64)
        if op.in_moe:
            inside = masks.get("moe")
            if inside is None:
                inside = masks["moe"] = columns.recomputes("moe").astype(np.float64)
            again = np.maximum(again, inside)
        behind = op.backward_input + op.backward_weight + again * op.forward
        front[op.cause] = front[op.cause] + op.forward
        back[op.cause] = back[op.cause] + behind
        weight = weight + op.backward_weight
        gradients = 2 if isinstance(op.backward_weight, np.ndarray) or op.backward_weight > 0 else 1
        launches_front = launches_front + op.launches
        launches_back = launches_back + op.launches * (gradients + again)
        if op.name.startswith("shared_experts.") and not op.name.endswith(".add"):
            shared = shared + op.forward
        if op.cause == "compute":
            matmuls_front, matmuls_back = matmuls_front + op.forward, matmuls_back + behind
    raw = sum(front[c] + back[c] for c in _COMMUNICATION)

    def hide(
        what: tuple[str, ...],
        side: dict[str, Numbers],
        under: Numbers,
        share: Numbers,
        where: Numbers,
        cost: Numbers = 0.0,
    ) -> None:
        """Takes `share` of what can run under `under` seconds off, less what both sides lose by it and its `cost`."""
        left = sum(side[c] for c in what)
        won = share * np.minimum(left, under) * (1 - rates.slowdown) - cost
        saved = np.where(where, np.maximum(won, 0.0), 0.0)
        keep = 1 - saved / np.maximum(left, 1e-30)
        for c in what:
            side[c] = side[c] * keep

    overlaps = columns.overlaps
    for side, matmuls in ((front, matmuls_front), (back, matmuls_back)):
        hide(("tensor",), side, matmuls, rates.hidden_tensor, overlaps("tensor"))
        hide(_COMMUNICATION, side, matmuls, rates.hidden_inside, overlaps("inside"), sum(op.cut for op in layer.ops))
    hide(_COMMUNICATION, back, back["compute"] + back["memory_bound"], rates.hidden_between, overlaps("between"))
    hide(("dispatch",), front, shared, rates.hidden_shared, overlaps("shared_experts"))
    hide(("dispatch",), back, 2 * shared, rates.hidden_shared, overlaps("shared_experts"))
    hide(("dispatch",), back, weight, rates.hidden_between, overlaps("weight_gradients") & ~overlaps("experts"))
    # Another micro-batch's forward stands under backward's dispatch and the other way round. Without a pipeline, whose
    # bubble has these, the first forward and the last backward are alone.
    micro = np.maximum(columns.micro_batches(machine.work.global_batch), 1)
    paired = rates.hidden_experts * np.where(columns.pp == 1, (micro - 1) / micro, 1.0)
    hide(("dispatch",), front, back["compute"] + back["memory_bound"], paired, overlaps("experts"))
    hide(("dispatch",), back, front["compute"] + front["memory_bound"], paired, overlaps("experts"))
    device_front, device_back = sum(front.values()), sum(back.values())
    each = rates.launch_seconds * rates.framework_work
    host_front = np.maximum(launches_front * each - device_front, 0.0) + layer.wait
    host_back = np.maximum(launches_back * each - device_back, 0.0) + layer.wait * columns.recomputes("moe")
    parts: dict[str, Floats] = {c: front[c] + back[c] + zero for c in CAUSES}
    parts["host"] = host_front + host_back + zero
    shown = sum(front[c] + back[c] for c in _COMMUNICATION)
    return _Kind(
        parts, device_front + host_front + zero, device_back + host_back + zero, weight + zero,
        np.maximum(raw - shown, 0.0) + zero, layer.dense_parameters + zero, layer.expert_parameters + zero,
    )  # fmt: skip


# ---------------------------------------------------------------- around the micro-batches


def _to_next(machine: Machine) -> Bytes:
    """One micro-batch's hidden states of a rank, to the next pipeline stage; a pipeline that leaves its fast domain is
    as slow as its hops over the network."""
    sent = machine.own * machine.work.model.hidden * float(machine.item)
    near = machine.groups.pp.inside == machine.groups.pp.size
    return Bytes(np.where(near, sent, 0.0), np.where(near, 0.0, sent))


def next_stage_seconds(machine: Machine) -> Floats:
    """Seconds [N] of one micro-batch's hidden states to the next pipeline stage; 0 without a pipeline."""
    sent = seconds(_to_next(machine), machine.cluster, machine.rates)
    return np.where(machine.columns.pp > 1, sent, 0.0)


def _bubble(
    columns: Columns, times: Floats, forward: Floats, backward: Floats, weight: Floats, slowest: Floats
) -> Floats:
    """Seconds that the slowest rank waits: one micro-batch's way through all other ranks, over v chunks.

    1F1B (p − 1)(F + B), interleaved that over v, zero-bubble (p − 1)(F + B − 2W) (arXiv 2401.10241 table 2), DualPipe
    (p/2 − 1)(F&B + B − 3W) (github.com/deepseek-ai/DualPipe); uneven ranks each count with their own time.
    """
    at = np.arange(len(columns))
    others = times.copy()
    others[at, slowest] -= 1
    schedule = columns.schedule[:, None]
    pp = columns.pp[:, None]
    each = np.select(
        [schedule == _ZERO_BUBBLE, schedule == _DUALPIPE],
        [
            np.maximum(forward + backward - 2 * weight, 0.0),
            np.maximum(forward + 2 * backward - 3 * weight, 0.0) * np.maximum(pp / 2 - 1, 0) / np.maximum(pp - 1, 1),
        ],
        forward + backward,
    )
    return (others * each).sum(1) / columns.virtual_stages


def _data(
    dense: Floats, expert: Floats, machine: Machine, micro: Floats, blocks: Floats, forward: Floats, backward: Floats
) -> tuple[Floats, Floats]:
    """Exposed and hidden seconds of reducing gradients and gathering parameters.

    What forward gathers runs under forward; what backward gathers again and what it reduces share one network, and run
    under backward together. Gradients are there when their layer's backward has ended, so that those of the last of
    a rank's `blocks` layers have nothing to run under (`shown_layers`), but for a further micro-batch where each is
    reduced; neither have the parameters of the first one.
    """
    work, columns, cluster, rates, g = machine.work, machine.columns, machine.cluster, machine.rates, machine.groups
    reduce, gather = np.zeros(len(columns)), np.zeros(len(columns))
    for count, ranks in ((dense, g.data), (expert, g.edp)):
        gradients, parameters = data_parallel(count, ranks, columns, work.gradient_bytes, machine.item, micro)
        reduce = reduce + seconds(gradients, cluster, rates)
        gather = gather + seconds(parameters, cluster, rates)
    chunks = columns.virtual_stages
    sharded = columns.sharding == _LEVEL["parameters"]
    again = np.where(sharded, 0.5, 0.0)
    first, second = gather * (1 - again), gather * again

    def under(time: Floats, window: Floats, passes: Floats) -> Floats:
        """Seconds of `time` that run under compute. Of a rank's chunks only the first one's parameters are needed, and
        only its gradients come, at once; those of the others have as many passes as the pipeline is deep."""
        first = np.minimum(time / chunks, passes * window / chunks)
        rest = (chunks - 1) / chunks
        return first + np.minimum(time * rest, np.maximum(passes, columns.pp) * window * rest)

    reduces, gathers = columns.overlaps("gradients"), columns.overlaps("parameters")
    front = under(np.where(gathers, first, 0.0), forward, np.where(sharded, micro, 1.0))
    behind = np.where(reduces, reduce, 0.0) + np.where(gathers, second, 0.0)
    hidden = front + under(behind, backward, np.where(columns.sharding >= _LEVEL["gradients"], micro, 1.0))
    passes = np.maximum(blocks, 1) * np.where(columns.sharding >= _LEVEL["gradients"], micro, 1.0)
    share = np.minimum(rates.hidden_gradients, 1 - rates.shown_layers / passes)
    hidden = hidden * share * (1 - rates.slowdown_network)
    return reduce + gather - hidden, hidden


def _optimizer(dense: Floats, expert: Floats, machine: Machine) -> tuple[Floats, Floats]:
    """Seconds of the update, and of moving what it needs where it runs on the host.

    Per parameter of the shard: master weight and two moments are read and written, the gradient is read, the bf16
    weight written; the gradients' norm reads them once more. On the host master weight, moments and gradient (28 bytes
    with fp32 moments) go through its memory, which the accelerators of a node share; gradients are copied there, and
    weights back. Where the device updates what waits on the host, states are copied both ways instead.
    """
    work, columns, cluster, g = machine.work, machine.columns, machine.cluster, machine.groups

    def shard(count: Floats, ranks: Group) -> Floats:
        return np.where(columns.sharding == _LEVEL["none"], count, count * columns.replicas / ranks.size)

    held = shard(dense, g.data) + shard(expert, g.edp)
    states = 8 + 4 * work.moment_bytes
    weight = 0 if work.precision == "fp32" else machine.item  # in fp32 weight and master weight are one
    moved = held * (states + 2 * work.gradient_bytes + weight) / machine.bandwidth
    away = np.where(columns.offloads("optimizer"), columns.offload_fraction, 0.0)
    if not machine.rates.host_update:
        master = 0 if work.precision == "fp32" else 4 if work.master == "split" else 8
        return moved, away * held * (master + 4 * work.moment_bytes) / cluster.gpu.host_bandwidth
    there = held * (states + work.gradient_bytes) / machine.rates.host_memory
    copies = held * (work.gradient_bytes + machine.item) / cluster.gpu.host_bandwidth
    return (1 - away) * moved + away * there, away * copies


def _activation_copies(layer: LayerSpec | str, kind: _Kind, machine: Machine) -> Floats:
    """Exposed seconds of one micro-batch in which a layer's kept activations go to host memory, under its forward, and
    come back, under its backward."""
    work, columns = machine.work, machine.columns
    if layer == "mtp":
        layer = work.model.mtp[0]
    if isinstance(layer, str):
        return np.zeros(len(columns))
    rows = layer_kept(work.model, layer, work, columns)
    once = offloaded(rows, layer.moe is not None, columns) / machine.cluster.gpu.host_bandwidth
    shown = np.maximum(once - kind.forward, 0.0) + np.maximum(once - kind.backward, 0.0)
    return shown


# ---------------------------------------------------------------- pieces for a timeline


def layer_names(model: ModelSpec) -> list[str]:
    """The kind of each decoder layer, by its name in `layer_pieces`: "dense" and "moe", and "moe 2" and so on for
    those whose cost differs from that of the first ones, as that of windowed and full attention."""
    known: dict[tuple[object, ...], str] = {}
    names = []
    for layer in model.layers:
        key = _signature(layer)
        if key not in known:
            name = "dense" if layer.moe is None else "moe"
            number = 1 + sum(other.split()[0] == name for other in known.values())
            known[key] = name if number == 1 else f"{name} {number}"
        names.append(known[key])
    return names


def layer_pieces(work: Workload, layout: Layout, cluster: ClusterSpec, rates: Rates) -> dict[str, tuple[Piece, ...]]:
    """The operations of one micro-batch through one layer of each kind, in order of forward: those of `layer_names`,
    "mtp", "embedding" and "head" (kinds that the model lacks are absent), with their seconds."""
    from .timeline import Piece

    columns = Columns.of([layout])
    machine = Machine.of(work, columns, cluster, rates)
    wanted: dict[str, LayerOps] = {"embedding": embedding_ops(machine), "head": head_ops(machine)}
    for name, layer in zip(layer_names(work.model), work.model.layers, strict=True):
        if name not in wanted:
            wanted[name] = layer_ops(layer, machine)
    if work.mtp and work.model.mtp:
        wanted["mtp"] = mtp_ops(work.model.mtp[0], machine)

    def piece(op: Op) -> Piece:
        stream: Stream = "compute"
        if op.cause in _COMMUNICATION:
            stream = "network" if bool(np.any(op.network)) else "fast"
        again = columns.recomputes(op.module or "full") | (op.in_moe & columns.recomputes("moe"))
        first, second, third = (float(np.ravel(x)[0]) for x in (op.forward, op.backward_input, op.backward_weight))
        return Piece(op.name, stream, first, second, third, first if again[0] else 0.0)

    def taken(op: Op) -> bool:
        return bool(np.any(np.asarray(op.forward) > 0) or np.any(np.asarray(op.backward_input) > 0))

    return {name: tuple(piece(op) for op in made.ops if taken(op)) for name, made in wanted.items()}
