"""The page of a plan: a single HTML file that needs no network, with the answer and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import ascii_lowercase
from typing import Any

import moesaic
from moesaic.cost.memory import StageMemory
from moesaic.cost.timeline import Timeline
from moesaic.report.charts import share_bar
from moesaic.report.page import card
from moesaic.report.plan_charts import Spot, front_plot, memory_bars, meshes, nodes_spanned, stage_hues
from moesaic.report.timeline_chart import seconds_text, timeline_svg
from moesaic.spec.layout import Layout

GIB = 2**30
MEMORY_NAMES = {
    "weights": ("weights", "var(--q1)"),
    "gradients": ("gradients", "var(--q9)"),
    "optimizer": ("optimizer", "var(--q3)"),
    "activations": ("activations", "var(--q2)"),
    "logits": ("logits", "var(--q5)"),
    "buffers": ("buffers", "var(--q4)"),
    "overhead": ("overhead", "var(--q11)"),
}
"""Parts of memory: what the page calls them, and a CSS colour."""
TIME_NAMES = {
    "compute": ("matmuls and attention", "var(--q1)"),
    "memory_bound": ("memory-bound work", "var(--q9)"),
    "host": ("waiting for the host", "var(--q10)"),
    "dispatch": ("dispatch of tokens to experts", "var(--q2)"),
    "tensor": ("tensor-parallel traffic", "var(--q5)"),
    "context": ("context-parallel traffic", "var(--q8)"),
    "pipeline": ("pipeline sends", "var(--q6)"),
    "data": ("gradient and parameter traffic", "var(--q4)"),
    "bubble": ("pipeline bubble", "var(--q11)"),
    "optimizer": ("optimizer", "var(--q3)"),
    "offload": ("copies to the host", "var(--q7)"),
}
"""Parts of a step's seconds, likewise."""
WALLS = {
    "memory": ("memory in use", "var(--q3)"),
    "compute": ("compute", "var(--q1)"),
    "communication": ("communication", "var(--q2)"),
    "host": ("host", "var(--q10)"),
}
_USUAL_OVERLAP = ("gradients", "parameters", "tensor")


@dataclass(frozen=True)
class PlanFacts:
    """What the page of a plan is made from; all but `result` is about the best layout."""

    result: dict[str, Any]
    """What `moesaic plan --json` prints."""
    layout: Layout
    stages: Sequence[StageMemory]
    """One per pipeline rank."""
    gpu_bytes: float
    """Memory of one accelerator."""
    domain: int
    """Accelerators that share the fast link."""
    gpus_per_node: int
    timeline: Timeline
    """Of the first `shown` micro-batches of a step, over all pipeline ranks."""
    layer: Timeline
    """One layer, forward and backward."""
    shown: int
    micro_batches: int
    """Of a step."""
    simulated_seconds: float | None = None
    """Of the whole step by the simulation that `timeline` is the beginning of."""
    headroom_bytes: float = 0.0
    """Of `gpu_bytes`, what the search left free."""


def plan_page(facts: PlanFacts) -> str:
    """The page as text."""
    assets = resources.files("moesaic.report")
    style = "".join((assets / name).read_text(encoding="utf-8") for name in ("page.css", "plan_page.css"))
    title = escape(f"{facts.result['model']} on {facts.result['gpus']:,} × {facts.result['gpu']}")
    body = "".join(
        [
            _headline(facts, title),
            _tiles(facts),
            _memory(facts),
            _step(facts),
            _layer(facts),
            _seconds(facts),
            _front(facts),
            _table(facts),
            _meshes(facts),
            _notes(facts),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} · moesaic plan</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style></head><body><main>{body}'
        f"<footer>Written by moesaic {escape(moesaic.__version__)}.</footer></main></body></html>\n"
    )


def _best(facts: PlanFacts) -> dict[str, Any]:
    best: dict[str, Any] = facts.result["layouts"][0]
    return best


def _headline(facts: PlanFacts, title: str) -> str:
    result, best = facts.result, _best(facts)
    line = [
        f"{result['global_batch']:,} sequences of {result['seq_len']:,} tokens a step",
        result["precision"],
        result["stack"],
        f"{result['searched']:,} layouts priced",
        f"{result['fitting']:,} fit in memory",
    ]
    low, high = best["interval_seconds"]
    return (
        f"<header><h1>{title}</h1><p>{' · '.join(escape(part) for part in line)}</p>"
        f'<p class="lead">Fastest that fits: <code>{escape(degrees_text(best["layout"]))}</code>, '
        f"{escape(options_text(best['options']))}. A step takes {_number(best['step_seconds'])} s, and between "
        f"{_number(low)} and {_number(high)} s nine times in ten.</p></header>"
    )


