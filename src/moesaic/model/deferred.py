"""Weight gradients that backward leaves for later.

A pipeline waits for gradients of activations, never for gradients of weights, so a schedule may do these when there is
nothing else to do. Inside `deferring(queue)` a module's forward notes the queue; its backward then returns the gradient
of its input and leaves to the queue what gives the weights'; `queue.run()` does that work. Backward of GPU graphs runs
on threads of its own, so it is forward that looks for the queue.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Leaves = tuple[Tensor | None, ...]
"""Parameters of a module, None for those it does not have."""
Compute = Callable[[Leaves], Sequence[Tensor | None]]
"""Gives the gradients of parameters, None where there is none. Called once."""


class WeightGradients:
    """The weight gradients that one micro-batch has left in one virtual stage."""

    def __init__(self) -> None:
        self._left: deque[tuple[Compute, Leaves]] = deque()
        self._uses: Counter[Tensor] = Counter()

    def __len__(self) -> int:
        return len(self._left)

    def append(self, compute: Compute, leaves: Leaves) -> None:
        """Leave `compute(leaves)` for later. It keeps alive whatever it refers to, and is dropped after it ran."""
        self._left.append((compute, leaves))

    def expect(self, leaves: Leaves) -> None:
        """Forward has used these parameters, and backward will leave their gradients."""
        self._uses.update(leaf for leaf in leaves if leaf is not None)

    def uses(self, leaf: Tensor) -> int:
        """How many gradients of a parameter are left, or will be."""
        return max(0, self._uses[leaf])

    def _compute(self, compute: Compute, leaves: Leaves) -> Sequence[Tensor | None]:
        self._uses.subtract(leaf for leaf in leaves if leaf is not None)
        return compute(leaves)

    def run(self) -> None:
        """Compute what was left, oldest first, and add it to the parameters' `.grad`.

        Autograd itself accumulates: hooks on parameters run, a first gradient is stored without a copy, and a
        parameter that was used several times gets one sum, as in backward.
        """
        if not self._left:
            return
        roots: list[Tensor] = []
        with torch.enable_grad():
            while self._left:  # of the nodes that can run, autograd takes the one made last
                compute, leaves = self._left.pop()
                roots.append(_Compute.apply(partial(self._compute, compute), *leaves))
        torch.autograd.backward(roots, [root.detach() for root in roots])

    def run_one(self) -> bool:
        """Compute and add what was left first; False if nothing is left. May be called inside backward.

        Until all is done a caller should go on with this one: sums of parameters that were used several times then do
        not depend on when it is called.
        """
        if not self._left:
            return False
        with torch.enable_grad():
            compute, leaves = self._left.popleft()
            root = _Compute.apply(partial(self._compute, compute), *leaves)
            del compute
        torch.autograd.backward([root], [root.detach()])
        return True

    def run_each(self) -> None:
        """`run_one` for all that is left."""
        while self.run_one():
            pass


class _Compute(torch.autograd.Function):
    """An empty tensor whose backward computes gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, *leaves: Tensor | None) -> Tensor:
        ctx.compute, ctx.leaves = compute, leaves
        return torch.empty(0, device=next(leaf.device for leaf in leaves if leaf is not None))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        compute, leaves = ctx.compute, ctx.leaves
        ctx.compute = ctx.leaves = None
        return None, *compute(leaves)


@dataclass(frozen=True)
class Later:
    """Where the gradients of a module's parameters are left."""

    queue: WeightGradients
    leaves: Leaves

    def leave(self, compute: Compute) -> None:
        """Leave `compute(leaves)`, the gradients of these parameters, for later."""
        self.queue.append(compute, self.leaves)


class _Active(threading.local):
    queue: WeightGradients | None = None
    again = False
    """Whether forward runs again for what backward needs of it, so that its uses of parameters are counted already."""


_active = _Active()


@contextlib.contextmanager
def deferring(queue: WeightGradients | None, again: bool = False) -> Iterator[None]:
    """Forward inside, on this thread, leaves weight gradients to `queue`. None: it leaves nothing. `again`: it runs for
    the second time."""
    before = _active.queue, _active.again
    _active.queue, _active.again = queue, again
    try:
        yield
    finally:
        _active.queue, _active.again = before


def active_queue() -> WeightGradients | None:
    """Where forward on this thread leaves weight gradients now."""
    return _active.queue


def hide_from_autograd(x: Tensor, *parameters: Tensor | None) -> tuple[Later | None, Leaves]:
    """For an autograd function of `x` and `parameters`: where to leave the parameters' gradients, or None where its
    backward must give them; and the parameters to apply it to, detached where their gradients are left, because
    autograd would call the hooks of a parameter without gradient.

    Gradients can be left to the active queue if parameters are leaves, and if backward passes through the function all
    the same because `x` needs a gradient.
    """
    queue = _active.queue
    if queue is None or not (x.requires_grad and torch.is_grad_enabled()):
        return None, parameters
    given = [p for p in parameters if p is not None]
    if not all(p.is_leaf for p in given) or not any(p.requires_grad for p in given):
        return None, parameters
    if not _active.again:
        queue.expect(parameters)
    return Later(queue, parameters), tuple(None if p is None else p.detach() for p in parameters)


def recompute_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint`: what is recomputed leaves weight gradients exactly if forward did."""
    return contextlib.nullcontext(), deferring(_active.queue, again=True)
