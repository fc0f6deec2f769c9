"""How much communication hides: training steps on two emulated hosts, with and without overlap, over link speeds.

    python -m benchmarks.overlap --links 100mbit 200mbit 400mbit none --json benchmarks/results/overlap.json

For each link, steps without overlap and with each set of words take turns in one run. From a trace of the messages:
`travelling` is the time in which any message to experts or back was on its way (a union of intervals), `waiting` how
much of that the rank stood still. Hidden is 1 − waiting/travelling. The bound is max(compute, communication) of the
plain step, where communication is its `travelling` and the sums of gradients (`others`), and compute the rest of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import ClusterError, cluster

ROOT = Path(__file__).resolve().parents[1]
MODES: dict[str, list[str]] = {
    "none": [],
    "inside": ["inside"],
    "experts": ["experts"],
    "experts, weight_gradients": ["experts", "weight_gradients"],
    "experts, weight_gradients, gradients": ["experts", "weight_gradients", "gradients"],
    "inside, experts, weight_gradients": ["inside", "experts", "weight_gradients"],
    "inside, experts, weight_gradients, gradients": ["inside", "experts", "weight_gradients", "gradients"],
}


def rows(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row per set of words: medians over its steps, and the ratios to the plain step."""
    middle = {
        name: {key: median(step[key] for step in steps) for key in steps[0]} for name, steps in found.items() if steps
    }
    plain = middle["none"]
    communication = plain["travelling"] + plain["others"]
    compute = plain["own"] - plain["waiting"] - plain["others"]
    bound = max(compute, communication)
    return [
        {
            "overlap": name,
            "seconds": each["seconds"],
            "faster": plain["seconds"] / each["seconds"],
            "travelling": each["travelling"],
            "waiting": each["waiting"],
            "hidden": 1 - each["waiting"] / each["travelling"],
            "of_bound": each["seconds"] / bound,
            "communication_share": communication / plain["seconds"],
        }
        for name, each in middle.items()
    ]


def table(link: str, made: list[dict[str, Any]]) -> str:
    """Markdown."""
    share = made[0]["communication_share"]
    lines = [
        f"Link {link}: communication is {share:.0%} of the plain step",
        "",
        "| overlap | step s | plain / this | on its way s | waiting s | hidden | step / bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['overlap']} | {row['seconds']:.3f} | {row['faster']:.2f} | {row['travelling']:.3f} | "
        f"{row['waiting']:.3f} | {row['hidden']:.0%} | {row['of_bound']:.2f} |"
        for row in made
    ]
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", default=["200mbit"], help='as tc writes rates, or "none"')
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--dispatcher", default="alltoall")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    task = {key: getattr(args, key) for key in ("hidden", "ffn", "experts", "topk", "layers", "seq", "turns")}
    task |= {"micro_batches": args.micro_batches, "dispatcher": args.dispatcher}
    task["modes"] = {name: MODES[name] for name in dict.fromkeys(["none", *args.modes])}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["OMP_NUM_THREADS"] = "1"
    kept = []
    try:
        with cluster(2, 1, args.links[0]) as up:
            for link in args.links:
                up.set_link(link)
                said = "".join(
                    up.torchrun(["-m", "benchmarks.overlap_rank", json.dumps(task)], cwd=ROOT, timeout=900.0)
                )
                found = json.loads(said.split("RESULT ")[1].splitlines()[0])
                made = rows(found)
                kept.append({"link": link, "task": task, "steps": found, "rows": made})
                print(table(link, made) + "\n", flush=True)
    except ClusterError as error:
        print(f"skipped: {error}" if not kept else f"benchmarks.overlap: {error}")
        return 0 if not kept else 1
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
