"""The operations of one micro-batch through one layer, with their seconds, for many layouts at once.

A layer is a short list of operations in the order of its forward pass. Each has a module (what recompute names), a
cause (what the step's time is split by) and seconds of forward, of the gradient of its input and of its weights.
Letters: D hidden, T tokens of the tensor-parallel group, t a rank's own tokens, s sequence, H heads, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moesaic.spec.cluster import ClusterSpec, GpuSpec
from moesaic.spec.errors import SpecError
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from moesaic.spec.options import INSIDE_CHUNKS

from .counts import attention_norms, visible_positions
from .rates import Rates
from .rows import imbalance, layer_ep, routed_rows
from .traffic import Bytes, Groups, Numbers, dispatch, groups, ring, seconds, tensor_parallel, ulysses
from .workload import PRECISIONS, Columns, Floats, Precision, Workload

Cause = Literal["compute", "memory_bound", "dispatch", "tensor", "context"]
CAUSES: tuple[Cause, ...] = ("compute", "memory_bound", "dispatch", "tensor", "context")
_FP8_CASTS = 5
"""Bytes moved per element that is cast: 2 read, 1 written, and 2 for the transposed copy that backward needs."""
_PARTS = 2 + INSIDE_CHUNKS
"""Parts of a layer's rows with overlap `inside`: own halves, and chunks that travel."""
_TILE = 256
"""Columns of a matmul's output that one block of threads makes, on Hopper and Blackwell."""
_PEAK_KEY: dict[Precision, str] = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


def computes(gpu: GpuSpec, precision: Precision) -> bool:
    """Whether an accelerator has matmuls of that precision; mxfp8 and nvfp4 need scales of blocks in hardware, nvfp4
    those of Blackwell (AMD's fp4 has the blocks of OCP MX only)."""
    needs = {"mxfp8": gpu.microscaled, "nvfp4": gpu.microscaled and not gpu.architecture.startswith("cdna")}
    return _PEAK_KEY[precision] in gpu.peak_flops and needs.get(precision, True)


def _filled(width: Numbers) -> Numbers:
    """Share of whole tiles that `width` columns fill; what less than one tile costs, `gemm_half_balance` says."""
    return np.where(width > _TILE, width / (np.ceil(width / _TILE) * _TILE), 1.0)


@dataclass(frozen=True)
class Op:
    """One operation of a micro-batch in a layer. Seconds are arrays [N] or one number for all."""

    name: str
    module: str
    """The name in `RECOMPUTE` that repeats it; "" for what only `full` repeats."""
    cause: Cause
    forward: Numbers = 0.0
    backward_input: Numbers = 0.0
    backward_weight: Numbers = 0.0
    launches: Numbers = 1
    """Kernels of its forward; backward has as many for each gradient it makes."""
    network: Numbers = False
    """Whether a collective leaves the fast domain."""
    in_moe: bool = False
    """Whether recompute of whole expert blocks (`moe`) repeats it."""
    cut: Numbers = 0.0
    """Seconds more of each pass where overlap `inside` cuts its rows in parts."""


