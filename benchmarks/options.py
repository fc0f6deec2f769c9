"""The command line that both benchmarks share."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.peers.registry import DEFAULT_ENVS, PEERS, Peer
from benchmarks.peers.workload import LayerShape
from benchmarks.rounds import MALLOC, Plan


def layer_shape(text: str) -> LayerShape:
    """D,F,E,K,T → LayerShape; raises ArgumentTypeError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
        shape = LayerShape(*numbers)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not D,F,E,K,T: five whole numbers, as 512,512,16,2,4096"
        ) from None
    if min(numbers) < 1 or shape.topk > shape.experts:
        raise argparse.ArgumentTypeError(f"{text!r}: all five are at least 1, and K is at most E")
    return shape


def peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer named {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return names


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--malloc", nargs="+", choices=tuple(MALLOC), default=list(MALLOC))
    add("--peers", type=peer_names, default=list(PEERS), help=f"comma separated, of {', '.join(PEERS)}")
    add("--rounds", type=int, default=3, help="times that each peer gets its turn (default 3)")
    add("--iters", type=int, default=5, help="most iterations in a turn (default 5)")
    add("--turn-seconds", type=float, default=3.0, help="no new iteration in a turn after this (default 3)")
    add(
        "--limit-seconds",
        type=float,
        default=120.0,
        help="longest iteration; a peer that needs more is stopped (default 120)",
    )
    add(
        "--limit-times",
        type=float,
        default=0.0,
        help="also stop a peer after this many times moesaic's seconds, at least 5 s (default: never)",
    )
    add("--profile", type=peer_names, default=[], help="peers to run once more under torch's profiler after the rounds")
    add("--threads", type=int, default=2)
    add("--envs", type=Path, default=DEFAULT_ENVS, help=f"the peers' environments (default {DEFAULT_ENVS})")
    add("--logs", type=Path, default=None, help="folder for what the peers print (default: a temporary one)")
    add("--json", type=Path, default=None, help="write all numbers here")
    add("--markdown", type=Path, default=None, help="write the tables here")
    return options


def plan_of(args: argparse.Namespace, alive: bool) -> Plan:
    logs = args.logs or Path(tempfile.mkdtemp(prefix="moesaic-benchmark-"))
    logs.mkdir(parents=True, exist_ok=True)
    return Plan(
        rounds=args.rounds,
        iters=args.iters,
        turn_seconds=args.turn_seconds,
        limit_seconds=args.limit_seconds,
        limit_times=args.limit_times,
        threads=args.threads,
        alive=alive,
        profile=tuple(args.profile),
        envs=args.envs,
        logs=logs,
    )


def selected_peers(args: argparse.Namespace, work: str) -> list[Peer]:
    return [PEERS[name] for name in args.peers if work in PEERS[name].works]
