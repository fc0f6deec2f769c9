"""The routing that a dry run supposes, in numbers: how many tokens and rows go where."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from moesaic.cost.rows import received_tokens, routed_rows
from moesaic.cost.traffic import distinct
from moesaic.cost.workload import Columns, Workload
from moesaic.mesh.mesh import Mesh
from moesaic.model.moe import Moe
from moesaic.spec.layout import Layout
from moesaic.spec.model import MoeSpec


@dataclass(frozen=True)
class _Layer:
    tokens: int
    """Own tokens."""
    ep: int
    etp: int
    copies: float
    """Ranks that a token goes to."""
    nodes: float
    """Nodes that a token goes to where a dispatcher sends it to those first, else 0."""
    arrived: int
    rows: int


class Supposed:
    """The counts of `mesh.dry.Expected`: choices are spread over experts at random, and this rank gets `imbalance`
    times the mean, or all there is."""

    def __init__(self, work: Workload, layout: Layout, mesh: Mesh, imbalance: float) -> None:
        self._work, self._columns = replace(work, imbalance=imbalance), Columns.of([layout])
        self._mesh = mesh
        self._gathers = layout.dispatcher == "allgather"
        self._now = _Layer(0, 1, 1, 0.0, 0.0, 0, 0)
        self._first_leg, self._all = True, False

    def watch(self, model: nn.Module) -> None:
        """Answer for the mixture layer of `model` whose forward pass ran last."""
        for module in model.modules():
            if isinstance(module, Moe):
                module.register_forward_pre_hook(lambda moe, args: self._enter(moe.spec, len(args[0])))

    def _enter(self, spec: MoeSpec, tokens: int) -> None:
        groups, router = self._mesh.expert(spec.router.experts), spec.router
        ep, etp = groups.ep.size, groups.etp.size
        nodes = 1 if groups.ep_across is None else groups.ep_across.size

        def needed(places: int) -> float:
            return distinct(places, router.experts, router.top_k, router.groups_kept, router.groups)

        rows = float(routed_rows(spec, self._work, self._columns)[0])
        # As many per rank of a cut expert: each sends on what it got.
        arrived = round(float(received_tokens(spec, self._work, self._columns)[0]) / etp) * etp
        gathers = self._gathers or ep == 1
        if gathers:
            arrived = tokens * ep * etp
        self._all = gathers
        self._now = _Layer(tokens, ep, etp, needed(ep), needed(nodes) if nodes > 1 else 0.0, arrived, round(rows))
        self._first_leg = True

    def sent(self, tokens: int, top_k: int, places: int) -> list[int]:
        """Of own tokens, or of those that are to be passed on, how many go to each place."""
        now = self._now
        if self._all:
            return [tokens] * places
        per_token = now.nodes if now.nodes and self._first_leg else now.copies
        return _shared(round(now.tokens * per_token), places)

    def received(self, tokens: int, top_k: int, places: int) -> list[int]:
        """How many come here from each place. Asked after `sent`."""
        now = self._now
        if self._all:
            return [tokens] * places
        if now.nodes and self._first_leg:
            self._first_leg = False
            # At most all tokens of the ranks in the same place.
            share = now.arrived / now.etp / (now.tokens * now.copies)
            return _shared(min(round(now.tokens * now.nodes * share), now.tokens * places), places)
        return _shared(now.arrived // now.etp, places)

    def rows(self, tokens: int) -> int:
        """Of `tokens` that came here, the rows."""
        now = self._now
        return now.rows if tokens == now.arrived else round(now.rows * tokens / max(1, now.arrived))


def _shared(total: int, places: int) -> list[int]:
    return [total * (i + 1) // places - total * i // places for i in range(places)]
