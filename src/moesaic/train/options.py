"""What a run file leaves open in its layout: the cost model's choice for the cluster that the run file names."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from moesaic.cost.inside import choose_chunks, choose_head_groups
from moesaic.cost.options import Choice, choose_options, recompute_sets
from moesaic.cost.rates import Stack, rates_for
from moesaic.spec.cluster import ClusterSpec, cluster_of
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.legal import option_rules
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import recompute_instead
from moesaic.spec.run import RunSpec
from moesaic.train.predicted import habits_here, workload

_TRIED = ("gradients", "inside", "experts", "weight_gradients")
"""Overlaps that are tried in every combination; the shared expert always runs under dispatch."""


def chosen_layout(run: RunSpec, model: ModelSpec, world: int, ranks_per_node: int) -> tuple[Layout, list[str]]:
    """The layout of `run` on `world` ranks with what it leaves open filled in, and sentences that say why.

    With `overlap = "auto"` or `recompute = "auto"`, and with `dispatcher = "auto"` or `inside_chunks = "auto"` where
    [cluster] names the accelerator, the cost model chooses.

    Raises:
        SpecError: the layout is not legal; overlap or recompute is "auto" and [cluster] names no accelerator; or
            nothing that could be recomputed makes the layout fit.
    """
    table, keys = run.layout, run.train
    plain = resolve_layout(table, model, world, seq_len=keys.seq_len, global_batch=keys.global_batch)
    asked = [name for name in ("overlap", "recompute") if getattr(table, name) == "auto"]
    if run.cluster.gpu is None and asked:
        raise SpecError(
            f'layout.{asked[0]} is "auto", which the cost model chooses for a cluster, and cluster.gpu is not set: '
            f"name an accelerator or a file of moesaic calibrate, or name the {asked[0]}."
        )
    if world == 1 and "recompute" not in asked:
        return plain, []
    if not asked and (table.dispatcher != "auto" or run.cluster.gpu is None):
        return _in_chunks(run, model, plain, world, ranks_per_node)
    choice = price(run, model, plain, world, ranks_per_node)
    open_keys = [f"layout.{name}" for name in ("dispatcher", "overlap", "recompute") if getattr(table, name) == "auto"]
    notes = [f"The cost model chose {choice.why()} ({', '.join(open_keys)})."]
    if "recompute" in asked:
        notes += choice.recomputes()
    layout, why = _in_chunks(run, model, choice.layout, world, ranks_per_node)
    return layout, notes + why


def _in_chunks(
    run: RunSpec, model: ModelSpec, layout: Layout, world: int, ranks_per_node: int
) -> tuple[Layout, list[str]]:
    """`layout` with the chunks that the cost model finds fastest, where the run leaves them open and names a cluster,
    and a sentence about them."""
    if run.layout.inside_chunks != "auto" or run.cluster.gpu is None or "inside" not in layout.overlap:
        return layout, []
    cluster, work = _cluster(run, world, ranks_per_node), workload(run, model)
    rates = rates_for(cluster, Stack("moesaic"))
    choices = choose_chunks(work, layout, cluster, rates)
    found = dict(layout.inside_chunks) | {choice.experts: choice.chunks for choice in choices}
    why = [choice.why() for choice in choices]
    if seconds := choose_head_groups(work, layout, cluster, rates):
        groups = min(seconds, key=lambda most: (seconds[most], most))
        layout = replace(layout, heads_in=groups)
        why.append(
            f"heads of attention in {groups} group{'s' if groups > 1 else ''} at most: {seconds[groups] * 1e3:.3g} ms "
            f"for all layers predicted, in one {seconds[1] * 1e3:.3g} ms"
        )
    if not why:
        return layout, []
    layout = replace(layout, inside_chunks=tuple(found.items()))
    return layout, [f"With overlap inside the cost model chose {'; '.join(why)} (layout.inside_chunks)."]


def _cluster(run: RunSpec, world: int, ranks_per_node: int) -> ClusterSpec:
    """The cluster of a run, as many ranks to a node as there are unless the run says so."""
    cluster = cluster_of(run.cluster.model_copy(update={"nodes": None}), world)
    if run.cluster.gpus_per_node is not None:
        return cluster
    return cluster.model_copy(update={"gpus_per_node": ranks_per_node, "domain": ranks_per_node})


def price(run: RunSpec, model: ModelSpec, plain: Layout, world: int, ranks_per_node: int) -> Choice:
    """All legal dispatchers, overlaps and modules to recompute that the run leaves open, priced.

    Raises:
        SpecError: recompute is open and nothing fits.
    """
    table = run.layout
    cluster = _cluster(run, world, ranks_per_node)
    dispatchers = [plain.dispatcher]
    if table.dispatcher == "auto" and plain.ep * plain.etp > 1:
        dispatchers = ["alltoall", "allgather"] if plain.ep > 1 else ["allgather"]
        if ranks_per_node < plain.ep * plain.etp and not plain.ep % ranks_per_node and plain.etp == 1:
            dispatchers.append("hierarchical")
    overlaps: list[tuple[str, ...]] = [plain.overlap]
    if table.overlap == "auto" and world > 1:
        overlaps = [chosen for size in range(len(_TRIED) + 1) for chosen in combinations(_TRIED, size)]
    recomputes, limit = [plain.recompute], None
    if table.recompute == "auto":
        recomputes = recompute_sets(model)
        limit = cluster.gpu.memory_bytes * (1 - table.recompute_headroom)
    together = {
        (o, r): changed_layout(run, model, world, overlap=list(o), recompute=list(r)) is not None
        for o in overlaps
        for r in recomputes
    }
    overlaps = [o for o in overlaps if any(together[o, r] for r in recomputes)]
    recomputes = [r for r in recomputes if all(together[o, r] for o in overlaps)]
    work, habits = workload(run, model), habits_here()
    return choose_options(work, plain, cluster, dispatchers, overlaps, recomputes, limit, habits)


def changed_layout(run: RunSpec, model: ModelSpec, world: int, **changed: object) -> Layout | None:
    """The layout of `run` with other keys of [layout], or None where that is not legal. Modules to recompute are then
    those of all layers."""
    if "recompute" in changed:
        changed = changed | recompute_instead(run.layout, changed.pop("recompute"))  # type: ignore[arg-type]
    table = run.layout.model_copy(update=changed)
    if next(option_rules(table), None) is not None:
        return None
    try:
        return resolve_layout(table, model, world, seq_len=run.train.seq_len, global_batch=run.train.global_batch)
    except SpecError:
        return None
