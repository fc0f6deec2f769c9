"""Runs each run file of a plan in a process that kills itself with SIGKILL at the point named, then resumes it.

Processes are forked from this one after the imports, because importing torch takes longer than the tiny runs. Prints
one JSON object: how each process ended that was to die.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys

import torch
import torch.utils.tensorboard
from rich.console import Console

from moesaic.mesh.device import device
from moesaic.spec.run import load_run
from moesaic.train import checkpoint, loop, metrics


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Replace the function that `point` is about by one that dies there."""
    what, _, where = point.partition(" ")
    if what == "step":
        real_step = loop.train_step

        def train_step(*args, **kwargs):
            result = real_step(*args, **kwargs)
            if kwargs["step"] == int(where):
                die()
            return result

        loop.train_step = train_step
    elif what == "write":
        real_write = checkpoint._write_text

        def write_text(path, text):
            if str(path).endswith(where):
                with builtins.open(path, "w") as file:
                    file.write(text[: len(text) // 2])
                die()
            real_write(path, text)

        checkpoint._write_text = write_text
    elif what in ("rename", "renamed"):
        real_rename = os.rename

        def rename(source, target):
            hit = str(source).endswith("/" + where)
            if hit and what == "rename":
                die()
            real_rename(source, target)
            if hit:
                die()

        os.rename = rename
    elif what.startswith("metrics"):
        real_row = metrics.MetricsFile.write

        def write_row(self, row):
            if row["step"] == int(where):
                if what == "metrics_torn":
                    self._file.write(json.dumps(row)[:25])
                    self._file.flush()
                die()
            real_row(self, row)

        metrics.MetricsFile.write = write_row


def in_process(path: str, point: str, resume: bool) -> int:
    """The wait status of a forked process that trains."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if point:
                arm(point)
            code = loop.train(load_run(path), resume=resume, console=Console(file=io.StringIO()))
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main() -> None:
    # What every child would do alike is done once, with one thread, so that forking stays safe.
    torch.set_num_threads(1)
    device().matmul_flops(torch.float32)
    deaths = {}
    for path, point in json.loads(sys.argv[1]):
        status = in_process(path, point, resume=False)
        if point:
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            deaths[point] = "killed" if killed else f"ended with {status}"
            status = in_process(path, "", resume=True)
        if status:
            sys.exit(f"{path} ended with {status}")
    print(json.dumps(deaths))


if __name__ == "__main__":
    main()