@dataclass(frozen=True)
class Machine:
    """What turns quantities into seconds, for a workload on N layouts."""

    work: Workload
    columns: Columns
    cluster: ClusterSpec
    rates: Rates
    groups: Groups
    bandwidth: float
    """Bytes per second of memory at the share that elementwise kernels reach."""
    item: int
    """Bytes of an activation outside of quantised inputs of matmuls."""
    bf16: float
    """FLOP/s that large matmuls sustain which are not quantised: in bf16, or in fp32 where all is."""
    low: float
    """The same in the workload's precision."""
    own: Floats
    """Tokens of a rank, micro_batch·s/(cp·tp)."""
    tokens: Floats
    """Tokens of its tensor-parallel group, micro_batch·s/cp."""

    @classmethod
    def of(cls, work: Workload, columns: Columns, cluster: ClusterSpec, rates: Rates) -> Machine:
        """The machine of `work` on `columns`.

        Raises:
            SpecError: the accelerator has no such precision.
        """
        peaks = cluster.gpu.peak_flops
        key = _PEAK_KEY[work.precision]
        if not computes(cluster.gpu, work.precision):
            can = ", ".join(p for p in PRECISIONS if computes(cluster.gpu, p))
            raise SpecError(f"{cluster.gpu.name} has no {work.precision} matmuls: it can do {can}.")
        full = work.precision == "fp32"
        share = rates.sustained(peaks.get("bf16", peaks[key]))
        tokens = columns.micro_batch * work.seq_len / columns.cp
        return cls(
            work,
            columns,
            cluster,
            rates,
            groups(columns, cluster.fast_domain),
            cluster.gpu.memory_bandwidth * rates.memory_share,
            4 if full else 2,
            (peaks[key] if full else peaks.get("bf16", peaks[key])) * share,
            peaks[key] * share * rates.precision_share(work.precision),
            tokens / columns.tp,
            tokens,
        )

    # ------------------------------------------------------------ kernels

    def _reached(self, speed: float, n: Numbers, k: Numbers) -> Numbers:
        """FLOP/s with weights [k, n], of `speed` with large ones."""
        narrow = np.minimum(n, k)
        # Products come in whole tiles: n wide forward, k wide for the input's gradient, both for the weights'.
        filled = np.sqrt(_filled(n) * _filled(k))
        return speed * filled * narrow / (narrow + self.rates.gemm_half_balance * speed / self.bandwidth)

    def gemm(
        self, name: str, module: str, m: Numbers, n: Numbers, k: Numbers, *, low: bool = True, in_moe: bool = False
    ) -> Op:
        """[m, k] times [k, n]: the slower of its FLOPs and its bytes, and a fixed time to fill the device."""
        flops, speed = 2.0 * m * n * k, self._reached(self.low if low else self.bf16, n, k)
        moved = self.item * (m * k + k * n + m * n) / self.bandwidth
        once = np.maximum(flops / speed, moved) + self.rates.gemm_seconds
        weight = np.maximum(flops / (speed * self.rates.weight_gradient_share), moved) + self.rates.gemm_seconds
        return Op(name, module, "compute", once, once, weight, in_moe=in_moe)

    def grouped(self, name: str, count: Numbers, rows: Numbers, n: Numbers, k: Numbers) -> Op:
        """`count` experts of `rows` rows each. Each loads its weights before its rows flow, and its weight gradient is
        written in fp32 (SimuMax's B200 figures for 128 to 9,832 rows per expert, all three passes: mean error 9 %)."""
        flops, weights = 2.0 * count * rows * n * k, count * n * k
        fixed = self.rates.gemm_seconds + self.rates.group_seconds * (count - 1)
        item = 1 if self.low > self.bf16 else self.item
        unhidden = self.rates.unhidden_load / self.bandwidth
        moved = self.item * count * rows * (n + k)
        speed = self._reached(self.low, n, k)
        once = flops / speed + (item * weights + moved) * unhidden + fixed
        weight = flops / (speed * self.rates.weight_gradient_share) + (4 * weights + moved) * unhidden + fixed
        return Op(name, "moe", "compute", once, once, weight, in_moe=True)

    def own_experts(self, count: Numbers, rows: Numbers, width: Numbers, hidden: int, ways: int) -> list[Op]:
        """Experts of the trainer, from tokens to their sums, by what was measured of them here: seconds of FLOPs, and
        of the weights' bytes whatever the rows. Half of backward is for weight gradients."""
        flops, weights = 2.0 * count * rows * width * hidden, self.item * count * width * hidden
        rates, ops = self.rates, []
        for name, matrices in (("experts.up", ways), ("experts.down", 1)):
            forward = matrices * (rates.expert_flop_seconds * flops + rates.expert_byte_seconds * weights)
            back = 2 * rates.expert_backward_flop_seconds * flops + rates.expert_backward_byte_seconds * weights
            # Every part loads the weights again; weight gradients are made of all parts together.
            cut = (_PARTS - 1) * matrices * rates.expert_byte_seconds * weights
            ops.append(
                Op(name, "moe", "compute", forward, matrices * back / 2, matrices * back / 2, in_moe=True, cut=cut)
            )
        return ops

    def memory(
        self,
        name: str,
        module: str,
        forward: Numbers,
        backward: Numbers | None = None,
        *,
        kernels: int = 1,
        share: float | None = None,
        in_moe: bool = False,
    ) -> Op:
        """Kernels that move `forward` bytes, and `backward` bytes (twice as many unless given)."""
        reached = self.rates.memory_share / self.rates.other_work if share is None else share
        speed = self.cluster.gpu.memory_bandwidth * reached
        fixed = kernels * self.rates.kernel_seconds
        back = 2.0 * forward if backward is None else backward
        return Op(
            name, module, "memory_bound", forward / speed + fixed, back / speed + fixed, launches=kernels, in_moe=in_moe
        )

    def cast(self, name: str, module: str, elements: Numbers, in_moe: bool = False, launches: Numbers = 1) -> list[Op]:
        """Quantising a matmul's input in forward, and its output's gradient (taken as equally large) in backward."""
        if self.low <= self.bf16:
            return []
        moved = _FP8_CASTS * elements
        made = self.memory(name, module, moved, moved, in_moe=in_moe)
        return [replace(made, launches=launches)]

    def exchange(
        self, name: str, module: str, cause: Cause, sent: Bytes, *, ratio: Numbers = 1.0, back: Numbers = 1.0,
        messages: Numbers = 1.0, in_moe: bool = False, launches: int = 1, late: Numbers = 0.0,
    ) -> Op:  # fmt: skip
        """A collective, which takes `late` seconds beside its bytes and latency; backward repeats it `back` times."""
        once = seconds(sent, self.cluster, self.rates, ratio, messages) + late
        return Op(name, module, cause, once, once * back, launches=launches, network=sent.network > 0, in_moe=in_moe)


