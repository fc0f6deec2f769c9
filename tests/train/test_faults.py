"""Jobs of several processes under a real torchrun, in which a rank dies, hangs or throws somewhere: they end, they say
who, over what and when, and they go on from the last checkpoint to the loss of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .jobs import HANGS, STEPS, Job, job_folder

pytestmark = pytest.mark.slow

TIMEOUT = 15
LAYOUTS = {
    2: ("layout.ep=2", "layout.tp=2"),
    4: ("layout.pp=2", "layout.ep=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return job_folder(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(folder) -> Iterator[dict[int, list[float]]]:
    """The losses of the runs that nothing happens to, by number of processes."""

    class Losses(dict):
        def __missing__(self, processes: int) -> list[float]:
            job = Job(folder, f"undisturbed-{processes}", processes, *LAYOUTS[processes])
            assert job.end() == 0, job.said()
            self[processes] = job.losses()
            return self[processes]

    return Losses()


def drawn(processes: int, kind: str) -> tuple[int, int, int]:
    """A random rank, step and collective in it; printed when a test fails."""
    seed = random.randrange(10**6)
    random_ = random.Random(seed)
    found = random_.randrange(processes), random_.randint(2, STEPS - 1), random_.randint(1, 6)
    print(f"{kind} on {processes} processes: rank {found[0]}, step {found[1]}, collective {found[2]}")
    return found


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_a_rank_that_fails_takes_the_job_down_with_rank_group_and_step(kind, processes, folder):
    rank, step, collective = drawn(processes, kind)
    sets = (*LAYOUTS[processes], f"run.timeout_seconds={TIMEOUT if kind == 'stop' else 120}")
    job = Job(folder, f"{kind}-{processes}", processes, *sets, fault=f"{kind} {rank} {step} {collective}")
    code = job.end()
    assert code != 0, job.said()
    lines = job.lines()
    others = [line for line in lines if re.search(rf"Rank (?!{rank}:)\d+: .* over group [\w -]+ \(with rank", line)]
    assert others and all(f"in step {step}" in line for line in others), job.said()
    if kind == "raise":
        (own,) = [line for line in lines if f"Rank {rank}:" in line]
        # What a checkpoint's own thread raised is told at the next look at it.
        assert own in [f"moesaic: Rank {rank}: ZeroDivisionError: by hand (in step {n})" for n in (step, step + 1)]
    if kind == "kill":
        assert "SIGKILL" in job.said(), "torchrun says which rank was killed"
    if kind == "stop":
        assert any(f"within {TIMEOUT} s" in line for line in others)
        assert any(f"rank {rank} was last heard of" in line for line in others)


@pytest.mark.long
@pytest.mark.parametrize("processes", [4])
def test_torchrun_starts_anew_from_the_last_checkpoint_and_ends_at_the_same_loss(processes, folder, undisturbed):
    rank, step, collective = drawn(processes, "kill")
    fault = f"kill {rank} {step} {collective}"
    job = Job(folder, f"anew-{processes}", processes, *LAYOUTS[processes], fault=fault, more=("--max-restarts", "1"))
    assert job.end() == 0, job.said()
    assert job.losses() == undisturbed[processes]
    if step > 6:  # the checkpoint of step 3 is whole before that of step 6 is begun
        assert re.search(r"Going on after step \d+ from", job.said())


@pytest.mark.long
def test_a_rank_killed_from_outside_at_any_time(folder, undisturbed):
    job = Job(folder, "outside", 2, *LAYOUTS[2], more=("--max-restarts", "1"))
    job.wait_for_step(random.randint(1, STEPS - 2))
    os.kill(job.workers()[random.randrange(2)], signal.SIGKILL)
    assert job.end() == 0, job.said()
    assert job.losses() == undisturbed[2]


@pytest.mark.long
def test_fewer_processes_go_on_with_another_layout(folder, undisturbed):
    """Four ranks lose one for good; two go on, and the data-parallel degree follows."""
    sets = ("layout.ep=2", "layout.dp='auto'", "layout.micro_batch=2", "layout.sharding='optimizer'")
    rank, step, collective = drawn(4, "kill")
    job = Job(folder, "fewer", 4, *sets, fault=f"kill {rank} {max(step, 8)} {collective}")
    assert job.end() != 0 and "SIGKILL" in job.said(), job.said()
    job = Job(folder, "fewer", 2, *sets)
    assert job.end() == 0, job.said()
    assert re.search(r"Going on after step \d+ from", job.said())
    assert job.losses() == pytest.approx(undisturbed[4], rel=1e-5)


@pytest.mark.long
def test_a_machine_that_is_lost_leaves_the_others_to_go_on(folder):
    """Two torchruns of one process each, of which one vanishes with its worker; --nnodes 1:2 lets the other go on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = (
        *("--nnodes", "1:2", "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-id", "lost"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3,timeout=300"),
    )
    sets = ("layout.dp='auto'", "layout.micro_batch=2", "train.steps=120", "train.checkpoint_every=2")
    first = Job(folder, "lost", 1, *sets, more=more)
    # The store at which both meet must stand in the one that stays.
    first.wait_until(lambda: answers(port), "the store answers")
    second = Job(folder, "lost", 1, *sets, more=more)
    first.wait_until(lambda: "on 2 ranks" in first.said() + second.said(), "both train")
    started = len(first.metrics.read_text().splitlines()) if first.metrics.exists() else 0
    first.wait_for_step(started + 6)
    worker = next(iter(second.workers().values()))
    for pid in (second.process.pid, worker):
        os.kill(pid, signal.SIGKILL)
    second.process.wait(HANGS)
    assert first.end() == 0, first.said()
    rows = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 121))
    assert re.search(r"Started anew by torchrun .* on 1 processes|Going on after step \d+ from", first.said())


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_a_job_told_to_stop_saves_and_goes_on_to_the_same_loss(folder, undisturbed):
    job = Job(folder, "stopped", 4, *LAYOUTS[4])
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() != 0  # torchrun's own code for a signal
    assert re.search(r"Stopped by SIGTERM after step \d+; saved", job.said()), job.said()
    job = Job(folder, "stopped", 4, *LAYOUTS[4])
    assert job.end() == 0, job.said()
    assert job.losses() == undisturbed[4]
