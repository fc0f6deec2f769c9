"""Sums of gradients under backward, and weights gathered ahead, train as one process does, with the bits of the sums
taken afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moesaic.mesh.reduction import PendingScatter
from moesaic.mesh.traffic import meter
from moesaic.model.losses import LossWeights
from moesaic.spec.errors import MoesaicError
from moesaic.train import overlapped, sharding
from tests.parity import runs
from tests.parity.runs import Plan
from tests.ranks import ranks

pytestmark = pytest.mark.long

TOLERANCE = 1e-5
PLAN = Plan(steps=2)
WORDS = {"overlap": ["gradients"]}


def in_small_buckets(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """A rank of a tiny model that has as many buckets as a large one."""
    with patch.object(overlapped, "LEAST_BUCKET_BYTES", 2**11):
        return function(rank, *args)


def with_and_without(
    rank: int, name: str, keys: dict[str, Any], dtype: torch.dtype
) -> tuple[runs.Record, runs.Record] | None:
    """What a run computes with sums under backward, and with sums after it."""
    words = keys.get("overlap", [])
    under = in_small_buckets(rank, runs.outcome, name, keys | {"overlap": ["gradients", *words]}, PLAN, dtype)
    later = runs.outcome(rank, name, keys | {"overlap": words or "none"}, PLAN, dtype)
    return None if under is None or later is None else (under, later)


@pytest.mark.parametrize(
    ("world", "name", "keys", "dtype"),
    [
        (2, "mixtral", {}, torch.float32),
        (2, "deepseek_v3", {"ep": 2}, torch.bfloat16),
        (2, "mixtral", {"ep": 2, "sharding": "optimizer"}, torch.float32),
        (2, "mixtral", {"overlap": ["weight_gradients", "inside"], "ep": 2}, torch.float32),
        (4, "qwen3_moe", {"ep": 2, "tp": 2}, torch.float32),
        (4, "deepseek_v3", {"pp": 2, "virtual_stages": 2, "schedule": "zero_bubble"}, torch.bfloat16),
    ],
    ids=str,
)
def test_overlapped_sums_have_the_bits_of_later_ones(
    world: int, name: str, keys: dict[str, Any], dtype: torch.dtype
) -> None:
    found = ranks(world).run(with_and_without, name, keys, dtype)[0]
    assert found is not None
    under, later = found
    assert later.norms == under.norms and later.losses == under.losses
    for a, b in zip(later.gradients, under.gradients, strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    ("world", "name", "keys"),
    [
        (2, "mixtral", WORDS),
        (2, "deepseek_v3", {"overlap": ["gradients", "between"], "ep": 2}),
        (2, "qwen3_moe", {"overlap": ["gradients"], "micro_batch": 2, "ep": 2}),
        (2, "deepseek_v3", {"overlap": ["gradients", "inside", "experts", "weight_gradients"], "ep": 2}),
        (2, "mixtral", {"overlap": ["gradients", "weight_gradients"], "recompute": ["layernorm", "mlp", "moe"]}),
        (2, "mixtral", {"overlap": ["gradients", "parameters"], "sharding": "optimizer", "ep": 2}),
        (2, "mixtral", {"overlap": ["parameters"], "sharding": "parameters"}),
        (4, "deepseek_v3", {"overlap": ["gradients"], "pp": 2, "ep": 2}),
        (4, "deepseek_v3", {"overlap": ["gradients"], "pp": 2, "schedule": "zero_bubble"}),
        (4, "mixtral", {"overlap": ["gradients", "parameters"], "sharding": "parameters", "ep": 2}),
        (4, "mixtral", {"overlap": ["parameters"], "sharding": "gradients", "pp": 2, "virtual_stages": 2}),
    ],
    ids=str,
)
def test_as_in_one_process(world: int, name: str, keys: dict[str, Any]) -> None:
    found = ranks(world).run(in_small_buckets, runs.errors, name, keys, PLAN)
    exact = ("counts", "bias", "missing")
    worst = {what: max(each[what] for each in found) for what in found[0]}
    assert {what: x for what, x in worst.items() if not x <= (0 if what in exact else TOLERANCE)} == {}


def events(rank: int, keys: dict[str, Any]) -> tuple[list[tuple[str, Any]], list[str], dict[str, str]]:
    """What happens in a step: gradients come, sums begin, sums are waited for. Then all parameters with a gradient, and
    which of them experts have."""
    mesh = runs.mesh_for("mixtral", keys)
    trainer = runs.start("mixtral", mesh, keys, PLAN)
    overlap = trainer.optimizer.overlap
    assert overlap is not None
    seen: list[tuple[str, Any]] = []
    for name, parameter in trainer.decoder.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(("gradient", name)))
    start, wait = overlap._start, overlap.wait

    def watched_start(bucket: Any) -> None:
        start(bucket)
        if bucket.sum is not None:
            seen.append(("sum", list(bucket.taken)))

    def watched_wait() -> set[str]:
        seen.append(("wait", [name for names in overlap.begun for name in names]))
        return wait()

    with patch.object(overlap, "_start", watched_start), patch.object(overlap, "wait", watched_wait):
        runs.step("mixtral", trainer, runs.own_batches(mesh, keys, PLAN, 1), PLAN, 1)
    experts = {name for name, cut in trainer.decoder.cuts.items() if cut.expert}
    kinds = {name: "expert" if name in experts else "dense" for name in trainer.optimizer.masters}
    return seen, list(trainer.optimizer.gradients()), kinds


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (2, {}),
        (2, {"overlap": ["gradients", "weight_gradients"]}),
        (4, {"pp": 2, "schedule": "zero_bubble"}),
        (4, {"ep": 2, "overlap": ["gradients", "inside"]}),
    ],
    ids=str,
)
def test_sums_begin_before_backward_ends_and_all_before_the_optimizer_waits(world: int, keys: dict[str, Any]) -> None:
    per_rank = ranks(world).run(in_small_buckets, events, WORDS | keys)
    for seen, with_gradient, kinds in per_rank:
        sums = [(place, names) for place, (what, names) in enumerate(seen) if what == "sum"]
        last = {name: place for place, (what, name) in enumerate(seen) if what == "gradient"}
        ended = max(last.values())
        assert all(len({kinds[name] for name in names}) == 1 for _, names in sums)
        for kind in ("dense", "expert"):
            early = [place for place, names in sums if place < ended and kinds[names[0]] == kind]
            assert len(early) > 1, f"no sums of {kind} parameters under backward"
        assert ("wait", [name for _, names in sums for name in names]) == seen[-1]
        assert sorted(seen[-1][1]) == sorted(with_gradient)
    orders = [[names for what, names in seen if what == "sum"] for seen, _, _ in per_rank]
    half = world // 2
    assert orders[0] == orders[half - 1] and orders[half] == orders[-1]  # ranks of one stage begin in one order


def scatters(rank: int, keys: dict[str, Any]) -> list[str]:
    """When sums of sharded gradients begin and are waited for, and when FSDP2 needs nothing more of backward."""
    mesh = runs.mesh_for("mixtral", keys)
    trainer = runs.start("mixtral", mesh, keys, PLAN)
    seen: list[str] = []
    wait, end = PendingScatter.wait, trainer.sharding.end_backward

    class Watched(PendingScatter):
        def __init__(self, *args: Any, **named: Any) -> None:
            seen.append("begin")
            super().__init__(*args, **named)

        def wait(self) -> None:
            seen.append("wait")
            wait(self)

    def watched_end() -> None:
        seen.append("backward is over")
        end()

    with patch.object(sharding, "PendingScatter", Watched), patch.object(trainer.sharding, "end_backward", watched_end):
        runs.step("mixtral", trainer, runs.own_batches(mesh, keys, PLAN, 1), PLAN, 1)
    return seen


def test_sums_of_sharded_gradients_are_left_until_backward_is_over() -> None:
    """Of four layers' dense parameters, their experts, and the rest."""
    for seen in ranks(2).run(scatters, WORDS | {"sharding": "optimizer"}):
        assert seen == ["begin"] * 9 + ["backward is over"] + ["wait"] * 9
    for seen in ranks(2).run(scatters, WORDS | {"sharding": "gradients"}):
        assert seen == ["backward is over"]


