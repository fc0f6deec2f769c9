"""One rank of one peer: builds its share of a workload, checks it, then times iterations in step with the others.

Started under torchrun, by `benchmarks.teams` or by hand:

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 -m benchmarks.peers.parallel.rank megatron \\
        '{"work": "layer", "shape": {"hidden": 1024, "ffn": 512, "experts": 32, "topk": 4, "tokens": 2048},
          "variant": "alltoall", "threads": 1, "iterations": 3}'

By hand each rank writes one JSON line. `benchmarks.teams` gives the path of a socket instead: the process imports its
peer once and, for each task, forks a child that joins the other ranks' children in a process group of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.peers.adapters import Layer, layer_pass  # noqa: E402
from benchmarks.peers.parallel import RankStep, held  # noqa: E402
from benchmarks.peers.parallel.registry import Degrees  # noqa: E402
from benchmarks.peers.worker import (  # noqa: E402
    TOLERANCE,
    busy_seconds,
    commands,
    own_seconds,
    rest,
    status_mb,
)
from benchmarks.peers.workload import (  # noqa: E402
    SEED,
    LayerShape,
    StepShape,
    expected_output,
    layer_inputs,
    layer_weights,
    step_tokens,
)

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CHECK_TOKENS = 16


def join(task: int) -> None:
    """Makes the process group of this task: the store that torchrun keeps is shared, the prefix keeps tasks apart."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=300)
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(host, port, is_master=RANK == 0 and not kept_by_agent, timeout=limit)
    prefixed = dist.PrefixStore(f"benchmark-{task}", store)
    dist.init_process_group("gloo", store=prefixed, rank=RANK, world_size=RANKS, timeout=limit)


