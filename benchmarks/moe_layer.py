"""One MoE layer, forward and backward, of moesaic beside those of other projects.

    python benchmarks/peers/make_envs.py          # once: the peers' environments
    python benchmarks/moe_layer.py                # everything: three shapes, fp32 and bf16, stock and tuned malloc
    python benchmarks/moe_layer.py --shapes 512,512,16,2,4096 --dtypes fp32 --peers moesaic,hf_grouped

Every peer gets the same weights and the same x, and its output is compared with the layer's definition before it is
timed. `docs/benchmarks.md` says what is measured and how to read it.
"""

from __future__ import annotations

import itertools
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.options import layer_shape, parser, plan_of, selected_peers
from benchmarks.peers.workload import LAYER_SHAPES
from benchmarks.rounds import Cell, Workers, run_cell


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--shapes", nargs="+", type=layer_shape, default=list(LAYER_SHAPES), help="D,F,E,K,T (default: three shapes)"
    )
    args = options.parse_args(arguments)
    peers, plan = selected_peers(args, "layer"), plan_of(args, alive=True)
    started, cells = datetime.now(), []
    with Workers(plan) as workers:
        for malloc in args.malloc:
            for dtype, shape in itertools.product(args.dtypes, args.shapes):
                cell = Cell("layer", shape, dtype, malloc)
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
