"""Memory that the experts use again and again.

A fresh tensor costs a CPU a page fault for every 4 KiB, often more than the arithmetic on it. Scratch tensors live in a
workspace; what is kept for backward comes from a pool, and goes back to it when autograd lets go of it.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor


class Workspace(threading.local):
    """Named scratch tensors of one thread, grown when needed and never given back."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised [rows, columns] tensor; the same memory as the last one of this name."""
        key = (name, dtype, like.device)
        size = rows * columns
        flat = self.flat.get(key)
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype, device=like.device)
            self.flat[key] = flat
        return flat[:size].view(rows, columns)


WORKSPACE = Workspace()


class Pool:
    """Tensors that are handed out until nobody refers to them any more, then handed out again.

    It keeps no more free tensors than were ever in use at once, and only where fresh memory is expensive: on a CPU.
    What it hands out must not be viewed by anything that outlives it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._in_use = 0
        self._most_in_use = 0
        self._lock = threading.Lock()

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """An uninitialised [rows, columns] tensor of `like`'s type and device."""
        if like.device.type != "cpu":
            return like.new_empty(rows, columns)
        size = rows * columns
        with self._lock:
            fitting = (t for t in self._free if t.dtype == like.dtype and size <= t.numel() <= 2 * size + 1024)
            flat = min(fitting, key=lambda t: t.numel(), default=None)
            if flat is None:
                flat = like.new_empty(size + size // 16)  # a little room, since routing changes row counts
            else:
                self._free = [t for t in self._free if t is not flat]
            self._in_use += 1
            self._most_in_use = max(self._most_in_use, self._in_use)
        handed = flat[:size].view(rows, columns)
        weakref.finalize(handed, self._give_back, flat).atexit = False
        return handed

    def _give_back(self, flat: Tensor) -> None:
        with self._lock:
            self._in_use -= 1
            self._free.append(flat)
            del self._free[: max(0, len(self._free) + self._in_use - self._most_in_use)]


KEPT = Pool()
"""What experts keep for backward."""
