"""What backward computes again instead of keeping: `layout.recompute`.

Two ways. A word whose work is cheap drops what its module made: whoever saves such a tensor for its backward gets a
handle instead, and when the first of them needs it, just before it runs, the work is done again, once for all of them
(`droppable`, `droppable_output`). Each value goes when its last reader has read it. Nothing that a module communicates
lies inside such work.

The words `moe` and `full` run a whole module without a graph, keep its input alone, and run it again in backward, which
then passes through it (`again`). Communication inside is repeated.

On the second pass routers choose by what chose on the first and draw the same noise (`remembered`), and weight
gradients are left for later exactly if the first pass would have left them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moesaic.mesh.device import device
from moesaic.model.deferred import active_queue, deferring

T = TypeVar("T")
Make = Callable[..., Tensor | tuple[Tensor, ...]]
"""Makes tensors from tensors, the same ones from the same. It must not hold any that backward would have to keep."""


class Stand(Protocol):
    """What is kept in a tensor's place."""

    def take(self) -> Tensor:
        """The tensor."""
        ...


class _Handle:
    """What is saved in place of a tensor that `part` makes again. `geometry`: a view of its output, in elements."""

    __slots__ = ("__weakref__", "geometry", "index", "part", "read", "value")

    def __init__(self, part: _Part, index: int, geometry: tuple[Any, ...] | None = None) -> None:
        self.part, self.index, self.geometry = part, index, geometry
        self.value: Tensor | None = None
        self.read = False
        part.handles.append(weakref.ref(self))

    def take(self) -> Tensor:
        """The tensor. A second backward through the same graph makes it once more."""
        if self.value is None:
            self.read = False
            self.part.make_again()
        value, self.value, self.read = self.value, None, True
        others = self.part.alive()
        if all(handle.read for handle in others):
            for handle in others:
                handle.read = False
        assert value is not None
        return value


def _saved(packed: Tensor | Stand) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.take()


class _Part:
    """Work that can be done again from `inputs`, which may be handles of other parts. `inside`: what it saves for its
    own backward is dropped too."""

    def __init__(self, make: Make, inputs: Sequence[tuple[Any, bool]], inside: bool) -> None:
        self.make, self.inputs, self.inside = make, inputs, inside
        # Whoever saved a handle holds it and with it this part. Held from here too, what the part begins from would
        # outlive its backward until Python looks for cycles.
        self.handles: list[weakref.ref[_Handle]] = []
        self.queue = active_queue()

    def alive(self) -> list[_Handle]:
        """The handles that somebody may still read."""
        return [handle for handle in (each() for each in self.handles) if handle is not None]

    def drop_saved(self, tensor: Tensor) -> _Handle:
        """Called for each tensor that the work saves, in order."""
        return _Handle(self, len(self.handles))

    def make_again(self) -> None:
        """Give every handle that has not been read its tensor."""
        inputs = [_saved(packed).detach().requires_grad_(wanted) for packed, wanted in self.inputs]
        saved: list[Tensor] = []

        def note(tensor: Tensor) -> None:
            saved.append(tensor.detach())

        if self.inside:
            with torch.enable_grad(), deferring(self.queue, again=True), saved_tensors_hooks(note, _saved):
                made = _as_tuple(self.make(*inputs))
        else:
            with torch.no_grad():
                made = _as_tuple(self.make(*inputs))
        for handle in self.alive():
            if handle.read:
                continue
            if handle.geometry is None:
                handle.value = saved[handle.index]
            else:
                handle.value = made[handle.index].detach().as_strided(*handle.geometry)


