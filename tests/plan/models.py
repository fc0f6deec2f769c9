"""Small models and clusters to plan for, and every layout of them by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moesaic.cost.rates import Stack
from moesaic.cost.workload import RECOMPUTE, Columns, Workload
from moesaic.plan.search import Question
from moesaic.plan.space import Choices, Stages, choices_of
from moesaic.spec.cluster import load_cluster
from moesaic.spec.layout import Layout, legal_layouts
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec
from moesaic.spec.tables import LayoutTable

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8)


def model(
    experts: Sequence[int] = (8, 8, 8, 8),
    heads: int = 8,
    kv_heads: int = 4,
    width: int = 1024,
    expert_width: int = 512,
    shared: int | None = None,
    mtp: int = 0,
    latent: bool = False,
    hidden: int = 512,
) -> ModelSpec:
    """One layer per entry of `experts`, dense where that is 0; prediction blocks are as the last layer."""
    attention = AttentionSpec(
        kind="mla" if latent else "gqa",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        v_head_dim=64,
        scale=0.125,
        **({"kv_rank": 64, "nope_dim": 32, "rope_dim": 32} if latent else {}),
    )

    def layer(count: int) -> LayerSpec:
        if count == 0:
            return LayerSpec(attention=attention, mlp=MlpSpec(width=width))
        return LayerSpec(
            attention=attention,
            moe=MoeSpec(
                router=RouterSpec(experts=count, top_k=2),
                expert=MlpSpec(width=expert_width),
                shared=None if shared is None else MlpSpec(width=shared),
            ),
        )

    layers = tuple(layer(count) for count in experts)
    return ModelSpec(name="small", family="moesaic", vocab=4096, hidden=hidden, layers=layers, mtp=layers[-1:] * mtp)


def question(
    spec: ModelSpec,
    gpus: int,
    memory_gib: float,
    framework: str = "megatron",
    seq_len: int = 2048,
    global_batch: int = 8,
    gpu: str = "h100",
) -> Question:
    """About a cluster whose accelerators have so little memory that it matters."""
    cluster = load_cluster(gpu, gpus, memory_gib=memory_gib)
    return Question(Workload(spec, seq_len, global_batch), cluster, Stack(framework), headroom=0.0, top=20)


def every_degree(work: Workload, world: int, **most: int) -> Iterator[Layout]:
    """Every layout of `world` ranks that `spec` calls legal, over the kinds of context parallelism, micro-batches and
    virtual stages."""
    for kind, micro, virtual in itertools.product(("ulysses", "ring"), MICRO_BATCHES, VIRTUAL_STAGES):
        table = LayoutTable(cp_kind=kind, micro_batch=micro, virtual_stages=virtual)  # type: ignore[arg-type]
        found = legal_layouts(
            work.model, world, seq_len=work.seq_len, global_batch=work.global_batch, table=table, **most
        )
        yield from (layout for layout in found if kind == "ulysses" or layout.cp > 1)


def every_layout(asked: Question, choices: Choices | None = None) -> Iterator[Layout]:
    """Every legal layout of a question's cluster with every option of its stack that goes with it."""
    cluster = asked.cluster
    domain = cluster.fast_domain
    choices = choices or choices_of(asked.stack, asked.work.model, cluster)
    most = {"tp": domain, "etp": domain, "cp": max(1, asked.work.seq_len // 1024)}
    if asked.stack.framework == "torchtitan":
        most["etp"] = 1
    stages = Stages(asked.work)
    for layout in every_degree(asked.work, cluster.gpus, **most):
        columns = Columns.of([layout])
        place = int(stages.index(columns.pp, columns.virtual_stages)[0])
        dealt = replace(layout, stages=stages.lists[place])
        dispatchers = choices.dispatchers if layout.ep * layout.etp > 1 else ("local",)
        schedules = (layout.schedule, "zero_bubble") if choices.zero_bubble else (layout.schedule,)
        for sharding, dispatcher, overlap, recompute, offload, schedule in itertools.product(
            choices.sharding, dispatchers, choices.overlaps, choices.recompute, choices.offload, schedules
        ):
            found = replace(
                dealt, sharding=sharding, dispatcher=dispatcher, overlap=overlap, recompute=recompute, offload=offload,
                schedule=schedule,
            )  # fmt: skip
            found = replace(found, recompute=tuple(sorted(found.recompute, key=RECOMPUTE.index)))
            if runs(found):
                yield found


def runs(layout: Layout) -> bool:
    """Whether Megatron-Core's constraints on overlap, and the trainer's on weight gradients left for later, hold."""
    overlap, recompute = set(layout.overlap), set(layout.recompute)
    if layout.schedule == "zero_bubble" and (layout.pp == 1 or layout.sharding != "none"):
        return False
    if overlap & {"experts", "shared_experts"}:
        if layout.dispatcher not in ("alltoall", "deepep", "hybridep", "hierarchical"):
            return False
        if recompute & {"moe", "shared_experts", "full"}:
            return False
    if "experts" in overlap:
        return layout.ep > 1 and (layout.pp == 1 or layout.virtual_stages > 1) and "shared_experts" not in overlap
    return "weight_gradients" not in overlap
