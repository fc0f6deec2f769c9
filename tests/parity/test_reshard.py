"""Training goes on in another layout, on another number of ranks, as if nothing had happened.

Two steps in one layout, a checkpoint, one step in another: loss and gradients are those of three steps in one process,
and what was read is what was written, bit for bit.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.mesh.collectives import gather_objects
from moesaic.mesh.group import Group
from moesaic.train import checkpoint
from moesaic.train.state import TrainState
from tests.parity import choices, models, runs
from tests.parity.choices import Keys
from tests.parity.runs import Plan, Record
from tests.ranks import ranks

TOLERANCE = 1e-5
PLAN = Plan(steps=3)
BEFORE = replace(PLAN, steps=2)
Where = tuple[int, Keys]
"""Ranks, and the keys of [layout]."""


def everywhere(size: int, function: Any, *args: Any) -> Any:
    """What function(rank, *args) returns on the first of `size` ranks; one rank is this process."""
    return function(0, *args) if size == 1 else ranks(size).run(function, *args)[0]


def group_of_all() -> Group:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world == 1:
        return Group.single("checkpoint")
    return Group.create("checkpoint", [tuple(range(world))], runs.TIMEOUT_SECONDS, channel="checkpoint")


def whole_state(trainer: TrainState) -> dict[str, Tensor]:
    """Masters, moments, update counts and biases of the whole model, by name."""
    states = trainer.optimizer.state()
    found = {f"model.{n}": x for n, x in runs.assembled(trainer, trainer.optimizer.masters).items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        mine = {name: each[moment] for name, each in states.items()}
        found |= {f"{moment}.{n}": x for n, x in runs.assembled(trainer, mine).items()}
    here = {f"step.{name}": each["step"] for name, each in states.items()}
    here |= {f"bias.{i}": r.select_bias for i, r in trainer.decoder.routers() if r.select_bias is not None}
    for each in gather_objects(here, trainer.decoder.mesh.world):
        for name, tensor in each.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return found


def saved(trainer: TrainState, group: Group) -> checkpoint.State:
    state = trainer.saved(group)
    return {kind: state[kind] for kind in ("model", "optimizer")}


def begin(rank: int, name: str, keys: Keys, dtype: torch.dtype, folder: str) -> dict[str, Tensor] | None:
    """Train two steps and save; all of the state on the first rank."""
    trainer = runs.train(name, runs.mesh_for(name, keys), keys, BEFORE, dtype)[1]
    group = group_of_all()
    checkpoint.write(Path(folder), saved(trainer, group), {"note.txt": "two steps"}, group)
    whole = whole_state(trainer)
    return whole if rank == 0 else None


def go_on(rank: int, name: str, keys: Keys, dtype: torch.dtype, folder: str) -> tuple[dict[str, Tensor], Record] | None:
    """Read into a model of other weights and train the third step: the state that was read, and the step's record."""
    trainer = runs.start(name, runs.mesh_for(name, keys), keys, replace(PLAN, seed=99), dtype)
    group = group_of_all()
    checkpoint.read(Path(folder), saved(trainer, group), group)
    trainer.optimizer.round_masters()
    whole = {key: tensor.clone() for key, tensor in whole_state(trainer).items()}
    record = runs.train(name, trainer.decoder.mesh, keys, PLAN, dtype, trainer, first=3)[0]
    record.gradients = [runs.assembled(trainer, gradients) for gradients in record.gradients]
    return (whole, record) if rank == 0 else None


def assert_resharded(name: str, before: Where, after: Where, dtype: torch.dtype = torch.float32) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "step-2")
        written = everywhere(before[0], begin, name, before[1], dtype, folder)
        read, found = everywhere(after[0], go_on, name, after[1], dtype, folder)
    assert read.keys() == written.keys()
    for key, tensor in written.items():
        assert torch.equal(read[key], tensor), key
    assert {float(tensor) for key, tensor in read.items() if key.startswith("step.")} == {2.0}
    if dtype != torch.float32:
        return
    expected = runs.alone(name, after[1].get("micro_batch", 1), plan=PLAN)
    if before[1].get("micro_batch", 1) != after[1].get("micro_batch", 1):
        # The balancing loss of micro-batches differs before and after, so the undisturbed run changes them too.
        expected = undisturbed(name, before[1].get("micro_batch", 1), after[1].get("micro_batch", 1))
    for what in ("losses", "totals", "norms"):
        pair = (getattr(found, what)[0], getattr(expected, what)[2])
        assert runs.difference([pair]) <= TOLERANCE, (what, pair)
    assert found.counts[0] == expected.counts[2]
    assert found.gradients[0].keys() == expected.gradients[2].keys()
    for parameter, gradient in found.gradients[0].items():
        whole = expected.gradients[2][parameter]
        far = float((gradient - whole).norm() / whole.norm().clamp(min=1e-6))
        assert far <= TOLERANCE, (parameter, far)


def undisturbed(name: str, micro_batch_before: int, micro_batch_after: int) -> Record:
    """Three steps in one process, the third with micro-batches of another size; records of all three."""
    mesh = runs.mesh_for(name, {})
    first, trainer = runs.train(name, mesh, {"micro_batch": micro_batch_before}, BEFORE)
    last = runs.train(name, mesh, {"micro_batch": micro_batch_after}, PLAN, trainer=trainer, first=3)[0]
    for what in ("losses", "totals", "parts", "norms", "counts", "gradients"):
        getattr(last, what)[:0] = getattr(first, what)
    return last


FEW: list[tuple[str, Where, Where]] = [
    ("deepseek_v3", (1, {}), (4, {"pp": 2, "ep": 2, "sharding": "parameters"})),
    ("deepseek_v3", (4, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}), (2, {"pp": 2, "virtual_stages": 2, "micro_batch": 4})),
    ("qwen3_moe", (4, {"ep": 2, "sharding": "gradients"}), (4, {"tp": 4, "etp": 2})),
    ("mixtral", (2, {"tp": 2, "ep": 2}), (1, {})),
]


@pytest.mark.parametrize(("name", "before", "after"), FEW)
def test_training_goes_on_in_another_layout(name: str, before: Where, after: Where) -> None:
    few_micro_batches = ((world, {"micro_batch": 2, **keys}) for world, keys in (before, after))
    assert_resharded(name, *few_micro_batches)


def test_bf16_goes_on_from_the_same_masters() -> None:
    before, after = (4, {"ep": 4, "sharding": "optimizer", "micro_batch": 2}), (2, {"pp": 2, "micro_batch": 2})
    assert_resharded("deepseek_v3", before, after, torch.bfloat16)


@st.composite
def places(draw: st.DrawFn, name: str) -> Where:
    """Any layout of 1, 2 or 4 ranks, with any choices."""
    world = draw(st.sampled_from([1, 2, 4]))
    by_degrees = choices.options(name, world)
    chosen = draw(st.sampled_from(sorted(by_degrees)))
    return world, draw(st.sampled_from(by_degrees[chosen])).table


@st.composite
def moves(draw: st.DrawFn) -> tuple[str, Where, Where]:
    name = draw(st.sampled_from(sorted(models.CONFIGS)))
    return name, draw(places(name)), draw(places(name))


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],  # a smaller layout is another layout
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(moves())
def test_training_goes_on_in_any_other_layout(move: tuple[str, Where, Where]) -> None:
    name, before, after = move
    for world, keys in (before, after):
        note(choices.text(name, keys, world))
    print(move, flush=True)  # pytest shows it with a failure, and with -s or -rP
    assert_resharded(name, before, after)