class _Scope:
    """One layer's forward pass: its words, and the tensors made so far that can be made again, by their storages."""

    def __init__(self, words: frozenset[str]) -> None:
        self.words, self.keep = words, _active.keep
        # A weak reference keeps an address from being another storage's while it stands here.
        self.made: dict[int, tuple[_Part, int, torch.dtype, StorageWeakRef]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What to save in place of a tensor."""
        found = self.made.get(tensor.untyped_storage()._cdata)
        if found is None or found[2] != tensor.dtype:
            return tensor if self.keep is None else self.keep(tensor)
        return _Handle(found[0], found[1], (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def add(self, part: _Part, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`part` makes `outputs`; those that are views of its inputs are nothing new."""
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for index, output in enumerate(outputs):
            storage = output.untyped_storage()
            if storage._cdata not in given:
                self.made.setdefault(storage._cdata, (part, index, output.dtype, StorageWeakRef(storage)))


class _Record:
    """What one pass chose, for the pass that repeats it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.place: int | None = None
        """Of the next value on the second pass; None on the first."""


class _Active(threading.local):
    scope: _Scope | None = None
    keep: Callable[[Tensor], Tensor | Stand] | None = None
    record: _Record | None = None


_active = _Active()


@contextlib.contextmanager
def keeping(keep: Callable[[Tensor], Tensor | Stand]) -> Iterator[None]:
    """Layers' forward passes inside, on this thread: what is kept for backward all the same is kept as `keep` says."""
    before, _active.keep = _active.keep, keep
    try:
        with saved_tensors_hooks(keep, _saved):
            yield
    finally:
        _active.keep = before


@contextlib.contextmanager
def recomputing(words: frozenset[str]) -> Iterator[None]:
    """One layer's forward pass, which drops what `words` name."""
    if not words or not torch.is_grad_enabled():
        yield
        return
    before, _active.scope = _active.scope, _Scope(words)
    try:
        with saved_tensors_hooks(_active.scope.pack, _saved):
            yield
    finally:
        _active.scope.made.clear()
        _active.scope = before


def droppable(word: str, make: Make, *inputs: Tensor) -> Any:
    """`make(*inputs)`; under `word` backward keeps neither its result nor what it saves for its own backward."""
    return _droppable(word, make, inputs, inside=True)


def droppable_output(word: str, make: Make, *inputs: Tensor) -> Any:
    """`make(*inputs)`; under `word` backward keeps what it saves for its own backward, but not its result."""
    return _droppable(word, make, inputs, inside=False)


def made_again(word: str, make: Make, made: Sequence[Tensor], *inputs: Tensor) -> None:
    """`make(*inputs)` would give `made`, which came about in another way: under `word` backward keeps `inputs` of the
    two."""
    scope = _active.scope
    if scope is not None and word in scope.words:
        kept = [(scope.pack(tensor.detach()), tensor.requires_grad) for tensor in inputs]
        scope.add(_Part(make, kept, inside=False), made, inputs)


def _droppable(word: str, make: Make, inputs: Sequence[Tensor], inside: bool) -> Any:
    scope = _active.scope
    if scope is None or word not in scope.words:
        return make(*inputs)
    part = _Part(make, [(scope.pack(tensor.detach()), tensor.requires_grad) for tensor in inputs], inside)
    with saved_tensors_hooks(part.drop_saved, _saved) if inside else contextlib.nullcontext():
        made = make(*inputs)
    scope.add(part, _as_tuple(made), inputs)
    return made


def again(word: str, make: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """`make(x)`; under `word` backward keeps x alone and runs `make` again."""
    scope = _active.scope
    if scope is None or word not in scope.words:
        return make(x)
    return run_again(make, x)


def run_again(make: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """`make(x)` without a graph; backward keeps x alone and runs `make` again."""
    if not torch.is_grad_enabled():
        return make(x)
    if not x.requires_grad:  # the parameters inside may need a gradient all the same
        x = x.detach().requires_grad_()
    return _Again.apply(make, active_queue(), x)  # type: ignore[no-any-return]


class _Again(torch.autograd.Function):
    """A function whose backward runs it once more, with a graph, and passes through that."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Tensor], tuple[Tensor, ...]], queue: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.make, ctx.queue, ctx.record = make, queue, _Record()
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        with _pass(ctx.record):
            return make(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        ctx.record.place = 0
        with torch.enable_grad(), deferring(ctx.queue), _pass(ctx.record):
            made = ctx.make(x)
        roots = [(y, grad) for y, grad in zip(made, grads, strict=True) if grad is not None and y.requires_grad]
        del made
        torch.autograd.backward([y for y, _ in roots], [grad for _, grad in roots])
        return None, None, x.grad


@contextlib.contextmanager
def _pass(record: _Record) -> Iterator[None]:
    """A pass of `_Again`; words of the layer around it do not reach inside."""
    before = _active.scope, _active.record
    _active.scope, _active.record = None, record
    try:
        yield
    finally:
        _active.scope, _active.record = before


def remembered(make: Callable[[], T]) -> T:
    """`make()`, or, on the second pass, what it gave on the first. Both passes ask in the same order."""
    record = _active.record
    if record is None:
        return make()
    if record.place is None:
        record.values.append(make())
        return record.values[-1]  # type: ignore[no-any-return]
    record.place += 1
    return record.values[record.place - 1]  # type: ignore[no-any-return]


def on_second_pass() -> bool:
    """Whether this runs for its gradients what has run before."""
    return _active.record is not None and _active.record.place is not None


@contextlib.contextmanager
def same_noise() -> Iterator[None]:
    """Inside, the second pass draws from the global generators what the first drew, and others draw as if it had not.
    Nothing inside may wait for a message: another micro-batch could draw meanwhile."""
    if _active.record is None:
        yield
        return
    state = remembered(device().rng_state)
    if not on_second_pass():
        yield
        return
    before = device().rng_state()
    device().set_rng_state(state)
    try:
        yield
    finally:
        device().set_rng_state(before)


def _as_tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
