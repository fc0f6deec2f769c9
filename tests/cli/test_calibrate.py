"""`moesaic calibrate`: what it prints and writes, and what bad input gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import COMMANDS, main
from moesaic.spec.cluster import load_cluster
from moesaic.tune import calibrate as tune
from moesaic.tune import ranks
from moesaic.tune.bench import Measurements

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = "moesaic.cli.calibrate:calibrate"


@pytest.fixture(autouse=True)
def _command(monkeypatch):
    monkeypatch.setitem(COMMANDS, "calibrate", TARGET)


@pytest.fixture
def measured(monkeypatch):
    """Instead of processes that measure, their result: four figures of two processes."""
    calls = []

    def here(processes, plan, say):
        calls.append((processes, plan))
        say("products of matrices")
        facts = {
            "kind": "cpu",
            "name": "Some CPU",
            "threads": 1,
            "torch": "9.9",
            "native_bf16": False,
            "core_share": 1.0,
            "memory_bytes": 2**30,
            "world": processes,
            "domain": processes,
        }
        found = Measurements(facts, launch_seconds=1e-6, skipped=["3 of 9 products"])
        found.products = [("fp32", "matmul", (16, 32, 64), name, 1e-6) for name in ("forward", "input", "weight")]
        found.products += [("fp32", "grouped", (4, 16, 32, 64), "forward", 1e-5)]
        found.copies = [("memory", 2**20, 1e-4)]
        found.messages = [("all_gather", 2, 2, 2**p, 1e-3 + 2**p / 1e9) for p in (10, 16, 20)]
        return found

    monkeypatch.setattr(ranks, "measure_here", here)
    return calls


def test_prints_a_table_and_writes_a_file_that_is_read_back(tmp_path, capsys, measured):
    out = tmp_path / "mine.toml"
    assert main(["calibrate", "--quick", "--procs", "2", "--dtype", "fp32", "--out", str(out)]) == 0
    said = capsys.readouterr()
    for word in ("2 × Some CPU", "all_gather", "65.5 (100%)", "GB/s", "3 of 9 products", f"Wrote {out}"):
        assert word in said.out
    assert "measuring products" in said.err
    cluster = load_cluster(out)
    assert cluster.gpus == 2 and cluster.rates["all_gather"] == [[2, 2, 1e-3, 1e9]]
    (processes, plan), *_ = measured
    assert processes == 2 and plan.quick and plan.precisions == ("fp32",)
    assert main(["calibrate", "--out", str(out)]) == 0
    assert f"Replaced {out}" in capsys.readouterr().out


def test_bad_options_are_refused_before_anything_is_measured(tmp_path, capsys, measured):
    for options, word in (
        (["--out", str(tmp_path)], "is a folder"),
        (["--out", str(tmp_path / "no" / "x.toml")], "does not exist"),
        (["--out", str(tmp_path / "x.toml"), "--dtype", "bf17"], "did you mean 'bf16'"),
        (["--out", str(tmp_path / "x.toml"), "--procs", "0"], "--procs"),
    ):
        assert main(["calibrate", *options]) == 2
        assert word in capsys.readouterr().err
    assert not measured and not list(tmp_path.iterdir())


def test_an_interrupted_run_writes_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(processes, plan, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "measure_here", interrupted)
    assert main(["calibrate", "--out", str(tmp_path / "x.toml")]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_what_is_measured_counts_as_a_precision():
    assert set(tune.PRECISIONS) == {"fp32", "tf32", "bf16"}


def _start(tmp_path: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The command in a session of its own, so that whatever it leaves behind can be found."""
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\nfrom moesaic.cli import main\n"
        f"main.COMMANDS['calibrate'] = {TARGET!r}\n"
        "if __name__ == '__main__':\n    sys.argv[1:] = ['calibrate', *sys.argv[1:]]\n    main.run()\n"
    )
    return subprocess.Popen(
        [sys.executable, *before, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")},
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _commands(leader: int) -> list[bytes]:
    """Command lines of the processes of a session that still run; those that are ending have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if session == leader and command:
            found.append(command)
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_file(tmp_path, how):
    (tmp_path / "tmp").mkdir()
    process = _start(tmp_path, "--quick", "--procs", "2", "--out", str(tmp_path / "tmp" / "x.toml"))
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "measuring" in line, line + process.stderr.read()
    assert len(_commands(process.pid)) >= 3
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "interrupted" in error
    # Python's own tracker of shared resources goes when it sees that its pipe is closed.
    assert not [command for command in _commands(process.pid) if b"resource_tracker" not in command]
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith(("x.toml", ".x", "moesaic-"))]


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_torchrun_measure_together(tmp_path):
    (tmp_path / "tmp").mkdir()
    out = tmp_path / "x.toml"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    process = _start(tmp_path, "--quick", "--out", str(out), before=launcher)
    said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert said.count("Wrote") == 1
    cluster = load_cluster(out)
    assert cluster.gpus == 2 and {"all_to_all", "matmul_fp32_forward"} <= set(cluster.rates)
