"""Which peers train with several ranks, and on which layouts each of them runs here.

Imports nothing but the standard library: the parent of the benchmark and every peer's environment read it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

NAMES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")


@dataclass(frozen=True)
class Degrees:
    """How many ways dense weights (pp·dp·cp·tp) and experts (pp·edp·ep·etp) are cut, over the same ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    edp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def text(self) -> str:
        """`dp2 tp2 / ep4`: degrees of 1 are left out, `1` stands for a side where all are."""
        parts = [[f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1] for names in _SIDES]
        return " / ".join(" ".join(side) or "1" for side in parts)

    def as_json(self) -> dict[str, int]:
        return asdict(self)


_SIDES = (NAMES[:4], NAMES[4:])


def parse_degrees(text: str, world: int) -> Degrees:
    """`dp2 tp2 / ep4` → Degrees, with dp and edp filled up to `world` where they are not named.

    Raises ValueError if the degrees do not make `world` ranks on both sides.
    """
    found: dict[str, int] = {}
    for word in text.replace("/", " ").split():
        match = re.fullmatch(r"(pp|dp|cp|tp|edp|ep|etp)([1-9]\d*)", word)
        if word != "1" and not match:
            raise ValueError(f"{word!r} is not a degree: write for example 'dp2 tp2 / ep4'")
        if match:
            found[match[1]] = int(match[2])
    dense = found.get("pp", 1) * found.get("cp", 1) * found.get("tp", 1)
    expert = found.get("pp", 1) * found.get("ep", 1) * found.get("etp", 1)
    found.setdefault("dp", max(1, world // dense))
    found.setdefault("edp", max(1, world // expert))
    degrees = Degrees(**found)
    sizes = (degrees.world, degrees.pp * degrees.edp * degrees.ep * degrees.etp)
    if sizes != (world, world):
        raise ValueError(f"'{text}' makes {sizes[0]} ranks for attention and {sizes[1]} for experts; there are {world}")
    return degrees


def all_degrees(world: int) -> Iterator[Degrees]:
    """Every way to fold both meshes over `world` ranks, before any model has a say."""

    def factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (product,)
            return
        for first in range(1, product + 1):
            if product % first == 0:
                for rest in factors(product // first, count - 1):
                    yield (first, *rest)

    for pp, dp, cp, tp in factors(world, 4):
        for edp, ep, etp in factors(world // pp, 3):
            yield Degrees(pp, dp, cp, tp, edp, ep, etp)


@dataclass(frozen=True)
class ParallelPeer:
    """One column of the comparison."""

    name: str
    title: str
    env: str
    """Folder of its virtual environment; "base" is the interpreter that runs the benchmark."""
    adapter: str
    """Module under `benchmarks.peers.parallel`."""
    variant: str = ""
    note: str = ""
    fp32_is_bf16: bool = False
    """Its experts compute in bf16 whatever the dtype, so its rows are shown and never compared with."""
    works: tuple[str, ...] = ("layer", "step")
    misfit: Callable[[Degrees], str] = lambda degrees: ""
    """Why it cannot train on a layout here; empty where it can."""


def interpreter(peer: ParallelPeer, envs: Path) -> Path:
    """The Python that runs `peer`; a path that does not exist means its environment was never made."""
    return Path(sys.executable) if peer.env == "base" else envs / peer.env / "bin" / "python"


def _experts_cut_as_attention(degrees: Degrees) -> str:
    """For those that cut experts either by their tensor plan, as the dense weights, or whole over ep."""
    if degrees.ep == 1 and degrees.etp != degrees.tp:
        return "without ep it cuts experts as it cuts attention: etp = tp"
    if degrees.ep > 1 and degrees.etp > 1:
        return "with ep it leaves each expert whole: etp = 1"
    return ""


def _ring(degrees: Degrees) -> str:
    return "" if degrees.cp > 1 else "a ring needs cp above 1"


def _sharded(degrees: Degrees) -> str:
    if degrees.dp * degrees.cp * degrees.edp > 1:
        return ""
    return "no two ranks hold the same parameters"


def _hf(degrees: Degrees) -> str:
    if degrees.pp > 1:
        return "its pipeline sends no gradients back"
    if degrees.cp > 1:
        return "it has no context parallelism of its own"
    if degrees.ep % degrees.tp and degrees.ep > 1:
        return "its ep is a multiple of tp"
    return _experts_cut_as_attention(degrees)


def _torchtitan(degrees: Degrees) -> str:
    if degrees.cp > 1:
        return "its context parallelism needs attention kernels that torch has for GPUs only"
    return _experts_cut_as_attention(degrees)


def _megatron(degrees: Degrees) -> str:
    return "its context parallelism needs Transformer Engine's attention" if degrees.cp > 1 else ""


def _megatron_alltoall(degrees: Degrees) -> str:
    if degrees.ep > 1 and degrees.etp > 1:
        return "with ep and etp its all-to-all dispatcher gathers uneven pieces by a call that gloo refuses"
    return _megatron(degrees)


def _deepspeed(degrees: Degrees) -> str:
    if degrees.pp * degrees.cp * degrees.tp * degrees.etp > 1:
        return "the benchmark's plain decoder around its layer is cut by data and experts only"
    return ""


PARALLEL_PEERS: dict[str, ParallelPeer] = {
    peer.name: peer
    for peer in (
        ParallelPeer("moesaic", "moesaic", "base", "ours"),
        ParallelPeer("moesaic_ring", "moesaic, ring", "base", "ours", "ring", works=("step",), misfit=_ring),
        ParallelPeer(
            "moesaic_sharded",
            "moesaic, FSDP2",
            "base",
            "ours",
            "sharded",
            works=("step",),
            misfit=_sharded,
        ),
        ParallelPeer("hf", "transformers, all_to_all EP", "transformers", "hf", misfit=_hf),
        ParallelPeer(
            "torchtitan",
            "torchtitan, all-to-all",
            "torchtitan",
            "titan",
            note="computes its experts in bf16 whatever the dtype of its parameters",
            fp32_is_bf16=True,
            misfit=_torchtitan,
        ),
        ParallelPeer(
            "torchtitan_fp32",
            "torchtitan, bf16 casts removed by us",
            "torchtitan",
            "titan",
            "no_cast",
            misfit=_torchtitan,
        ),
        ParallelPeer(
            "megatron_alltoall",
            "Megatron-Core, all-to-all",
            "megatron",
            "megatron",
            "alltoall",
            misfit=_megatron_alltoall,
        ),
        ParallelPeer(
            "megatron_allgather", "Megatron-Core, all-gather", "megatron", "megatron", "allgather", misfit=_megatron
        ),
        ParallelPeer("deepspeed", "DeepSpeed MoE, no drop", "deepspeed", "deepspeed_moe", misfit=_deepspeed),
        ParallelPeer("automodel", "NeMo Automodel, torch_mm", "automodel", "automodel", works=("layer",)),
    )
}
