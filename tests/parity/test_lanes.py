"""Micro-batches beside each other, and weight gradients in waits, train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.mesh import collectives, lanes
from moesaic.model import experts
from tests.parity import runs
from tests.parity.runs import Plan
from tests.ranks import ranks

TOLERANCE = 1e-5
PLAN = Plan(steps=2)
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "deepseek_v3", {"ep": 2, "overlap": ["experts", "weight_gradients"]}),
    (2, "deepseek_v3", {"tp": 2, "ep": 2, "overlap": ["between"], "dispatcher": "allgather"}),
    (2, "qwen3_moe", {"cp": 2, "ep": 2, "overlap": ["experts", "between"]}),
    (2, "mixtral", {"ep": 2, "overlap": ["experts"], "sharding": "optimizer"}),
    (2, "deepseek_v3", {"overlap": ["experts"], "sharding": "gradients"}),
    (4, "deepseek_v3", {"pp": 2, "ep": 2, "overlap": ["experts", "weight_gradients"]}),
    (4, "qwen3_moe", {"pp": 2, "ep": 2, "virtual_stages": 2, "overlap": ["experts"]}),
    (4, "mixtral", {"tp": 2, "etp": 2, "ep": 2, "overlap": ["experts"]}),
]


@pytest.mark.long
@pytest.mark.parametrize(("world", "name", "keys"), CASES, ids=str)
def test_lanes_train_as_one_process(world: int, name: str, keys: dict[str, Any]) -> None:
    found = ranks(world).run(runs.errors, name, keys, PLAN)
    worst = {what: max(each[what] for each in found) for what in found[0]}
    exact = ("counts", "bias", "missing")
    assert {w: x for w, x in worst.items() if not x <= (0 if w in exact else TOLERANCE)} == {}


Event = tuple[str, int, str]
"""What happens (start, wait, compute), in which lane, and which message or computation."""


def events(rank: int, keys: dict[str, Any]) -> list[Event]:
    """What one step of the tiny Mixtral does while two lanes are under way."""
    found: list[Event] = []
    numbers: dict[int, str] = {}
    alive: list[Any] = []

    def note(what: str, which: str) -> None:
        if lanes._state.pair is not None:
            found.append((what, lanes._current(), which))

    start, wait, run = collectives.start_all_to_all, lanes.before_wait, experts.run_experts

    def watched_start(*args: Any, **named: Any) -> Any:
        pending = start(*args, **named)
        if pending.what in collectives.BULK:
            numbers[id(pending.work)] = f"{pending.what} {len(numbers)}"
            alive.append(pending.work)
            note("start", numbers[id(pending.work)])
        return pending

    def watched_wait(work: Any, result: Any) -> None:
        wait(work, result)
        note("wait", numbers[id(work)])

    def watched_run(*args: Any) -> Any:
        note("compute", "experts")
        return run(*args)

    def watched_attention(module: Any, inputs: Any, output: Any) -> None:
        note("compute", "attention")
        output.register_hook(lambda grad: note("compute", "attention"))

    mesh = runs.mesh_for("mixtral", keys)
    trainer = runs.start("mixtral", mesh, keys, PLAN)
    for layer in trainer.decoder.layers:
        layer.attn.register_forward_hook(watched_attention)
    collectives.start_all_to_all, collectives.before_wait, experts.run_experts = (
        watched_start,
        watched_wait,
        watched_run,
    )
    try:
        runs.step("mixtral", trainer, runs.own_batches(mesh, keys, PLAN, 1), PLAN, 1)
    finally:
        collectives.start_all_to_all, collectives.before_wait, experts.run_experts = start, wait, run
    return found


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 2])
def test_every_bulk_message_travels_under_computation_of_the_other_lane(pp: int) -> None:
    per_rank = ranks(2 * pp).run(events, {"pp": pp, "ep": 2, "dispatcher": "alltoall", "overlap": ["experts"]})
    for found in per_rank:
        begun = {which: place for place, (what, _, which) in enumerate(found) if what == "start"}
        ended = {which: place for place, (what, _, which) in enumerate(found) if what == "wait"}
        assert begun and begun.keys() == ended.keys()
        if pp == 1:  # pairs of micro-batches, 4 layers, 4 messages each
            assert len(begun) == 3 * 4 * 4
        for which, place in begun.items():
            mine = found[place][1]
            under = [lane for what, lane, _ in found[place : ended[which]] if what == "compute"]
            assert 1 - mine in under, f"{which} travels under nothing of the other lane"
            assert mine not in under
    assert per_rank[0] == per_rank[1]  # ranks that exchange rows agree on the order
