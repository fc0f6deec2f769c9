"""A stack of layers over several processes has the gradients of the same stack in one, whatever the schedule."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.mesh import collectives
from moesaic.mesh.group import CommunicationError, Group
from moesaic.mesh.mesh import Links
from moesaic.mesh.traffic import meter
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.kernels import linear
from moesaic.schedule.orders import Action, pipeline_order, splits_backward
from moesaic.schedule.pipeline import run_pipeline
from moesaic.spec.errors import MoesaicError
from tests.ranks import ranks

DTYPE = torch.float64


def width(stage: int) -> int:
    """Features that `stage` receives: different ones, so that nothing fits by accident."""
    return 3 + stage % 4


def rows(micro: int) -> int:
    """Rows of a micro-batch."""
    return 2 + micro % 3


def weights(stages: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(width(stage + 1), width(stage)) for stage in range(stages)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=DTYPE)) for shape in shapes]


def micro_batch(micro: int) -> Tensor:
    return torch.randn(rows(micro), width(0), generator=torch.Generator().manual_seed(micro), dtype=DTYPE)


def stage_output(x: Tensor, weight: Tensor, is_last: bool) -> Tensor:
    y = linear(x, weight).tanh()
    return y.square().sum() if is_last else y


def in_one_process(stages: int, micros: int) -> list[Tensor]:
    """Gradients of all stages."""
    parameters = weights(stages)
    for micro in range(micros):
        x = micro_batch(micro).requires_grad_()
        for stage, weight in enumerate(parameters):
            x = stage_output(x, weight, stage == stages - 1)
        x.backward()
    return [p.grad for p in parameters]


class Toy:
    """One stage: a linear layer and tanh, or the sum of squares of that in the last."""

    dtype, device = DTYPE, torch.device("cpu")

    def __init__(self, stage: int, stages: int, split: bool) -> None:
        self.stage, self.is_last, self.split = stage, stage == stages - 1, split
        self.weight = weights(stages)[stage]
        self.open: dict[int, tuple[Tensor, Tensor]] = {}
        self.left: dict[int, WeightGradients] = {}

    def received_shape(self, micro: int) -> tuple[int, ...]:
        assert self.stage > 0
        return rows(micro), width(self.stage)

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None:
        x = (micro_batch(micro) if x is None else x).requires_grad_()
        self.left[micro] = WeightGradients()
        with deferring(self.left[micro] if self.split else None):
            y = stage_output(x, self.weight, self.is_last)
        self.open[micro] = x, y
        return None if self.is_last else y

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        x, y = self.open.pop(micro)
        torch.autograd.backward(y, grad)
        return None if self.stage == 0 else x.grad

    def weight_gradients(self, micro: int) -> None:
        assert len(self.left[micro])
        self.left[micro].run()


def links(pp: int) -> Links:
    """The links of this rank, made once per process, the last and the first rank joined too."""
    if pp not in _links:
        me, found = dist.get_rank(), {}
        for direction in ("forward", "backward"):
            for parity in (0, 1):  # each rank in one pair at a time, so that all make equally many groups
                pairs = [(start, (start + 1) % pp) for start in range(parity, pp, 2)]
                here, there = next(pair for pair in pairs if me in pair)
                name = f"pp {direction} {here}-{there}"
                group = Group.create(name, [tuple(sorted(pair)) for pair in pairs], 60.0, channel=name)
                sends = me == (here if direction == "forward" else there)
                found[f"{direction}_{'out' if sends else 'in'}"] = group
        _links[pp] = Links(**found)
    return _links[pp]


_links: dict[int, Links] = {}


def train(rank: int, schedule: str, pp: int, virtual: int, micros: int) -> tuple[dict[int, Tensor], dict, list[Action]]:
    """Gradients by stage, bytes sent by link, and the actions in the order in which their computation began."""
    actions = pipeline_order(schedule, rank, pp, virtual, micros)
    stages = pp * virtual
    runners = {stage: Toy(stage, stages, splits_backward(actions)) for stage in range(rank, stages, pp)}
    done: list[Action] = []

    @contextlib.contextmanager
    def around(action: Action) -> Iterator[None]:
        done.append(action)
        yield

    with meter() as traffic:
        run_pipeline(actions, runners, links(pp), rank, pp, around=around)
    return {stage: toy.weight.grad for stage, toy in runners.items()}, dict(traffic.bytes), done


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual", "micros"),
    [
        ("1f1b", 2, 1, 5),
        ("1f1b", 4, 1, 6),
        ("1f1b", 4, 1, 2),
        ("interleaved", 2, 2, 4),
        ("interleaved", 2, 3, 2),
        ("interleaved", 4, 2, 8),
        ("zero_bubble", 2, 1, 5),
        ("zero_bubble", 2, 2, 4),
        ("zero_bubble", 4, 1, 6),
        ("zero_bubble", 4, 1, 3),
        ("zero_bubble", 4, 2, 8),
    ],
)
def test_gradients_are_those_of_one_process(schedule: str, pp: int, virtual: int, micros: int) -> None:
    stages = pp * virtual
    results = ranks(pp).run(train, schedule, pp, virtual, micros)
    wanted, sent = in_one_process(stages, micros), Counter()
    for rank, (gradients, traffic, done) in enumerate(results):
        for stage, gradient in gradients.items():
            assert torch.equal(gradient, wanted[stage]), f"stage {stage}"
        assert done == pipeline_order(schedule, rank, pp, virtual, micros)
        sent.update(traffic)
    # Every boundary between stages carries each micro-batch's activations forward and as much back.
    expected: Counter = Counter()
    all_rows = sum(map(rows, range(micros)))
    for stage in range(stages - 1):
        here, there = stage % pp, (stage + 1) % pp
        for direction in ("forward", "backward"):
            expected["send", f"pp {direction} {here}-{there}"] += all_rows * width(stage + 1) * DTYPE.itemsize
    assert sent == expected


def infer(rank: int, pp: int, virtual: int, micros: int) -> list[float]:
    """Losses of forwards alone, on the last rank."""
    stages = pp * virtual
    runners = {stage: Toy(stage, stages, False) for stage in range(rank, stages, pp)}
    actions = [Action("F", micro, stage) for micro in range(micros) for stage in range(rank, stages, pp)]
    with torch.no_grad():
        run_pipeline(actions, runners, links(pp), rank, pp)
    return [float(y) for _, y in runners[stages - 1].open.values()] if stages - 1 in runners else []


def test_forwards_alone_give_the_losses_of_one_process() -> None:
    losses = []
    for micro in range(5):
        x = micro_batch(micro)
        for stage, weight in enumerate(weights(4)):
            x = stage_output(x, weight, stage == 3)
        losses.append(float(x.detach()))
    assert ranks(2).run(infer, 2, 2, 5) == [[], losses]


def test_stages_in_one_process_hand_over_by_themselves() -> None:
    for schedule, virtual in (("1f1b", 1), ("interleaved", 3), ("zero_bubble", 2)):
        actions = pipeline_order(schedule, 0, 1, virtual, 4)
        runners = {stage: Toy(stage, virtual, splits_backward(actions)) for stage in range(virtual)}
        run_pipeline(actions, runners, Links(), 0, 1)
        for toy, wanted in zip(runners.values(), in_one_process(virtual, 4), strict=True):
            assert torch.equal(toy.weight.grad, wanted)


PAIR = Links(
    forward_out=Group("pp forward 0-1", (4, 9), 0),
    backward_in=Group("pp backward 0-1", (4, 9), 0),
)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (
            "isend",
            "send the activations of forward of micro-batch 0 in virtual stage 0 over link pp forward 0-1",
        ),
        (
            "irecv",
            "receive the gradients for forward of micro-batch 0 in virtual stage 0 over link pp backward 0-1",
        ),
    ],
)
def test_a_lost_neighbour_is_named_with_link_and_action(monkeypatch, fails: str, says: str) -> None:
    def lost(*_: object, **__: object) -> None:
        raise CommunicationError("no answer")

    monkeypatch.setattr(collectives, "isend", lambda *_, **__: None)
    monkeypatch.setattr(collectives, "irecv", lambda *_, **__: None)
    monkeypatch.setattr(collectives, fails, lost)
    with pytest.raises(CommunicationError, match=rf"Pipeline rank 0 could not {says} \(ranks 4, 9\): no answer"):
        run_pipeline(pipeline_order("1f1b", 0, 2, 1, 2), {0: Toy(0, 2, False)}, PAIR, 0, 2)


@pytest.mark.parametrize(
    ("given_links", "stage", "rank", "says"),
    [
        (Links(forward_out=PAIR.forward_out), 0, 0, "no link backward_in"),
        (Links(), 0, 0, "no link forward_out, backward_in"),
        (PAIR, 1, 0, r"rank 0 of 2 with 1 virtual stages has stages \[0\], but was given runners for \[1\]"),
        (PAIR, 0, 1, "was told to do forward of micro-batch 0 in virtual stage 1, which lives on rank 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(given_links, stage: int, rank: int, says: str) -> None:
    with pytest.raises(MoesaicError, match=says):
        run_pipeline(pipeline_order("1f1b", rank, 2, 1, 2), {stage: Toy(stage, 2, False)}, given_links, 0, 2)


def test_a_stage_that_returns_nothing_is_named() -> None:
    class Silent(Toy):
        def forward(self, micro: int, x: Tensor | None) -> None:
            return None

    with pytest.raises(MoesaicError, match="forward of micro-batch 0 in virtual stage 0 returned nothing to send"):
        run_pipeline(pipeline_order("1f1b", 0, 2, 1, 2), {0: Silent(0, 2, False)}, PAIR, 0, 2)