def _tiles(facts: PlanFacts) -> str:
    best = _best(facts)
    low, high = best["interval_seconds"]
    tiles = [
        (_number(best["step_seconds"]), "s", f"a step; {_number(low)} to {_number(high)} s in nine of ten"),
        (f"{best['tokens_per_second_per_gpu']:,.0f}", "tokens/s", "per accelerator"),
        (f"{best['model_tflops_per_gpu']:,.0f}", "TFLOP/s", "of the model, per accelerator"),
        (f"{best['memory_gib']:.1f}", "GiB", f"of {facts.gpu_bytes / GIB:.1f} GiB on the fullest accelerator"),
        (f"{best['walls']['communication']:.1%}", "", "of the step is exposed communication"),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)} <small>{unit}</small></b><span>{escape(word)}</span></div>'
            for value, unit, word in tiles
        )
        + "</div>"
    )


def _memory(facts: PlanFacts) -> str:
    names, colours = [name for name, _ in MEMORY_NAMES.values()], [fill for _, fill in MEMORY_NAMES.values()]
    rows = [
        (
            f"rank {stage.rank}",
            [getattr(stage, part) for part in MEMORY_NAMES],
            f"{_number(stage.in_flight)} in flight" if facts.layout.pp > 1 else "",
        )
        for stage in facts.stages
    ]
    limits = [("accelerator", facts.gpu_bytes)]
    text = "Bytes at the peak of a step"
    if facts.layout.pp > 1:
        text += " by pipeline rank, and the micro-batches that it holds then"
    if facts.headroom_bytes:
        limits.append(("with headroom", facts.gpu_bytes - facts.headroom_bytes))
        text += ". The dashed line is what the search was allowed"
    used = [index for index in range(len(names)) if any(values[index] for _, values, _ in rows)]
    legend = _legend([(names[index], colours[index]) for index in used])
    fullest = max(facts.stages, key=lambda stage: stage.total)
    return card(
        "Memory of an accelerator", f"{text}.", legend, memory_bars(names, colours, rows, limits), _kept(fullest)
    )


def _kept(stage: StageMemory) -> str:
    """What one micro-batch keeps, largest first."""
    kept = sorted(((size, name) for name, size in stage.kept.items() if size > 0), reverse=True)
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{size / GIB:.3f}</td></tr>" for size, name in kept)
    total = sum(size for size, _ in kept)
    return (
        f"<details><summary>What one micro-batch keeps for backward on rank {stage.rank}, by module</summary>"
        f'<table class="numbers"><tr><th>module</th><th>GiB</th></tr>{rows}'
        f"<tr><td>together</td><td>{total / GIB:.3f}</td></tr></table></details>"
    )


def _step(facts: PlanFacts) -> str:
    if facts.shown < facts.micro_batches:
        which = f"The first {facts.shown:,} of {facts.micro_batches:,} micro-batches; the others repeat the middle"
    else:
        which = f"All {facts.shown:,} micro-batches"
    text = f"{which}. Time goes to the right, and bare ground is waiting. Hover for names and times."
    simulated, told = facts.simulated_seconds, _best(facts)["step_seconds"]
    if simulated is not None and abs(simulated / told - 1) > 0.02:
        text += (
            f" The whole step as simulated takes {_number(simulated)} s; the {_number(told)} s above allow for how far "
            "past predictions were off."
        )
    return card("One step", text, timeline_svg(facts.timeline))


def _layer(facts: PlanFacts) -> str:
    layer = facts.layer
    text = "Forward and backward of one layer, by stream."
    if any(event.name.startswith("backward") and event.start == 0 for event in layer.events):
        text = "One layer, by stream: forward of a micro-batch beside backward of the one before."
    if layer.busy("fast", "network"):
        exposed = layer.exposed()
        if exposed > 1e-6 * layer.makespan:
            text += (
                f" {layer.hidden():.0%} of its communication runs under compute; {seconds_text(exposed)} of "
                f"{seconds_text(layer.makespan)} are exposed."
            )
        else:
            text += " All of its communication runs under compute."
    return card("One layer", text, timeline_svg(layer, height=180))


