"""Two lanes take turns at waits for bulk messages, stop together, and do left work while a message is on its way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from moesaic.mesh import lanes
from moesaic.mesh.collectives import Pending
from moesaic.mesh.group import Group
from moesaic.spec.errors import MoesaicError


class Message:
    """A message that has arrived when it has been asked for `asks` times."""

    def __init__(self, asks: int = 0) -> None:
        self.asks, self.waited = asks, False

    def is_completed(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait(self) -> None:
        self.waited = True


def bulk(work: object, name: str = "dispatch") -> Pending:
    return Pending(name, Group.single("ep"), torch.zeros(1), work)


def lane(name: str, waits: int, log: list[str], message: str = "dispatch") -> Callable[[], None]:
    def work() -> None:
        for number in range(waits):
            log.append(f"{name}{number}")
            bulk(Message(), message).wait()
        log.append(f"{name} done")

    return work


def test_lanes_alternate_at_bulk_waits() -> None:
    log: list[str] = []
    lanes.together(lane("b", 3, log), lane("f", 3, log))
    assert log == ["b0", "f0", "b1", "f1", "b2", "f2", "b done", "f done"]


@pytest.mark.parametrize(("first", "second"), [(4, 1), (1, 4), (0, 2), (2, 0), (0, 0)])
def test_a_lane_alone_goes_on(first: int, second: int) -> None:
    log: list[str] = []
    lanes.together(lane("b", first, log), lane("f", second, log))
    for name, waits in (("b", first), ("f", second)):
        assert [x for x in log if x[0] == name] == [*(f"{name}{i}" for i in range(waits)), f"{name} done"]
    assert len(log) == first + second + 2


def test_small_messages_are_waited_for_at_once() -> None:
    log: list[str] = []
    lanes.together(lane("b", 2, log, "counts"), lane("f", 2, log, "routing"))
    assert log == ["b0", "b1", "b done", "f0", "f1", "f done"]


def test_only_one_lane_runs() -> None:
    running: list[str] = []

    def work(name: str) -> Callable[[], None]:
        def body() -> None:
            for _ in range(50):
                running.append(name)
                assert running == [name]
                sum(i * i for i in range(2000))
                running.remove(name)
                bulk(Message()).wait()

        return body

    lanes.together(work("b"), work("f"))


class Broken(Exception):
    pass


@pytest.mark.parametrize("failing", ["b", "f"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_failure_stops_both_and_is_what_is_raised(failing: str, after: int) -> None:
    log: list[str] = []
    seen: dict[str, BaseException] = {}

    def work(name: str) -> Callable[[], None]:
        def body() -> None:
            try:
                for number in range(5):
                    log.append(name)
                    if name == failing and number == after:
                        raise Broken(name)
                    bulk(Message()).wait()
            except BaseException as error:
                seen[name] = error
                raise

        return body

    with pytest.raises(Broken, match=failing):
        lanes.together(work("b"), work("f"))
    other = "f" if failing == "b" else "b"
    assert log.count(other) <= after + 1  # none begins anything new
    if other in seen:
        assert isinstance(seen[other], lanes.LaneStopped)
    else:
        assert other not in log
    again: list[str] = []
    lanes.together(lane("b", 1, again), lane("f", 1, again))
    assert again == ["b0", "f0", "b done", "f done"]


def test_a_failure_passes_through_a_backward_under_way() -> None:
    x = torch.ones(2, requires_grad=True)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            bulk(Message(), "combine gradient").wait()
            return grad

    def fails() -> None:
        raise Broken("forward")

    loss = Waits.apply(x).sum()
    with pytest.raises(Broken):
        lanes.together(loss.backward, fails)
    assert x.grad is None
    Waits.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1]


def test_lanes_do_not_nest() -> None:
    with pytest.raises(MoesaicError, match="cannot be split"):
        lanes.together(lambda: lanes.together(lambda: None, lambda: None), lambda: None)


def test_modes_are_those_of_the_caller_and_the_thread_stays() -> None:
    found: list[tuple[bool, bool, int, int]] = []

    def look() -> None:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()
        found.append((*modes, threading.get_ident()))

    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with context:
            lanes.together(look, look)
            first, second = found[-2:]
            assert first[:3] == second[:3]
    assert len({each[3] for each in found[1::2]}) == 1
    assert found[0][3] == threading.get_ident() != found[1][3]


@pytest.mark.parametrize(("asks", "there", "done"), [(0, 5, 0), (2, 5, 2), (9, 3, 3)])
def test_left_work_fills_a_wait_until_the_message_is_there(asks: int, there: int, done: int) -> None:
    left = list(range(there))
    message = Message(asks)
    with lanes.filling(lambda: bool(left) and left.pop(0) >= 0):
        bulk(message).wait()
    assert message.waited and left == list(range(done, there))
    bulk(Message(9)).wait()
    assert len(left) == there - done


def test_a_lane_that_waits_does_what_the_other_left() -> None:
    left, log = [0, 1, 2], list[str]()

    def backward() -> None:
        with lanes.filling(lambda: bool(left) and (log.append(f"left {left.pop(0)}") or True)):
            bulk(Message()).wait()
            log.append("backward")
            bulk(Message()).wait()

    def forward() -> None:
        bulk(Message(2)).wait()
        log.append("forward")

    lanes.together(backward, forward)
    assert log == ["backward", "left 0", "left 1", "forward"]


def test_a_lanes_clock_leaves_out_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is one second later; together lanes cannot have used more than went by."""
    ticks = itertools.count()
    monkeypatch.setattr(lanes.time, "perf_counter", lambda: float(next(ticks)))
    spent: list[float] = []

    def work() -> None:
        begin = lanes.own_seconds()
        for _ in range(10):
            bulk(Message()).wait()
        spent.append(lanes.own_seconds() - begin)

    begin = next(ticks)
    lanes.together(work, work)
    assert 0 < sum(spent) <= next(ticks) - begin