@dataclass(frozen=True)
class LayerOps:
    """The operations of a layer in order of forward, and its parameters on one rank."""

    ops: list[Op]
    dense_parameters: Numbers = 0.0
    """On the dense mesh, cut by tp where they are cut."""
    expert_parameters: Numbers = 0.0
    wait: Numbers = 0.0
    """Seconds per pass in which the host waits for the device."""


def layer_ops(layer: LayerSpec, machine: Machine) -> LayerOps:
    """One decoder layer."""
    m, hidden = machine, machine.work.model.hidden
    ops = [m.memory("norm.input", "layernorm", 2 * m.item * m.own * hidden, 3 * m.item * m.own * hidden)]
    attention, weights = _attention(layer.attention, machine)
    ops += attention
    ops.append(m.memory("residual.attention", "", 3 * m.item * m.own * hidden, m.item * m.own * hidden))
    ops.append(m.memory("norm.feed_forward", "layernorm", 2 * m.item * m.own * hidden, 3 * m.item * m.own * hidden))
    expert: Numbers = 0.0
    wait: Numbers = 0.0
    if layer.mlp is not None:
        block, count = _mlp(layer.mlp, machine, "mlp", "mlp")
        ops += block
        weights = weights + count
    if layer.moe is not None:
        block, count, expert = _moe(layer.moe, machine)
        ops += block
        weights = weights + count
        # What sends rows by counts needs these on the host before experts can start.
        counted = (m.columns.ep > 1) & m.columns.dispatches("alltoall", "hierarchical", "deepep", "hybridep")
        wait = np.where(counted, m.rates.sync_seconds, 0.0)
    ops.append(m.memory("residual.feed_forward", "", 3 * m.item * m.own * hidden, m.item * m.own * hidden))
    return LayerOps(ops, weights + 2 * hidden + attention_norms(layer.attention), expert, wait)


