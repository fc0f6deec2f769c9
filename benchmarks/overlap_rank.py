"""One rank of `benchmarks.overlap`: times training steps of a small model with and without overlap, in turns.

Started by torchrun. Rank 0 writes one JSON line: for each set of words the seconds of each step, and from a trace of
the messages how long any was on its way and how much of that this rank spent waiting for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moesaic.mesh import messages
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.state import TrainState
from moesaic.train.step import train_step
from moesaic.tune.modules import experts

Interval = tuple[float, float]


class Trace:
    """Intervals of messages on their way and of waiting for them, on this rank.

    `travelling` and `waiting` are of messages to experts and back, `others` on their way of all the rest: sums of
    gradients at the end of a step.
    """

    def __init__(self) -> None:
        self.travelling: list[Interval] = []
        self.waiting: list[Interval] = []
        self.others: list[Interval] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Watch all exchanges between ranks from now on."""
        real = messages.exchange

        def watched(pieces: Any, places: Any, group: Any) -> Any:
            start = time.perf_counter()
            work = real(pieces, places, group)
            to_experts = group.name.startswith("ep")
            to = self.travelling if to_experts else self.others
            work.watched(lambda: self._add(to, start))
            return _Watched(work, self) if to_experts else work

        messages.exchange = watched

    def _add(self, to: list[Interval], start: float) -> None:
        end = time.perf_counter()
        with self._lock:
            to.append((start, end))

    def take(self) -> dict[str, float]:
        """Seconds in which something travelled to or from experts, seconds of these spent waiting, and seconds in which
        anything else travelled; then forgets them."""
        with self._lock:
            travelling, waiting, others = union(self.travelling), union(self.waiting), union(self.others)
            for each in (self.travelling, self.waiting, self.others):
                each.clear()
        return {
            "travelling": length(travelling),
            "waiting": length(both(travelling, waiting)),
            "others": length(others) - length(both(travelling, others)),
        }


class _Watched:
    def __init__(self, work: Any, trace: Trace) -> None:
        self._work, self._trace = work, trace

    def wait(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._work.wait(*args)
        finally:
            self._trace._add(self._trace.waiting, start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def union(intervals: list[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def both(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What lies in both of two lists of disjoint intervals."""
    return [(max(s, t), min(e, f)) for s, e in a for t, f in b if max(s, t) < min(e, f)]


def length(intervals: list[Interval]) -> float:
    """Seconds in all."""
    return sum(end - start for start, end in intervals)


def step_of(task: dict[str, Any], overlap: list[str], dispatcher: str) -> Callable[[], float]:
    """A training step of the task's model; every call trains on the same tokens."""
    spec = load_model_spec(
        {
            "model_type": "mixtral",
            "hidden_size": task["hidden"],
            "intermediate_size": task["ffn"],
            "num_local_experts": task["experts"],
            "num_experts_per_tok": task["topk"],
            "num_hidden_layers": task["layers"],
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": 512,
            "sliding_window": None,
        }
    )
    world = dist.get_world_size()
    batch = task["micro_batches"] * world
    table = LayoutTable(ep=world, dispatcher=dispatcher, overlap=overlap or "none")
    layout = resolve_layout(table, spec, world, seq_len=task["seq"], global_batch=batch)
    mesh = Mesh.create(layout, 300.0)
    decoder = Decoder(spec, mesh=mesh)
    decoder.init_weights(1)
    state = TrainState.of(decoder, torch.float32)
    made = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, 512, (task["micro_batches"], task["seq"] + 1), generator=made)
    batches = [Batch(row[None, :-1], row[None, 1:], None, None, task["seq"], 0) for row in ids]
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        result = train_step(
            decoder, state.optimizer, batches, step=number, lr=0.0, weights=LossWeights(), clip=1.0, bias_update=0.0,
            clock=Stopwatch(), sharding=state.sharding,
        )  # fmt: skip
        return result.loss

    return step


def experts_seconds(task: dict[str, Any]) -> float:
    """What a step's experts take by themselves, forward and backward, with equally many rows each; the median of
    five."""
    world = dist.get_world_size()
    rows = task["seq"] * task["topk"] * world // task["experts"]
    calls = experts(task["experts"] // world, rows, task["ffn"], task["hidden"], torch.float32, torch.device("cpu"))
    found = []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        calls.backward(calls.forward())
        found.append(time.perf_counter() - start)
    return median(found[1:]) * task["layers"] * task["micro_batches"]


def main() -> None:
    """Run the task given as JSON in the first argument."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = json.loads(sys.argv[1])
    alone = experts_seconds(task)
    trace = Trace()
    trace.install()
    modes = {name: step_of(task, words, task["dispatcher"]) for name, words in task["modes"].items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    for turn in range(task["turns"] + 1):
        for name, step in modes.items():
            dist.barrier()
            trace.take()
            start, cpu = time.perf_counter(), time.process_time()
            loss = step()
            mine = time.perf_counter() - start
            busy = time.process_time() - cpu
            dist.barrier()
            seconds = time.perf_counter() - start
            traced = trace.take()
            if turn:  # the first one warms up
                found[name].append({"seconds": seconds, "own": mine, "cpu": busy, "loss": loss, **traced})
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps({"steps": found, "experts": alone}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