def test_a_gradient_that_comes_after_its_sum_began_is_an_error() -> None:
    for said in ranks(2).run(_late):
        assert said == "the gradient of norm.weight was added to after its sum over ranks had begun"


def _late(rank: int) -> str:
    mesh = runs.mesh_for("mixtral", WORDS)
    trainer = runs.start("mixtral", mesh, WORDS, PLAN)
    overlap, masters = trainer.optimizer.overlap, trainer.optimizer.masters
    assert overlap is not None
    wait = overlap.wait

    def watched() -> set[str]:
        gradient = masters["norm.weight"].grad
        assert gradient is not None
        gradient.add_(1.0)
        return wait()

    with patch.object(overlap, "wait", watched), pytest.raises(MoesaicError) as error:
        runs.step("mixtral", trainer, runs.own_batches(mesh, WORDS, PLAN, 1), PLAN, 1)
    return str(error.value)


CALM = Plan(steps=1, weights=LossWeights())
FP32, BF16 = 4, 2


def sent(rank: int, keys: dict[str, Any]) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Bytes that a step sends, and how many elements this rank has of experts and of everything else."""
    mesh = runs.mesh_for("mixtral", keys)
    trainer = runs.start("mixtral", mesh, keys, CALM)
    with meter() as traffic:
        runs.step("mixtral", trainer, runs.own_batches(mesh, keys, CALM, 1), CALM, 1)
    sizes = {"expert": 0, "dense": 0}
    for cut in trainer.decoder.cuts.values():
        sizes["expert" if cut.expert else "dense"] += torch.Size(cut.local_shape).numel()
    return {key: count for key, count in traffic.bytes.items() if count}, sizes


@pytest.mark.parametrize("words", [[], ["gradients"]])
def test_compressed_gradients_send_6_bytes_of_8_and_overlap_sends_no_more(words: list[str]) -> None:
    """A sum of P fp32 elements over n ranks sends 8 P (n − 1)/n bytes of each; with bf16 all-to-all 2 + 4 of these."""
    keys = {"ep": 2, "dispatcher": "allgather", "overlap": words or "none"}
    plain = ranks(4).run(in_small_buckets, sent, keys)
    small = ranks(4).run(in_small_buckets, sent, keys | {"compression": ["gradients"]})
    for (traffic, sizes), (compressed, _) in zip(plain, small, strict=True):
        for group, kind, n in (("stage", "dense", 4), ("edp", "expert", 2)):
            whole = 2 * sizes[kind] * FP32 * (n - 1) // n
            counts = traffic["all-reduce", group] - whole  # of tokens per expert, not gradients
            assert counts == compressed.get(("all-reduce", group), 0)
            assert compressed["all-to-all of gradients", group] == sizes[kind] * BF16 * (n - 1) // n
            assert compressed["all-gather of gradients", group] == sizes[kind] * FP32 * (n - 1) // n


@pytest.mark.parametrize("level", ["optimizer", "parameters"])
def test_sharded_compressed_gradients_send_half_and_gathering_ahead_sends_no_more(level: str) -> None:
    keys = {"sharding": level}
    words = {"overlap": ["parameters"], "compression": ["gradients"]}
    plain, small = ranks(2).run(sent, keys), ranks(2).run(sent, keys | words)
    for (traffic, _), (compressed, _) in zip(plain, small, strict=True):
        assert not any(what == "reduce-scatter" for what, _ in compressed)
        for group in ("data", "edp"):
            assert 2 * compressed["all-to-all of gradients", group] == traffic["reduce-scatter", group]
            assert compressed["all-gather", group] == traffic["all-gather", group]


def test_a_step_with_compressed_gradients_is_near_that_without() -> None:
    """Each addend is rounded by at most 2⁻⁸ of itself, so a sum errs by hardly more."""
    keys = {"compression": ["gradients"]}
    for under in ({}, WORDS):
        found = ranks(2).run(in_small_buckets, runs.errors, "mixtral", keys | under, Plan(steps=1))
        assert all(1e-6 < each["gradient"] < 2.0**-7 and each["loss"] < TOLERANCE for each in found)
