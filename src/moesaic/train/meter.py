"""The memory meter: what every tensor storage of this process is for, from its making to its end.

While it is on, each operation's results are looked at: a storage that is new is noted with its bytes, the phase and the
module that made it (in backward: whose forward made the node at work), and noted again when nothing refers to it any
more. That sees what autograd saves, what functions
keep for backward by themselves, gradients and temporaries alike; it does not see what a kernel allocates and frees
inside. Views and results written in place have no storage of their own and are counted once.

`kept` is what one forward pass left for its backward, by (layer, module); modules have the planner's names
(`cost.activations`). `peaks` are the moments of each phase with most bytes, by category.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.mesh.device import device
from moesaic.model.decoder import Decoder
from moesaic.model.expert_memory import POOL, WORKSPACE
from moesaic.model.layer import Layer
from moesaic.model.mla import LatentAttention
from moesaic.model.sequences import Sequences

_autograd: Any = torch.autograd  # which does not say that it counts the graph's nodes

Place = tuple[int, str]
"""A layer's number, −1 outside of layers, and a module as the planner names it."""

NOWHERE: Place = (-1, "loss")
"""What no module made: in a forward pass, the decoder's own work after its layers."""
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "workspaces", "other")
"""`activations`: what forward passes kept for backward; `workspaces`: the experts' scratch, which stays; `other`: what
was there before."""


@dataclass(eq=False)
class Made:
    """One storage."""

    bytes: int
    phase: str
    place: Place
    shape: tuple[int, ...]
    """Of the tensor that it was made for."""
    category: str = "temporaries"
    alive: bool = True

    @property
    def numel(self) -> int:
        """Numbers in that tensor."""
        return math.prod(self.shape)


_NOTHING = Made(0, "", NOWHERE, ())


@dataclass(frozen=True)
class Peak:
    """The moment of a phase with most bytes."""

    total: int
    categories: dict[str, int]
    consumers: dict[str, int]
    """The same bytes, activations and temporaries by module too, largest first."""


