"""Sums of gradients under backward, and weights gathered ahead, train as one process does, with the bits of the sums
taken afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import runs
from tests.parity.runs import Plan
from tests.ranks import ranks

TOLERANCE = 1e-5
CASES = [
    (2, "mixtral", {"ep": 1}),
    (4, "mixtral", {"ep": 2, "tp": 2, "micro_batch": 1}),
    (4, "mixtral", {"pp": 2, "virtual_stages": 2, "schedule": "zero_bubble"}),
    (4, "mixtral", {"pp": 2, "ep": 2}),
    (2, "mixtral", {"sharding": "optimizer", "ep": 2}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "name", "keys"), CASES)
def test_overlapped_sums_have_the_bits_of_later_ones(
    world: int, name: str, keys: dict[str, Any], dtype: torch.dtype
) -> None:
    plan = Plan(steps=2)
    later = ranks(world).run(runs.outcome, name, keys, plan, dtype)[0]
    under = ranks(world).run(runs.outcome, name, keys | {"overlap": ["gradients"]}, plan, dtype)[0]
    assert later.norms == under.norms and later.losses == under.losses
    for a, b in zip(later.gradients, under.gradients, strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (2, {"overlap": ["gradients"]}),
        (4, {"overlap": ["gradients"], "pp": 2, "ep": 2}),
        (2, {"overlap": ["parameters"], "sharding": "parameters"}),
        (4, {"overlap": ["gradients", "parameters"], "sharding": "parameters", "ep": 2}),
        (4, {"overlap": ["parameters"], "sharding": "gradients", "pp": 2, "virtual_stages": 2}),
    ],
)
def test_as_in_one_process(world: int, keys: dict[str, Any]) -> None:
    found = ranks(world).run(runs.errors, "mixtral", keys, Plan(steps=2))
    exact = ("counts", "bias", "missing")
    worst = {what: max(each[what] for each in found) for what in found[0]}
    assert {what: x for what, x in worst.items() if not x <= (0 if what in exact else TOLERANCE)} == {}


def _begun(rank: int, keys: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Parameters whose sums had begun when backward was over, and those with a gradient."""
    mesh = runs.mesh_for("mixtral", keys)
    plan = Plan(steps=1)
    trainer = runs.start("mixtral", mesh, keys, plan)
    overlap = trainer.optimizer.overlap
    assert overlap is not None
    found: list[set[str]] = []
    wait = overlap.wait

    def watched() -> set[str]:
        found.append(wait())
        return found[-1]

    overlap.wait = watched  # type: ignore[method-assign]
    runs.train("mixtral", mesh, keys, plan, trainer=trainer)
    return found[0], set(trainer.optimizer.masters)


def test_all_sums_have_begun_when_backward_is_over() -> None:
    for begun, all_of_them in ranks(4).run(_begun, {"overlap": ["gradients"], "pp": 2, "schedule": "zero_bubble"}):
        assert begun == all_of_them
