"""Tensor-parallel products rank by rank, so that the rows of some ranks travel under the products of others'.

`GatheredProducts` is an all-gather of tokens and the products of them all; `products_to_tokens` is a product for all
tokens and the reduce-scatter of what each rank's are. Backward is alike: the gradient of a gathered input is made for
one rank after the other, sent as soon as it is there, and weight gradients are computed while the last ones travel; the
gradients of scattered outputs are multiplied as they come. (Cf. Wang et al., ASPLOS 2023, and MegaScale-MoE, arXiv
2505.11432, section 5.)

Rows of gathered tensors [n, B, s, …] stand by rank, those of products [B, n, s, …] by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moesaic.mesh.by_rank import gather_under, sum_under
from moesaic.mesh.group import Group
from moesaic.model.deferred import Later, Leaves, hide_from_autograd
from moesaic.model.kernels import compute_dtype

if TYPE_CHECKING:
    from moesaic.model.linear import Linear


@dataclass(frozen=True)
class Reads:
    """`layer` of columns `first` … `last` − 1 of what is gathered (all by default); None gives these themselves."""

    layer: Linear | None
    first: int = 0
    last: int | None = None


class GatheredProducts(nn.Module):
    """Gathers tokens and applies layers to them. A module for those who watch modules; it has no parameters."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_TD: Tensor, batch: int, reads: Sequence[Reads]) -> tuple[Tensor, ...]:
        """x [T, D] of own tokens, pieces of `batch` sequences: the tokens of all ranks [n, T, D], which carry no
        gradient, and of each that reads them y [n · T, O], sequence after sequence."""
        columns = tuple((each.first, x_TD.shape[1] if each.last is None else each.last) for each in reads)
        parameters = _parameters(reads)
        later, leaves = hide_from_autograd(x_TD, *parameters)
        return _Gathered.apply(x_TD, self.group, batch, columns, later, *leaves)  # type: ignore[no-any-return]

    @staticmethod
    def again(x_nTD: Tensor, batch: int, reads: Sequence[Reads]) -> tuple[Tensor, ...]:
        """The same products of tokens that were gathered before."""
        columns = tuple((each.first, x_nTD.shape[2] if each.last is None else each.last) for each in reads)
        products = _Products(x_nTD, batch, columns, _parameters(reads))
        for rank, x_TD in enumerate(x_nTD):
            products.add(rank, x_TD)
        return products.results()


def _parameters(reads: Sequence[Reads]) -> list[Tensor | None]:
    """Weight and bias of each."""
    found: list[Tensor | None] = []
    for each in reads:
        found += (None, None) if each.layer is None else (each.layer.weight, each.layer.bias)
    return found