class Meter(TorchDispatchMode):
    """Counts the storages of a step while it is entered; see the module's text.

    `state`: tensors that exist before, by category. `limit`: bytes beyond which making a tensor raises MemoryError, as
    a device with that much memory would.
    """

    def __init__(self, decoder: Decoder, state: dict[str, list[Tensor]], limit: int | None = None) -> None:
        super().__init__()
        self._places, self._inputs = dict(_places(decoder)), dict(_inputs(decoder))
        self._marks: list[tuple[int, Place]] = []
        """Since which node of the graph, by its number, which module is at work."""
        self._gathers = dict(_gathers(decoder))
        self._live: dict[int, Made] = {}
        self._events: list[tuple[str, Made, int]] = []
        self._phase = "other"
        self._passing: list[Made] | None = None
        self._kept: list[list[Made]] = []
        self._sequences: Sequences | None = None
        self.allocated: dict[str, int] = {}
        """Peak of the device's allocator by phase, where the device has one."""
        self._thread = threading.local()
        self._held = contextlib.ExitStack()
        self._total, self._limit = 0, limit
        # Where gradients end up: on the parameters, or on the fp32 masters that an optimizer steps.
        self._parameters = [*decoder.parameters(), *state.get("parameters", ()), *state.get("optimizer", ())]
        for category, tensors in state.items():
            for tensor in tensors:
                self._see(tensor, category)

    def __enter__(self) -> Meter:
        """Count from here on. Experts take fresh memory meanwhile, so that what they keep has an end that shows."""
        held = self._held
        held.enter_context(POOL.paused())
        held.callback(module_hooks.register_module_forward_pre_hook(self._enter_module).remove)
        held.callback(module_hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        held.enter_context(_watching_resizes(self._resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._held.close()
        # What lives on is nobody's business from here on.
        self._live.clear()

    # ------------------------------------------------------------ storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages of its results."""
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, "other")  # made before the meter was on, or inside of a kernel
        out = func(*args, **(kwargs or {}))
        name = str(func)
        for tensor in _tensors(out):
            self._see(tensor, name=name)
        return out

    def _see(self, tensor: Tensor, category: str = "temporaries", name: str = "") -> None:
        storage = _storage(tensor)
        if storage is None or storage._cdata in self._live:
            return
        key = storage._cdata
        made = Made(storage.nbytes(), self._phase, self._place(tensor, name), tuple(tensor.shape), category)
        self._live[key] = made
        weakref.finalize(storage, self._end, key, made).atexit = False
        if self._passing is not None and category == "temporaries":
            self._passing.append(made)
        self._note(made, made.bytes)

    def _end(self, key: int, made: Made) -> None:
        if self._live.get(key) is made:
            del self._live[key]
        made.alive = False
        self._note(made, -made.bytes)

    def _note(self, made: Made, change: int) -> None:
        self._events.append((self._phase, made, change))
        self._total += change
        if self._limit is not None and change > 0 and self._total > self._limit:
            limit, self._limit = self._limit, None
            raise MemoryError(f"can't allocate memory: {self._total:,} bytes of tensors, and there are {limit:,}")

    def _resized(self, storage: torch.UntypedStorage) -> None:
        made = self._live.get(storage._cdata)
        if made is not None and made.bytes != storage.nbytes():
            change, made.bytes = storage.nbytes() - made.bytes, storage.nbytes()
            self._note(made, change)

    # ------------------------------------------------------------ where it was made

    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._thread, "modules"):
            self._thread.modules = []
        return self._thread.modules  # type: ignore[no-any-return]

    def _place(self, tensor: Tensor, operation: str) -> Place:
        for module in reversed(self._stack()):
            place = self._places.get(module)
            if place is None:
                continue
            layer, name = place
            if name == "experts" and tensor.dim() == 1:
                return layer, "dispatch"  # numbers per row: their order, tokens and weights
            if name == "qkv" and operation.startswith(_OF_THE_CORE):
                return layer, "attention"
            if name == "dispatch" and operation.startswith(_OF_THE_GATE):
                return layer, "shared_experts"
            return place
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return NOWHERE
        # Backward: of the module that made the node.
        found = bisect.bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0])
        return self._marks[found - 1][1] if 0 < found < len(self._marks) else NOWHERE

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in self._inputs:
            self._rename([args[0]], self._inputs[module])
        if module in self._places:
            self._stack().append(module)
            self._mark()
            if isinstance(module, Layer):
                self._sequences = args[1]

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = self._stack()
        if module in stack:
            while stack.pop() is not module:
                pass
            self._mark()
        if module in self._gathers and output is not None:
            self._rename([output[0]], self._gathers[module])
        if isinstance(module, Layer) and output is not None:
            # The next layer's input; where there is none, what waits to be sent.
            self._rename([output[0]], (self._places[module][0], "output"))

    def _mark(self) -> None:
        stack = self._stack()
        self._marks.append((_autograd._get_sequence_nr(), self._places[stack[-1]] if stack else NOWHERE))

    def _rename(self, tensors: Iterable[Tensor], place: Place) -> None:
        for made in self._known(tensors):
            made.place = place

    def _known(self, tensors: Iterable[Tensor]) -> Iterator[Made]:
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage._cdata in self._live:
                yield self._live[storage._cdata]

    # ------------------------------------------------------------ phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is made inside belongs to phase `name`. One `forward` is one micro-batch on one stage."""
        before, self._phase = self._phase, name
        passing, self._passing = self._passing, [] if name == "forward" else None
        if name == "optimizer":
            for made in self._known(p.grad for p in self._parameters if p.grad is not None):
                made.category = "gradients"
        self._events.append((name, _NOTHING, 0))
        device().restart_peak()
        try:
            yield
        finally:
            if self._passing is not None:
                self._end_pass(self._passing)
            allocated = device().allocator_peak_bytes()
            if allocated is not None:
                self.allocated[name] = max(allocated, self.allocated.get(name, 0))
            self._phase, self._passing = before, passing
            self._events.append((before, _NOTHING, 0))

    def _end_pass(self, passing: list[Made]) -> None:
        """Sort out what lives on for other reasons than backward."""
        for made in self._known(WORKSPACE.tensors()):
            made.category = "workspaces"
        self._rename(_tensors(vars(self._sequences) if self._sequences else None), (NOWHERE[0], "positions"))
        self._sequences = None
        self._kept.append([made for made in passing if made.alive and made.category == "temporaries"])

    # ------------------------------------------------------------ results

    def kept(self) -> list[dict[Place, int]]:
        """What each forward pass so far left for its backward, bytes by layer and module; single numbers left out."""
        return [_by_place(made for made in each if made.numel > 1) for each in self._kept]

    def peaks(self) -> dict[str, Peak]:
        """The moment with most bytes of each phase that has been entered."""
        for each in self._kept:
            for made in each:
                if made.category == "temporaries":
                    made.category = "activations"
        now: Counter[Made] = Counter()
        total, highest = 0, dict[str, int]()
        moments: dict[str, dict[Made, int]] = {}
        for phase, made, change in self._events:
            total += change
            now[made] += change
            if not now[made]:
                del now[made]
            if total > highest.get(phase, -1):
                highest[phase], moments[phase] = total, dict(now)
        return {phase: _peak(held) for phase, held in moments.items()}


