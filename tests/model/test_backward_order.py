"""What backward computes again runs under its messages: what is read next first, one at a time, of its layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moesaic.mesh import lanes
from moesaic.mesh.collectives import Pending
from moesaic.mesh.group import Group
from moesaic.model import recompute, spread
from moesaic.model.decoder import Decoder
from moesaic.model.deferred import WeightGradients
from moesaic.model.losses import LossWeights
from moesaic.spec.model import ModelSpec
from moesaic.train.data import Batch
from moesaic.train.stages import Work
from tests.cost.kinds import KINDS
from tests.cost.test_activations_of_the_trainer import Made, bytes_counted

WORDS = frozenset({"layernorm", "core_attn", "shared_experts", "mla_up_proj", "mlp"})
LATENT = "latent attention, shared expert"
TOKENS = 128
READ = ["second norm", "shared expert", "query norm", "key norm", "up projections", "core", "first norm"]
"""What backward of a layer with latent attention and a shared expert computes again, each when it is first read: the
shared expert's activation is made from the second norm's output, attention's core from the up projections."""


class Late:
    """A message that is not there until it has been asked for `asks` times."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def is_completed(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait(self) -> None: ...


class Travels(torch.autograd.Function):
    """Nothing, but backward waits for a message first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: Callable[[], Late], note: Callable[[str], None]) -> Tensor:
        ctx.message, ctx.note = message, note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        ctx.note("wait")
        Pending("combine gradient", Group.single("ep"), grads[0], ctx.message()).wait()
        ctx.note("there")
        return grads[0], None, None


class New(Made):
    """Knows what operations were given that none of them had made."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.known |= {each.untyped_storage()._cdata for each in given} - self.found.keys()
        return super().__torch_dispatch__(func, types, args, kwargs)


class Watched:
    """A decoder of equal layers whose backward waits for a message before attention's and the block's own, and the log
    of what it does."""

    def __init__(self, kind: str, layers: int, asks: Callable[[int], int], patch: pytest.MonkeyPatch) -> None:
        """`asks`: of each layer's two messages."""
        spec = ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(KINDS[kind],) * layers)
        self.decoder = Decoder(spec)
        self.decoder.init_weights(0)
        self.log: list[str] = []
        for number in range(layers):
            self._watch(self.decoder.layers[number], lambda number=number: Late(asks(number)))
        attend, run_one = spread.attend, WeightGradients.run_one

        def watched_attend(*args: Any, **named: Any) -> Tensor:
            self.log.append("core")
            return attend(*args, **named)

        def watched_run(queue: WeightGradients) -> bool:
            done = run_one(queue)
            self.log.extend(["weights"] * done)
            return done

        patch.setattr(spread, "attend", watched_attend)
        patch.setattr(WeightGradients, "run_one", watched_run)

    def _watch(self, layer: Any, message: Callable[[], Late]) -> None:
        names = {
            "attn_norm": "first norm",
            "mlp_norm": "second norm",
            "attn.q_a_norm": "query norm",
            "attn.kv_a_norm": "key norm",
            "attn.q_b": "up projections",
            "moe.shared.gate_up": "shared expert",
            "mlp.gate_up": "block",
        }
        for path, module in layer.named_modules():
            if path in names:
                module.register_forward_hook(lambda *_, name=names[path]: self.log.append(name))
        layer.attn.register_forward_hook(lambda module, given, out: Travels.apply(out, message, self.log.append))
        if layer.moe is not None:
            layer.moe.register_forward_hook(
                lambda module, given, out: (Travels.apply(out[0], message, self.log.append), out[1])
            )

    def backward(self, overlap: tuple[str, ...] = ("between",)) -> list[str]:
        """What one micro-batch's backward does; gradients are added."""
        for layer in self.decoder.layers:
            layer.recompute = WORDS
        ids = torch.arange(TOKENS)[None] * 7 % 53
        batch = Batch(ids, ids.roll(-1, 1), None, None, TOKENS, 0)
        work = Work(self.decoder, [batch], weights=LossWeights(), step_tokens=TOKENS)
        work.overlap = overlap
        (stage,) = work.runners().values()
        stage.forward(0, None)
        self.log.clear()
        stage.backward(0, None)
        return self.log

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.decoder.named_parameters() if p.grad is not None}


def waits(log: list[str]) -> Iterator[list[str]]:
    """What is done in each wait."""
    inside = False
    for each in log:
        if each == "wait":
            inside, found = True, []
        elif each == "there":
            inside = False
            yield found
        elif inside:
            found.append(each)


def again(log: list[str]) -> list[str]:
    return [each for each in log if each not in ("wait", "there", "weights")]


def test_without_waits_each_is_computed_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Watched(LATENT, 1, lambda layer: 0, monkeypatch).backward()
    assert again(log) == READ and list(waits(log)) == [[], []]


@pytest.mark.parametrize("asks", range(1, 8))
def test_a_late_message_sees_what_is_read_next(asks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Watched(LATENT, 1, lambda layer: asks, monkeypatch).backward()
    block, attention = waits(log)
    assert block == READ[:asks]
    begun = max(asks, 2)  # the block has read the first two before attention's message
    assert attention[: 7 - begun] == READ[begun:][:asks]
    assert again(log) == READ


def test_weight_gradients_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer has left its own when the first one waits."""
    log = Watched(LATENT, 2, lambda layer: 9 if layer == 0 else 0, monkeypatch).backward()
    block, attention = list(waits(log))[2:]
    assert block == [*READ, "weights", "weights"]
    assert attention == ["weights"] * 9
    assert again(log) == READ * 2


@pytest.mark.parametrize("overlap", [(), ("weight_gradients",), ("experts",)])
def test_only_between_says_so(overlap: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    log = Watched(LATENT, 1, lambda layer: 9, monkeypatch).backward(overlap)
    assert [again(each) for each in waits(log)] == [[], []] and again(log) == READ


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_bits_are_those_of_backward_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at each wait, all at the first, none: one order."""
    found = []
    for asks in (0, 1, 99):
        with monkeypatch.context() as patch:
            watched = Watched(kind, 2, lambda layer, asks=asks: asks, patch)
            found.append((again(watched.backward()), watched.gradients()))
    (plain, wanted), *others = found
    for order, gradients in others:
        assert order == plain
        assert gradients.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []


@pytest.mark.parametrize("kind", [LATENT, "grouped queries, gated shared expert"])
def test_one_layer_is_there_at_most(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that waits of a layer make and leave behind is, byte for byte, what the planner's table says that it
    dropped."""
    monkeypatch.setattr(WeightGradients, "run_one", lambda queue: False)
    held: list[int] = []
    watched = Watched(kind, 3, lambda layer: 99, monkeypatch)
    fill = recompute.make_ahead

    def counted() -> bool:
        """All that the layer has, in one go, and what it holds."""
        with New() as made:
            while fill():
                pass
        if made.found:
            held.append(made.alive(made.known))
        return False

    monkeypatch.setattr("moesaic.train.stages.make_ahead", counted)
    watched.backward()
    dropped = sum(bytes_counted(kind, ()).values()) - sum(bytes_counted(kind, WORDS).values())
    assert held == [dropped] * 3


def test_nothing_is_made_when_no_layer_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(LATENT, 2, lambda layer: 0, monkeypatch)
    watched.backward()
    assert not recompute.make_ahead()
    with lanes.filling(recompute.make_ahead):
        Pending("dispatch", Group.single("ep"), torch.zeros(1), Late(9)).wait()
    assert again(watched.log) == READ * 2
