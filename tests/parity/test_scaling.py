"""Gradients have one scale, whatever is folded where: the six traps in which expert gradients, per-token losses and
balancing losses have come out wrong elsewhere, each against a layout that cannot be wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moesaic.mesh.collectives import all_reduce
from moesaic.model.decoder import Decoder
from moesaic.model.deferred import recompute_contexts
from moesaic.model.layer import Layer
from moesaic.model.losses import IGNORED, LossWeights
from moesaic.train.data import Batch
from moesaic.train.stages import Work
from tests.parity import models, runs
from tests.parity.runs import Plan, Record
from tests.ranks import ranks

TOLERANCE = 1e-5
ONE_STEP = Plan(steps=1)


def trained(world: int, name: str, plan: Plan = ONE_STEP, **keys: Any) -> Record:
    """What training in a layout gives, with whole gradients; one rank is this process."""
    if world == 1:
        return runs.alone(name, keys.get("micro_batch", 1), plan=plan)
    return ranks(world).run(runs.outcome, name, keys, plan)[0]


def assert_same(found: Record, expected: Record, tolerance: float = TOLERANCE) -> None:
    """Equal losses, gradients and norms; equal counts."""
    for what in ("losses", "totals", "norms"):
        pairs = list(zip(getattr(found, what), getattr(expected, what), strict=True))
        assert runs.difference(pairs) <= tolerance, (what, pairs)
    assert found.counts == expected.counts
    for mine, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert mine.keys() == wanted.keys()
        far = {name: relative(mine[name], wanted[name]) for name in wanted}
        assert max(far.values()) <= tolerance, sorted(far.items(), key=lambda item: -item[1])[:5]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of a tensor from another, in the 2-norm."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_gradients_and_norm_do_not_depend_on_expert_parallelism(dispatcher: str) -> None:
    unspread = trained(4, "qwen3_moe", micro_batch=2)
    for ep in (2, 4):
        assert_same(trained(4, "qwen3_moe", micro_batch=2, ep=ep, dispatcher=dispatcher), unspread)
    assert_same(unspread, trained(1, "qwen3_moe", micro_batch=2))


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"etp": 2, "tp": 2}, id="expert tensor parallelism, edp 2"),
        pytest.param({"etp": 4, "ep": 1}, id="expert tensor parallelism without dense"),
        pytest.param({"etp": 2, "ep": 2, "cp": 2, "dispatcher": "alltoall"}, id="both ways of cutting experts"),
        pytest.param({"cp": 4, "ep": 4, "dispatcher": "alltoall"}, id="experts over all context ranks"),
        pytest.param({"cp": 2, "tp": 2, "ep": 4, "cp_kind": "ring"}, id="experts over context and tensor ranks"),
        pytest.param({"cp": 2, "ep": 2}, id="experts over context ranks, edp 2"),
        pytest.param({"ep": 2, "sharding": "gradients"}, id="edp 2, sharded"),
    ],
)
def test_b_nor_on_expert_tensor_context_and_data_parallelism(keys: dict[str, Any]) -> None:
    assert_same(trained(4, "deepseek_v3", micro_batch=2, **keys), trained(1, "deepseek_v3", micro_batch=2))


def equal_rows(step: int, micro_batch: int) -> list[Batch]:
    """Micro-batches in which every token is trained, so that all ranks have equally many."""
    batches = []
    for batch in models.micro_batches(step, micro_batch):
        labels = batch.ids_BS.roll(-1, 1)
        batches.append(Batch(batch.ids_BS, labels, None, None, labels.numel(), 0))
    return batches


def sums_and_averages(rank: int, name: str, keys: dict[str, Any]) -> dict[str, float]:
    """Gradients by this project's rule beside those of a trainer whose ranks take the mean over their own tokens and
    average over groups: per parameter kind the largest relative difference, and for experts also without their factor.
    """
    mesh, plan = runs.mesh_for(name, keys), Plan(batches=equal_rows)
    trainer = runs.start(name, mesh, keys, plan)
    batches = runs.own_batches(mesh, keys, plan, 1)
    all_tokens = sum(batch.tokens for batch in plan.batches(1, 1))
    own_tokens = all_tokens // mesh.data.size
    trainer.decoder.train()

    def backward(tokens: int) -> dict[str, torch.Tensor]:
        trainer.optimizer.zero_grad()
        Work(trainer.decoder, batches, weights=plan.weights, step_tokens=tokens).run()
        return {name: g.clone() for name, g in trainer.optimizer.gradients().items()}

    local = backward(own_tokens)
    backward(all_tokens)
    trainer.optimizer.sum_gradients()
    summed = trainer.optimizer.gradients()
    worst = {"dense": 0.0, "expert": 0.0, "expert without its factor": 0.0}
    for parameter, mean in local.items():
        cut = trainer.sharding.held[parameter].cut
        if cut.expert:
            edp = mesh.expert(cut.shape[0]).edp
            average = all_reduce(mean, edp) / edp.size
            factor = edp.size / mesh.data.size
            worst["expert"] = max(worst["expert"], relative(average * factor, summed[parameter]))
            bare = relative(average, summed[parameter])
            worst["expert without its factor"] = max(worst["expert without its factor"], bare)
            continue
        if cut.is_whole:  # each tensor-parallel rank has used it on its own tokens
            all_reduce(mean, mesh.tp)
        worst["dense"] = max(worst["dense"], relative(all_reduce(mean, mesh.data) / mesh.data.size, summed[parameter]))
    return worst


@pytest.mark.parametrize("keys", [{"ep": 4}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "cp": 2}])
def test_c_averages_over_groups_with_their_factors_are_our_sums(keys: dict[str, Any]) -> None:
    """A mean loss per rank: dense gradients averaged over dp·cp; expert gradients times edp/(dp·cp), averaged over edp,
    because an expert has seen the tokens of all its ep ranks."""
    for found in ranks(4).run(sums_and_averages, "qwen3_moe", {"micro_batch": 2, **keys}):
        assert max(found["dense"], found["expert"]) <= TOLERANCE, found
        edp = 4 // keys["ep"]
        factor = edp / (4 // keys.get("tp", 1))
        assert found["expert without its factor"] == pytest.approx(1 / factor - 1, rel=1e-4, abs=TOLERANCE)


# ---------------------------------------------------------------- tokens


def uneven_rows(step: int, micro_batch: int) -> list[Batch]:
    """Row r trains 2·r tokens: the first none at all."""
    batches = []
    for number, batch in enumerate(models.micro_batches(step, micro_batch)):
        labels = batch.labels_BS.clone()
        for row in range(micro_batch):
            labels[row, 2 * (number * micro_batch + row) :] = IGNORED
        batches.append(Batch(batch.ids_BS, labels, batch.positions_BS, batch.documents_BS, _trained(labels), 0))
    return batches


def _trained(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


@pytest.mark.parametrize(
    "keys", [{"ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "ep": 4, "dispatcher": "alltoall"}, {"pp": 2, "ep": 2}]
)
def test_d_every_token_counts_the_same_however_many_a_rank_has(keys: dict[str, Any]) -> None:
    plan = Plan(steps=2, batches=uneven_rows)
    per_batch = [batch.tokens for batch in uneven_rows(1, 2)]
    assert max(per_batch) > 4 * min(per_batch)
    found = trained(4, "deepseek_v3", plan, micro_batch=2, **keys)
    assert_same(found, trained(1, "deepseek_v3", plan, micro_batch=2))


# ---------------------------------------------------------------- balancing losses

GLOBAL = Plan(steps=1, weights=LossWeights(global_aux=100.0))
SEQUENCE = Plan(steps=1, weights=LossWeights(sequence_aux=100.0))
BATCH = Plan(steps=1, weights=LossWeights(batch_aux=100.0))


@functools.cache
def router_gradient(plan: Plan, micro_batch: int) -> torch.Tensor:
    """Gradients of all routers in one process, where the balancing loss is most of them."""
    gradients = runs.alone("mixtral", micro_batch, plan=plan).gradients[0]
    return torch.cat([g.flatten() for name, g in gradients.items() if ".router." in name])


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch": 2},
        {"tp": 2, "micro_batch": 4, "ep": 2},
        {"cp": 2, "micro_batch": 4, "ep": 4},
        {"cp": 4, "cp_kind": "ring", "micro_batch": 8},
        {"pp": 2, "micro_batch": 2},
    ],
)
def test_e_global_balancing_loss_is_that_of_all_rows_whatever_dp(keys: dict[str, Any]) -> None:
    """All rows are in one micro-step, so that the counts of the step so far are those of all of it."""
    if keys.get("pp", 1) > 1:  # a pipeline needs two micro-batches: the second half of the rows follows the first
        expected = trained(1, "mixtral", GLOBAL, micro_batch=4)
    else:
        expected = trained(1, "mixtral", GLOBAL, micro_batch=8)
    assert_same(trained(4, "mixtral", GLOBAL, **keys), expected)


def test_e_global_balancing_loss_is_most_of_the_routers_gradient() -> None:
    plain = router_gradient(Plan(steps=1, weights=LossWeights()), 8)
    for plan in (GLOBAL, SEQUENCE, BATCH):
        assert plain.norm() < 0.1 * router_gradient(plan, 8).norm()
    # What does depend on how rows are put together is seen by this measure.
    assert relative(router_gradient(BATCH, 1), router_gradient(BATCH, 8)) > 0.01


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_e_sequence_balancing_loss_is_independent_of_micro_batching(micro_batch: int) -> None:
    assert_same(
        trained(1, "mixtral", SEQUENCE, micro_batch=micro_batch), trained(1, "mixtral", SEQUENCE, micro_batch=8)
    )


@pytest.mark.parametrize(
    "keys",
    [{}, {"micro_batch": 2, "ep": 4}, {"cp": 2, "micro_batch": 4, "ep": 2}, {"tp": 2}, {"pp": 2, "tp": 2}],
)
def test_e_and_of_the_layout(keys: dict[str, Any]) -> None:
    assert_same(trained(4, "mixtral", SEQUENCE, **keys), trained(1, "mixtral", SEQUENCE, micro_batch=8))


# ---------------------------------------------------------------- recompute


def recompute_layers(decoder: Decoder) -> None:
    """Keep only the inputs of layers, and compute the rest again in backward."""
    blocks: list[nn.Module] = [*decoder.layers, *(block.get_submodule("layer") for block in decoder.mtp)]
    for layer in blocks:
        assert isinstance(layer, Layer)
        layer.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, context_fn=recompute_contexts
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, {}),
        (4, {"tp": 2, "ep": 4, "dispatcher": "alltoall"}),
        (4, {"cp": 2, "cp_kind": "ring", "ep": 2, "sharding": "parameters"}),
        (4, {"pp": 2, "ep": 2, "schedule": "zero_bubble"}),
        (4, {"pp": 2, "cp": 2, "virtual_stages": 2, "sharding": "gradients"}),
    ],
)
def test_f_recomputing_layers_changes_nothing(world: int, keys: dict[str, Any]) -> None:
    kept, again = (
        trained(world, "deepseek_v3", Plan(steps=2, prepare=prepare), micro_batch=2, **keys)
        for prepare in (None, recompute_layers)
    )
    assert again.losses == kept.losses
    assert again.totals == kept.totals
    assert again.parts == kept.parts
    assert again.norms == kept.norms
    assert again.counts == kept.counts
    assert again.biases.keys() == kept.biases.keys()
    for mine, wanted in zip(again.gradients, kept.gradients, strict=True):
        for name in wanted:
            assert torch.equal(mine[name], wanted[name]), name
    for layer, bias in kept.biases.items():
        assert torch.equal(again.biases[layer], bias)
