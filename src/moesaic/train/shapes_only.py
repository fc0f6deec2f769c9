"""Operations on tensors without memory, for a dry run: what torch's `meta` device lacks for the trainer's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_META = torch.device("meta")


class ShapesOnly(TorchDispatchMode):
    """While it is entered, every operation gives a result, with the shape and type of the real one.

    Numbers read from a tensor are 1 and True. Conditions hold for all elements (`nonzero`). Main memory holds no
    fractions: where code outside this package asks for a CPU tensor of them, it gets one without memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[Any, str] = {}
        self._shapes: dict[Any, list[tuple[Any, ...] | None] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of one operation."""
        kwargs = kwargs or {}
        tensors = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
        if not any(each.is_meta for each in tensors):
            if not tensors and func in _FACTORIES and _is_fraction_on_cpu(kwargs):
                kwargs = kwargs | {"device": _META}
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind == "writes":
            return _written(func, args, kwargs)
        if not all(each.is_meta for each in tensors):
            if func is _aten._to_copy.default or func is _aten.copy_.default:
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
        return self._new(func, args, kwargs) if kind == "new" else func(*args, **kwargs)

    def _new(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation whose results are new tensors. Their shapes are looked up once: torch finds them in Python."""
        key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        found = self._shapes.get(key)
        if found is None:
            out = func(*args, **kwargs)
            results = out if isinstance(out, tuple | list) else [out]
            if all(each is None or (isinstance(each, Tensor) and each.is_meta) for each in results):
                self._shapes[key] = [None if t is None else (t.shape, t.stride(), t.dtype) for t in results]
            return out
        made = [None if one is None else torch.empty_strided(*one[:2], dtype=one[2], device=_META) for one in found]
        returns = func._schema.returns
        if len(returns) != 1:
            return tuple(made)
        return made if str(returns[0].type).startswith("List") else made[0]


def _kind(func: Any) -> str:
    """`new`: all results are new tensors; `writes`: all results are what was written to; else `views` and the rest."""
    schema = func._schema
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns) if each.alias_info is not None]
    name = schema.name.rpartition("::")[2]
    if not schema.name.startswith("aten::") or name in _OF_SHAPES:
        return "views"
    if not aliases:
        return "new" if schema.returns else "views"
    if all(info.is_write for info in aliases) and all(each.alias_info is not None for each in schema.returns):
        return "writes"
    return "views"


_OF_SHAPES = {
    "resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "_to_copy",
    "lift_fresh", "swapaxes_", "swapdims_", "_unsafe_view",
}  # fmt: skip
"""Operations that change a tensor's shape or place in memory, or move it; and a view whose signature hides that it is
one."""


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that writes into its arguments returns: those arguments."""
    schema = func._schema
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    outs = [given.get(each.name) for each in schema.arguments if each.alias_info is not None]
    if not schema.returns:
        return None
    return outs[0] if len(schema.returns) == 1 else tuple(outs)


def _one(tensor: Tensor) -> Any:
    return {torch.bool: True}.get(tensor.dtype, 1.0 if tensor.dtype.is_floating_point else 1)


def _all_places(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _grouped(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rows by matrices of experts [R, N] [E, N, M], or, of two [N, R] [R, M], the experts' own products [E, N, M]."""
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])


def _copied(tensor: Tensor, **kwargs: Any) -> Tensor:
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or tensor.dtype
    if tensor.is_meta and device is not None and torch.device(device).type == "cpu":
        return torch.ones(tensor.shape, dtype=dtype)
    return torch.empty_like(tensor, dtype=dtype, device=_META)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _one,
    _aten.nonzero.default: _all_places,
    _aten._to_copy.default: _copied,
    _aten._grouped_mm.default: _grouped,
}
_FACTORIES = {_aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default}


def _flat(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else (type(value), value)


def _is_fraction_on_cpu(kwargs: dict[str, Any]) -> bool:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    floating = (torch.get_default_dtype() if dtype is None else dtype).is_floating_point
    return floating and device is not None and torch.device(device).type == "cpu"


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=_META)
