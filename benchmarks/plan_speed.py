"""How many layouts a second the planner prices.

    python -m benchmarks.plan_speed [--model deepseek-v3] [--gpus 2048] [--layouts 100000]

All legal layouts of the model and GPUs, with several micro-batches, pipelines and recompute sets, are written as
columns first; only pricing them is timed. The best of three rounds counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from moesaic.cost.memory import memory
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import step_time
from moesaic.cost.workload import RECOMPUTE, Columns, Workload, bits
from moesaic.plan.search import Question, search
from moesaic.spec.cluster import load_cluster
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, legal_layouts
from moesaic.spec.tables import LayoutTable

RECOMPUTED = ((), ("moe_act",), ("layernorm", "moe_act"), ("mla_up_proj", "mlp"), ("moe",), ("full",))


def layouts(work: Workload, gpus: int) -> Iterator[Layout]:
    """Legal layouts over degrees, virtual stages, micro-batches and dispatchers."""
    for virtual, micro, dispatcher in itertools.product((1, 2, 4), (1, 2, 4), ("alltoall", "allgather")):
        options = {"sharding": "optimizer", "virtual_stages": virtual, "micro_batch": micro, "dispatcher": dispatcher}
        yield from legal_layouts(
            work.model,
            gpus,
            seq_len=work.seq_len,
            global_batch=work.global_batch,
            table=LayoutTable.model_validate(options),
            tp=8,
            pp=32,
        )


def repeated(columns: Columns, count: int) -> Columns:
    """`count` layouts: the given ones under every recompute set, in turn until there are enough."""
    rows = np.arange(count) % len(columns)
    sets = np.array([bits(RECOMPUTE, names) for names in RECOMPUTED])
    found = columns.take(rows)
    return replace(found, recompute=sets[np.arange(count) // len(columns) % len(sets)])


def rates(price: Callable[[], Any], count: int, rounds: int = 3) -> str:
    """Layouts a second by the clock and by processor time, the best of `rounds`; other work on the machine slows only
    the clock."""
    seconds, processor = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        price()
        seconds.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return f"{count / min(seconds):,.0f} layouts/s, {count / min(processor):,.0f} a second of one core"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpus", type=int, default=2048)
    parser.add_argument("--layouts", type=int, default=100_000)
    options = parser.parse_args()
    work = Workload(load_model_spec(options.model), 4096, 16384)
    start = time.perf_counter()
    found = list(layouts(work, options.gpus))
    columns = repeated(Columns.of(found), options.layouts)
    listed = time.perf_counter() - start
    print(f"{options.model} on {options.gpus} GPUs: {len(found)} legal layouts listed in {listed:.1f} s,")
    print(f"priced as {len(columns)} with recompute sets, {len(columns.stage_lists)} stage lists")
    cluster = load_cluster(options.gpu, options.gpus)
    shares = rates_for(cluster, Stack())
    print(f"memory: {rates(lambda: memory(work, columns), len(columns))}")
    print(f"time: {rates(lambda: step_time(work, columns, cluster, shares), len(columns))}")
    print(f"both: {rates(lambda: (memory(work, columns), step_time(work, columns, cluster, shares)), len(columns))}")
    size = sum(getattr(columns, f.name).nbytes for f in fields(columns) if f.name != "stage_lists")
    print(f"columns: {size / len(columns):.0f} bytes a layout")
    searched(Question(work, cluster))
    asked(["plan", "mixtral-8x7b", "--gpus", "8", "--json"])


def searched(question: Question) -> None:
    """Prints what one search over all dimensions takes."""
    start = time.perf_counter(), time.process_time()
    result = search(question)
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    print(f"search: {result.searched:,} layouts priced in {wall:.1f} s, {processor:.1f} s of one core")


def asked(arguments: list[str]) -> None:
    """Prints what a whole process takes for a small question, the best of three."""
    walls, processors = [], []
    for _ in range(3):
        before, start = os.times(), time.perf_counter()
        subprocess.run([sys.executable, "-m", "moesaic", *arguments], check=True, capture_output=True)
        after = os.times()
        walls.append(time.perf_counter() - start)
        processors.append(after.children_user + after.children_system - before.children_user - before.children_system)
    print(f"moesaic {' '.join(arguments)}: {min(walls):.2f} s, {min(processors):.2f} s of one core")


if __name__ == "__main__":
    main()