class _Products:
    """Products y [B, n, s, O] that are filled in one rank's tokens after the other's. `like_nTD`: the tokens."""

    def __init__(
        self,
        like_nTD: Tensor,
        batch: int,
        columns: Sequence[tuple[int, int]],
        parameters: Sequence[Tensor | None],
    ) -> None:
        n, tokens, _ = like_nTD.shape
        self.columns, self.dtype = columns, compute_dtype(like_nTD)
        self.parameters = [None if each is None else each.to(self.dtype) for each in parameters]
        widths = [b - a if w is None else len(w) for (a, b), w in zip(columns, parameters[::2], strict=True)]
        self.outs = [like_nTD.new_empty(batch, n, tokens // batch, width) for width in widths]

    def add(self, rank: int, x_TD: Tensor) -> None:
        """The products of the tokens x of `rank`."""
        x_TD = x_TD.to(self.dtype)
        weights, biases = self.parameters[::2], self.parameters[1::2]
        for out_BnsO, (a, b), weight, bias in zip(self.outs, self.columns, weights, biases, strict=True):
            part = x_TD[:, a:b]
            y_TO = part if weight is None else F.linear(part, weight, bias)
            out_BnsO[:, rank] = y_TO.unflatten(0, (len(out_BnsO), -1))

    def results(self) -> tuple[Tensor, ...]:
        """Each [n · T, O]."""
        return tuple(out_BnsO.flatten(0, 2) for out_BnsO in self.outs)


class _Gathered(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        group: Group,
        batch: int,
        columns: tuple[tuple[int, int], ...],
        later: Later | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        products = _Products(x_TD.expand(group.size, *x_TD.shape), batch, columns, parameters)
        x_nTD = gather_under(x_TD, group, products.add)
        ctx.group, ctx.batch, ctx.columns, ctx.later = group, batch, columns, later
        ctx.save_for_backward(x_nTD, *parameters)
        ctx.mark_non_differentiable(x_nTD)
        ctx.set_materialize_grads(False)
        return x_nTD, *products.results()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_nTD, *parameters = ctx.saved_tensors
        batch, columns, dtype = ctx.batch, ctx.columns, compute_dtype(x_nTD)
        weights = [None if weight is None else weight.to(dtype) for weight in parameters[::2]]
        n, tokens, _ = x_nTD.shape
        grads = grads[1:]

        def grad_of(rank: int) -> Tensor:
            """This rank's share of the gradient of another's tokens."""
            grad_TD = x_nTD.new_zeros(tokens, x_nTD.shape[2], dtype=dtype)
            for grad_RO, (a, b), weight in zip(grads, columns, weights, strict=True):
                if grad_RO is None:
                    continue
                grad_TO = grad_RO.unflatten(0, (batch, n, -1))[:, rank].flatten(0, 1).to(dtype)
                if weight is None:
                    grad_TD[:, a:b] += grad_TO
                else:
                    grad_TD[:, a:b].addmm_(grad_TO, weight)
            return grad_TD.to(x_nTD.dtype)

        def weight_gradients(leaves: Leaves) -> list[Tensor | None]:
            x_RD = _by_sequence(x_nTD, batch).to(dtype)
            found: list[Tensor | None] = []
            for grad_RO, (a, b), weight, bias in zip(grads, columns, leaves[::2], leaves[1::2], strict=True):
                rows_RO = None if grad_RO is None else grad_RO.to(dtype)
                found += _gradients(weight, bias, rows_RO, x_RD[:, a:b])
            return found

        given: list[Tensor | None] = [None] * len(parameters)

        def now() -> None:
            wanted = ctx.needs_input_grad[5:]
            given[:] = weight_gradients(tuple(p if want else None for p, want in zip(parameters, wanted, strict=True)))

        if ctx.later is not None:
            ctx.later.leave(weight_gradients)
        meanwhile = None if ctx.later is not None else now
        grad_x_TD = None
        if ctx.needs_input_grad[0]:
            grad_x_TD = sum_under(grad_of, x_nTD.new_empty(x_nTD.shape), ctx.group, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        return grad_x_TD, None, None, None, None, *given


def products_to_tokens(x_RI: Tensor, weight_OI: Tensor, group: Group, batch: int) -> Tensor:
    """The sum over ranks of x Wᵀ for own tokens, [T, O]; x [n · T, I] holds the group's, `batch` sequences."""
    later, (weight,) = hide_from_autograd(x_RI, weight_OI)
    return _ToTokens.apply(x_RI, weight, group, batch, later)  # type: ignore[no-any-return]


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, group: Group, batch: int, later: Later | None) -> Tensor:
        ctx.group, ctx.batch, ctx.later = group, batch, later
        ctx.save_for_backward(x_RI, weight_OI)
        n, dtype = group.size, compute_dtype(x_RI)
        x_BnsI, weight = x_RI.unflatten(0, (batch, n, -1)), weight_OI.to(dtype)

        def product(rank: int) -> Tensor:
            return F.linear(x_BnsI[:, rank].flatten(0, 1).to(dtype), weight).to(x_RI.dtype)

        return sum_under(product, x_RI.new_empty(n, len(x_RI) // n, len(weight)), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_RI, weight_OI = ctx.saved_tensors
        n, batch, dtype = ctx.group.size, ctx.batch, compute_dtype(x_RI)
        weight = weight_OI.to(dtype)
        grad_BnsI = x_RI.new_empty(batch, n, len(x_RI) // (n * batch), x_RI.shape[1])

        def multiply(rank: int, grad_TO: Tensor) -> None:
            if ctx.needs_input_grad[0]:
                grad_BnsI[:, rank] = (grad_TO.to(dtype) @ weight).unflatten(0, (batch, -1))

        grad_nTO = gather_under(grads[0], ctx.group, multiply)

        def weight_gradient(leaves: Leaves) -> Sequence[Tensor | None]:
            rows_RO = _by_sequence(grad_nTO, batch).to(dtype)
            return _gradients(leaves[0], None, rows_RO, x_RI.to(dtype))[:1]

        given: Sequence[Tensor | None] = [None]
        if ctx.later is not None:
            ctx.later.leave(weight_gradient)
        elif ctx.needs_input_grad[1]:
            given = weight_gradient((weight_OI,))
        grad_x_RI = grad_BnsI.flatten(0, 2) if ctx.needs_input_grad[0] else None
        return grad_x_RI, *given, None, None, None


def _by_sequence(x_nTD: Tensor, batch: int) -> Tensor:
    """Rows that stand by rank [n, B · s, D], sequence after sequence [B · n · s, D]."""
    return x_nTD.unflatten(1, (batch, -1)).transpose(0, 1).flatten(0, 2)


def _gradients(
    weight: Tensor | None, bias: Tensor | None, grad_RO: Tensor | None, x_RI: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Of x Wᵀ + b, as far as they are wanted."""
    found: list[Tensor | None] = [None, None]
    if grad_RO is not None and weight is not None and weight.requires_grad:
        found[0] = (grad_RO.t() @ x_RI).to(weight.dtype)
    if grad_RO is not None and bias is not None and bias.requires_grad:
        found[1] = grad_RO.sum(0).to(bias.dtype)
    return found[0], found[1]