def own_tokens(shape: LayerShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the output's gradient [1, T, D] of this rank: every rank has tokens of its own."""
    x, grad = layer_inputs(shape, torch.float32, tokens=tokens * RANKS)
    mine = slice(RANK * tokens, (RANK + 1) * tokens)
    return x[:, mine].contiguous(), grad[:, mine].contiguous()


def check(layer: Layer, shape: LayerShape) -> float:
    """Largest difference of output and x's gradient from the layer's definition, as a share of the largest number.

    The router is ten times larger than in the timed run, since a near tie that rounding decides is no error.
    """
    weights = layer_weights(shape)
    weights.router *= 10
    layer.load(weights)
    x, grad = own_tokens(shape, CHECK_TOKENS)
    exact = x.double().requires_grad_()
    expected = expected_output(exact, weights, shape.topk)
    expected.backward(grad.double())
    x.requires_grad_()
    y = layer.call(x)
    y.backward(grad.view(y.shape))
    assert x.grad is not None and exact.grad is not None
    pairs = ((y.detach().view(expected.shape), expected.detach()), (x.grad, exact.grad))
    errors = [float((found.double() - true).abs().max() / true.abs().max()) for found, true in pairs]
    x, grad = own_tokens(shape, CHECK_TOKENS + 8)
    again = layer.call(x.requires_grad_())  # what a peer compiles anew for a second size is there before it is timed
    again.backward(grad.view(again.shape))
    for parameter in layer.module.parameters():
        parameter.grad = None
    return max(errors)


def layer_work(task: dict[str, Any], adapter: Any) -> tuple[Callable[[], float], dict[str, Any]]:
    """Forward and backward of one layer whose experts are spread over all ranks: gradients of x and of all weights."""
    shape = LayerShape(**task["shape"])
    layer: Layer = adapter.layer(shape, task["variant"])
    error = check(layer, shape)
    tolerance = TOLERANCE["bf16" if task.get("fp32_is_bf16") else "fp32"]
    if not error < tolerance:
        raise RuntimeError(f"with the benchmark's weights it is {error:.1e} off, more than {tolerance:.0e}")
    layer.load(layer_weights(shape))
    x, grad = own_tokens(shape, shape.tokens)
    return layer_pass(layer, x, grad), {
        "detail": layer.detail,
        "output_error": error,
        "parameters": held(layer.module.parameters()),
    }


def step_work(task: dict[str, Any], adapter: Any) -> tuple[Callable[[], float], dict[str, Any]]:
    """A whole training step on random tokens, the same ones each time and for everybody."""
    shape, degrees = StepShape(**task["shape"]), Degrees(**task["degrees"])
    torch.manual_seed(SEED)
    built: RankStep = adapter.step(shape, degrees, task["variant"])
    inputs, labels = step_tokens(shape)
    return lambda: built.step(inputs, labels), {"detail": built.detail, "parameters": built.parameters}


def turn(iteration: Callable[[], float], iterations: int, answer: Callable[[dict[str, Any]], None]) -> None:
    """Iterations between barriers; answers after each, then with the peak of the resident set."""
    for _ in range(iterations):
        dist.barrier()
        busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
        loss = iteration()
        cpu = own_seconds() - own  # waiting for the others is not this rank's work
        dist.barrier()
        answer({"seconds": time.perf_counter() - start, "cpu": cpu, "busy": busy_seconds() - busy, "loss": loss})
    answer({"peak_mb": status_mb("VmHWM")})


def begin(task: dict[str, Any], adapter: Any, number: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Joins the other ranks, builds the task's workload and says what it is."""
    torch.set_num_threads(task["threads"])
    torch.manual_seed(SEED)
    join(number)
    before = rest()
    layer = task["work"] == "layer"
    iteration, facts = (layer_work if layer else step_work)(task, adapter)
    # A step's model and optimizer belong to what is measured; a layer's weights are the same for everybody.
    after = rest()
    return iteration, {"idle_mb": after if layer else before, "torch": torch.__version__, **facts}


def serve(task: dict[str, Any], adapter: Any, number: int, answer: Callable[[dict[str, Any]], None]) -> None:
    """A child's life: one task, then turns until it is ended."""
    iteration, facts = begin(task, adapter, number)
    answer({"ready": True, **facts})
    for command in commands():
        turn(iteration, command["iterations"], answer)


def once(task: dict[str, Any], adapter: Any) -> None:
    """By hand: one task, one turn, one line."""
    iteration, facts = begin(task, adapter, 0)
    line: dict[str, Any] = {"rank": RANK, "ranks": RANKS, **facts, "seconds": [], "loss": []}

    def note(message: dict[str, Any]) -> None:
        line.update(peak_mb=message["peak_mb"]) if "peak_mb" in message else None
        for key in ("seconds", "loss"):
            if key in message:
                line[key].append(round(message[key], 4))

    turn(iteration, task["iterations"], note)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    dist.barrier()


def peer(name: str) -> Any:
    """The adapter of a peer, with the peer imported."""
    adapter = importlib.import_module(f"benchmarks.peers.parallel.{name}")
    for module in adapter.IMPORTS:
        importlib.import_module(module)
    return adapter


def main() -> None:
    name, how = sys.argv[1:3]
    if how.startswith("{"):
        once(json.loads(how), peer(name))
        os._exit(0)
    link = socket.socket(socket.AF_UNIX)
    link.connect(how)
    os.dup2(link.fileno(), 0)  # commands are read from descriptor 0, by this process and by its children in turn
    out = os.fdopen(os.dup(link.fileno()), "w", buffering=1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        adapter = peer(name)
    except Exception as error:
        traceback.print_exc()
        answer({"rank": RANK, "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    answer({"rank": RANK, "imported": True})
    for number, task in enumerate(commands()):
        child = os.fork()
        if child == 0:
            try:
                answer({"pid": os.getpid()})
                serve(task, adapter, number, answer)
            except BaseException as error:
                traceback.print_exc()
                answer({"error": f"{type(error).__name__}: {error}"})
                for _ in commands():  # the others may still need this rank's connections until the team is ended
                    pass
            os._exit(0)
        os.waitpid(child, 0)
        answer({"ended": True})
    os._exit(0)


if __name__ == "__main__":
    main()