def _peak(held: dict[Made, int]) -> Peak:
    categories, consumers = dict.fromkeys(CATEGORIES, 0), Counter[str]()
    for made, size in held.items():
        categories[made.category] += size
        by_module = made.category in ("activations", "temporaries")
        consumers[f"{made.category} of {made.place[1]}" if by_module else made.category] += size
    return Peak(sum(held.values()), categories, dict(consumers.most_common()))


def _by_place(found: Iterable[Made]) -> dict[Place, int]:
    sizes: Counter[Place] = Counter()
    for made in found:
        sizes[made.place] += made.bytes
    return dict(sizes)


_OF_THE_CORE = ("aten._scaled_dot_product", "aten.full.", "aten.logaddexp")
"""Operations whose results inside attention are the core's: its output and its log-sums."""
_OF_THE_GATE = ("aten.sigmoid", "aten._softmax")
"""Those whose results in a mixture's own work are the gate between routed and shared experts."""

_MODULES = {
    "embed": "embedding", "positions": "embedding", "norm": "head",
    "attn_norm": "norms", "mlp_norm": "norms", "attn": "qkv", "q_a": "latents", "kv_a": "latents",
    "q_a_norm": "latents", "kv_a_norm": "latents", "mlp": "mlp", "moe": "dispatch", "router": "router",
    "experts": "experts", "shared": "shared_experts", "shared_gate": "shared_experts",
}  # fmt: skip
"""The planner's name for what a module makes, by the module's own name. Those not named belong to what they are in."""


_READS = {
    "attn.q": "norms", "attn.q_b": "latents", "attn.kv_b": "latents", "mlp.gate_up": "norms", "mlp.up": "norms",
}  # fmt: skip
"""What stands before these in a layer, also where it was gathered for them: later ones decide."""
_GATHERS = {"attn.gathered": "norms", "mlp.gathered": "norms"}
"""What these gather, where that is done under products; latents, in latent attention."""


def _places(decoder: Decoder) -> Iterator[tuple[nn.Module, Place]]:
    for name in ("embed", "positions", "norm"):
        module = getattr(decoder, name)
        if module is not None:
            yield module, (NOWHERE[0], _MODULES[name])
    for block in decoder.mtp:
        yield block, (NOWHERE[0], "mtp")
    for number, layer in _layers(decoder):
        yield layer, (number, "residual")
        for path, module in layer.named_modules():
            name = path.rpartition(".")[2]
            if name in _MODULES:
                yield module, (number, _MODULES[name])


def _inputs(decoder: Decoder) -> Iterator[tuple[nn.Module, Place]]:
    """Whose input is named by what it is for, not by who made it."""
    for number, layer in _layers(decoder):
        yield layer, (number, "residual")
        yield layer.attn.o, (number, "attention")
        for name in _READS:
            for path, module in layer.named_modules():
                if path == name:
                    yield module, (number, _READS[name])
    if decoder.embed is not None:
        yield decoder.embed, (NOWHERE[0], "embedding")
    if decoder.norm is not None:
        yield decoder.norm, (NOWHERE[0], "head")
    for block in decoder.mtp:
        yield block.get_submodule("norm"), (NOWHERE[0], "mtp")
        yield block.get_submodule("embed_norm"), (NOWHERE[0], "mtp")


def _gathers(decoder: Decoder) -> Iterator[tuple[nn.Module, Place]]:
    """Whose first result is named by what it is."""
    for number, layer in _layers(decoder):
        for path, module in layer.named_modules():
            if path in _GATHERS:
                latent = path == "attn.gathered" and isinstance(layer.attn, LatentAttention)
                yield module, (number, "latents" if latent else _GATHERS[path])


def _layers(decoder: Decoder) -> Iterator[tuple[int, Layer]]:
    for number in decoder.layers.indices:
        yield number, decoder.layers[number]
    for depth, block in enumerate(decoder.mtp):
        layer = block.get_submodule("layer")
        assert isinstance(layer, Layer)
        yield len(decoder.spec.layers) + depth, layer


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif is_dataclass(found):
        yield from _tensors(vars(found))


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.untyped_storage() if tensor.device.type == device().kind else None


@contextlib.contextmanager
def _watching_resizes(changed: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Sharding frees and fills gathered weights by resizing their storage, which is no operation on tensors."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        changed(storage)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
