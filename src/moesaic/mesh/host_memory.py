"""Host memory: where tensors wait that the device has no room for.

Beside an accelerator it is pinned main memory, and copies run on two streams of their own, one in each direction. A
processor's tensors are in main memory already. What waits is written to a file without a name there, by threads, so
that the memory of the process really falls and the same code runs on a laptop: a slower device and a larger store
behind it. The system may keep the file's pages as long as it has room for them.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moesaic.mesh.device import Done, device

_GRAIN = 1 << 12


@dataclass(frozen=True)
class Place:
    """Room in host memory. `at` is an offset in the file (processor) or pinned memory (accelerator)."""

    room: int
    at: int | Tensor


class HostMemory:
    """Room outside the device, handed out again when it is given back; it never shrinks.

    `folder` is where the file of a processor lies, by default the system's folder of temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._out, self._back = device().side(), device().side()
        self._free: dict[int, list[Place]] = {}
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(dir=folder) if device().kind == "cpu" else None
        self.bytes = 0
        """Room in all, in use or not."""
        self.moved = 0
        """Bytes that were ever sent to or brought from the host."""

    def reserve(self, size: int) -> Place:
        """Room for `size` bytes."""
        room = _size_class(size)
        with self._lock:
            free = self._free.get(room)
            if free:
                return free.pop()
            start, self.bytes = self.bytes, self.bytes + room
        if self._file is not None:
            return Place(room, start)
        return Place(room, torch.empty(room, dtype=torch.uint8, pin_memory=True))

    def release(self, place: Place) -> None:
        """Give room back. A copy to it may still be under way, since the next one comes after it."""
        with self._lock:
            self._free.setdefault(place.room, []).append(place)

    def send(self, tensor: Tensor, place: Place) -> Done:
        """Begin to copy a contiguous tensor of the device to `place`. Before it is done the tensor must not change."""
        flat = _as_bytes(tensor)
        self.moved += flat.numel()
        return self._out.run(lambda: self._write(flat, place))

    def bring(self, place: Place, tensor: Tensor) -> Done:
        """Begin to fill a contiguous tensor of the device from `place`, to which the copy must have been waited for."""
        flat = _as_bytes(tensor)
        self.moved += flat.numel()
        return self._back.run(lambda: self._read(place, flat))

    def copy(self, place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A copy of what is at `place` in main memory, where no copy to it is under way."""
        made = torch.empty(tuple(shape), dtype=dtype)
        self._read(place, _as_bytes(made))
        return made

    def _write(self, flat: Tensor, place: Place) -> None:
        if isinstance(place.at, Tensor):
            place.at[: flat.numel()].copy_(flat, non_blocking=True)
            return
        assert self._file is not None
        view, done = flat.numpy().data, 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], place.at + done)

    def _read(self, place: Place, flat: Tensor) -> None:
        if isinstance(place.at, Tensor):
            flat.copy_(place.at[: flat.numel()], non_blocking=flat.is_cuda)
            return
        assert self._file is not None
        view, done = flat.numpy().data, 0
        while done < len(view):
            read = os.preadv(self._file.fileno(), [view[done:]], place.at + done)
            if read == 0:
                raise OSError("the file that stands for host memory ends too early")
            done += read


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _size_class(size: int) -> int:
    """`size` rounded up by an eighth at most, so that sizes that vary a little share room."""
    size = max(size, _GRAIN)
    step = max(_GRAIN, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
