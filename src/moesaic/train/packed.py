"""Optimizer state that is stored in fewer bytes, or elsewhere, than the update computes with.

The update runs in fp32 on the device, one parameter at a time: its state is brought there, unpacked, updated, packed
and put away, while that of the next parameter is on its way. The arithmetic is that of the state that is always there,
so host memory and split masters change no bit of a result; moments in bf16 do.

A split master is the bf16 weight that the model computes with and the 16 low bits of the fp32 number that it is the
rounding of. The weight is rounded to nearest, ties to even, so these 16 bits say which way, but for a tie: then the
weight may lie above or below. That bit is the sign of the second moment, which is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.mesh.device import Done
from moesaic.mesh.host_memory import HostMemory, Place

_TIE = 1 << 15


@dataclass(frozen=True)
class Storing:
    """How the optimizer keeps its state: `moments` in fp32 or bf16; masters split; `fraction` of the bytes in `host`
    memory."""

    moments: torch.dtype = torch.float32
    split: bool = False
    host: HostMemory | None = None
    fraction: float = 1.0


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An fp32 tensor as (rounded to bf16, its low 16 bits as int16, whether it is a tie that was rounded up)."""
    low = master.contiguous().view(torch.int16).unflatten(-1, (-1, 2))[..., 0].contiguous()
    rounded = master.to(torch.bfloat16)
    # The largest negative int16 is the pattern of a tie.
    up = (low == -_TIE) & (rounded.abs().float() > master.abs())
    return rounded, low, up


def join(rounded: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """The fp32 tensor that `split` was given."""
    bits = low.to(torch.int32) & 0xFFFF
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    high -= ((bits > _TIE) | ((bits == _TIE) & up)).to(torch.int32)
    return (high << 16 | bits).view(torch.float32)


class Packed:
    """The state of one parameter.

    `master` is where its fp32 gradient is. If the master `stays` (it is the parameter itself, or rows that weights are
    gathered from) it always has values; else, split or away, only during the update.
    """

    def __init__(
        self, parameter: nn.Parameter, master: nn.Parameter, storing: Storing, *, stays: bool, away: bool
    ) -> None:
        self.parameter, self.master, self.stays = parameter, master, stays
        self.updates = torch.zeros((), dtype=torch.float32, device=master.device)
        self._host = storing.host if away else None
        self._split = storing.split and not stays
        self._types = {"exp_avg": storing.moments, "exp_avg_sq": storing.moments}
        if not stays:
            self._types["master"] = torch.int16 if self._split else torch.float32
        self._here: dict[str, Tensor] = {}
        self._places: dict[str, Place] = {}
        self._going: dict[str, Tensor] = {}
        self._sent: list[Done] = []
        self._arrives: list[Done] = []
        if self._host is not None:
            self._places = {kind: self._host.reserve(self._bytes(kind)) for kind in self._types}
        zeros = torch.zeros_like(master, memory_format=torch.contiguous_format)
        self.store(master.detach() if stays else master.detach().clone(), zeros, zeros.clone())
        self.settle()
        if not stays:
            master.untyped_storage().resize_(0)

    def _bytes(self, kind: str) -> int:
        return self.master.numel() * self._types[kind].itemsize

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the state as it is stored, on the `device` and on the `host`; not the master that stays."""
        size = sum(self._bytes(kind) for kind in self._types)
        return {"device": 0 if self._host is not None else size, "host": size if self._host is not None else 0}

    @property
    def here(self) -> list[Tensor]:
        """What is stored on the device."""
        return list(self._here.values())

    def ask(self) -> None:
        """Start to bring what is away."""
        if self._host is None or self._here:
            return
        self.settle()
        for kind, place in self._places.items():
            made = torch.empty(self.master.shape, dtype=self._types[kind], device=self.master.device)
            self._here[kind] = made
            self._arrives.append(self._host.bring(place, made))

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and both moments in fp32 on the device. What comes of them goes to `store`."""
        self.ask()
        for each in self._arrives:
            each.wait()
        self._arrives = []
        return self._unpack(self._here, self.parameter.detach())

    def _unpack(self, stored: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = stored["exp_avg"].float(), stored["exp_avg_sq"].float()
        if self.stays:
            return self.master.detach(), first, second
        if not self._split:
            return stored["master"], first, second
        master = join(weight, stored["master"], torch.signbit(second))
        return master, first, second.abs_() if second is not stored["exp_avg_sq"] else second.abs()

    def store(self, master: Tensor, first: Tensor, second: Tensor) -> None:
        """Pack the state and put it away; the parameter in bf16 becomes the rounded master."""
        made = {"exp_avg": first.to(self._types["exp_avg"]), "exp_avg_sq": second.to(self._types["exp_avg_sq"])}
        if self._split:
            rounded, low, up = split(master)
            self.parameter.detach().copy_(rounded)
            made["exp_avg_sq"] = torch.where(up, -made["exp_avg_sq"], made["exp_avg_sq"])
            made["master"] = low
        elif not self.stays:
            made["master"] = master
            self.parameter.detach().copy_(master)
        else:
            self.master.detach().copy_(master)
        if self._host is None:
            self._here = made
            return
        self._here, self._going = {}, {kind: value.contiguous() for kind, value in made.items()}
        self._sent = [self._host.send(self._going[kind], place) for kind, place in self._places.items()]

    def settle(self) -> None:
        """Wait until what was put away has left, and forget it here."""
        for each in self._sent:
            each.wait()
        self._sent, self._going = [], {}

    def copies(self) -> dict[str, Tensor]:
        """`master` and moments in fp32 in main memory, as a checkpoint has them."""
        stored = {kind: value.cpu() for kind, value in self._here.items()}
        if self._host is not None:
            for each in self._sent:
                each.finish()
            self.settle()
            host, shape = self._host, self.master.shape
            stored = {kind: host.copy(place, shape, self._types[kind]) for kind, place in self._places.items()}
        master, first, second = self._unpack(stored, self.parameter.detach().cpu())
        copied = {"exp_avg": first, "exp_avg_sq": second}
        return copied if self.stays else copied | {"master": master}

    def take(self, copies: dict[str, Tensor]) -> None:
        """Become what `copies` say."""
        self.settle()
        where = self.master.device
        master = self.master.detach() if self.stays else copies["master"].to(where)
        self.store(master, copies["exp_avg"].to(where), copies["exp_avg_sq"].to(where))
