"""One layer's tokens in parts: results and bytes of one dispatch, and experts at work while messages travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.dispatch import make_dispatcher
from moesaic.dispatch.parts import sum_of
from moesaic.dispatch.protocol import Dispatcher
from moesaic.mesh import collectives
from moesaic.model.expert_gradients import PartGradients
from moesaic.model.experts import Experts
from tests.dispatch.test_dispatchers import Case, cases, compare, expert_groups, on_a_rank, random_ids
from tests.ranks import ranks


@settings(max_examples=10)
@given(case=cases(), name=st.sampled_from(["alltoall", "allgather"]), chunks=st.integers(1, 4))
def test_parts_of_any_routing_equal_one_process(case: Case, name: str, chunks: int) -> None:
    compare(case, name, chunks=chunks)


@pytest.mark.parametrize(
    ("ep", "etp", "name"), [(2, 1, "alltoall"), (4, 1, "allgather"), (4, 1, "alltoall"), (1, 2, "allgather")]
)
def test_parts_send_the_bytes_of_one_dispatch(ep: int, etp: int, name: str) -> None:
    case = Case(ep, etp, 4, random_ids([7, 12, 0, 5][: ep * etp], 4, 2), 2)
    whole, parts = (ranks(case.size).run(on_a_rank, case, name, False, chunks) for chunks in (0, 3))
    for each, cut in zip(whole, parts, strict=True):
        for when in ("forward", "both"):
            sent = {key: n for key, n in each[when].bytes.items() if key[0] != "counts"}
            assert sent == {key: n for key, n in cut[when].bytes.items() if key[0] != "counts"}
        assert cut["both"].calls["counts", "ep" if name == "alltoall" else "ep_etp"] == 1
        assert cut["rows"] == each["rows"]


def generic_parts(rank: int, case: Case) -> dict[str, Any]:
    """Parts of a dispatcher that says nothing about parts, which are token ranges; gradients as copies."""
    kind = type(make_dispatcher("alltoall", expert_groups(case.ep, case.etp), case.experts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "routes_of_parts", Dispatcher.routes_of_parts)
        found = on_a_rank(rank, case, "alltoall", False, 3)
    return found | {"parameters": {key: gradient.clone() for key, gradient in found["parameters"].items()}}


def test_token_ranges_on_the_whole_route_give_the_same() -> None:
    case = Case(2, 1, 4, random_ids([7, 2], 4, 2), 2)
    found, expected = ranks(2).run(generic_parts, case), ranks(2).run(on_a_rank, case, "alltoall", False)
    for each, whole in zip(found, expected, strict=True):
        for key in ("y", "x", "weights"):
            torch.testing.assert_close(each[key], whole[key], rtol=1e-5, atol=1e-5)
        for key, gradient in whole["parameters"].items():
            torch.testing.assert_close(each["parameters"][key], gradient, rtol=1e-5, atol=1e-5)


def watched(rank: int, case: Case, name: str, passes: int) -> tuple[list[list[str]], dict[str, bool]]:
    """What a rank does, in order, in each forward and backward: `start` and `wait` with a message's number, and
    `experts`; and whether gradients of two passes are twice those of one."""
    groups = expert_groups(case.ep, case.etp)
    module = Experts(case.moe, case.hidden, case.dtype, groups=groups)
    whole = dict(case.whole().named_parameters())
    for key, parameter in module.named_parameters():
        parameter.data.copy_(parameter.cut.take(whole[key].data))  # type: ignore[attr-defined]
    dispatcher = make_dispatcher(name, groups, case.experts)
    events: list[str] = []
    start, number = collectives.start_all_to_all, 0

    class Watched:
        def __init__(self, pending: collectives.Pending, text: str) -> None:
            self.pending, self.text = pending, text

        def wait(self) -> torch.Tensor:
            events.append("wait " + self.text)
            return self.pending.wait()

    def watched_start(x: Any, group: Any, send: Any, receive: Any, what: str = "") -> Any:
        nonlocal number
        pending = start(x, group, send, receive, what)
        if not what.startswith(("dispatch", "combine")):
            return pending
        number += 1
        events.append(f"start {what} {number}")
        return Watched(pending, f"{what} {number}")

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            events.append("experts")
            return grad

    found = []
    collectives.start_all_to_all = watched_start  # type: ignore[assignment]
    try:
        for _ in range(passes):
            x, ids, weights, grad_y = case.inputs(rank)
            x.requires_grad_()
            sent = dispatcher.start_parts(x, ids, weights, 2)
            gradients, back = PartGradients(len(sent)), []
            for part in sent:
                here = part.finish()
                events.append("experts")
                y = module(Mark.apply(here.rows_RD), here.ids_RK, here.weights_RK, gradients)
                back.append(dispatcher.start_combine(y, here.handle))
            y = dispatcher.finish_parts(back)
            found.append(events.copy())
            events.clear()
            y.backward(grad_y)
            found.append(events.copy())
            events.clear()
            if len(found) == 2:
                once = {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
    finally:
        collectives.start_all_to_all = start
    same = {
        key: p.grad is not None and torch.allclose(p.grad, passes * once[key], rtol=1e-5, atol=1e-5)
        for key, p in module.named_parameters()
    }
    return found, same


@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_experts_work_while_each_message_travels_in_both_directions(name: str) -> None:
    case = Case(2, 1, 4, random_ids([8, 8], 4, 2), 2)
    for found, same in ranks(2).run(watched, case, name, 2):
        assert same and all(same.values())
        for events in found:
            messages = [text.removeprefix("start ") for text in events if text.startswith("start")]
            # All-gather of two ranks has one source.
            remote = 2 if name == "alltoall" else 1
            assert len(messages) == 2 * remote and events.count("experts") == 2 + remote
            for message in messages:
                between = events[events.index("start " + message) : events.index("wait " + message)]
                assert "experts" in between, (message, events)


def test_narrow_parts_are_added_in_fp32() -> None:
    parts = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    assert sum_of([part.bfloat16() for part in parts]).item() == 260.0  # 256 + 1 is 256 in bf16
