"""How tokens reach the experts that they chose, and how results come back."""

from __future__ import annotations

from moesaic.dispatch.allgather import AllGatherDispatcher
from moesaic.dispatch.alltoall import AllToAllDispatcher
from moesaic.dispatch.compressed import CompressedDispatcher
from moesaic.dispatch.deepep import DeepEPDispatcher
from moesaic.dispatch.hierarchical import HierarchicalDispatcher
from moesaic.dispatch.hybridep import HybridEPDispatcher
from moesaic.dispatch.library import LibraryDispatcher
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.protocol import Dispatched, Dispatcher, PendingCombine, PendingDispatch
from moesaic.mesh.mesh import ExpertGroups
from moesaic.spec.errors import SpecError

__all__ = ["LIBRARIES", "Dispatched", "Dispatcher", "PendingCombine", "PendingDispatch", "make_dispatcher"]

LIBRARIES: dict[str, type[LibraryDispatcher]] = {"deepep": DeepEPDispatcher, "hybridep": HybridEPDispatcher}
"""Dispatchers over libraries for NVIDIA GPUs."""


def make_dispatcher(name: str, groups: ExpertGroups, experts: int, *, compressed: bool = False) -> Dispatcher:
    """The dispatcher `name` for a layer of `experts` experts, whose groups are `groups`.

    Where nothing travels it is `local` whatever `name` says; over experts that are cut but not spread, `alltoall` is
    the same as `allgather`, and where every group of them is on one node, `hierarchical` is the same as `alltoall`.
    `compressed`: rows travel in fp8 (`dispatch.compressed`), which changes results a little.

    Raises:
        SpecError: an unknown name, a library that is not there, `local` where experts are spread, or experts that do
            not divide by the ranks.
    """
    ep, etp = groups.ep, groups.etp
    if experts % ep.size:
        raise SpecError(
            f"{experts} experts do not divide by {ep.size} expert-parallel ranks; take an ep that divides it."
        )
    here = experts // ep.size
    if groups.ep_etp.size == 1:
        return LocalDispatcher(here, 0)
    if compressed:
        return CompressedDispatcher(make_dispatcher(name, groups, experts), groups.ep_etp)
    if name == "allgather" or (name in ("alltoall", "hierarchical") and ep.size == 1):
        return AllGatherDispatcher(here, here * ep.rank, groups.ep_etp)
    across, inside = groups.ep_across, groups.ep_inside
    if name == "hierarchical" and across is not None and inside is not None and across.size > 1:
        return HierarchicalDispatcher(here, here * ep.rank, across, inside, etp)
    if name in ("alltoall", "hierarchical"):
        return AllToAllDispatcher(here, here * ep.rank, ep, etp)
    if name in LIBRARIES:
        return LIBRARIES[name](here, here * ep.rank, ep, etp)
    raise SpecError(
        f"dispatcher {name!r} cannot bring tokens to experts on ep·etp = {ep.size}·{etp.size} = {groups.ep_etp.size} "
        "ranks; use allgather, alltoall or hierarchical."
    )
