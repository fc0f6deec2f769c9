"""What layers keep for backward, in host memory until backward needs it.

While a layer's forward runs, tensors that autograd saves are copied to the host beside the computation. A layer's
tensors stay on the device until the next layer has made its own and are let go then, their copies done. When backward
reaches a layer, the tensors of the layer before it are already on their way back. So two layers' worth is on the
device: the one that computes and the one on its way. That is also the cap on what is in flight. What backward asks for
before it has been let go, such as the last layer's right after forward, it gets without a copy.

A copy is made of each stretch of memory once, however many operations save it. Parameters, rotary tables, and tensors
smaller than `smallest` stay. What is computed again in backward is not copied; what it is computed from is.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.mesh.device import Done, device
from moesaic.mesh.host_memory import HostMemory, Place
from moesaic.model.decoder import Decoder
from moesaic.model.layer import Layer
from moesaic.model.recompute import keeping
from moesaic.spec.options import OFFLOAD_BLOCKS

SMALLEST = 1 << 16
"""Bytes from which a tensor is worth a copy."""
_PLAIN = (Tensor, nn.Parameter)
_MEMBERS = {"attn_norm": "norms", "mlp_norm": "norms", "attn": "attention", "mlp": "mlp", "moe": "moe"}
"""Members of a layer, and the blocks of `spec.options.OFFLOAD_BLOCKS` that they are."""


class ActivationOffload:
    """Sends what the layers of `decoder` keep to `host`: of the `blocks` that are named, what their forward saves.

    `sent` counts the bytes copied out.
    """

    def __init__(
        self, decoder: Decoder, host: HostMemory, blocks: Sequence[str] = OFFLOAD_BLOCKS, smallest: int = SMALLEST
    ) -> None:
        self.host, self.blocks, self.smallest = host, frozenset(blocks), smallest
        self.where = device().torch_device
        self.sent = 0
        self._held: deque[_Scope] = deque()
        self._lock = threading.Lock()
        self._running = _Running()
        first = {stage.layers[0] for stage in decoder.stages.values() if stage.layers}
        layers = [(decoder.layers[i], i in first) for i in decoder.layers.indices]
        layers += [(module, False) for block in decoder.mtp for module in block.modules() if isinstance(module, Layer)]
        for layer, starts in layers:
            layer.register_forward_pre_hook(partial(self._enter, starts))
            layer.register_forward_hook(self._leave, always_call=True)
            for member, block in _MEMBERS.items():
                module = getattr(layer, member)
                if isinstance(module, nn.Module):
                    module.register_forward_pre_hook(partial(self._enter_block, block))
                    module.register_forward_hook(self._leave_block, always_call=True)

    def _enter(self, starts: bool, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before a layer's forward. `starts`: it is the first of its stage."""
        running = self._running
        if not torch.is_grad_enabled():
            running.scopes.append(None)
            return
        scope = _Scope(self, layer, inputs[1], None if starts else running.previous)
        scope.hooks.__enter__()
        running.scopes.append(scope)

    def _leave(self, layer: nn.Module, inputs: object, output: object) -> None:
        running = self._running
        scope = running.scopes.pop()
        if scope is None:
            return
        scope.hooks.__exit__(None, None, None)
        scope.close()
        running.previous = scope
        with self._lock:
            self._held.append(scope)
            done = [self._held.popleft() for _ in range(len(self._held) - 1)]
        for each in done:
            each.let_go()

    def _enter_block(self, block: str, module: nn.Module, inputs: object) -> None:
        self._running.blocks.append(block)

    def _leave_block(self, module: nn.Module, inputs: object, output: object) -> None:
        self._running.blocks.pop()

    @property
    def block(self) -> str:
        """The block that this thread is in. What a layer itself keeps is what its norms read."""
        return self._running.blocks[-1] if self._running.blocks else "norms"


class _Running(threading.local):
    """Where a thread's forward is: micro-batches may run in two."""

    def __init__(self) -> None:
        self.scopes: list[_Scope | None] = []
        self.blocks: list[str] = []
        self.previous: _Scope | None = None


