"""Every legal layout of one model on a few ranks, beside what other projects make of the layouts that they run here.

    python benchmarks/peers/make_envs.py                       # once: the peers' environments
    python benchmarks/folding.py --ranks 2 4 --out out.md      # one MoE layer under EP, then whole steps in all layouts
    python benchmarks/folding.py --works step --ranks 4 --layouts "dp4 / ep4" "dp2 tp2 / ep4" --peers moesaic,hf

Ranks are processes under torchrun with gloo, fp32, one thread each. In a layer every rank has tokens of its own, every
peer has the same weights, and its output and x's gradient are compared with the layer's definition before it is timed.
In a step all ranks share one batch. Peers take turns, round after round. `docs/benchmarks.md` says how to read it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import folding_tables as tables
from benchmarks.options import layer_shape
from benchmarks.peers.parallel.registry import PARALLEL_PEERS, Degrees, ParallelPeer, all_degrees, parse_degrees
from benchmarks.peers.registry import DEFAULT_ENVS
from benchmarks.peers.workload import LayerShape, StepShape
from benchmarks.rounds import MALLOC
from benchmarks.teams import ParallelCell, Plan, Teams, run_cell

LAYER = LayerShape(1024, 512, 32, 4, 2048)
STEP = StepShape(hidden=512, ffn=512, experts=8, topk=2, layers=4, heads=8, vocab=8192, seq=256, batch=8)


def peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PARALLEL_PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer named {', '.join(unknown)}; there are {', '.join(PARALLEL_PEERS)}")
    return names


def legal(shape: StepShape, degrees: Degrees, variant: str = "") -> str:
    """Why moesaic refuses this layout for the model; empty where it is legal."""
    from benchmarks.peers.parallel.ours import layout_of
    from moesaic.spec.errors import SpecError

    if shape.batch % degrees.dp:
        return f"{shape.batch} sequences do not divide by dp = {degrees.dp}"
    try:
        layout_of(shape, degrees, variant)
    except SpecError as error:
        return str(error)
    return ""


def step_cells(shape: StepShape, ranks: int, wanted: list[str]) -> Iterator[ParallelCell]:
    """One cell per layout: those that are asked for, or all that are legal with either way to split a sequence."""
    layouts = [parse_degrees(text, ranks) for text in wanted] or all_degrees(ranks)
    for degrees in layouts:
        reasons = [legal(shape, degrees, variant) for variant in ("", "ring")[: 1 + (degrees.cp > 1)]]
        if wanted or not all(reasons):
            yield ParallelCell("step", shape, degrees)


def layer_cells(shape: LayerShape, ranks: int) -> Iterator[ParallelCell]:
    """One cell: the experts over all ranks."""
    if shape.experts % ranks == 0:
        yield ParallelCell("layer", shape, Degrees(dp=ranks, ep=ranks))


def peers_of(cell: ParallelCell, names: list[str]) -> list[ParallelPeer]:
    """The peers of a cell; a layout that moesaic's own variants refuse becomes their reason."""
    peers = [PARALLEL_PEERS[name] for name in names if cell.work in PARALLEL_PEERS[name].works]
    if not isinstance(cell.shape, StepShape):
        return peers
    shape = cell.shape

    def refusing(peer: ParallelPeer) -> ParallelPeer:
        def misfit(degrees: Degrees) -> str:
            return peer.misfit(degrees) or legal(shape, degrees, peer.variant)

        return replace(peer, misfit=misfit) if peer.adapter == "ours" else peer

    return [refusing(peer) for peer in peers]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--ranks", nargs="+", type=int, default=[2, 4], help="numbers of processes (default 2 4)")
    add("--works", nargs="+", choices=("layer", "step"), default=["layer", "step"])
    add("--layouts", nargs="+", default=[], help="as 'dp2 tp2 / ep4' (default: all legal ones)")
    add("--peers", type=peer_names, default=list(PARALLEL_PEERS), help=f"of {', '.join(PARALLEL_PEERS)}")
    add("--layer-shape", type=layer_shape, default=LAYER, help="D,F,E,K,T with T tokens per rank")
    for name in ("hidden", "ffn", "experts", "topk", "layers", "heads", "vocab", "seq", "batch"):
        add(f"--{name}", type=int, default=getattr(STEP, name), help=f"of the step's model ({getattr(STEP, name)})")
    add("--rounds", type=int, default=3, help="times that each peer gets its turn (default 3)")
    add("--iters", type=int, default=5, help="most iterations in a turn, after one that warms up (default 5)")
    add("--turn-seconds", type=float, default=6.0, help="no more iterations in a turn than fit into this (default 6)")
    add("--limit-seconds", type=float, default=120.0, help="longest iteration; slower peers are stopped (default 120)")
    add("--threads", type=int, default=1, help="of each rank (default 1)")
    add("--malloc", choices=tuple(MALLOC), default="tuned", help="glibc's malloc, the same for all (default tuned)")
    add("--envs", type=Path, default=DEFAULT_ENVS, help=f"the peers' environments (default {DEFAULT_ENVS})")
    add("--logs", type=Path, default=None, help="folder for what the peers print (default: a temporary one)")
    add("--json", type=Path, default=None, help="write all numbers here")
    add("--out", type=Path, default=None, help="write the tables here, as Markdown")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser()
    args = options.parse_args(arguments)
    fields = ("hidden", "ffn", "experts", "topk", "layers", "heads", "vocab", "seq", "batch")
    shape = StepShape(**{name: getattr(args, name) for name in fields})
    cells: list[ParallelCell] = []
    for ranks in args.ranks:
        try:
            cells += layer_cells(args.layer_shape, ranks) if "layer" in args.works else ()
            cells += step_cells(shape, ranks, args.layouts) if "step" in args.works else ()
        except ValueError as error:
            options.error(str(error))
    logs = args.logs or Path(tempfile.mkdtemp(prefix="moesaic-folding-"))
    logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        rounds=args.rounds,
        iters=args.iters,
        turn_seconds=args.turn_seconds,
        limit_seconds=args.limit_seconds,
        threads=args.threads,
        malloc=args.malloc,
        envs=args.envs,
        logs=logs,
    )
    started, done = datetime.now(), []
    with Teams(plan) as teams:
        for number, cell in enumerate(cells, 1):
            if done and done[-1].degrees.world != cell.degrees.world:
                teams.stop()  # teams of another size only hold memory
            print(f"[{number}/{len(cells)}] {tables.heading(cell)}", flush=True)
            done.append(cell)
            try:
                run_cell(cell, peers_of(cell, args.peers), teams, lambda line: print(line, flush=True))
            finally:  # a run that is stopped keeps what it has
                tables.save(done, plan, started, args.json, args.out)
    print(tables.text(done))


if __name__ == "__main__":
    main()
