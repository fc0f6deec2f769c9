"""Memory that the experts use again and again.

A fresh tensor costs a CPU a page fault for every 4 KiB, often more than the arithmetic on it. Scratch tensors live in a
workspace; what is kept for backward and the gradients of weights come from a pool, which hands memory out again when
nobody refers to it any more.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

Scratch = dict[tuple[str, torch.dtype, torch.device], Tensor]
"""Flat memory by name."""
ELEMENTS_BETWEEN_ROWS = 16
"""One line of a cache, of fp32."""


class Workspace(threading.local):
    """Named scratch tensors of one thread, grown when needed and never given back.

    A thread lends scratch to workers that run for it while it waits; that of the first is its own. So there is as much
    as threads that compute at once, whether experts or the inside of a product are shared out.
    """

    def __init__(self) -> None:
        self.flat: Scratch = {}
        self._others: list[Scratch] = []

    def lend(self, workers: int) -> list[Scratch]:
        """Scratch for each of `workers`."""
        self._others += [{} for _ in range(workers - 1 - len(self._others))]
        return [self.flat, *self._others[: workers - 1]]

    @contextlib.contextmanager
    def borrowed(self, scratch: Scratch) -> Iterator[None]:
        """Inside, this thread works in `scratch`."""
        own, self.flat = self.flat, scratch
        try:
            yield
        finally:
            self.flat = own

    def tensors(self) -> list[Tensor]:
        """All scratch of this thread, lent or not."""
        return [flat for scratch in (self.flat, *self._others) for flat in scratch.values()]

    def get(self, name: str, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised [rows, columns] tensor; the same memory as the last one of this name."""
        key = (name, dtype, like.device)
        size = rows * columns
        flat = self.flat.get(key)
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                flat = torch.empty(size, dtype=dtype, device=like.device)
            self.flat[key] = flat
        return flat[:size].view(rows, columns)

    def get_apart(self, name: str, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """As `get`, with rows a little more apart than they are long. A product of its transpose reads down columns,
        which would otherwise share few places of a cache where rows are a power of two long."""
        return self.get(name, rows, columns + ELEMENTS_BETWEEN_ROWS, like, dtype)[:, :columns]


WORKSPACE = Workspace()


def _references(flat: Tensor) -> int:
    """How many tensors, and Python handles such as the one made here, hold the memory of `flat`."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _references_when_free() -> int | None:
    """What `_references` says of memory that one tensor alone holds; None where a view does not raise it by one.

    Measured, because torch releases differ in whether the handle that `_references` makes counts too.
    """
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    flat = torch.empty(2)
    alone = _references(flat)
    view = flat[:1]
    shared = _references(flat)
    del view
    return alone if shared == alone + 1 and _references(flat) == alone else None


_REFERENCES_WHEN_FREE = _references_when_free()


class Pool:
    """Tensors that are handed out again once nothing refers to their memory any more.

    It keeps no more of them than were ever in use at once. On devices with a caching allocator, and where torch does
    not tell how often memory is referred to, every tensor is a fresh one.
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._most_in_use = 0
        self._paused = False
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of `shape`, with `like`'s type and device."""
        if like.device.type != "cpu" or _REFERENCES_WHEN_FREE is None or self._paused:
            return like.new_empty(shape)
        size = math.prod(shape)
        with self._lock:
            free = [t for t in self._all if _references(t) == _REFERENCES_WHEN_FREE]
            self._most_in_use = max(self._most_in_use, len(self._all) - len(free) + 1)
            fitting = [t for t in free if t.dtype == like.dtype and size <= t.numel() <= size + size // 8 + 1024]
            if fitting:
                flat = min(fitting, key=lambda t: t.numel())
            else:
                with torch.inference_mode(False):
                    flat = like.new_empty(size + size // 16)  # a little room, since routing changes row counts
                spare = {id(t) for t in free[: max(0, len(self._all) + 1 - self._most_in_use)]}
                self._all = [t for t in self._all if id(t) not in spare] + [flat]
        return flat[:size].view(shape)

    def release(self) -> None:
        """Give up all memory that nothing else refers to; what is in use goes with its last reader."""
        with self._lock:
            self._all.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every tensor is a fresh one and what was kept is given back: for who counts what is in use."""
        self.release()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


POOL = Pool()
"""For what experts keep for backward, and for the gradients of their weights."""
