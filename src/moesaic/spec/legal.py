"""Which layouts are legal for a model, and the sentence about each one that is not.

A rule is a generator that yields a sentence where it is broken; the sentence holds the equation with its numbers, what
it is for, and what would do. The reader of run files, the trainer, the enumeration and the search for the nearest
legal layouts all use these rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .model import ModelSpec
from .options import OVERLAP, RECOMPUTE, RECOMPUTE_SETS, recompute_words, words, words_rules
from .stages import Recompute, Stage, default_stages, expand, parse_stages
from .tables import LayoutTable


class Degrees(NamedTuple):
    """The sizes of both meshes. They cover the same ranks: tp·cp·dp = etp·ep·edp = world / pp."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    edp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        """The written form of a layout."""
        return f"pp{self.pp} dp{self.dp} cp{self.cp} tp{self.tp} / edp{self.edp} ep{self.ep} etp{self.etp}"


@dataclass(frozen=True)
class Sizes:
    """What of a model decides which layouts are legal. Tuples hold distinct values, ascending."""

    name: str
    layers: int
    mtp: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    """Of grouped-query attention; latent attention expands keys and values for every head."""
    widths: tuple[int, ...]
    """Of dense MLPs and shared experts, which tensor parallelism cuts."""
    experts: tuple[int, ...]
    expert_widths: tuple[int, ...]
    top_k: int
    """The largest of all layers; 0 for a model without experts."""

    @staticmethod
    def of(model: ModelSpec) -> Sizes:
        layers = (*model.layers, *model.mtp)
        moes = [layer.moe for layer in layers if layer.moe is not None]
        mlps = [layer.mlp for layer in layers if layer.mlp is not None]
        return Sizes(
            model.name,
            len(model.layers),
            len(model.mtp),
            _distinct(layer.attention.heads for layer in layers),
            _distinct(layer.attention.kv_heads for layer in layers if layer.attention.kind == "gqa"),
            _distinct([mlp.width for mlp in mlps] + [moe.shared.width for moe in moes if moe.shared is not None]),
            _distinct(moe.router.experts for moe in moes),
            _distinct(moe.expert.width for moe in moes),
            max((moe.router.top_k for moe in moes), default=0),
        )


def sequence_multiple(cp: int, tp: int, cp_kind: str) -> int:
    """What a sequence's length must be a multiple of: cp·tp equal pieces, and for the ring 2·cp equal chunks whose
    pairs are cut in tp pieces."""
    return cp * math.lcm(2, tp) if cp_kind == "ring" and cp > 1 else cp * tp


def sequence_rule(cp: int, tp: int, cp_kind: str, seq_len: int) -> Iterator[str]:
    """Every rank owns equally many tokens of a sequence of `seq_len` tokens."""
    parts = sequence_multiple(cp, tp, cp_kind)
    if seq_len % parts == 0:
        return
    below, above = seq_len // parts * parts, -(-seq_len // parts) * parts
    cuts = {
        (True, True): f"{cp_kind} context parallelism of degree {cp} and tensor parallelism of degree {tp} cut",
        (True, False): f"{cp_kind} context parallelism of degree {cp} cuts",
        (False, True): f"tensor parallelism of degree {tp} cuts",
    }[cp > 1, tp > 1]
    formula = (f"cp·lcm(2, tp) = {cp}·lcm(2, {tp})" if cp_kind == "ring" else f"cp·tp = {cp}·{tp}") if cp > 1 else "tp"
    yield (
        f"train.seq_len is {seq_len} tokens, which {cuts} in equal parts: use a multiple of {parts} "
        f"({formula}), such as {f'{below} or ' if below else ''}{above}; padding every sequence to {above} would make "
        f"{(above - seq_len) / above:.1%} of the tokens padding"
    )


def batch_rule(dp: int, table: LayoutTable, global_batch: int) -> Iterator[str]:
    """A step of `global_batch` sequences is whole micro-batches on every data-parallel rank."""
    each = table.micro_batch * dp
    if global_batch % each:
        below = global_batch // each * each
        ranks = f" times layout.dp {dp}" if dp > 1 else ""
        near = f"{below} or {below + each}" if below else str(each)
        yield (
            f"train.global_batch is {global_batch} sequences, not a multiple of layout.micro_batch "
            f"{table.micro_batch}{ranks}: use {near}"
        )


def micro_batch_rule(pp: int, dp: int, table: LayoutTable, global_batch: int) -> Iterator[str]:
    """1F1B fills the pipeline with one micro-batch per stage; interleaving works in rounds of pp micro-batches."""
    if pp == 1:
        return
    each = table.micro_batch * dp
    count = global_batch // each
    shown = f"global_batch / (micro_batch·dp) = {global_batch} / ({table.micro_batch}·{dp}) = {count} micro-batches"
    if count < pp:
        yield f"{shown}, fewer than the pp = {pp} pipeline stages: use a train.global_batch of at least {pp * each}"
    elif table.virtual_stages > 1 and count % pp:
        near = count // pp * pp * each
        yield (
            f"{shown}, not a multiple of pp = {pp}, which interleaving with {table.virtual_stages} virtual stages "
            f"needs: use a train.global_batch of {near} or {near + pp * each}"
        )


def virtual_stage_rule(pp: int, table: LayoutTable) -> Iterator[str]:
    """What only a pipeline has."""
    if pp > 1:
        return
    if table.virtual_stages > 1:
        yield f"layout.virtual_stages is {table.virtual_stages}, but layout.pp is 1: there is no pipeline"
    elif table.schedule in ("interleaved", "zero_bubble"):
        yield f"layout.schedule is {table.schedule!r}, but layout.pp is 1: there is no pipeline"


def option_rules(table: LayoutTable) -> Iterator[str]:
    """What no choice of degrees can mend."""
    yield from words_rules(table)
    if table.replicas > 1 and table.sharding == "none":
        yield (
            f'layout.replicas is {table.replicas}, but layout.sharding is "none", so that every rank is a copy: '
            f"name a sharding level or use replicas 1"
        )
    if table.schedule == "zero_bubble" and table.sharding != "none":
        yield (
            f'layout.schedule is "zero_bubble" and layout.sharding "{table.sharding}", but sharding sums weight '
            f'gradients when backward ends, before zero_bubble has made them: use sharding "none" or another schedule'
        )
    yield from _overlap_rules(table)
    if "core_attn" in recompute_words(table) and table.cp > 1 and table.cp_kind == "ring":
        yield (
            'layout.recompute has "core_attn" and layout.cp_kind is "ring", but keys and values would go around once '
            'more: use cp_kind "ulysses" or leave "core_attn" out'
        )
    if table.virtual_stages > 1 and table.schedule == "1f1b":
        yield f'layout.schedule is "1f1b", but layout.virtual_stages is {table.virtual_stages}: use "interleaved"'
    if table.virtual_stages == 1 and table.schedule == "interleaved":
        yield 'layout.schedule is "interleaved", but layout.virtual_stages is 1: use 2 or more, or "1f1b"'


def _overlap_rules(table: LayoutTable) -> Iterator[str]:
    """What does not go with the order of work that an overlap asks for."""
    for word in words(table.overlap, OVERLAP):
        if word not in ("experts", "between", "weight_gradients"):
            continue
        if table.schedule == "zero_bubble":
            yield (
                f'layout.schedule is "zero_bubble" and layout.overlap has {word!r}, but zero_bubble gives weight '
                f"gradients an order of its own: use another schedule or leave {word!r} out"
            )
        if word == "experts" and table.sharding == "parameters":
            yield (
                'layout.overlap has "experts" and layout.sharding is "parameters", but the backward of a layer drops '
                'its weights while the forward of another micro-batch needs them: use sharding "gradients"'
            )
        if word != "experts" and table.sharding != "none":
            yield (
                f'layout.overlap has {word!r} and layout.sharding is "{table.sharding}", but sharding sums weight '
                f'gradients when backward ends, before these are made: use sharding "none" or leave {word!r} out'
            )


def stage_rules(pp: int, table: LayoutTable, sizes: Sizes) -> Iterator[str]:
    """Every virtual stage has something to hold, or stands in a stage string of as many stages."""
    yield from virtual_stage_rule(pp, table)
    if table.recompute_stages and len(table.recompute_stages) != pp:
        yield (
            f"layout.recompute_stages has {len(table.recompute_stages)} lists, but layout.pp is {pp}: give one for "
            f"each pipeline rank"
        )
    count = pp * table.virtual_stages
    if table.stages is None:
        if count > sizes.layers:
            yield (
                f"pp·virtual_stages = {pp}·{table.virtual_stages} = {count} stages, more than the {sizes.layers} "
                f"layers of {sizes.name}: a stage holds at least one, unless layout.stages says otherwise"
            )
        return
    pieces = expand(table.stages).split("|")
    if len(pieces) != count:
        fit = f": use layout.virtual_stages {len(pieces) // pp}" if len(pieces) % pp == 0 else ""
        yield (
            f"layout.stages {table.stages!r} has {len(pieces)} stages, but pp·virtual_stages = "
            f"{pp}·{table.virtual_stages} = {count}{fit}"
        )
        return
    for rank in range(pp):
        if not any(pieces[rank::pp]):
            yield f"layout.stages {table.stages!r} leaves pipeline rank {rank} of {pp} with nothing to hold"


def dense_rules(
    pp: int, dp: int, cp: int, tp: int, table: LayoutTable, sizes: Sizes, seq_len: int | None, global_batch: int | None
) -> Iterator[str]:
    """What the model, the sequence and the batch ask of the dense mesh."""
    for what, values in (("heads", sizes.heads), ("kv_heads", sizes.kv_heads), ("width", sizes.widths)):
        for value in values:
            if value % tp:
                cut = "dense MLPs and shared experts" if what == "width" else "attention"
                yield (
                    f"{what} % tp = {value} % {tp} = {value % tp}, not 0: tensor parallelism cuts {cut} into equal "
                    f"parts (tp may be {_listed(divisors(math.gcd(*sizes.heads, *sizes.kv_heads, *sizes.widths)))})"
                )
    if cp > 1 and table.cp_kind == "ulysses":
        yield from _ulysses_rules(cp, tp, sizes)
    if seq_len is not None:
        yield from sequence_rule(cp, tp, table.cp_kind, seq_len)
    if global_batch is not None:
        yield from batch_rule(dp, table, global_batch)
        yield from micro_batch_rule(pp, dp, table, global_batch)
    if dp * cp % table.replicas:
        yield (
            f"dp·cp % replicas = {dp}·{cp} % {table.replicas} = {dp * cp % table.replicas}, not 0: dense parameters "
            f"are sharded within layout.replicas equal groups of the dp·cp ranks"
        )


def _ulysses_rules(cp: int, tp: int, sizes: Sizes) -> Iterator[str]:
    for heads in sizes.heads:
        if heads % tp == 0 and heads // tp % cp:
            yield (
                f"heads / tp % cp = {heads} / {tp} % {cp} = {heads // tp % cp}, not 0: ulysses gives every context "
                f"rank the same number of heads; layout.cp_kind ring has no such limit"
            )
    for heads in sizes.kv_heads:
        if heads % tp == 0 and heads // tp % cp and cp % (heads // tp):
            yield (
                f"kv_heads / tp = {heads} / {tp} = {heads // tp} is neither a multiple nor a divisor of cp = {cp}, "
                f"as ulysses needs it; layout.cp_kind ring has no such limit"
            )


def expert_rules(degrees: Degrees, table: LayoutTable, sizes: Sizes) -> Iterator[str]:
    """What the model and the options ask of the expert mesh."""
    pp, dp, cp, tp, edp, ep, etp = degrees
    if ep * etp > 1 and not sizes.experts:
        yield f"ep·etp = {ep}·{etp} = {ep * etp}, but {sizes.name} has no experts: use ep 1 and etp 1"
    elif sizes.experts and all(count % ep for count in sizes.experts):
        may = f"ep may be {_listed(sorted({d for count in sizes.experts for d in divisors(count)}))}"
        if len(sizes.experts) == 1:
            yield (
                f"experts % ep = {sizes.experts[0]} % {ep} = {sizes.experts[0] % ep}, not 0: every rank of an "
                f"expert-parallel group holds the same number of experts ({may})"
            )
        else:
            yield f"ep = {ep} divides none of the expert counts {_listed(sizes.experts)} of {sizes.name} ({may})"
    for width in sizes.expert_widths:
        if width % etp:
            yield (
                f"expert width % etp = {width} % {etp} = {width % etp}, not 0: tensor parallelism inside experts cuts "
                f"them into equal parts (etp may be {_listed(divisors(math.gcd(*sizes.expert_widths)))})"
            )
    if table.dispatcher == "local" and ep * etp > 1:
        yield f"layout.dispatcher is 'local', but ep·etp = {ep}·{etp} = {ep * etp}: use auto, allgather or alltoall"
    if table.dispatcher in ("allgather", "alltoall", "hierarchical", "flex") and ep * etp == 1:
        yield f"layout.dispatcher is {table.dispatcher!r}, but ep·etp = 1, so that no token travels: use auto or local"
    if edp % table.replicas:
        yield (
            f"edp % replicas = {edp} % {table.replicas} = {edp % table.replicas}, not 0: expert parameters are sharded "
            f"within layout.replicas equal groups of the edp ranks"
        )
    if table.order == "dp-outer" and pp > 1 and edp != dp:
        yield (
            f'edp = dp does not hold: edp is {edp} and dp {dp}, but with layout.order "dp-outer" and pp = {pp} the '
            f"pipelines of both meshes are the same ranks only if cp·tp = ep·etp ({cp}·{tp} and {ep}·{etp})"
        )


def mesh_rules(table: LayoutTable, world: int) -> Iterator[str]:
    """Whether the degrees of a table make up `world` ranks on both meshes."""
    pp, cp, tp, ep, etp = table.pp, table.cp, table.tp, table.ep, table.etp
    least = pp * max(tp * cp, etp * ep)
    if world < least:
        yield (
            f"pp·max(tp·cp, etp·ep) = {pp}·max({tp}·{cp}, {etp}·{ep}) = {least} is more than the {world} "
            f"{processes(world)} there {'is' if world == 1 else 'are'}"
        )
        return
    if table.dp == "auto" and world % (pp * cp * tp):
        yield (
            f"pp·dp·cp·tp = world does not hold: {pp}·dp·{cp}·{tp} = {world} gives no whole dp, "
            f"as {world} is not a multiple of {pp * cp * tp}"
        )
        return
    dp = world // (pp * cp * tp) if table.dp == "auto" else table.dp
    if pp * dp * cp * tp != world:
        yield f"pp·dp·cp·tp = world does not hold: {pp}·{dp}·{cp}·{tp} = {pp * dp * cp * tp}, but the world is {world}"
    elif tp * cp * dp % (etp * ep):
        yield expert_mesh_sentence(tp, cp, dp, ep, etp)


def expert_mesh_sentence(tp: int, cp: int, dp: int, ep: int, etp: int) -> str:
    """What is said where etp·ep does not divide the ranks of a stage."""
    return (
        f"tp·cp·dp = etp·ep·edp does not hold: {tp}·{cp}·{dp} = {tp * cp * dp} is not a multiple of "
        f"etp·ep = {etp}·{ep} = {etp * ep}"
    )


def fewest_ranks(table: LayoutTable) -> int:
    """The fewest ranks that both meshes of a table can cover, whatever its dp. With dp = "auto" every other number of
    ranks is a multiple of it."""
    dense, experts = table.tp * table.cp, table.etp * table.ep
    stage = math.lcm(dense, experts)
    held = (stage // table.tp, stage // experts)
    more = math.lcm(*(table.replicas // math.gcd(table.replicas, ranks) for ranks in held))
    return table.pp * stage * more


def legal_degrees(
    sizes: Sizes,
    world: int,
    table: LayoutTable,
    seq_len: int | None,
    global_batch: int | None,
    most: dict[str, int] | None = None,
) -> Iterator[Degrees]:
    """Every legal choice of degrees for `world` ranks, pp slowest, then tp, cp, etp and ep, each ascending. The
    degrees in `table` play no part, its other keys do. `most` bounds degrees by name."""
    if next(option_rules(table), None) is not None:
        return
    most = most or {}

    def allowed(name: str, values: Iterable[int]) -> list[int]:
        return [value for value in values if value <= most.get(name, world)]

    tps = math.gcd(*sizes.heads, *sizes.kv_heads, *sizes.widths)
    etps = math.gcd(*sizes.expert_widths) if sizes.experts else 1
    for pp in allowed("pp", divisors(world)):
        if next(stage_rules(pp, table, sizes), None) is not None:
            continue
        stage = world // pp
        experts = [
            (etp, ep)
            for etp in allowed("etp", divisors(math.gcd(stage, etps)))
            for ep in allowed("ep", divisors(stage // etp))
            if (ep == 1 or any(count % ep == 0 for count in sizes.experts))
            and stage // (etp * ep) <= most.get("edp", world)
        ]
        for tp in allowed("tp", divisors(math.gcd(stage, tps))):
            for cp in allowed("cp", divisors(stage // tp)):
                dp = stage // (tp * cp)
                if dp > most.get("dp", world):
                    continue
                if next(dense_rules(pp, dp, cp, tp, table, sizes, seq_len, global_batch), None) is not None:
                    continue
                for etp, ep in experts:
                    degrees = Degrees(pp, dp, cp, tp, stage // (etp * ep), ep, etp)
                    if next(expert_rules(degrees, table, sizes), None) is None:
                        yield degrees


def stages_of(pp: int, table: LayoutTable, sizes: Sizes) -> tuple[Stage, ...]:
    """The stages of a table, from its string or dealt evenly, with what they recompute where that differs.

    Raises:
        SpecError: the string does not fit the model.
    """
    if table.stages is None:
        stages = default_stages(pp * table.virtual_stages, sizes.layers, sizes.mtp)
    else:
        stages = parse_stages(table.stages, sizes.layers, sizes.mtp)
    method, count = table.recompute_method, table.recompute_layers or 1
    if not table.recompute_stages and method == "uniform" and count == 1:
        return stages
    sets = [words(each, RECOMPUTE, RECOMPUTE_SETS) for each in table.recompute_stages] or [recompute_words(table)] * pp
    made = [Recompute.of(stage.layers, sets[i % pp], method, count) for i, stage in enumerate(stages)]
    return tuple(replace(stage, recompute=each) for stage, each in zip(stages, made, strict=True))


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def divisors(number: int) -> list[int]:
    """The divisors of a number of at least 1, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _listed(values: Iterable[int]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:12], "…", shown[-1]])


def processes(count: int) -> str:
    """The word after a count of them."""
    return "process" if count == 1 else "processes"