def _gather(machine: Machine, name: str, module: str, width: int, in_moe: bool = False, where: Numbers = 1.0) -> Op:
    """Rows of the tensor-parallel group gathered before a matmul; backward scatters their gradient, and gathers the
    rows again where they were not kept."""
    sent = tensor_parallel(machine.tokens * where, width, machine.item, machine.groups.tp)
    return machine.exchange(name, module, "tensor", sent, back=1 + machine.rates.regather, in_moe=in_moe)


def _scatter(machine: Machine, name: str, module: str, width: int, in_moe: bool = False, where: Numbers = 1.0) -> Op:
    """Sums of rows scattered after a matmul; backward gathers their gradient."""
    sent = tensor_parallel(machine.tokens * where, width, machine.item, machine.groups.tp)
    return machine.exchange(name, module, "tensor", sent, in_moe=in_moe)


def _attention(spec: AttentionSpec, machine: Machine) -> tuple[list[Op], Numbers]:
    m, c, hidden = machine, machine.columns, machine.work.model.hidden
    tp, heads = c.tp, spec.heads / c.tp
    kv_heads = np.maximum(spec.kv_heads / tp, 1.0)
    ops: list[Op] = []
    if spec.kind == "mla":
        latent = (spec.kv_rank or 0) + (spec.rope_dim or 0)
        ops += m.cast("attention.cast_input", "", m.own * hidden)
        if spec.q_rank is not None:
            ops.append(m.gemm("attention.query_down", "", m.own, spec.q_rank, hidden))
            ops.append(m.memory("attention.query_norm", "layernorm", 2 * m.item * m.own * spec.q_rank))
        ops.append(m.gemm("attention.latent_down", "", m.own, latent, hidden))
        ops.append(m.memory("attention.latent_norm", "layernorm", 2 * m.item * m.own * (spec.kv_rank or 0)))
        ops.append(_gather(m, "tensor.latents", "", latent + (spec.q_rank or hidden)))
        up = (spec.nope_dim or 0) + spec.v_head_dim
        query_in = spec.q_rank or hidden
        ops += m.cast("attention.cast_latents", "mla_up_proj", m.tokens * (query_in + (spec.kv_rank or 0)))
        ops.append(m.gemm("attention.query_up", "mla_up_proj", m.tokens, heads * spec.head_dim, query_in))
        ops.append(m.gemm("attention.latent_up", "mla_up_proj", m.tokens, heads * up, spec.kv_rank or 1))
        weights: Numbers = hidden * latent + (spec.kv_rank or 0) * heads * up
        weights = weights + (hidden * spec.q_rank if spec.q_rank else 0) + query_in * heads * spec.head_dim
        q, kv = heads * spec.head_dim, heads * (spec.head_dim + spec.v_head_dim)
        # Keys and values are put together from the latent's parts and the shared rotary key.
        ops.append(m.memory("attention.rope", "mla_up_proj", 2 * m.item * m.tokens * (q + kv), kernels=4))
    else:
        q, kv = heads * spec.head_dim, kv_heads * (spec.head_dim + spec.v_head_dim)
        ops.append(_gather(m, "tensor.attention_in", "", hidden))
        ops += m.cast("attention.cast_input", "", m.tokens * hidden)
        ops.append(m.gemm("attention.qkv", "", m.tokens, q + kv, hidden))
        weights = hidden * (q + kv)
        rotated = q + kv_heads * spec.head_dim
        ops.append(
            m.memory("attention.rope", "", 2 * m.item * m.tokens * rotated, 2 * m.item * m.tokens * rotated, kernels=3)
        )
        if spec.qk_norm != "none":
            ops.append(m.memory("attention.qk_norm", "layernorm", 2 * m.item * m.tokens * rotated, kernels=2))
    out = heads * spec.v_head_dim
    ops += _core(spec, machine, q, kv, out)
    ops += m.cast("attention.cast_output", "", m.tokens * out)
    ops.append(m.gemm("attention.output", "", m.tokens, hidden, out))
    ops.append(_scatter(m, "tensor.attention_out", "", hidden))
    return ops, weights + out * hidden