def _seconds(facts: PlanFacts) -> str:
    best = _best(facts)
    parts = [(part, seconds) for part, seconds in best["time_seconds"].items() if seconds > 0]
    parts.sort(key=lambda part: -part[1])
    titles = [TIME_NAMES.get(part, (part, "var(--q10)")) for part, _ in parts]
    share = share_bar(
        [title for title, _ in titles],
        [fill for _, fill in titles],
        [seconds for _, seconds in parts],
        lambda seconds: seconds_text(seconds),
    )
    walls = "".join(
        f'<div class="wall"><span>{escape(name)}</span><div><i style="width:{min(best["walls"][wall], 1):.1%};'
        f'background:{fill}"></i></div><b>{best["walls"][wall]:.1%}</b></div>'
        for wall, (name, fill) in WALLS.items()
    )
    text = "Of a step, on the critical path; communication only where it shows."
    if best["hidden_seconds"] > 0:
        text += f" {seconds_text(best['hidden_seconds'])} more of it run under other work."
    return (
        '<div class="grid2">'
        + card(
            "Where the seconds go",
            text,
            share,
            "<h3>The four walls (memory in use, and shares of the step)</h3>",
            walls,
        )
        + card("The fastest layout", "All of its options, also those that are usual.", _all_options(best))
        + "</div>"
    )


