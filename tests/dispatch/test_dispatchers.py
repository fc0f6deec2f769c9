"""Experts spread over ranks against the same experts in one process, on the same tokens; and the bytes that travel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.dispatch import make_dispatcher
from moesaic.dispatch.local import LocalDispatcher
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups
from moesaic.mesh.nodes import split_by_node
from moesaic.mesh.traffic import Traffic, meter
from moesaic.model.expert_gradients import PartGradients
from moesaic.model.experts import Experts
from moesaic.spec.errors import SpecError
from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec
from tests.ranks import ranks


@dataclass(frozen=True)
class Case:
    """Experts over `ep` · `etp` ranks and the choices of each rank's tokens."""

    ep: int
    etp: int
    experts: int
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each rank, of each token, the K experts."""
    top_k: int
    hidden: int = 5
    width: int = 6
    dtype: torch.dtype = torch.float32
    expert: dict[str, Any] = field(default_factory=dict)
    apply: str = "output"

    @property
    def size(self) -> int:
        """Ranks."""
        return self.ep * self.etp

    @property
    def moe(self) -> MoeSpec:
        """The block."""
        router = RouterSpec(experts=self.experts, top_k=self.top_k, apply=self.apply)
        return MoeSpec(router=router, expert=MlpSpec(width=self.width, **self.expert))

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ids, weights and the output's gradient of a rank's tokens."""
        made = torch.Generator().manual_seed(rank)
        tokens = len(self.ids[rank])
        x = torch.randn(tokens, self.hidden, generator=made).to(self.dtype)
        weights = torch.rand(tokens, self.top_k, generator=made)
        grad_y = torch.randn(tokens, self.hidden, generator=made).to(self.dtype)
        return x, torch.tensor(self.ids[rank], dtype=torch.int64).view(tokens, self.top_k), weights, grad_y

    def whole(self) -> Experts:
        """All experts, with weights that every process makes alike."""
        module = Experts(self.moe, self.hidden, self.dtype)
        made = torch.Generator().manual_seed(99)
        for parameter in module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=made) * 0.5)
        return module


def gradients(module: Experts) -> dict[str, Tensor]:
    """By name. Copies: a rank shares what it returns, and hands pooled memory out again at the next call."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@functools.cache
def expert_groups(ep: int, etp: int) -> ExpertGroups:
    """The groups of a process of a pool of ep · etp, made once. Half of the pool is a node."""
    n = ep * etp
    assert dist.get_world_size() == n
    ep_groups = [tuple(range(t, n, etp)) for t in range(etp)]
    inside, across = split_by_node(ep_groups, max(1, n // 2))
    return ExpertGroups(
        Group.create("ep", ep_groups, 60.0),
        Group.create("etp", [tuple(range(e * etp, (e + 1) * etp)) for e in range(ep)], 60.0),
        Group.single("edp", dist.get_rank()),
        Group.create("ep_etp", [tuple(range(n))], 60.0),
        Group.create("ep_inside", inside, 60.0),
        Group.create("ep_across", across, 60.0),
    )


def on_a_rank(rank: int, case: Case, name: str, staged: bool, chunks: int = 0) -> dict[str, Any]:
    """Dispatch, experts, combine and backward of one rank, with `chunks` in parts."""
    groups = expert_groups(case.ep, case.etp)
    module = Experts(case.moe, case.hidden, case.dtype, groups=groups)
    whole = dict(case.whole().named_parameters())
    for key, parameter in module.named_parameters():
        parameter.data.copy_(parameter.cut.take(whole[key].data))  # type: ignore[attr-defined]
    dispatcher = make_dispatcher(name, groups, case.experts)
    x, ids, weights, grad_y = case.inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()
    with meter() as traffic:
        if chunks:
            back, rows = [], 0
            sent = dispatcher.start_parts(x, ids, weights, chunks)
            gradients_of_parts = PartGradients(len(sent))
            for part in sent:
                here = part.finish()
                rows += len(here.rows_RD)
                y = module(here.rows_RD, here.ids_RK, here.weights_RK, gradients_of_parts)
                back.append(dispatcher.start_combine(y, here.handle))
            y = dispatcher.finish_parts(back)
        elif staged:
            pending = dispatcher.start_dispatch(x, ids, weights)
            other = x.square()
            here = pending.finish()
            back = dispatcher.start_combine(module(here.rows_RD, here.ids_RK, here.weights_RK), here.handle)
            other = other * 0
            y = back.finish() + other
        else:
            here = dispatcher.dispatch(x, ids, weights)
            y = dispatcher.combine(module(here.rows_RD, here.ids_RK, here.weights_RK), here.handle)
        forward = Traffic(dict(traffic.bytes), dict(traffic.calls))
        y.backward(grad_y)
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "parameters": gradients(module),
        "cuts": {key: parameter.cut for key, parameter in module.named_parameters()},  # type: ignore[attr-defined]
        "forward": forward,
        "both": Traffic(dict(traffic.bytes), dict(traffic.calls)),
        "rows": rows if chunks else len(here.rows_RD),
    }


def alone(case: Case) -> dict[str, Any]:
    """The same in this process, all ranks' tokens one after another."""
    inputs = [case.inputs(rank) for rank in range(case.size)]
    x, ids, weights, grad_y = (torch.cat(each) for each in zip(*inputs, strict=True))
    x.requires_grad_()
    weights.requires_grad_()
    module = case.whole()
    y = module(x, ids, weights)
    y.backward(grad_y)
    counts = [len(each) for each in case.ids]
    assert x.grad is not None and weights.grad is not None
    return {
        "y": y.detach().split(counts),
        "x": x.grad.split(counts),
        "weights": weights.grad.split(counts),
        "parameters": gradients(module),
    }


