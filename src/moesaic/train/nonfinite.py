"""When a loss or a gradient is not finite: which module produced it first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.spec.errors import MoesaicError


class NonFiniteError(MoesaicError):
    """Training met a NaN or an infinity and stopped before it reached the weights."""

    exit_code = 4


def explain(model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> str:
    """One clause on where the first NaN or infinity comes from, found by running the step again under watch.

    `losses` compute the loss of each micro-batch anew; weights must be as they were when the step failed. Looks in
    this order: weights, outputs of modules in the forward pass, the loss, gradients of modules in the backward pass.
    """
    culprit = not_finite({**dict(model.named_parameters()), **dict(model.named_buffers())}) or ""
    for number, loss in enumerate(losses, 1):
        with _Watch(model) as watch:
            value = loss()
            forward = watch.first_output
            if forward is None and math.isfinite(float(value.detach())):
                model.zero_grad(set_to_none=True)
                value.backward()
        where = f" in micro-batch {number} of {len(losses)}" if len(losses) > 1 else ""
        if forward is not None:
            return _join(culprit, f"the first module to produce it was `{forward}`, in the forward pass{where}")
        if not math.isfinite(float(value.detach())):
            return _join(culprit, f"every module's output was finite, but not the loss{where}")
        if watch.first_gradient is not None:
            gradient = f"the first non-finite gradient came back to `{watch.first_gradient}`"
            return _join(culprit, f"the forward pass was finite; {gradient}{where}")
    return culprit or "running the step again gave finite numbers, so the cause is not in the weights or the data"


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """A clause that names the first of `tensors` with a NaN or an infinity, None if all are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not _finite(tensor):
            return f"the weights `{name}` hold {_kind(tensor)}"
    return None


def _join(culprit: str, found: str) -> str:
    return f"{culprit}; {found}" if culprit else found


class _Watch:
    """Hooks every module; remembers the first whose output, and the first whose output's gradient, is not finite.

    Hooks run when a module is done, so of nested modules the innermost is named.
    """

    def __init__(self, model: nn.Module) -> None:
        self.first_output: str | None = None
        self.first_gradient: str | None = None
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name or type(module).__name__)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def gradient_hook(gradient: Tensor) -> None:
            if self.first_gradient is None and not _finite(gradient):
                self.first_gradient = name

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if self.first_output is None and not _finite(tensor):
                    self.first_output = name
                if tensor.requires_grad:
                    tensor.register_hook(gradient_hook)

        return hook


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _kind(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor.detach()).any()) else "infinity"