def _core(spec: AttentionSpec, machine: Machine, q: Numbers, kv: Numbers, out: Numbers) -> list[Op]:
    """Scores and their sum over values, with what context parallelism exchanges before and after."""
    m, c, rates = machine, machine.columns, machine.rates
    seq, cp = m.work.seq_len, m.groups.cp
    # Fewer key heads than ranks travel as one per rank (as in our trainer).
    kv_sent = np.maximum(kv, c.cp * (spec.head_dim + spec.v_head_dim)) if spec.kind == "gqa" else kv
    heads_sent = ulysses(m.tokens, q + kv_sent + out, m.item, cp)
    ring_sent = ring(m.tokens, kv, m.item, cp)
    ratio = np.where(c.ring, 1.0, rates.alltoall_ratio)
    back = np.where(c.ring, 2.0, 1.0)
    sent = Bytes(
        np.where(c.ring, ring_sent.fast, heads_sent.fast), np.where(c.ring, ring_sent.network, heads_sent.network)
    )
    messages = np.where(c.ring, c.cp - 1, 4)
    again = "core_attn" if rates.whole_again else ""
    exchange = m.exchange("context.exchange", again, "context", sent, ratio=ratio, back=back, messages=messages)
    positions = visible_positions(spec, seq)
    flops = 2.0 * (spec.heads / c.tp) * (spec.head_dim + spec.v_head_dim) * positions * m.tokens
    # A kernel sees whole sequences under ulysses, and blocks of s/cp positions in a ring.
    length = np.where(c.ring, 2.0 * positions / c.cp, 2.0 * positions)
    speed = m.bf16 * rates.attention_share * length / (length + rates.attention_half)
    width = (spec.head_dim + spec.v_head_dim) / 2
    speed = speed * (width / 128) * (128 + rates.attention_half_width) / (width + rates.attention_half_width)
    forward = flops / speed + rates.kernel_seconds * np.where(c.ring, c.cp, 1)
    # Backward computes scores again: five matmuls where forward has two.
    core = Op("attention.core", "core_attn", "compute", forward, 2.5 * forward / rates.attention_backward, launches=2)
    return [exchange, core]


def _mlp(
    spec: MlpSpec, machine: Machine, name: str, module: str, in_moe: bool = False, where: Numbers = 1.0
) -> tuple[list[Op], Numbers]:
    m, hidden = machine, machine.work.model.hidden
    width, ways = spec.width / m.columns.tp, 2 if spec.gated else 1
    around = module if m.rates.whole_again else ""
    ops = [_gather(m, f"tensor.{name}_in", around, hidden, in_moe, where)]
    ops += m.cast(f"{name}.cast_input", module, m.tokens * hidden, in_moe)
    ops.append(m.gemm(f"{name}.up", module, m.tokens, ways * width, hidden, in_moe=in_moe))
    ops.append(
        m.memory(
            f"{name}.activation",
            module,
            m.item * m.tokens * width * (ways + 1),
            m.item * m.tokens * width * (2 * ways + 1),
            in_moe=in_moe,
        )
    )
    ops += m.cast(f"{name}.cast_middle", module, m.tokens * width, in_moe)
    ops.append(m.gemm(f"{name}.down", around, m.tokens, hidden, width, in_moe=in_moe))
    ops.append(_scatter(m, f"tensor.{name}_out", around, hidden, in_moe, where))
    return ops, (ways + 1) * hidden * width