def compare(
    case: Case, name: str, staged: bool = False, tolerance: float = 1e-5, chunks: int = 0
) -> list[dict[str, Any]]:
    """Raises unless every rank's results are those of one process; returns what ranks say."""
    found = ranks(case.size).run(on_a_rank, case, name, staged, chunks)
    expected = alone(case)
    for rank, each in enumerate(found):
        for key in ("y", "x", "weights"):
            torch.testing.assert_close(each[key], expected[key][rank], rtol=tolerance, atol=tolerance)
        for key, cut in each["cuts"].items():
            want = cut.take(expected["parameters"][key])
            got = each["parameters"][key]
            if key == "down_bias":  # cut along experts only: a sum over the ranks that hold it
                same = [r for r in range(case.size) if r // case.etp == rank // case.etp]
                got = sum(found[r]["parameters"][key] for r in same)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mesh of 1, 2 or 4 ranks, any number of tokens on each, any choice, often of few experts."""
    ep, etp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]))
    experts = ep * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(experts, 4)))
    chosen = draw(st.integers(top_k, experts))  # only the first so many experts are chosen
    choice = st.permutations(range(chosen)).map(lambda order: tuple(order[:top_k]))
    ids = draw(st.lists(st.lists(choice, max_size=6).map(tuple), min_size=ep * etp, max_size=ep * etp))
    expert = {"bias": draw(st.booleans()), "gated": draw(st.booleans())}
    apply = draw(st.sampled_from(["output", "input"]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return Case(ep, etp, experts, tuple(ids), top_k, width=4, dtype=dtype, expert=expert, apply=apply)


NAMES = ["alltoall", "allgather", "hierarchical"]


@settings(max_examples=30)
@given(case=cases(), name=st.sampled_from(NAMES), staged=st.booleans())
def test_any_routing_on_any_mesh_equals_one_process(case: Case, name: str, staged: bool) -> None:
    compare(case, name, staged)


def random_ids(tokens: list[int], experts: int, top_k: int, seed: int = 0) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Different experts for each token, drawn evenly."""
    made = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(tuple(torch.randperm(experts, generator=made)[:top_k].tolist()) for _ in range(count)) for count in tokens
    )


