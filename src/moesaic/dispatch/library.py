"""What dispatchers over a library for NVIDIA GPUs have in common.

Such a library makes a handle as it first sends tokens, from which it repeats that message and makes its transpose. So
there is no route before the tokens go, and the first message is a leg of its own. Rows are bf16 and router weights fp32
in the kernels.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moesaic.dispatch.protocol import Dispatcher, DispatchLeg
from moesaic.dispatch.route import Arrival, Route
from moesaic.mesh.group import Group
from moesaic.mesh.lanes import before_wait
from moesaic.spec.errors import SpecError


class Event(Protocol):
    """The end of work on another stream."""

    def current_stream_wait(self) -> None:
        """What is queued from here on begins after it."""


@dataclass(frozen=True)
class Sent:
    """Rows that are there once the stream has reached `event`; `sources` must live until then."""

    event: Event
    rows: Tensor
    sources: tuple[Tensor, ...] = field(repr=False)

    def wait(self) -> Tensor:
        """The rows; another lane may use the wait."""
        before_wait(self.event, self.rows)
        self.event.current_stream_wait()
        return self.rows


class LibraryRoute(Route, Protocol):
    """A route that also brings back router weights, which the library has no message of their own for."""

    def collect(self, y_RW: Tensor, weights_RK: Tensor | None) -> tuple[Sent, Tensor | None]:
        """Begin to send rows back with numbers like router weights; the sums of these [T, K] are there when rows are"""


@dataclass(frozen=True)
class First:
    """The first message of some tokens: its rows, and what is there with them."""

    sent: Sent
    ids_RK: Tensor
    weights_RK: Tensor
    route: LibraryRoute


class LibraryDispatcher(Dispatcher):
    """Sends rows over the expert-parallel group by a library's kernels."""

    package: ClassVar[str]
    attribute: ClassVar[str]
    """What of the package makes its buffers."""
    source: ClassVar[str]
    """Where the package comes from."""
    device: ClassVar[str] = "cuda"
    """Where its kernels run."""
    multiple: ClassVar[int]
    """What a row's length must be a multiple of."""

    def __init__(self, experts_here: int, first_expert: int, ep: Group, etp: Group) -> None:
        """
        Raises:
            SpecError: the package does not import, or experts are cut.
        """
        super().__init__(experts_here, first_expert)
        if etp.size > 1:
            raise SpecError(
                f"layout.dispatcher {self.name!r} brings tokens to whole experts, and etp is {etp.size}: use etp 1 or "
                "the dispatcher hierarchical."
            )
        self.library = self.load()
        self.ep = ep

    @classmethod
    def load(cls) -> Any:
        """The package.

        Raises:
            SpecError: it does not import, or is a build without what is needed.
        """
        try:
            found = importlib.import_module(cls.package)
        except ImportError as error:
            raise SpecError(
                f"layout.dispatcher {cls.name!r} needs the package {cls.package}, which does not import ({error}): "
                f"install it from {cls.source} or use the dispatcher hierarchical."
            ) from error
        if not hasattr(found, cls.attribute):
            raise SpecError(
                f"layout.dispatcher {cls.name!r} needs {cls.package}.{cls.attribute}, which this build of "
                f"{cls.package} lacks: install it from {cls.source} or use the dispatcher hierarchical."
            )
        return found

    @classmethod
    def check(cls, kind: str, dtype: str) -> None:
        """Nothing where a run with tokens of `dtype` ("bf16", "fp32") on such a device can use the library.

        Raises:
            SpecError: it cannot.
        """
        cls.load()
        if kind != cls.device:
            raise SpecError(
                f"layout.dispatcher {cls.name!r} runs on NVIDIA GPUs, and tokens are on {kind}: use the dispatcher "
                "hierarchical."
            )
        if dtype != "bf16":
            raise SpecError(
                f'layout.dispatcher {cls.name!r} sends bf16 rows, and tokens are {dtype}: use train.dtype "bf16" or '
                "the dispatcher hierarchical."
            )

    def check_rows(self, x_TD: Tensor) -> None:
        """Nothing for rows that the kernels can send.

        Raises:
            SpecError: they cannot.
        """
        self.check(x_TD.device.type, _NAMES.get(x_TD.dtype, str(x_TD.dtype).removeprefix("torch.")))
        if x_TD.shape[1] % self.multiple:
            raise SpecError(
                f"layout.dispatcher {self.name!r} sends rows of a multiple of {self.multiple} numbers, and the hidden "
                f"size is {x_TD.shape[1]}: use the dispatcher hierarchical."
            )

    def route(self, ids_TK: Tensor) -> Route:
        """Not without tokens."""
        raise NotImplementedError(f"{self.package} makes a route by dispatching; call start_dispatch")

    def leg(self, ids_TK: Tensor) -> DispatchLeg:
        """The first message, which makes the handle that all others of these tokens use."""
        return _FirstLeg(self, ids_TK)

    @abstractmethod
    def first(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> First:
        """Begin the first message of these tokens."""


class _FirstLeg(DispatchLeg):
    route: LibraryRoute

    def __init__(self, dispatcher: LibraryDispatcher, ids_TK: Tensor) -> None:
        self.dispatcher = dispatcher
        self.ids_TK: Tensor | None = ids_TK
        self.sent: Arrival | None = None

    def start(self, *tensors: Tensor) -> None:
        x_TD, weights_TK = (tensor.contiguous() for tensor in tensors)
        assert self.ids_TK is not None
        ids_TK, self.ids_TK = self.ids_TK.contiguous(), None
        self.dispatcher.check_rows(x_TD)
        first = self.dispatcher.first(x_TD, ids_TK, weights_TK)
        self.sent, self.ids_RK, self.weights_RK, self.route = first.sent, first.ids_RK, first.weights_RK, first.route

    def finish(self) -> tuple[Tensor, ...]:
        rows_RD, weights_RK = self._arrived(), self.weights_RK
        del self.weights_RK
        return rows_RD, weights_RK

    def start_backward(self, *grads: Tensor) -> None:
        grad_RD, grad_weights_RK = grads
        # Rows go back even if only weights want a gradient: the library has no message of weights alone.
        self.sent, self.grad_weights_TK = self.route.collect(grad_RD, grad_weights_RK if self.wants[1] else None)

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        grad_TD = self._arrived()
        grad_TK, self.grad_weights_TK = self.grad_weights_TK, None
        return grad_TD if self.wants[0] else None, grad_TK

    def _arrived(self) -> Tensor:
        assert self.sent is not None
        sent, self.sent = self.sent, None
        return sent.wait()


_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
