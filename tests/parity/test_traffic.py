"""Bytes that each rank sends equal the published closed forms: exactly, forward and backward.

Letters of the formulas: b rows, s tokens of a row, h hidden size, n ranks, m query heads per key head, k choices per
token. Everything is fp32. MegaScale-MoE is arXiv 2505.11432.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch import make_dispatcher
from moesaic.mesh.mesh import Mesh
from moesaic.mesh.traffic import Traffic, meter
from moesaic.model.attention import Attention
from moesaic.model.losses import LossWeights
from moesaic.model.mla import LatentAttention
from moesaic.model.mlp import Mlp
from moesaic.model.sequences import Sequences
from moesaic.spec.model import AttentionSpec, MlpSpec
from tests.parity import models, runs
from tests.parity.runs import Plan
from tests.ranks import ranks

Sent = dict[tuple[str, str], int]
"""Bytes by (collective, group)."""
FP32, INT64 = 4, 8
B, S, D = 2, 16, 32
"""b, s and h."""


def sent(traffic: Traffic) -> Sent:
    """What was metered, without what is nothing."""
    return {what: count for what, count in traffic.bytes.items() if count}


def mesh_of(keys: dict[str, Any]) -> Mesh:
    return runs.mesh_for("mixtral", keys)


def both_ways(forward: Callable[[], Tensor]) -> tuple[Sent, Sent]:
    """Bytes of a forward pass and of its backward pass."""
    with meter() as there:
        out = forward()
    with meter() as back:
        out.sum().backward()
    return sent(there), sent(back)


def new_weights(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)


# ---------------------------------------------------------------- attention and dense MLP


def grouped(heads: int, kv_heads: int, **rest: Any) -> AttentionSpec:
    """h = heads · head size, as the formulas assume."""
    size = D // heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "v_head_dim": size}
    return AttentionSpec(**sizes, scale=size**-0.5, **rest)


LATENT = AttentionSpec(
    kind="mla", heads=8, kv_heads=8, head_dim=12, v_head_dim=8, scale=0.3, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4
)


def attention_traffic(rank: int, spec: AttentionSpec, keys: dict[str, Any]) -> tuple[Sent, Sent]:
    mesh = mesh_of(keys)
    kind = LatentAttention if spec.kind == "mla" else Attention
    module = kind(spec, D, dtype=torch.float32, device="cpu", mesh=mesh)
    new_weights(module)
    sequences = Sequences(B, S, mesh=mesh)
    x_TD = torch.randn(B * sequences.own_length, D, requires_grad=True)
    return both_ways(lambda: module(x_TD, sequences))


def mlp_traffic(rank: int, keys: dict[str, Any]) -> tuple[Sent, Sent]:
    mesh = mesh_of(keys)
    module = Mlp(MlpSpec(width=48), D, dtype=torch.float32, device="cpu", tp=mesh.tp, by_rank=mesh.by_rank)
    new_weights(module)
    x_TD = torch.randn(B * S // mesh.sequence.size, D, requires_grad=True)
    return both_ways(lambda: module(x_TD, B))


def assert_everywhere(world: int, function: Any, args: tuple[Any, ...], forward: Sent, backward: Sent) -> None:
    for there, back in ranks(world).run(function, *args):
        assert there == forward
        assert back == backward


def half_of_equation_1(n: int, width: int = D) -> int:
    """bsh(n − 1)/n: an all-gather before and a reduce-scatter after are twice that."""
    return B * S * width * (n - 1) // n * FP32


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "spec", [grouped(8, 8), grouped(8, 4), grouped(8, 4, qk_norm="head"), LATENT], ids=["mha", "gqa", "norms", "mla"]
)
def test_tensor_parallel_attention_sends_2bsh_n_minus_1_over_n(spec: AttentionSpec, n: int) -> None:
    """MegaScale-MoE, Eq. 1. Latent attention gathers its latents instead of the input: q_rank + kv_rank + rope_dim
    columns, not h."""
    latents = (spec.q_rank or 0) + (spec.kv_rank or 0) + (spec.rope_dim or 0)
    before, after = half_of_equation_1(n, latents or D), half_of_equation_1(n)
    if not latents:
        assert before + after == 2 * B * S * D * (n - 1) // n * FP32
    forward = {("all-gather", "tp"): before, ("reduce-scatter", "tp"): after}
    backward = {("reduce-scatter", "tp"): before, ("all-gather", "tp"): after}
    assert_everywhere(n, attention_traffic, (spec, {"tp": n}), forward, backward)


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallel_mlp_sends_2bsh_n_minus_1_over_n(n: int) -> None:
    """MegaScale-MoE, Eq. 4."""
    half = half_of_equation_1(n)
    both = {("all-gather", "tp"): half, ("reduce-scatter", "tp"): half}
    assert_everywhere(n, mlp_traffic, ({"tp": n},), both, both)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_ulysses_sends_bsh_n_minus_1_over_n_times_2_plus_2_over_m_over_n(kv_heads: int, n: int) -> None:
    """The count of DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2), for grouped queries; MegaScale-MoE's Eq. 2 is
    twice that. Fewer key heads than ranks are sent as one per rank."""
    m = 8 / max(kv_heads, n)
    total = B * S * D * (n - 1) / n * (2 + 2 / m) / n * FP32
    both = {("head all-to-all", "cp"): int(total)}
    assert int(total) == total
    assert_everywhere(n, attention_traffic, (grouped(8, kv_heads), {"cp": n}), both, both)


def test_ulysses_under_tensor_parallelism_sends_its_share_of_heads() -> None:
    """cp 2, tp 2: the formula with h/tp, beside tensor parallelism over the context part's s/cp tokens."""
    heads = B * S * (D // 2) * 1 // 2 * (2 + 2 // 2) // 2 * FP32
    half = B * (S // 2) * D // 2 * FP32
    both = {("head all-to-all", "cp"): heads, ("all-gather", "tp"): half, ("reduce-scatter", "tp"): half}
    assert_everywhere(4, attention_traffic, (grouped(8, 4), {"cp": 2, "tp": 2}), both, both)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_ring_sends_keys_and_values_once_around(kv_heads: int, n: int) -> None:
    """bsh(n − 1)/n · 2/m forward; backward keys and values go around again, with the sums of their gradients."""
    m = 8 // kv_heads
    around = B * S * D * (n - 1) // n * 2 // m * FP32
    keys = {"cp": n, "cp_kind": "ring"}
    args = (grouped(8, kv_heads), keys)
    assert_everywhere(n, attention_traffic, args, {("shift", "cp"): around}, {("shift", "cp"): 2 * around})


# ---------------------------------------------------------------- experts

E, K = 8, 3


def choices(kind: str, rank: int, n: int, tokens: int) -> Tensor:
    """ids_TK of one rank: `random`; `spread`, K distinct ranks for each token, all ranks equally often; `together`,
    all K on one rank; `none`, no tokens at all on odd ranks."""
    generator = torch.Generator().manual_seed(rank)
    each = E // n
    if kind == "spread":
        targets = torch.arange(tokens)[:, None] + torch.arange(min(K, n))
        return targets % n * each + torch.randint(0, each, targets.shape, generator=generator)
    if kind == "together":
        return torch.arange(tokens)[:, None] % n * each + torch.arange(min(K, each))
    if kind == "none" and rank % 2:
        tokens = 0
    return torch.rand(tokens, E, generator=generator).topk(K, -1).indices


def dispatch_traffic(
    rank: int, dispatcher: str, kind: str, keys: dict[str, Any], tokens: int
) -> tuple[Sent, Sent, int, int]:
    """Bytes of dispatch and combine, and of their backward; and this rank's places in ep and etp."""
    mesh = mesh_of(keys)
    groups = mesh.expert(E)
    made = make_dispatcher(dispatcher, groups, E)
    ids_TK = choices(kind, groups.ep_etp.rank, groups.ep.size, tokens)
    x_TD = torch.randn(len(ids_TK), D, requires_grad=True)
    weights_TK = torch.rand(ids_TK.shape, requires_grad=True)

    def forward() -> Tensor:
        here = made.dispatch(x_TD, ids_TK, weights_TK)
        rows_RD = here.rows_RD * here.weights_RK.sum(1, keepdim=True)
        return made.combine(rows_RD, here.handle)

    return *both_ways(forward), groups.ep.rank, groups.etp.rank


def counted(hidden_bytes: int, back_bytes: int, rows_out: int, rows_in: int, k: int, group: str) -> tuple[Sent, Sent]:
    """Bytes of a layer's both ways, given those of hidden states there and back and the rows that they were: with a
    row go its K choices and K weights, 4 bytes each; with a row's gradient that of its K weights."""
    forward = {
        ("routing", group): rows_out * 2 * k * FP32,
        ("dispatch", group): hidden_bytes,
        ("combine", group): back_bytes,
    }
    backward = {
        ("combine gradient", group): hidden_bytes,
        ("dispatch gradient", group): back_bytes,
        ("routing gradient", group): rows_in * k * FP32,
    }
    return tuple({what: count for what, count in each.items() if count} for each in (forward, backward))


@pytest.mark.parametrize(("n", "etp"), [(2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["random", "none"])
def test_all_gather_dispatch_sends_2bsh_n_minus_1_over_n_whatever_is_chosen(kind: str, n: int, etp: int) -> None:
    """MegaScale-MoE, section 4.2, for n ranks of ep · etp; each rank tells the n − 1 others how many tokens it has."""
    tokens, keys = 8, {"ep": n // etp, "etp": etp, "dispatcher": "allgather"}
    found = ranks(n).run(dispatch_traffic, "allgather", kind, keys, tokens)
    lengths = [0 if kind == "none" and rank % 2 else tokens for rank in range(n)]
    for rank, (forward, backward, _, _) in enumerate(found):
        own, others = lengths[rank], sum(lengths) - lengths[rank]
        there, back = own * (n - 1) * D * FP32, others * D * FP32
        if kind == "random":
            bsh = tokens * n * D
            assert there + back == 2 * bsh * (n - 1) // n * FP32
        wanted, wanted_back = counted(there, back, own * (n - 1), others, K, "ep_etp")
        assert forward == {("counts", "ep_etp"): (n - 1) * INT64, **wanted}
        assert backward == wanted_back


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ["random", "spread", "together", "none"])
def test_all_to_all_dispatch_sends_one_copy_to_each_rank_that_is_needed(kind: str, n: int) -> None:
    tokens = 8
    found = ranks(n).run(dispatch_traffic, "alltoall", kind, {"ep": n, "dispatcher": "alltoall"}, tokens)
    ids = [choices(kind, rank, n, tokens).tolist() for rank in range(n)]
    k = max(len(row) for rows in ids for row in rows)
    # copies[a][b]: tokens of rank a with at least one expert on rank b
    copies = [[sum(any(e // (E // n) == b for e in row) for row in rows) for b in range(n)] for rows in ids]
    total = 0
    for rank, (forward, backward, _, _) in enumerate(found):
        out = sum(copies[rank]) - copies[rank][rank]
        into = sum(copies[other][rank] for other in range(n) if other != rank)
        wanted, wanted_back = counted(out * D * FP32, into * D * FP32, out, into, k, "ep")
        assert forward == {("counts", "ep"): (n - 1) * INT64, **wanted}
        assert backward == wanted_back
        total += forward.get(("dispatch", "ep"), 0) + forward.get(("combine", "ep"), 0)
        if kind == "spread":  # MegaScale-MoE, Eq. 3, on every rank
            bsh = tokens * n * D
            equation_3 = 2 * k / n * bsh * (n - 1) / n * FP32
            assert forward["dispatch", "ep"] + forward["combine", "ep"] == equation_3
    assert total <= 2 * n * tokens * (n - 1) * D * FP32  # never more than an all-gather


def test_all_to_all_over_cut_experts_gathers_what_arrived() -> None:
    """ep 2, etp 2: rows go to the ranks of the same cut, whose arrivals are gathered over the ranks of the cut."""
    tokens, keys = 8, {"ep": 2, "etp": 2, "dispatcher": "alltoall"}
    found = ranks(4).run(dispatch_traffic, "alltoall", "random", keys, tokens)
    place = {(ep, etp): rank for rank, (_, _, ep, etp) in enumerate(found)}
    ids = [choices("random", rank, 2, tokens).tolist() for rank in range(4)]
    goes = [[sum(any(e // (E // 2) == b for e in row) for row in rows) for b in range(2)] for rows in ids]
    for forward, backward, ep, etp in found:
        out = goes[place[ep, etp]][1 - ep]
        into = goes[place[1 - ep, etp]][ep]
        here = into + goes[place[ep, etp]][ep]
        beside = sum(goes[place[other, 1 - etp]][ep] for other in range(2))
        wanted, wanted_back = counted(out * D * FP32, into * D * FP32, out, into, K, "ep")
        cut, cut_back = counted(here * D * FP32, beside * D * FP32, here, beside, K, "etp")
        assert forward == {("counts", "ep"): INT64, ("counts", "etp"): INT64, **wanted, **cut}
        assert backward == {**wanted_back, **cut_back}


# ---------------------------------------------------------------- parameters

MICRO_BATCHES = 2
CALM = Plan(steps=1, weights=LossWeights())


def step_traffic(rank: int, keys: dict[str, Any]) -> tuple[Sent, dict[str, Any]]:
    """What one step of the tiny Mixtral sends, and what is needed to say how much that must be."""
    mesh = mesh_of(keys)
    trainer = runs.start("mixtral", mesh, keys, CALM)
    with meter() as traffic:
        runs.step("mixtral", trainer, runs.own_batches(mesh, keys, CALM, 1), CALM, 1)
    kinds = {
        name: "expert" if c.expert else "whole" if c.is_whole else "cut" for name, c in trainer.decoder.cuts.items()
    }
    shapes = {name: cut.local_shape for name, cut in trainer.decoder.cuts.items()}
    return sent(traffic), {"kinds": kinds, "shapes": shapes, "routers": len(trainer.decoder.routers())}


def elements(about: dict[str, Any], kind: str) -> int:
    """How many elements a rank holds of one kind of parameters."""
    return sum(torch.Size(about["shapes"][name]).numel() for name, each in about["kinds"].items() if each == kind)


@pytest.mark.parametrize(
    ("keys", "stage", "data", "edp"),
    [
        ({}, 4, 4, 4),
        ({"ep": 2, "dispatcher": "allgather"}, 4, 4, 2),
        ({"ep": 4, "dispatcher": "allgather"}, 4, 4, 1),
        ({"cp": 2, "ep": 2, "dispatcher": "allgather"}, 4, 4, 2),
        ({"tp": 2, "ep": 2, "dispatcher": "allgather"}, 4, 2, 2),
        ({"cp": 2, "tp": 2}, 4, 2, 4),
        ({"pp": 2}, 2, 2, 2),
    ],
)
def test_gradients_are_summed_with_2p_n_minus_1_over_n(keys: dict[str, Any], stage: int, data: int, edp: int) -> None:
    """Whole parameters over all ranks of a stage, what tensor parallelism cuts over dp·cp, experts over edp. The counts
    of each router's E experts are summed over the stage too."""

    def summed(count: int, size: int, n: int) -> int:
        return 2 * count * size * (n - 1) // n

    for traffic, about in ranks(4).run(step_traffic, {"micro_batch": 1, **keys}):
        wanted = {
            "stage": summed(elements(about, "whole"), FP32, stage) + summed(about["routers"] * E, INT64, stage),
            "data": summed(elements(about, "cut"), FP32, data),
            "edp": summed(elements(about, "expert"), FP32, edp),
        }
        assert {group: traffic.get(("all-reduce", group), 0) for group in wanted} == wanted


GATHERS = {"optimizer": (1, 1), "gradients": (1, MICRO_BATCHES), "parameters": (2 * MICRO_BATCHES, MICRO_BATCHES)}
"""How often a step of two micro-batches gathers weights and scatters gradients, by sharding level."""


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("level", GATHERS)
def test_sharded_state_sends_p_n_minus_1_over_n_per_gather_and_per_scatter(level: str, ep: int) -> None:
    """Rows that do not divide by n are filled up."""
    keys = {"micro_batch": 1, "sharding": level, "ep": ep, "dispatcher": "allgather" if ep > 1 else "auto"}
    gathers, scatters = GATHERS[level]
    for traffic, about in ranks(4).run(step_traffic, keys):
        for group, n, kind in (("data", 4, "whole"), ("edp", 4 // ep, "expert")):
            shapes = [about["shapes"][name] for name, each in about["kinds"].items() if each == kind]
            filled = sum(-(-rows // n) * n * torch.Size(rest).numel() for rows, *rest in shapes)
            once = filled * (n - 1) // n * FP32
            assert traffic["all-gather", group] == gathers * once
            assert traffic["reduce-scatter", group] == scatters * once
            assert ("all-reduce", group) not in traffic


def test_pipelines_send_hidden_states_and_their_gradients() -> None:
    """bsh per micro-batch and boundary, each way, where b rows have s/(cp·tp) tokens on a rank."""
    keys = {"pp": 2, "tp": 2, "micro_batch": 2}
    own = keys["micro_batch"] * models.SEQ_LEN // keys["tp"] * D * FP32 * (models.GLOBAL_BATCH // keys["micro_batch"])
    for rank, (traffic, _) in enumerate(ranks(4).run(step_traffic, keys)):
        name = "pp forward" if rank < 2 else "pp backward"
        assert {group: count for (what, group), count in traffic.items() if what == "send"} == {name: own}


def test_one_process_sends_nothing() -> None:
    with meter() as traffic:
        runs.alone("mixtral", 1, plan=Plan(steps=1, seed=5))
    assert sent(traffic) == {}
