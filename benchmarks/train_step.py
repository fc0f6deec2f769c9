"""A whole training step of a 243 M-parameter MoE decoder of moesaic beside those of other projects.

    python benchmarks/peers/make_envs.py          # once: the peers' environments
    python benchmarks/train_step.py               # fp32 and bf16, tuned and stock malloc

Forward, cross entropy, backward, clipping at 1.0, fused AdamW, gradients cleared. Peers keep parameters, gradients and
optimizer state in the stated dtype. moesaic takes the step of `moesaic train`: in bf16 it keeps fp32 masters and
fp32 moments besides, which its time and memory include. `docs/benchmarks.md` says how to read the numbers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.options import parser, plan_of, selected_peers
from benchmarks.peers.workload import StepShape
from benchmarks.rounds import Cell, Workers, run_cell


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--seq", type=int, default=1024)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--vocab", type=int, default=32000)
    args = options.parse_args(arguments)
    shape = replace(StepShape(), layers=args.layers, seq=args.seq, batch=args.batch, vocab=args.vocab)
    peers, plan = selected_peers(args, "step"), plan_of(args, alive=False)
    started, cells = datetime.now(), []
    with Workers(plan) as workers:
        for malloc in args.malloc:
            for dtype in args.dtypes:
                cell = Cell("step", shape, dtype, malloc)
                cells.append(cell)
                print(tables.heading(cell), flush=True)
                try:
                    run_cell(cell, peers, workers, lambda line: print(line, flush=True))
                finally:  # a run that is stopped keeps what it has
                    tables.save(cells, started, args.json, args.markdown)
                print(tables.text(cell), flush=True)
            workers.forget(malloc)


if __name__ == "__main__":
    main()