class Piece:
    """A stretch of memory and its copy on the host. The room goes back when no saved tensor is left."""

    def __init__(self, offload: ActivationOffload, here: Tensor) -> None:
        """`here`: its bytes."""
        self.size, self.host = here.numel(), offload.host
        self.here: Tensor | None = here
        self.place: Place = self.host.reserve(self.size)
        self.copied: Done | None = self.host.send(here, self.place)
        self.arrives: Done | None = None
        offload.sent += self.size

    def __del__(self) -> None:
        self.host.release(self.place)

    def let_go(self) -> None:
        """Free the device's memory once the copy is done."""
        if self.copied is not None:
            self.copied.wait()
        self.copied = self.here = None

    def begin(self, where: torch.device) -> None:
        """Start the way back."""
        if self.here is None:
            self.here = torch.empty(self.size, dtype=torch.uint8, device=where)
            self.arrives = self.host.bring(self.place, self.here)

    def bytes(self) -> Tensor:
        """Its bytes on the device."""
        if self.arrives is not None:
            self.arrives.wait()
            self.arrives = None
        assert self.here is not None
        return self.here


@dataclass(frozen=True)
class _Saved:
    """What autograd holds in a tensor's place. `offset` is in bytes of the piece."""

    scope: _Scope
    piece: Piece
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def take(self) -> Tensor:
        """The tensor, on the device again."""
        scope, where = self.scope, self.scope.offload.where
        scope.ask(where)
        if scope.previous is not None:
            scope.previous.ask(where)
        here = self.piece.bytes()
        made = torch.empty(0, dtype=self.dtype, device=where)
        start = (here.storage_offset() + self.offset) // made.itemsize
        return made.set_(here.untyped_storage(), start, self.size, self.stride)  # type: ignore[call-overload, no-any-return]


class _Scope:
    """One forward of one layer: what it saved, and the layer before it in the same micro-batch."""

    def __init__(self, offload: ActivationOffload, layer: nn.Module, sequences: Any, previous: _Scope | None) -> None:
        self.offload, self.previous = offload, previous
        self.hooks = keeping(self.pack)
        self._layer: nn.Module | None = layer
        self._sequences: Any = sequences
        self._stretches: dict[int, list[tuple[int, int, Piece]]] = {}
        self._pieces: list[weakref.ref[Piece]] = []
        self._asked = False
        self._lock = threading.Lock()

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """A tensor that autograd saves; in its place what stands for it."""
        if (
            self.offload.block not in self.offload.blocks
            or tensor.numel() * tensor.itemsize < max(1, self.offload.smallest)
            or type(tensor) not in _PLAIN
            or tensor.layout != torch.strided
        ):
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        start, stop = _stretch(tensor)
        known = self._stretches.setdefault(address, [])
        for first, last, piece in known:
            if first <= start and stop <= last:
                return self._saved(piece, tensor, start - first)
        if self._stays(address):
            return tensor
        if not _is_dense(tensor):
            # Others may want what lies between.
            start, stop = 0, storage.nbytes()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (stop - start,))  # type: ignore[call-overload]
        piece = Piece(self.offload, flat)
        known.append((start, stop, piece))
        self._pieces.append(weakref.ref(piece))
        return self._saved(piece, tensor, _stretch(tensor)[0] - start)

    def _saved(self, piece: Piece, tensor: Tensor, offset: int) -> _Saved:
        return _Saved(self, piece, offset, tensor.dtype, tensor.size(), tensor.stride())

    def _stays(self, address: int) -> bool:
        """Whether memory outlives this layer's backward anyway."""
        assert self._layer is not None
        lasting = (*self._layer.parameters(), *self._sequences.tables())
        # Sharded parameters are not what computes.
        plain = (each for each in lasting if type(each) in _PLAIN)
        return any(each.untyped_storage().data_ptr() == address for each in plain)

    def close(self) -> None:
        """The forward is over."""
        self._stretches.clear()
        self._layer = self._sequences = None

    def let_go(self) -> None:
        """Free the device's memory of what has been copied, unless backward is here already."""
        with self._lock:
            if not self._asked:
                for piece in self._alive():
                    piece.let_go()

    def ask(self, where: torch.device) -> None:
        """Start the way back of all that is left of this layer, last saved first."""
        with self._lock:
            if not self._asked:
                self._asked = True
                for piece in reversed(self._alive()):
                    piece.begin(where)

    def _alive(self) -> list[Piece]:
        return [piece for each in self._pieces if (piece := each()) is not None]


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    start = int(tensor.storage_offset())
    last = start + sum(int(n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start * tensor.itemsize, (last + 1) * tensor.itemsize


def _is_dense(tensor: Tensor) -> bool:
    """Whether every element between the first and the last is the tensor's."""
    start, stop = _stretch(tensor)
    return stop - start == tensor.numel() * tensor.itemsize
