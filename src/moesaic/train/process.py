"""What a training process sets for itself before it makes its first large tensor: threads and the allocator."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_OWN_MAPPING = 128 * 1024
"""Bytes from which a block has a mapping of its own where freed memory is given back: what glibc starts with."""


def tune_malloc(keep: bool = True) -> bool:
    """Make glibc keep freed memory for the next tensor, or give every large block back when it is freed; True if it
    obeyed.

    Kept memory costs no page faults, but gaps between live tensors stay resident: glibc asks for 96 bytes more than an
    aligned tensor needs, so the gap that one leaves is too small for the next of its size once small blocks sit at its
    edge. Given back, the process has resident what its tensors need, and every page faults in again each step. By
    itself glibc does neither: it gives back until a block is freed, then keeps blocks of that size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if not keep:
        return bool(mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING))
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def physical_cores() -> int:
    """Cores this process may use: hyper-threads of one core count once, and a container's CPU quota is respected."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add((topology / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota(len(cores))))


def _quota(default: int) -> int:
    """The control group's CPU quota in whole cores, rounded up; `default` where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return default
    return default if quota == "max" else -(-int(quota) // int(period))


def set_threads(threads: int) -> int:
    """Use `threads` threads within one operation; 0 means OMP_NUM_THREADS if set, else the physical cores."""
    if threads == 0:
        asked = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(asked) if asked.isdecimal() and int(asked) > 0 else physical_cores()
    torch.set_num_threads(threads)
    return threads
