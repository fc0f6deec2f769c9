"""One peer in a process of its own: builds its workload, checks it, then times iterations when told to.

Started by `benchmarks.rounds`, never by hand. The process imports its peer once and computes nothing itself: for each
task it forks a child, so that every task starts from the same memory without importing again. Commands come as JSON
lines on stdin; answers go as JSON lines to the file descriptor given as the second argument, because some peers print
to stdout.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.peers.adapters import Layer, Model, Step, layer_pass  # noqa: E402
from benchmarks.peers.workload import (  # noqa: E402
    SEED,
    LayerShape,
    StepShape,
    expected_output,
    layer_inputs,
    layer_weights,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Relative to the largest number of the expected output; bf16 has 8 bits of mantissa.
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2}


def status_mb(key: str) -> float:
    """A memory figure of /proc/self/status in MB (10⁶ bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def rest() -> float:
    """Gives freed memory back and forgets the peak so far, so that imports and set-up do not count. Returns what the
    process then holds, in MB."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    return status_mb("VmRSS")


def busy_seconds() -> float:
    """CPU seconds used by everything on this machine since boot."""
    try:
        numbers = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def layer_work(task: dict[str, Any], adapter: Any, dtype: torch.dtype) -> tuple[Callable[[], float], dict[str, Any]]:
    """Forward and backward of one layer: gradients of x and of all weights, dropped again each time."""
    shape = LayerShape(**task["shape"])
    layer: Layer = adapter.layer(shape, dtype, task["variant"])
    error = check(layer, shape, dtype)
    tolerance = TOLERANCE["bf16" if task["fp32_is_bf16"] else task["dtype"]]
    if not error < tolerance:
        raise RuntimeError(f"with the benchmark's weights its output is {error:.1e} off, more than {tolerance:.0e}")
    layer.load(layer_weights(shape))
    x, grad = layer_inputs(shape, dtype)
    return layer_pass(layer, x, grad), {
        "detail": layer.detail,
        "output_error": error,
        "parameters": count(layer.module),
    }


def check(layer: Layer, shape: LayerShape, dtype: torch.dtype) -> float:
    """Largest difference from the layer's definition over 16 tokens, as a share of its largest number.

    Weights and x are rounded to `dtype` first. The router is ten times larger than in the timed run, since a near tie
    that rounding decides is no error; even so two of the sixteen may be off in bf16. Two backward passes, of two sizes,
    follow: what a first pass imports or compiles (once more for sizes that change) is then there before time and
    memory are measured.
    """
    x, grad = layer_inputs(shape, dtype, tokens=16)
    weights = layer_weights(shape)
    weights.router *= 10
    layer.load(weights)
    for name, tensor in vars(weights).items():
        setattr(weights, name, tensor.to(dtype).float())
    expected = expected_output(x, weights, shape.topk)[0]
    y = layer.call(x.requires_grad_())
    y.backward(grad.view(y.shape))
    x, grad = layer_inputs(shape, dtype, tokens=24)
    again = layer.call(x.requires_grad_())
    again.backward(grad.view(again.shape))
    for parameter in layer.module.parameters():
        parameter.grad = None
    worst_per_token = (y.detach().reshape(16, -1).double() - expected).abs().amax(-1) / expected.abs().max()
    return sorted(worst_per_token.tolist())[-1 if dtype == torch.float32 else -3]


def step_work(task: dict[str, Any], adapter: Any, dtype: torch.dtype) -> tuple[Callable[[], float], dict[str, Any]]:
    """A whole training step on random tokens, the same ones each time and for everybody."""
    shape = StepShape(**task["shape"])
    torch.manual_seed(SEED)
    model: Model | Step = adapter.model(shape, dtype, task["variant"])
    random = torch.Generator().manual_seed(SEED + 2)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1), generator=random)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    facts = {"detail": model.detail, "parameters": count(model.module)}
    if isinstance(model, Step):
        own = model.step
        return lambda: own(inputs, labels), facts

    parameters = list(model.module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    call = model.call

    def iteration() -> float:
        logits = call(inputs)
        loss = F.cross_entropy(logits.reshape(-1, shape.vocab).float(), labels.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return iteration, facts


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def turn(iteration: Callable[[], float], command: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Iterations until `seconds` are used, at least `least`, at most `most`; answers after each, then with the peak."""
    begin = time.perf_counter()
    done = 0
    while done < command["most"] and (done < command["least"] or time.perf_counter() - begin < command["seconds"]):
        busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
        loss = iteration()
        seconds = time.perf_counter() - start
        cpu = own_seconds() - own
        others = max(0.0, (busy_seconds() - busy - cpu) / seconds)
        answer({"seconds": seconds, "cpu": cpu, "others": others, "loss": loss})
        done += 1
    answer({"peak_mb": status_mb("VmHWM")})


def profile(iteration: Callable[[], float]) -> list[tuple[str, float, float]]:
    """(operator, milliseconds, share) of one iteration, by the time spent in the operator itself, largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        iteration()
    rows = [(event.key, event.self_cpu_time_total / 1e3) for event in profiler.key_averages()]
    total = sum(ms for _, ms in rows)
    return [(name, ms, ms / total) for name, ms in sorted(rows, key=lambda row: -row[1])[:12]]


def commands() -> Iterator[dict[str, Any]]:
    """Commands from stdin, read byte by byte: the child must not take what is meant for its parent."""
    line = b""
    while byte := os.read(0, 1):
        line += byte
        if byte == b"\n":
            yield json.loads(line)
            line = b""


def serve(task: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """A child's life: one task, then turns until it is told to stop."""
    torch.set_num_threads(task["threads"])
    torch.manual_seed(SEED)
    adapter = importlib.import_module(f"benchmarks.peers.adapters.{task['adapter']}")
    if task["work"] == "matmul":
        shape = LayerShape(**task["shape"])
        answer({"ready": True})
        for command in commands():
            if "stop" in command:
                return
            answer({"rate": adapter.rate(shape, DTYPES[command["dtype"]], command["seconds"])})
        return

    # A step's model and optimizer belong to what is measured; a layer's weights are the same for everybody.
    before = rest()
    iteration, facts = (layer_work if task["work"] == "layer" else step_work)(task, adapter, DTYPES[task["dtype"]])
    after = rest()
    idle = after if task["work"] == "layer" else before
    answer({"ready": True, "idle_mb": idle, "torch": torch.__version__, **facts})
    for command in commands():
        if "stop" in command:
            return
        if "profile" in command:
            answer({"profile": profile(iteration)})
        else:
            turn(iteration, command, answer)


def main() -> None:
    out = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        adapter = importlib.import_module(f"benchmarks.peers.adapters.{sys.argv[1]}")
        for name in adapter.IMPORTS:
            importlib.import_module(name)
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    answer({"imported": True})
    for task in commands():
        child = os.fork()
        if child == 0:
            try:
                answer({"pid": os.getpid()})
                serve(task, answer)
            except BaseException as error:
                traceback.print_exc()
                answer({"error": f"{type(error).__name__}: {error}"})
            os._exit(0)
        os.waitpid(child, 0)
        answer({"ended": True})
    os._exit(0)  # nobody is left to answer to; taking the interpreter down in order takes seconds


if __name__ == "__main__":
    main()