def _moe(spec: MoeSpec, machine: Machine) -> tuple[list[Op], Numbers, Numbers]:
    m, c, rates, hidden = machine, machine.columns, machine.rates, machine.work.model.hidden
    router, work = spec.router, machine.work
    experts, top_k = router.experts, router.top_k
    count = experts / layer_ep(spec, c)
    total = routed_rows(spec, work, c)
    rows = total / count
    width, ways = spec.expert.width / c.etp, 2 if spec.expert.gated else 1
    gathered = c.dispatches("allgather")

    def moved(name: str, count: Floats) -> Op:
        return m.memory(name, "moe", count, count, kernels=2, share=rates.permute_share, in_moe=True)

    ops = [
        m.gemm("router.scores", "", m.own, experts, hidden, low=False, in_moe=True),
        m.memory("router.choice", "", 4 * 4 * m.own * experts, kernels=8, in_moe=True),
    ]
    fused = c.dispatches("deepep", "hybridep")
    # DeepEP was made for nodes of eight; on links that join nodes its combine is slow.
    beyond = c.dispatches("deepep") & (m.groups.ep.inside > m.cluster.node_size)
    own_ratio = rates.fused_ratio * np.where(beyond, rates.deepep_beyond, 1.0)
    ratio = np.where(gathered, 1.0, np.where(fused, own_ratio, rates.alltoall_ratio))
    choice = (experts, top_k, router.groups_kept, router.groups)
    per_rank = rates.copy_per_rank > 0
    sent = dispatch(m.own * imbalance(spec, work, c), hidden, m.item, choice, c, m.groups, copy_per_rank=per_rank)
    send, order = _row_moves(router.top_k, total, machine)
    # Where norms are recomputed, what was gathered of their outputs may be gathered again (MegaScale-MoE, Fig. 8b).
    regather = np.maximum(rates.regather, rates.regather_norms * c.recomputes("layernorm"))
    again = 1 + np.where(gathered, regather, 0.0)
    # Where network cards need the host, each exchange has a cost, and each row that a kernel sends on its own.
    crossing = np.asarray(sent.network) / (m.item * hidden)
    late = np.where(crossing > 0, rates.exchange_seconds + np.where(fused, crossing * rates.row_seconds, 0.0), 0.0)
    latency = np.where(np.asarray(sent.network) > 0, rates.network_latency, rates.fast_latency)
    ahead = np.where(np.asarray(sent.total) > 0, rates.small_messages * latency, 0.0)
    there = m.exchange(
        "dispatch.rows", "moe", "dispatch", sent, ratio=ratio, back=again, in_moe=True, launches=3, late=late + ahead
    )
    ops += _shared(spec, machine)
    back = m.exchange("combine.rows", "moe", "dispatch", sent, ratio=ratio, in_moe=True, launches=3, late=late)
    ops += [moved("permute.send", send), there]
    if rates.expert_flop_seconds + rates.expert_byte_seconds > 0:
        ops += [*m.own_experts(count, rows, width, hidden, ways), back]
    else:
        ops.append(moved("permute.arrive", order))
        ops += _expert_ops(spec, machine, count, rows, total)
        ops += [moved("permute.back", order), back]
    ops.append(moved("permute.sum", send))
    weights: Numbers = experts * hidden
    if spec.shared is not None:
        weights = weights + (3 if spec.shared.gated else 2) * hidden * spec.shared.width / c.tp
    return ops, weights, count * (ways + 1) * hidden * width


def _expert_ops(spec: MoeSpec, machine: Machine, count: Numbers, rows: Numbers, total: Numbers) -> list[Op]:
    """Rows in the order of experts through their products, by published rates."""
    m, rates, hidden = machine, machine.rates, machine.work.model.hidden
    width, ways = spec.expert.width / machine.columns.etp, 2 if spec.expert.gated else 1
    casts = np.where(rates.split_casts > 0, count, 1.0)
    ops = m.cast("experts.cast_input", "moe", total * hidden, True, casts)
    ops.append(m.grouped("experts.up", count, rows, ways * width, hidden))
    ops.append(
        m.memory(
            "experts.activation",
            "moe_act" if rates.whole_again else "moe",
            m.item * total * width * (ways + 1),
            m.item * total * width * (2 * ways + 1),
            in_moe=True,
        )
    )
    ops += m.cast("experts.cast_middle", "moe_act", total * width, True, casts)
    ops.append(m.grouped("experts.down", count, rows, hidden, width))
    if spec.expert.bias:  # grouped matmuls have no bias of their own: it is added to both outputs, and summed backward
        biased = m.item * total * (ways * width + hidden)
        ops.append(m.memory("experts.bias", "moe", 2 * biased, biased, kernels=2, in_moe=True))
    return ops


