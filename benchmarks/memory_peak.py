"""What training takes of a processor's memory, and what recomputing modules saves and costs, beside the prediction.

    python -m benchmarks.memory_peak [--sets none layernorm sar full …] [--steps 4] [--malloc back kept]
                                     [--cluster FILE] [--out FILE.json]

Every set of modules trains the same few steps in a process of its own, round after round in turn. Resident memory is
the process's highest (`ru_maxrss`) less that of an idle one, which trains a model of nearly no size. Predicted are
`train.resident` less the idle model's, and, with a cluster file of `moesaic calibrate`, seconds of `cost.step`.

`back`: malloc gives freed blocks back (`train.tune_malloc = false`), so that what is resident is what is in use;
`kept`: it keeps them, as training does by default, and what is resident beyond `back` is gaps of the heap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import Columns
from moesaic.report.read import read_run
from moesaic.spec.cluster import load_cluster
from moesaic.spec.layout import resolve_layout
from moesaic.spec.run import RunSpec, parse_run
from moesaic.spec.toml import write_toml
from moesaic.train import process
from moesaic.train.predicted import workload
from moesaic.train.resident import resident

SETS = ["none", "layernorm", "core_attn", "mla_up_proj", "mlp", "shared_experts", "sar", "moe", "full"]
MIB = 2**20
Tables = dict[str, dict[str, Any]]


def tables(text: str, recompute: str, steps: int, idle: bool, malloc: str = "back") -> Tables:
    """A run file: a model in the manner of DeepSeek-V3 that keeps several times its states, or one of no size."""
    layers, hidden, seq_len = (1, 16, 16) if idle else (6, 256, 4096)
    return {
        "model": {
            "model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": hidden, "num_hidden_layers": layers,
            "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96,
            "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
            "intermediate_size": 16 if idle else 1024, "moe_intermediate_size": 16 if idle else 256,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 2,
            "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
            "max_position_embeddings": 4096,
        },
        "data": {"path": text, "tokenizer": "bytes"},
        "layout": {"recompute": "none" if recompute == "none" else recompute.split("+")},
        "train": {"steps": steps, "seq_len": seq_len, "global_batch": 2, "checkpoint_every": steps, "log_every": 1,
                  "eval_batches": 1, "tune_malloc": malloc == "kept"},
        "run": {"name": "peak"},
    }  # fmt: skip


def trained(keys: Tables, folder: Path) -> tuple[float, float]:
    """Highest resident bytes of a process that trains, and seconds of the median step but the first."""
    folder.mkdir(parents=True)
    keys = keys | {"run": {"dir": str(folder / "run")}}
    source = folder / "run.toml"
    source.write_text(write_toml(keys))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "moesaic", "train", str(source)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
    )
    _, status, usage = os.wait4(child, 0)
    os.close(log)
    if status:
        sys.exit(f"training failed: {(folder / 'log').read_text()[-600:]}")
    seconds = [value for _, value in read_run(folder / "run").series("seconds")]
    return usage.ru_maxrss * 1024.0, statistics.median(seconds[1:])


def measure(sets: list[str], steps: int, rounds: int, cluster: str | None, malloc: list[str]) -> dict[str, Any]:
    """Rows by set and what malloc does, each with lists over the rounds."""
    with tempfile.TemporaryDirectory(prefix="moesaic-peak-") as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(20_000)))
        idle = tables(str(text), "none", steps, True)
        cases = [(each, kind) for each in sets for kind in malloc]
        rows: dict[str, Any] = {f"{each}, {kind}": {"resident": [], "seconds": []} for each, kind in cases}
        base: list[float] = []
        for turn in range(rounds):
            base.append(trained(idle, folder / f"idle-{turn}")[0])
            for each, kind in cases:
                keys = tables(str(text), each, steps, False, kind)
                found, seconds = trained(keys, folder / f"{each}-{kind}-{turn}")
                rows[f"{each}, {kind}"]["resident"].append(found)
                rows[f"{each}, {kind}"]["seconds"].append(seconds)
                print(f"{each}, {kind}: {found / MIB:,.0f} MiB, {seconds:.2f} s a step", file=sys.stderr)
        least = _predicted(parse_run(idle))
        for each, kind in cases:
            run = parse_run(tables(str(text), each, steps, False))
            rows[f"{each}, {kind}"]["predicted"] = _predicted(run) - least
            rows[f"{each}, {kind}"]["predicted_seconds"] = _seconds(run, cluster) if cluster else None
    return {"idle": base, "rows": rows}


def _predicted(run: RunSpec) -> float:
    layout = resolve_layout(run.layout, run.model_spec(), 1, seq_len=run.train.seq_len, global_batch=2)
    return resident(run, run.model_spec(), layout, process.set_threads(0))[0].peak


def _seconds(run: RunSpec, cluster: str) -> float:
    spec = load_cluster(cluster)
    layout = resolve_layout(run.layout, run.model_spec(), 1, seq_len=run.train.seq_len, global_batch=2)
    columns = Columns.of([layout])
    return float(step_time(workload(run, run.model_spec()), columns, spec, rates_for(spec, Stack("moesaic"))).total[0])


def table(found: dict[str, Any]) -> list[str]:
    """Markdown."""
    idle, rows = statistics.median(found["idle"]), found["rows"]
    whole = next((row for name, row in rows.items() if name.startswith("none")), None)
    lines = [
        "| recompute, malloc | predicted MiB | resident MiB | ratio | s / step | over none | predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        resident, seconds = statistics.median(row["resident"]) - idle, statistics.median(row["seconds"])
        again = seconds / statistics.median(whole["seconds"]) if whole else float("nan")
        priced = row["predicted_seconds"]
        said = f"{priced / whole['predicted_seconds']:.3f}" if priced and whole else ""
        lines.append(
            f"| {name} | {row['predicted'] / MIB:,.0f} | {resident / MIB:,.0f} | {resident / row['predicted']:.3f} | "
            f"{seconds:.2f} | {again:.3f} | {said} |"
        )
    return lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=SETS, help="modules to recompute, joined by +; none, sar, full")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--malloc", nargs="+", default=["back"], choices=("back", "kept"), help="see above")
    parser.add_argument("--cluster", help="file of moesaic calibrate, for predicted seconds")
    parser.add_argument("--out", type=Path, help="where to keep what was measured, as JSON")
    asked = parser.parse_args()
    found = measure(asked.sets, asked.steps, asked.rounds, asked.cluster, asked.malloc)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
