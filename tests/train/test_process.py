"""Threads and the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from moesaic.train import process


def test_cores_are_between_one_and_what_the_kernel_allows():
    assert 1 <= process.physical_cores() <= len(os.sched_getaffinity(0))


def test_hyper_threads_of_one_core_count_once(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(process, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert process.physical_cores() == 2
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    assert process.physical_cores() == 1


@pytest.mark.parametrize(("asked", "environment", "expected"), [(3, "2", 3), (0, "2", 2)])
def test_threads_from_the_key_then_the_environment(asked, environment, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    before = torch.get_num_threads()
    assert process.set_threads(asked) == torch.get_num_threads() == expected
    torch.set_num_threads(before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_tuned_allocator_keeps_freed_memory():
    """With glibc's defaults a freed block of 64 MiB goes back to the kernel; tuned, the process keeps it."""
    program = (
        "import torch\n"
        "from moesaic.mesh.device import device\n"
        "from moesaic.train.process import tune_malloc\n"
        "def given_back():\n"
        "    x = torch.ones(16 * 2**20)\n"
        "    before = device().memory_bytes()\n"
        "    del x\n"
        "    return before - device().memory_bytes()\n"
        "print(given_back(), tune_malloc(), given_back())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    untuned, obeyed, tuned = done.stdout.split()
    assert obeyed == "True"
    assert int(untuned) > 60 * 2**20
    assert int(tuned) < 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_an_untuned_process_gives_blocks_back():
    """Also those that came out of the heap before: by itself glibc keeps blocks of a size once it has freed one."""
    program = (
        "import torch\n"
        "from moesaic.mesh.device import device\n"
        "from moesaic.train.process import tune_malloc\n"
        "obeyed = tune_malloc(keep=False)\n"
        "torch.ones(2**20)\n"
        "before = device().memory_bytes()\n"
        "held = [torch.ones(2**20) for _ in range(32)]\n"
        "del held[::2]\n"
        "print(obeyed, device().memory_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    obeyed, rest = done.stdout.split()
    assert obeyed == "True"
    assert int(rest) < 17 * 2**22
