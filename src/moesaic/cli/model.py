"""`moesaic model`: what a model is made of and what a token costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moesaic.spec.model import ModelSpec


def model(
    name: Annotated[
        str | None, typer.Argument(help="A preset, a config.json, or a folder with one.", metavar="NAME_OR_PATH")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            min=1,
            max=2**40,
            help="Tokens per sequence [default: 4096, or the model's most if that is less]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
) -> None:
    """Show a model's parameters, FLOPs per token and checkpoint size."""
    from moesaic.spec.errors import SpecError
    from moesaic.spec.families import load_model_spec

    if listing:
        _list(as_json)
        return
    if name is None:
        raise SpecError("moesaic model needs a preset's name, a config.json or its folder; --list shows the presets.")
    spec = load_model_spec(name)
    facts = describe(spec, min(4096, spec.max_positions) if seq_len is None else seq_len)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _show(spec, facts)


def describe(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """The figures of one model as plain data, which is what `--json` prints.

    Parameters are counts, FLOPs are training FLOPs (forward and backward) per token, sizes are bytes. Multi-token
    prediction is kept apart in `mtp`, as published totals keep it.
    """
    from moesaic.cost.counts import checkpoint_bytes, flops_per_token, parameters
    from moesaic.spec.presets import PRESETS

    counts, flops = parameters(spec), flops_per_token(spec, seq_len)
    facts: dict[str, Any] = {
        "name": spec.name,
        "family": spec.family,
        "layers": len(spec.layers),
        "moe_layers": len(spec.moe_layers),
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "parameters": {"total": counts.total, "active": counts.active, "by_part": counts.by_part},
        "seq_len": seq_len,
        "flops_per_token": {"total": flops.total, "by_part": flops.by_part, "excluded": flops.excluded},
        "checkpoint_bytes": checkpoint_bytes(spec),
        "mtp": None,
        "notes": list(spec.notes),
        "source": PRESETS.get(spec.name, {}).get("source"),
    }
    if spec.learned_positions and seq_len > spec.max_positions:
        facts["notes"].append(f"{seq_len} tokens are more than the {spec.max_positions} positions it has learned")
    if spec.mtp:
        facts["mtp"] = {
            "blocks": len(spec.mtp),
            "parameters": counts.mtp,
            "flops_per_token": flops_per_token(spec, seq_len, mtp=True).by_part["mtp"],
            "checkpoint_bytes": checkpoint_bytes(spec, mtp=True) - facts["checkpoint_bytes"],
        }
    return facts


def _list(as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from moesaic.cost.counts import parameters
    from moesaic.spec.families import load_model_spec
    from moesaic.spec.presets import PRESETS

    if as_json:
        print(json.dumps(list(PRESETS), indent=2))
        return
    table = Table("preset", "family", box=None, header_style="bold", pad_edge=False)
    table.add_column("parameters", justify="right")
    table.add_column("used by a token", justify="right")
    for name in PRESETS:
        spec = load_model_spec(name)
        counts = parameters(spec)
        table.add_row(name, spec.family, _count(counts.total), _count(counts.active))
    Console().print(table)


def _show(spec: ModelSpec, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    parts, flops = facts["parameters"], facts["flops_per_token"]
    console.print(Text(f"{spec.name}  ({spec.family})", style="bold"))
    console.print(Text("\n".join(_architecture(spec))))
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("part")
    for header in ("parameters", "share", "FLOPs per token", "share"):
        table.add_column(header, justify="right")
    for part in dict.fromkeys([*parts["by_part"], *flops["by_part"]]):
        count, work = parts["by_part"].get(part), flops["by_part"].get(part)
        table.add_row(
            part.replace("_", " "),
            "" if count is None else _count(count),
            "" if count is None else f"{count / parts['total']:.1%}",
            "" if work is None else _flops(work),
            "" if work is None else f"{work / flops['total']:.1%}",
        )
    table.add_row("total", _count(parts["total"]), "", _flops(flops["total"]), "", style="bold")
    table.add_row("used by a token", _count(parts["active"]), f"{parts['active'] / parts['total']:.1%}", "", "")
    console.print(table)
    console.print()
    lines = [
        f"FLOPs are training FLOPs at {facts['seq_len']} tokens per sequence, attention counted causally.",
        f"A bf16 checkpoint takes {_bytes(facts['checkpoint_bytes'])}.",
    ]
    if flops["excluded"].get("router"):
        lines[0] += f" Routers ({_flops(flops['excluded']['router'])}) are left out, as published numbers do."
    if facts["mtp"]:
        mtp = facts["mtp"]
        blocks = "block" if mtp["blocks"] == 1 else "blocks"
        lines.append(
            f"Multi-token prediction ({mtp['blocks']} {blocks}) adds {_count(mtp['parameters'])} parameters, "
            f"{_flops(mtp['flops_per_token'])} per token and {_bytes(mtp['checkpoint_bytes'])}."
        )
    lines += [f"Note: {note}." for note in facts["notes"]]
    if facts["source"]:
        lines.append(f"Source: {facts['source']}.")
    console.print(Text("\n".join(lines)))


def _architecture(spec: ModelSpec) -> list[str]:
    attention = spec.layers[0].attention
    if attention.kind == "mla":
        heads = f"{attention.heads} latent heads (rank {attention.q_rank or 'none'}/{attention.kv_rank})"
    else:
        heads = f"{attention.heads} heads, {attention.kv_heads} key/value heads of {attention.head_dim}"
    lines = [f"{len(spec.layers)} layers of width {spec.hidden}, {heads}, vocabulary {spec.vocab}"]
    sparse = [layer.moe for layer in spec.layers if layer.moe is not None]
    if not sparse:
        return lines
    experts = sorted({moe.router.experts for moe in sparse})
    top_k = sorted({moe.router.top_k for moe in sparse})
    shared = sorted({moe.shared.width for moe in sparse if moe.shared is not None})
    text = (
        f"{len(sparse)} sparse layers with {_several(experts)} experts of width "
        f"{_several(sorted({moe.expert.width for moe in sparse}))}, top-{_several(top_k)}"
    )
    if shared:
        text += f", and a shared expert of width {_several(shared)}"
    return [*lines, text]


def _several(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


def _count(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f}"


def _flops(count: float) -> str:
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} FLOP"


def _bytes(count: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"
