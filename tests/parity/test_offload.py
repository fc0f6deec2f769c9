"""What waits in host memory, and split masters, change no bit of a layout's results, nor of its checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.train import checkpoint
from moesaic.train.state import Host, TrainState
from tests.parity import models, runs
from tests.ranks import ranks

pytestmark = pytest.mark.long

Keys = dict[str, Any]
EVERYTHING = Host(("optimizer", "activations"), smallest=0)
PLAN = runs.Plan(steps=2)


def start(name: str, mesh: Mesh, keys: Keys, dtype: torch.dtype, seed: int = 3, **storing: Any) -> TrainState:
    decoder = Decoder(models.model(name), mesh=mesh)
    decoder.init_weights(seed)
    if models.BIAS_UPDATE.get(name):
        decoder.enable_select_bias()
    return TrainState.of(decoder, dtype, sharding=keys.get("sharding", "none"), eps=runs.EPS, **storing)


def state_of(trainer: TrainState) -> dict[str, Tensor]:
    """This rank's masters and moments, in fp32."""
    weights, moments = trainer.optimizer.saved()
    found = {f"model.{name}": tensor.detach().clone() for name, tensor in weights.items()}
    return found | {f"{kind}.{name}": t.clone() for name, each in moments.items() for kind, t in each.items()}


def differences(rank: int, name: str, keys: Keys, dtype: torch.dtype, storings: list[dict[str, Any]]) -> list[str]:
    """What differs in any bit between training with `storings` and without, on this rank."""
    mesh, found = runs.mesh_for(name, keys), []
    expected = plain = None
    for storing in ({}, *storings):
        record, trainer = runs.train(name, mesh, keys, PLAN, dtype, start(name, mesh, keys, dtype, **storing))
        state = state_of(trainer)
        if expected is None or plain is None:
            expected, plain = record, state
            continue
        for what in ("losses", "totals", "parts", "norms", "counts"):
            if getattr(record, what) != getattr(expected, what):
                found.append(f"{storing}: {what}")
        for here, there in zip((*record.gradients, state), (*expected.gradients, plain), strict=True):
            found += [f"{storing}: {n}" for n in there.keys() ^ here.keys()]
            found += [f"{storing}: {n}" for n, tensor in here.items() if not torch.equal(tensor, there[n])]
        if trainer.activations is not None and trainer.activations.sent == 0:
            found.append("nothing was sent")
    return found


LAYOUTS: list[tuple[str, Keys, torch.dtype]] = [
    ("deepseek_v3", {"ep": 2}, torch.bfloat16),
    ("mixtral", {"pp": 2, "virtual_stages": 2}, torch.float32),
    ("mixtral", {"pp": 2, "schedule": "zero_bubble"}, torch.bfloat16),
    ("mixtral", {"ep": 2, "overlap": ["experts"]}, torch.float32),
    ("deepseek_v3", {"ep": 2, "recompute": ["sar", "mla_up_proj"]}, torch.float32),
    ("mixtral", {"tp": 2, "overlap": ["gradients", "between"]}, torch.bfloat16),
    ("deepseek_v3", {"tp": 2, "overlap": ["tensor"], "recompute": ["mla_up_proj", "mlp"]}, torch.bfloat16),
    ("mixtral", {"sharding": "optimizer"}, torch.bfloat16),
    ("mixtral", {"ep": 2, "sharding": "gradients"}, torch.float32),
    ("mixtral", {"sharding": "parameters"}, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "keys", "dtype"), LAYOUTS)
def test_layouts_give_the_same_bits(name: str, keys: Keys, dtype: torch.dtype) -> None:
    storings: list[dict[str, Any]] = [{"host": EVERYTHING}]
    if dtype == torch.bfloat16 and "sharding" not in keys:
        storings.append({"host": Host(("optimizer",), fraction=0.5), "split_masters": True})
    assert ranks(2).run(differences, name, {"micro_batch": 2, **keys}, dtype, storings) == [[], []]


def write(rank: int, name: str, keys: Keys, dtype: torch.dtype, folder: str, storing: dict[str, Any]) -> None:
    """Train two steps and save."""
    mesh = runs.mesh_for(name, keys)
    trainer = runs.train(name, mesh, keys, PLAN, dtype, start(name, mesh, keys, dtype, **storing))[1]
    group = group_of(mesh)
    state = trainer.saved(group)
    checkpoint.write(Path(folder), {kind: state[kind] for kind in ("model", "optimizer")}, {}, group)


def read(
    rank: int, name: str, keys: Keys, dtype: torch.dtype, folder: str, storing: dict[str, Any]
) -> dict[str, Tensor]:
    """The state after reading into other weights, and after another step, this rank's part."""
    mesh = runs.mesh_for(name, keys)
    trainer = start(name, mesh, keys, dtype, seed=99, **storing)
    group = group_of(mesh)
    state = trainer.saved(group)
    wanted = {kind: state[kind] for kind in ("model", "optimizer")}
    checkpoint.read(Path(folder), wanted, group)
    trainer.take(wanted)
    found = {f"read {key}": tensor for key, tensor in state_of(trainer).items()}
    runs.train(name, mesh, keys, runs.Plan(steps=3), dtype, trainer, first=3)
    return found | {f"then {key}": tensor for key, tensor in state_of(trainer).items()}


def group_of(mesh: Mesh) -> Group:
    if mesh.world.size == 1:
        return Group.single("checkpoint")
    return Group.create("checkpoint", [mesh.world.ranks], runs.TIMEOUT_SECONDS, channel="checkpoint")


@pytest.mark.parametrize("keys", [{"pp": 2}, {"ep": 2, "sharding": "optimizer"}])
def test_checkpoints_are_those_of_state_that_is_simply_there(keys: Keys) -> None:
    """Written with or without, read with or without, in another layout."""
    name, dtype, keys = "mixtral", torch.bfloat16, {"micro_batch": 2, **keys}
    storing: dict[str, Any] = {"host": EVERYTHING, "split_masters": "sharding" not in keys}
    alone = {"micro_batch": 2}
    with tempfile.TemporaryDirectory() as parent:
        with_it, without = str(Path(parent) / "with"), str(Path(parent) / "without")
        ranks(2).run(write, name, keys, dtype, with_it, storing)
        ranks(2).run(write, name, keys, dtype, without, {})
        expected = read(0, name, alone, dtype, without, {})
        for folder, how in ((with_it, {}), (without, {"host": EVERYTHING, "split_masters": True})):
            found = read(0, name, alone, dtype, folder, how)
            assert found.keys() == expected.keys()
            assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []
        mine = ranks(2).run(read, name, keys, dtype, without, {})
        again = ranks(2).run(read, name, keys, dtype, with_it, storing)
    for here, there in zip(again, mine, strict=True):
        assert here.keys() == there.keys()
        assert [key for key, tensor in here.items() if not torch.equal(tensor, there[key])] == []