@pytest.mark.parametrize("name", NAMES)
def test_bf16_stays_near_one_process(name: str) -> None:
    case = Case(2, 1, 4, random_ids([9, 4], 4, 2), 2, hidden=8, width=16, dtype=torch.bfloat16)
    compare(case, name, tolerance=3e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_as_many_ranks_as_experts_one_choice_and_nobody_at_home(name: str, ep: int, etp: int) -> None:
    """EP = E with K = 1; two ranks have no tokens, and nobody chooses expert 0."""
    ids = random_ids([7, 0, 5, 0], ep - 1, 1)
    ids = tuple(tuple((e + 1,) for (e,) in rank) for rank in ids)
    compare(Case(ep, etp, ep, ids, 1, expert={"bias": True}), name)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_anywhere(name: str) -> None:
    found = compare(Case(2, 1, 2, ((), ()), 2), name)
    assert all(not each["parameters"]["down"].any() for each in found)


def sent_elements(each: dict[str, Any], what: str, group: str, case: Case) -> float:
    return each["both"].bytes[what, group] / case.dtype.itemsize


@settings(max_examples=10)
@given(data=st.data())
def test_alltoall_sends_a_token_to_a_rank_once(data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([2, 4]))
    experts, top_k = ep * 3, data.draw(st.integers(1, 5))
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=ep, max_size=ep))
    case = Case(ep, 1, experts, random_ids(tokens, experts, top_k, data.draw(st.integers(0, 99))), top_k)
    found = ranks(ep).run(on_a_rank, case, "alltoall", False)
    pairs = [[{e // 3 for e in choices} for choices in rank] for rank in case.ids]  # the ranks each token needs
    away = [sum(len(needed - {rank}) for needed in pairs[rank]) for rank in range(ep)]
    to = [sum(rank in needed for other in range(ep) if other != rank for needed in pairs[other]) for rank in range(ep)]
    for rank, each in enumerate(found):
        assert sent_elements(each, "dispatch", "ep", case) == away[rank] * case.hidden
        assert sent_elements(each, "combine gradient", "ep", case) == away[rank] * case.hidden
        assert sent_elements(each, "combine", "ep", case) == to[rank] * case.hidden
        assert sent_elements(each, "dispatch gradient", "ep", case) == to[rank] * case.hidden
        assert sent_elements(each, "routing", "ep", case) == away[rank] * 2 * top_k
        assert each["rows"] == to[rank] + sum(rank in needed for needed in pairs[rank])


@pytest.mark.parametrize(("ep", "top_k"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_alltoall_with_choices_on_different_ranks_sends_what_megatron_sends(ep: int, top_k: int) -> None:
    """T · K · D · (EP − 1)/EP when choices are spread evenly over ranks, each on another one."""
    tokens = 4 * ep
    spread = tuple(tuple(((t + j) % ep) * 2 + t % 2 for j in range(top_k)) for t in range(tokens))
    case = Case(ep, 1, 2 * ep, (spread,) * ep, top_k)
    closed = tokens * top_k * case.hidden * (ep - 1) / ep
    for each in ranks(ep).run(on_a_rank, case, "alltoall", False):
        for what in ("dispatch", "combine", "dispatch gradient", "combine gradient"):
            assert sent_elements(each, what, "ep", case) == closed


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_allgather_sends_the_same_for_every_top_k(ep: int, etp: int, top_k: int) -> None:
    """2 T D (n − 1) per rank forward, and the same backward (MegaScale-MoE, §4.2)."""
    n, tokens = ep * etp, 6
    case = Case(ep, etp, 4, random_ids([tokens] * n, 4, top_k), top_k)
    for each in ranks(n).run(on_a_rank, case, "allgather", False):
        for what in ("dispatch", "combine", "dispatch gradient", "combine gradient"):
            assert sent_elements(each, what, "ep_etp", case) == tokens * case.hidden * (n - 1)
        assert set(each["forward"].bytes) == {(w, "ep_etp") for w in ("counts", "routing", "dispatch", "combine")}


def test_one_process_dispatches_to_itself() -> None:
    groups = ExpertGroups(*(Group.single(name) for name in ("ep", "etp", "edp", "ep_etp")))
    dispatcher = make_dispatcher("local", groups, 4)
    assert isinstance(dispatcher, LocalDispatcher)
    x, ids, weights = torch.randn(3, 2), torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 1)
    here = dispatcher.dispatch(x, ids, weights)
    assert here.rows_RD is x and here.ids_RK is ids and here.weights_RK is weights
    assert dispatcher.combine(here.rows_RD, here.handle) is x
    staged = dispatcher.start_dispatch(x, ids, weights).finish()
    assert staged.rows_RD is x
    assert dispatcher.start_combine(x, staged.handle).finish() is x


def test_what_cannot_be_dispatched_is_refused() -> None:
    pair = Group("ep", (0, 1), 0)
    groups = ExpertGroups(pair, Group.single("etp"), Group.single("edp"), pair)
    with pytest.raises(SpecError, match="5 experts do not divide by 2"):
        make_dispatcher("alltoall", groups, 5)
    with pytest.raises(SpecError, match=r"'local' .* ep·etp = 2·1 = 2"):
        make_dispatcher("local", groups, 4)
