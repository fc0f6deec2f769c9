"""The head of a report: what the run was and how it ended, in words and numbers."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from pydantic import ValidationError

from moesaic.cost.counts import parameters
from moesaic.report.balance import final_loads
from moesaic.report.numbers import duration, gib, short
from moesaic.report.read import RunRecord
from moesaic.spec.errors import MoesaicError
from moesaic.spec.layout import written
from moesaic.spec.tables import LayoutTable

HEAVY = 3.0
"""Busiest expert over mean from which a report speaks of imbalance."""


def headline(record: RunRecord) -> str:
    """Title, run facts in one line, and the outcome in one sentence."""
    parts = [
        record.model.name if record.model else "",
        _parameters(record),
        _layout(record),
        f"{record.rows[-1]['step']} steps",
        f"{short(_tokens(record))} tokens",
        duration(_seconds(record)),
    ]
    line = " · ".join(escape(part) for part in parts if part)
    return f'<header><h1>{escape(record.title)}</h1><p>{line}</p><p class="lead">{escape(outcome(record))}</p></header>'


def outcome(record: RunRecord) -> str:
    """What the run reached, beside its baselines where it has them."""
    held = record.series("validation_loss")
    train = record.series("loss")
    if held:
        text = f"Held-out loss {held[-1][1]:.3f} nats per token after {int(record.rows[-1]['step'])} steps"
        bits = record.last("validation_bits_per_byte")
        text += f" ({bits:.3f} bits per byte)" if bits is not None else ""
    elif train:
        return f"Training loss went from {train[0][1]:.3f} to {train[-1][1]:.3f} nats per token; nothing was held out."
    else:
        return "No finite loss was recorded."
    below = [
        f"{name} {float(table['loss']):.3f}"
        for name in ("bigram", "unigram")
        if isinstance(table := record.baselines.get(name), dict) and "loss" in table
    ]
    return text + (f"; counting alone reaches {' and '.join(below)}." if below else ".")


def warnings(record: RunRecord) -> str:
    """What a reader should know before trusting the curves."""
    texts = list(record.warnings)
    bad = [row["step"] for row in record.rows if _not_finite(row.get("loss"))]
    if bad:
        texts.append(f"The loss was not finite at step {bad[0]}.")
    dead = dead_experts(record)
    if dead:
        texts.append(f"{len(dead)} experts got no token in the last steps: " + ", ".join(dead[:12]) + ".")
    worst = max(
        ((max(load) / (sum(load) / len(load)), layer) for layer, load in final_loads(record) if sum(load)), default=None
    )
    if worst and worst[0] >= HEAVY:
        texts.append(f"Layer {worst[1]} is unbalanced: its busiest expert gets {worst[0]:.1f} × the mean.")
    dropped = sum(value for _, value in record.series("dropped_tokens"))
    if dropped:
        texts.append(f"{short(dropped)} tokens were dropped.")
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in texts)


def dead_experts(record: RunRecord) -> list[str]:
    """'layer 3 expert 5' for every expert without a token over the last tenth of the steps."""
    return [
        f"layer {layer} expert {expert}"
        for layer, load in final_loads(record)
        for expert, count in enumerate(load)
        if count == 0
    ]


def tiles(record: RunRecord) -> str:
    """The numbers that people look for first."""
    items: list[tuple[str, str, str]] = []
    held, bits = record.last("validation_loss"), record.last("validation_bits_per_byte")
    bigram = record.baselines.get("bigram", {})
    if held is not None:
        better = isinstance(bigram, dict) and "loss" in bigram and held < float(bigram["loss"])
        items.append((f"{held:.3f}", "held-out loss, nats/token", "good" if better else ""))
    elif (loss := record.last("loss")) is not None:
        items.append((f"{loss:.3f}", "last training loss, nats/token", ""))
    if bits is not None:
        items.append((f"{bits:.3f}", "held-out bits per byte", ""))
    loads = final_loads(record)
    if loads:
        total, dead = sum(len(load) for _, load in loads), len(dead_experts(record))
        items.append((f"{total - dead} of {total}", "experts alive at the end", "bad" if dead else "good"))
        ratios = [max(load) * len(load) / sum(load) for _, load in loads if sum(load)]
        items.append(
            (f"{max(ratios):.2f}", "busiest expert / mean, worst layer", "bad" if max(ratios) >= HEAVY else "")
        )
    speeds = sorted(value for _, value in record.series("tokens_per_second"))
    if speeds:
        items.append((short(speeds[len(speeds) // 2]), "tokens per second, median", ""))
    shares = sorted(value for _, value in record.series("matmul_share"))
    if shares:
        items.append((f"{shares[len(shares) // 2]:.0%}", "of the measured matmul rate", ""))
    memory = max((value for _, value in record.series("peak_memory_bytes")), default=None)
    if memory is not None:
        items.append((gib(memory), "most memory", ""))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for value, name, kind in items
        )
        + "</div>"
    )


def fact_table(record: RunRecord) -> str:
    """Model, data, training and machine as a two-column table."""
    model, data = record.run.get("model", {}), record.run.get("data", {})
    train = record.run.get("train", {})
    rows = [
        ("Model", record.model.name if record.model else model.get("preset") or model.get("model_type")),
        ("Parameters", _parameters(record)),
        ("Experts", _experts(record)),
        ("Layout", _layout(record)),
        ("Data", data.get("path")),
        ("Tokenizer", data.get("tokenizer")),
        ("Batch", _batch(train)),
        ("Numbers", train.get("dtype")),
        ("Moments", "bf16" if train.get("moment_dtype") == "bf16" else ""),
        ("Compressed", ", ".join(record.rows[-1].get("compression", ())) if record.rows else ""),
        ("Seed", train.get("seed")),
        ("Tokens trained", short(_tokens(record), 4)),
        ("Time", duration(_seconds(record))),
        ("Plain matmul here", _matmul_rate(record)),
        ("Started as", record.first_words),
        ("Folder", str(record.folder.resolve())),
    ]
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in rows
        if value not in (None, "", "–")
    )
    return f'<table class="facts">{body}</table>'


def _not_finite(value: Any) -> bool:
    return value is not None and not (isinstance(value, (int, float)) and math.isfinite(value))


def _tokens(record: RunRecord) -> float | None:
    return record.last("total_tokens") or sum(value for _, value in record.series("tokens")) or None


def _seconds(record: RunRecord) -> float | None:
    return record.last("elapsed") or sum(value for _, value in record.series("seconds")) or None


def _parameters(record: RunRecord) -> str:
    if record.model is None:
        return ""
    counts = parameters(record.model)
    return f"{short(counts.total)} parameters, {short(counts.active)} active per token"


def _experts(record: RunRecord) -> str:
    if record.model is None or not record.model.moe_layers:
        return ""
    kinds = dict.fromkeys(
        f"{layer.moe.router.experts} of width {layer.moe.expert.width}, {layer.moe.router.top_k} per token"
        for layer in record.model.layers
        if layer.moe is not None
    )
    return f"{'; '.join(kinds)}; in {len(record.model.moe_layers)} of {len(record.model.layers)} layers"


def _layout(record: RunRecord) -> str:
    try:
        return written(LayoutTable.model_validate(record.run.get("layout", {})), dp=1)
    except (MoesaicError, ValidationError):
        return ""


def _batch(train: dict[str, Any]) -> str:
    if "global_batch" not in train or "seq_len" not in train:
        return ""
    return f"{train['global_batch']} sequences of {train['seq_len']} tokens"


def _matmul_rate(record: RunRecord) -> str:
    rate, share = record.last("model_flops_per_second"), record.last("matmul_share")
    return f"{short(rate / share)}FLOP/s" if rate and share else ""