def _all_options(best: Mapping[str, Any]) -> str:
    """The degrees, and every option by its own name."""
    rows = []
    for name, value in {"layout": best["layout"], **best["options"]}.items():
        text = ", ".join(value) or "none" if isinstance(value, list) else str(value)
        rows.append(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>")
    return f'<table class="facts">{"".join(rows)}</table>'


def _front(facts: PlanFacts) -> str:
    result = facts.result
    best = _best(facts)
    on_front = {_key(each) for each in result["front"]}
    spots = [
        Spot(each["memory_gib"], each["step_seconds"], _hint(each), True, _key(each) == _key(best))
        for each in result["front"]
    ]
    others = [each for each in result["layouts"] if _key(each) not in on_front]
    spots += [
        Spot(each["memory_gib"], each["step_seconds"], _hint(each), False, _key(each) == _key(best)) for each in others
    ]
    limits = [("accelerator", facts.gpu_bytes / GIB)]
    if facts.headroom_bytes:
        limits.append(("with headroom", (facts.gpu_bytes - facts.headroom_bytes) / GIB))
    names = [("the fastest", "var(--held)"), ("the front", "var(--train)")]
    legend = _legend(names + ([("others of the table", "var(--soft)")] if others else []))
    return card(
        "Speed against memory",
        "No layout is both faster and leaner than one on the front. Hover for the layout.",
        legend,
        front_plot(spots, limits),
    )


def _table(facts: PlanFacts) -> str:
    heads = ("layout", "options", "s/step", "nine of ten", "tokens/s", "TFLOP/s", "GiB", "communication")
    head = "".join(f'<th class="words">{name}</th>' if name == "options" else f"<th>{name}</th>" for name in heads)
    rows = []
    for number, each in enumerate(facts.result["layouts"]):
        low, high = each["interval_seconds"]
        rows.append(
            f"<tr{' class=best' if number == 0 else ''}><td><code>{escape(degrees_text(each['layout']))}</code></td>"
            f'<td class="words">{escape(options_text(each["options"]))}{_against(each)}</td>'
            f"<td>{_number(each['step_seconds'])}</td><td>{_number(low)}–{_number(high)}</td>"
            f"<td>{each['tokens_per_second_per_gpu']:,.0f}</td><td>{each['model_tflops_per_gpu']:,.0f}</td>"
            f"<td>{each['memory_gib']:.1f}</td><td>{each['walls']['communication']:.1%}</td></tr>"
        )
    return card(
        "The best layouts",
        "Tokens and model TFLOP/s are per accelerator; communication is its exposed share of the step.",
        f'<div class="wide"><table class="numbers plans"><tr>{head}</tr>{"".join(rows)}</table></div>',
    )


def _against(each: Mapping[str, Any]) -> str:
    """Why a layout loses to the fastest."""
    reason = each.get("against_best")
    return f"<small>{escape(reason)}</small>" if reason else ""


def _meshes(facts: PlanFacts) -> str:
    layout, node, domain = facts.layout, max(1, facts.gpus_per_node), facts.domain
    both = meshes(layout, node, domain)
    dense = f"pp{layout.pp} dp{layout.dp} cp{layout.cp} tp{layout.tp}"
    expert = f"pp{layout.pp} edp{layout.edp} ep{layout.ep} etp{layout.etp}"
    several = len(both.stages) > 1
    text = f"Ranks as squares, in nodes of {node}"
    text += f" and fast domains of {domain} (dashed)" if domain > node and layout.world > node else ""
    text += ". Hover for coordinates."
    if len(both.shown) < both.ranks:
        stages = f"hold pipeline rank 0 of {layout.pp}; the others look the same" if layout.pp > 1 else "are the first"
        text += f" {len(both.shown):,} of {both.ranks:,} ranks are shown: their nodes {stages}."
    unit = "shade" if several else "colour"
    legend = ""
    if several:
        text += " Each pipeline rank has a hue, and groups in it are shades."
        legend = _legend(stage_hues(both.stages))
    if max(layout.dp, layout.edp) > both.colours:
        text += f" {unit.capitalize()}s repeat: only neighbours of one {unit} belong together."
    size = _size(layout.groups("cp", "tp"), node, domain)
    pieces = [(f"Dense mesh: {dense}", f"One {unit}: ranks that share a replica's sequences ({size}).", both.dense)]
    if layout.experts_ep:
        size = _size(layout.expert_groups("ep", "etp"), node, domain)
        pieces.append(
            (f"Expert mesh: {expert}", f"One {unit}: ranks that together hold all experts ({size}).", both.expert)
        )
    columns = "".join(f"<div><h3>{title}</h3><p>{escape(word)}</p>{drawn}</div>" for title, word, drawn in pieces)
    return card("Where the ranks stand", text, legend, f'<div class="layers pair">{columns}</div>')


def _size(groups: Sequence[Sequence[int]], node: int, domain: int) -> str:
    """How large a group is, and how far it reaches."""
    ranks, nodes = len(groups[0]), nodes_spanned(groups, node)
    if ranks == 1:
        return "one rank each"
    if nodes == 1:
        return f"{ranks} ranks, inside a node"
    inside = domain > node and nodes_spanned(groups, domain) == 1
    return f"{ranks} ranks over {nodes} nodes{', inside a fast domain' if inside else ''}"


def _notes(facts: PlanFacts) -> str:
    notes = list(dict.fromkeys([*_best(facts)["notes"], *facts.result["notes"]]))
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return card("Notes", "What the search took as given.", f'<ul class="notes">{items}</ul>')


def _key(each: Mapping[str, Any]) -> tuple[str, str, float]:
    return each["layout"], str(each["options"]), each["step_seconds"]


def _hint(each: Mapping[str, Any]) -> str:
    low, high = each["interval_seconds"]
    return (
        f"{degrees_text(each['layout'])}\n{options_text(each['options'])}\n{_number(each['step_seconds'])} s "
        f"({_number(low)} to {_number(high)}), {each['memory_gib']:.1f} GiB"
    )


def degrees_text(written: str) -> str:
    """The written form of a layout without degrees of 1, as in `pp4 dp16 tp2 / edp4 ep8`."""
    dense, expert = (
        " ".join(word for word in side.split() if word.strip(ascii_lowercase) != "1") for side in written.split("/")
    )
    experts_apart = any(word.startswith("e") and not word.startswith("edp") for word in expert.split())
    return f"{dense or 'dp1'} / {expert}" if experts_apart else dense or "dp1"


def options_text(options: Mapping[str, Any]) -> str:
    """A layout's options in the words that `moesaic plan --why` reads; what is usual is left out."""
    words = [f"mb{options['micro_batch']}"]
    if options["virtual_stages"] > 1:
        words.append(f"vpp{options['virtual_stages']}")
    if options.get("schedule") not in (None, "1f1b", "interleaved"):
        words.append(options["schedule"])
    words += [options[name] for name in ("cp_kind", "dispatcher") if options.get(name) not in (None, "local")]
    if options["sharding"] != "optimizer":
        words.append(f"shard {options['sharding']}")
    for name in ("overlap", "recompute", "offload"):
        told = [word for word in options[name] if name != "overlap" or word not in _USUAL_OVERLAP]
        if told:
            words.append(f"{name} {'+'.join(told)}")
    return ", ".join(words)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{fill}"></i>{escape(name)}</span>' for name, fill in entries)
    return f'<div class="legend">{items}</div>'
