"""Starts cases as jobs of several processes, the way torchrun would, and tells how each rank ended and what it said.

Processes are forked after the imports, because importing torch takes longer than most cases. The store stands in this
process, as torchrun's agent keeps it. Prints one JSON object: {case: [[exit code, stdout, stderr] per rank]}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moesaic.cli import main as cli
from moesaic.mesh import collectives
from moesaic.mesh.group import Group, progress
from moesaic.spec.errors import MoesaicError
from moesaic.spec.run import load_run
from moesaic.train import launch

RUN = """
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
max_position_embeddings = 64
[train]
seq_len = 16
global_batch = 8
threads = 1
"""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def joined(*sets: str) -> launch.Launch:
    return launch.join(load_run("run.toml", ["run.timeout_seconds=50", *sets]))


def rank() -> int:
    return int(os.environ["RANK"])


# ---------------------------------------------------------------- cases: what each rank does


def healthy() -> int:
    job = joined("layout.ep=2")
    total = collectives.all_reduce(torch.tensor([rank() + 1]), job.mesh.world)
    print(job.layout, int(total), job.restarts, job.anyone(rank() == 1), job.first("a path", lambda: Path(f"{rank()}")))
    return 0


def illegal() -> int:
    dist.init_process_group = lambda *_, **__: print("a group was made")
    joined("layout.ep=3")
    return 0


def lr_differs() -> int:
    joined(f"train.lr={0.5 if rank() == 2 else 0.25}")
    return 0


def code_differs() -> int:
    launch.source_hash = lambda: "aaaa" if rank() < 2 else "bbbb"
    joined()
    return 0


def file_is_missing() -> int:
    if rank() == 1:
        load_run("elsewhere.toml")
    joined()
    return 0


def file_is_wrong() -> int:
    joined("train.stepz=3")
    return 0


def rank_is_missing() -> int:
    if rank() == 1:
        die()
    launch._START_SECONDS = 1.0
    joined("run.timeout_seconds=1")
    return 0


def data_differs() -> int:
    joined().agree({"the data": "x" if rank() else "y"})
    return 0


def group_disagrees() -> int:
    launch.agree(joined("layout.ep=2").mesh.world, {"the seed": rank()})
    return 0


def one_fails_alone() -> int:
    def work() -> None:
        if rank() == 1:
            raise MoesaicError("There is no cache here.")

    joined().settle("the data", work)
    return 0


def one_has_a_defect() -> int:
    joined().settle("the data", lambda: 1 // (1 - rank()))
    return 0


def all_fail_alike() -> int:
    def work() -> None:
        raise MoesaicError("data.path is missing.")

    joined().settle("the data", work)
    return 0


def one_dies_at_work() -> int:
    job = joined("run.timeout_seconds=5")
    job.settle("the data", die if rank() == 1 else lambda: None)
    return 0


def one_stops_at_work() -> int:
    job = joined("run.timeout_seconds=5")
    job.settle("the data", (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank() == 0 else lambda: None)
    return 0


def long_work() -> int:
    """Rank 0 works for longer than the time limit, while its heart beats."""
    job = joined("run.timeout_seconds=3")
    seen: set[bytes | None] = set()

    def work() -> None:
        while len(seen) < 9:  # half a second apart
            seen.add(job.assembly._beat.raw(0))
            threading.Event().wait(0.05)

    job.settle("the data", work if rank() == 0 else lambda: None)
    return 0


def leaders() -> int:
    job = joined()
    made = job.assembly.store

    def work() -> int:
        return made.add("made", 1)

    print(job.leaders_first("the cache", work))
    return 0


def dies_in_step() -> int:
    job = joined("layout.ep=2")
    progress.step = 7
    if rank() == 1:
        die()
    collectives.barrier(job.mesh.world)
    return 0


def stops_in_step() -> int:
    job = joined("layout.ep=2", "run.timeout_seconds=5")
    progress.step = 7
    collectives.barrier(job.mesh.world)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    collectives.barrier(job.mesh.world)
    return 0


def raises_in_step() -> int:
    job = joined("layout.ep=2")
    progress.step = 7
    if rank() == 1:
        raise ZeroDivisionError("by hand")
    collectives.barrier(job.mesh.world)
    return 0


def dies_at_once() -> int:
    """The first start of a job that is started anew: the keys of its ranks stay in the store."""
    job = joined("layout.ep=2")
    if rank() == 1:
        die()
    collectives.barrier(job.mesh.world)
    return 0


def single_group() -> int:
    launch.agree(Group.single("alone"), {"x": 1})
    return healthy()


# ---------------------------------------------------------------- running them


def child(case: str, place: dict[str, str], out: Path) -> None:
    os.environ.update(place)
    for number in (1, 2):
        os.dup2(os.open(f"{out}-{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    code = 70
    cli.main = lambda arguments: cli_main(case)
    try:
        cli.run()
    except SystemExit as leaving:
        code = leaving.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def cli_main(case: str) -> int:
    """What cli.main does with the errors of a command."""
    try:
        return globals()[case]()
    except MoesaicError as error:
        return cli._fail(str(error), error.exit_code, error)


def run_case(case: str, size: int, environment: dict[str, str]) -> list[list[object]]:
    children = []
    for r in range(size):
        place = {
            "RANK": str(r),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(r % 2),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(Path(f"{case}-{r}-error").absolute()),
        }
        pid = os.fork()
        if pid == 0:
            child(case, place | environment, Path(f"{case}-{r}"))
        children.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < size:
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        stopped = [pid for pid in children if pid not in codes]
        if case.startswith(("one_stops", "stops")):
            if len(stopped) == 1:
                os.kill(stopped[0], signal.SIGKILL)  # as torchrun does after a while
    return [
        [codes[pid], *(Path(f"{case}-{r}-{number}").read_text() for number in (1, 2))] for r, pid in enumerate(children)
    ]


def keep_store(pipe: int) -> None:
    """Holds the store until this process is ended. A process of its own: forking one that has threads is not safe."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    os.write(pipe, str(store.port).encode())
    signal.pause()


def main() -> None:
    torch.set_num_threads(1)
    Path("run.toml").write_text(RUN)
    reading, writing = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        keep_store(writing)
    port = os.read(reading, 16).decode()
    found = {}
    for name, case, size, environment in json.loads(sys.argv[1]):
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":  # then rank 0 holds the store
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environment["MASTER_PORT"] = str(free.getsockname()[1])
        found[name] = run_case(case, size, {"MASTER_PORT": port} | environment)
    os.kill(keeper, signal.SIGKILL)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
