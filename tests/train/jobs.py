"""Jobs of several processes under a real torchrun, on a tiny model, for tests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import moesaic

STEPS = 12
HANGS = 600
"""Seconds after which a job that has not ended counts as hanging, whatever the machine is busy with."""
RUN = f"""
[model]
model_type = "mixtral"
vocab_size = 257
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_local_experts = 4
num_experts_per_tok = 2
[data]
path = "text.txt"
validation_fraction = 0.1
[train]
steps = {STEPS}
seq_len = 16
global_batch = 8
lr = 1e-2
warmup_steps = 2
eval_every = 0
checkpoint_every = 3
[run]
timeout_seconds = 120
"""


def job_folder(folder: Path) -> Path:
    """`folder`, with a text and a run file in it."""
    drawn = random.Random(3)
    words = ["tok", "expert", "router", "gate", "load", "sum", "of", "the", "all"]
    (folder / "text.txt").write_text(" ".join(drawn.choices(words, k=4000)))
    (folder / "run.toml").write_text(RUN)
    return folder


class Job:
    """One torchrun, and what it and its workers print."""

    def __init__(self, folder: Path, name: str, processes: int, *sets: str, fault: str = "", more: tuple = ()) -> None:
        self.folder, self.name = folder, name
        self.log = folder / f"{name}-{time.monotonic_ns()}.txt"
        self.metrics = folder / name / "metrics.jsonl"
        program = [str(Path(__file__).with_name("faulty.py"))] if fault else ["-m", "moesaic"]
        where = () if "--rdzv-endpoint" in more else ("--standalone",)
        overrides = [word for text in (f"run.dir={name}", *sets) for word in ("--set", text)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes), *more),
            *(*program, "train", "run.toml", *overrides),
        ]
        resume = ["--resume"] if (folder / name / "run.toml").exists() else []
        environment = {
            "PYTHONPATH": str(Path(moesaic.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "MOESAIC_CACHE": str(folder / "cache"),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if "--nnodes" in more else "0",
            "FAULT": fault,
        }
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                command + resume, cwd=folder, env=os.environ | environment, stdout=out, stderr=out, text=True
            )

    def end(self) -> int:
        """Its exit code. One that does not end is killed, with all of its processes, and fails the test."""
        try:
            return self.process.wait(HANGS)
        except subprocess.TimeoutExpired:
            for pid in [*self.workers().values(), self.process.pid]:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"the job hangs:\n{self.said()}")

    def said(self) -> str:
        return self.log.read_text()

    def lines(self) -> list[str]:
        """What moesaic's processes said when they failed."""
        return [line for line in self.said().splitlines() if line.startswith("moesaic: ")]

    def workers(self) -> dict[int, int]:
        """The process of each rank that is running."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                environment = (path / "environ").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            rank = re.search(rb"(?:^|\0)RANK=(\d+)", environment)
            if parent == self.process.pid and rank:
                found[int(rank[1])] = int(path.name)
        return found

    def wait_for_step(self, step: int) -> None:
        """Until the line of that step has been written."""
        self.wait_until(
            lambda: self.metrics.exists() and len(self.metrics.read_text().splitlines()) >= step, f"step {step}"
        )

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Until something has happened, looking again and again while the job runs."""
        pause = threading.Event()
        deadline = time.monotonic() + HANGS
        while self.process.poll() is None and time.monotonic() < deadline:
            if happened():
                return
            pause.wait(0.05)
        pytest.fail(f"{what}: not reached\n{self.said()}")

    def losses(self, steps: int = STEPS) -> list[float]:
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1)), self.said()
        return [row["loss"] for row in rows]