def _row_moves(top_k: int, total: Numbers, machine: Machine) -> tuple[Floats, Floats]:
    """Bytes of putting rows in the order of the exchange, and of putting the `total` arrived ones in that of experts.

    An all-to-all has both: own rows are read once and written k times, arrived ones read and written. DeepEP and
    HybridEP send from where rows are, and an all-gather too; what they bring is copied once per choice.
    """
    m, c = machine, machine.columns
    row = m.item * m.work.model.hidden
    sorts = c.dispatches("alltoall", "hierarchical")
    send = np.where(sorts, m.own * (1 + top_k) * row, 0.0)
    brought = np.where(c.dispatches("allgather"), m.own * c.ep * c.etp, total / top_k)
    return send, np.where(sorts, 2 * total, brought + total) * row


def _shared(spec: MoeSpec, machine: Machine) -> list[Op]:
    if spec.shared is None:
        return []
    m, c = machine, machine.columns
    same = c.dispatches("allgather") & (c.ep * c.etp == c.tp) & (machine.rates.merge_shared > 0)
    apart = np.where(same, 0.0, 1.0)
    ops, _ = _mlp(spec.shared, machine, "shared_experts", "shared_experts", in_moe=True, where=apart)
    ops.append(m.memory("shared_experts.add", "", 3 * m.item * m.own * m.work.model.hidden, in_moe=True))
    return ops


def embedding_ops(machine: Machine) -> LayerOps:
    """The token embedding: a gather of rows, and its gradient in fp32."""
    m, model = machine, machine.work.model
    ops = [m.memory("embedding.rows", "", 2 * m.item * m.own * model.hidden, 8 * m.own * model.hidden)]
    ops.append(_scatter(m, "tensor.embedding", "", model.hidden))
    return LayerOps(ops, model.vocab * model.hidden / m.columns.tp)


def head_ops(machine: Machine) -> LayerOps:
    """Final norm, head and loss; the matmul is never quantised."""
    m, model = machine, machine.work.model
    vocab = model.vocab / m.columns.tp
    ops = [
        m.memory("norm.final", "", 2 * m.item * m.own * model.hidden, 3 * m.item * m.own * model.hidden),
        _gather(m, "tensor.head", "", model.hidden),
        m.gemm("head.matmul", "", m.tokens, vocab, model.hidden, low=False),
        # Logits are read, and their softmax written and read in fp32 and in their own type.
        m.memory(
            "loss.softmax",
            "loss",
            (4 + 2 * m.item) * m.tokens * vocab,
            (4 + m.item) * m.tokens * vocab,
            kernels=6,
            share=m.rates.loss_share,
        ),
    ]
    return LayerOps(ops, 0.0 if model.tied_embeddings else vocab * model.hidden)


def mtp_ops(layer: LayerSpec, machine: Machine) -> LayerOps:
    """A multi-token prediction block: two norms, a 2·D → D projection, a layer, and the head again."""
    m, hidden = machine, machine.work.model.hidden
    body, head = layer_ops(layer, machine), head_ops(machine)
    ops = [
        m.memory("norm.mtp", "layernorm", 4 * m.item * m.own * hidden, 6 * m.item * m.own * hidden, kernels=3),
        m.gemm("mtp.projection", "", m.tokens, hidden / m.columns.tp, 2 * hidden),
        _scatter(m, "tensor.mtp", "", hidden),
    ]
    weights = body.dense_parameters + 2 * hidden * hidden / m.columns.tp
    return LayerOps(ops + body.ops + head.ops, weights, body.expert_parameters, body.wait)
