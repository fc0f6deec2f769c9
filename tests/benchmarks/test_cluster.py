"""The emulated cluster: real network namespaces, and nothing of them left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cluster

ROOT = Path(__file__).resolve().parents[2]
WHY = cluster.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY is not None, reason=f"no network namespaces: {WHY}")]

EXCHANGE = """
import time, torch, torch.distributed as dist
def sent():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
dist.init_process_group("gloo")
x, y = torch.zeros(1 << 20), torch.empty(1 << 20)
dist.barrier()
before, start = sent(), time.perf_counter()
for _ in range(4):
    dist.all_to_all_single(y, x)
dist.barrier()
seconds, after = time.perf_counter() - start, sent()
if dist.get_rank() == 0:
    print("SENT", after - before, seconds)
dist.destroy_process_group()
"""


def ours() -> set[str]:
    """Namespaces of this process; other clusters of the machine may come and go meanwhile."""
    return {name for name in namespaces() if f"-{os.getpid()}-" in name}


def namespaces() -> list[str]:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()


def test_hosts_talk_over_the_link_and_leave_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    with cluster.cluster(2, 1, "1gbit") as up:
        assert len(up.names) == 2 and set(up.names) <= set(namespaces())
        said = "".join(up.torchrun([str(script)], timeout=120.0))
        up.set_link("200mbit")
        limit = subprocess.run(["ip", "netns", "exec", up.names[0], "tc", "qdisc", "show", "dev", "eth0"],
                               capture_output=True, text=True).stdout  # fmt: skip
    sent, seconds = map(float, said.split("SENT")[1].split()[:2])
    bulk = 4 * (1 << 20) * 4 / 2  # half of each tensor leaves the host
    assert abs(sent / bulk - 1) < 0.05, "the bytes that an all-to-all sends are those that leave through the card"
    # A full bucket, 1 ms of the rate, passes at once, with the packet of at most 64 KiB that empties it.
    assert sent - 125_000 - 65_536 <= seconds * 1e9 / 8, "no more leaves than the link lets through"
    assert "tbf" in limit and "200Mbit" in limit
    assert not ours()


def test_what_an_owner_that_died_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os\nfrom benchmarks.cluster import Cluster\n"
        "up = Cluster(2, 1, os.getpid())\nup.up('none')\nprint(os.getpid(), flush=True)\nos._exit(9)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert died.returncode == 9, died.stderr
    assert any(f"-{died.stdout.strip()}-" in name for name in namespaces())
    with cluster.cluster(2, 1, "none"):
        assert not any(f"-{died.stdout.strip()}-" in name for name in namespaces())
    assert not ours()


def test_a_command_that_fails_says_on_which_host() -> None:
    with cluster.cluster(2, 1, "none") as up:
        with pytest.raises(cluster.ClusterError, match=r"ended with 3 on host 1"):
            up.run(["sh", "-c", "exit $((NODE_RANK * 3))"])
        assert up.run(["sh", "-c", "echo $NODE_RANK of $NNODES"]) == ["0 of 2\n", "1 of 2\n"]


def test_without_root_it_skips_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    assert cluster.main(["with", "--", "true"]) == 0
    assert "skipped: network namespaces need root" in capsys.readouterr().out
