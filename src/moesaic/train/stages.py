"""A rank's virtual stages at work on micro-batches: what a pipeline schedule calls, and what a step without one does.

Kept per micro-batch and stage between forward and backward: the input, where the output's gradient enters, and this
stage's part of the loss.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moesaic.mesh import lanes
from moesaic.mesh.device import device
from moesaic.model.decoder import Decoder, MicroBatch
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.forced import Forced
from moesaic.model.losses import LossWeights
from moesaic.model.recompute import make_ahead
from moesaic.train.data import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.overlapped import OverlappedSums
from moesaic.train.sharding import Sharding


@dataclass
class LossSums:
    """What this rank's losses add up to over the micro-batches so far, as plain tensors on the device."""

    nats: Tensor
    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, nats: Tensor, total: Tensor, parts: dict[str, Tensor]) -> None:
        """Add one micro-batch of one stage."""
        self.nats += nats.detach()
        self.total += total.detach()
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value.double()


class Work:
    """The micro-batches of one step (or of an evaluation) and a decoder's stages on them."""

    def __init__(
        self,
        decoder: Decoder,
        batches: Sequence[Batch],
        *,
        weights: LossWeights,
        step_tokens: int,
        clock: Stopwatch | None = None,
        sharding: Sharding | None = None,
        reduction: OverlappedSums | None = None,
    ) -> None:
        self.decoder, self.weights, self.step_tokens = decoder, weights, max(1, step_tokens)
        self.micros: list[MicroBatch] = []
        for batch in batches:
            # Whole rows stand at the same places in every micro-batch, so their tables exist once.
            plain = [micro for micro in self.micros[:1] if batch.positions_BS is None and batch.documents_BS is None]
            self.micros.append(on_device(decoder, batch, plain[0] if plain else None))
        zero = torch.zeros((), dtype=torch.float64, device=device().torch_device)
        self.sums = LossSums(zero, zero.clone())
        self.clock, self.sharding = clock or Stopwatch(), sharding
        self.forced: Forced | None = None
        self.overlap = decoder.mesh.layout.overlap if decoder.mesh.layout is not None else ()
        self.reduction = reduction
        self.passes_left = len(decoder.stages)
        self.backwards_left = len(batches) * len(decoder.stages)

    def runners(self, *, backward: bool = True, split_backward: bool = False) -> dict[int, StageWork]:
        """This rank's stages, for a schedule. `split_backward`: weight gradients are actions of their own."""
        return {index: StageWork(self, index, backward, split_backward) for index in self.decoder.stages}

    def announce(self, micro: int) -> None:
        """Tell what chooses experts in the routers' place which tokens come next."""
        if self.forced is None:
            return
        dp, batch = self.decoder.mesh.dp, self.micros[0].sequences.batch
        self.forced.see((micro * dp.size + dp.rank) * batch, self.micros[micro].sequences)

    def run(self) -> None:
        """All micro-batches, where there is no pipeline: one after the other, or two at once."""
        (stage,) = self.runners().values()
        with lanes.filling(stage.filler):
            if "experts" in self.overlap and self.micros:
                self._run_in_pairs(stage)
                return
            for number in range(len(self.micros)):
                stage.forward(number, None)
                stage.backward(number, None)

    def _run_in_pairs(self, stage: StageWork) -> None:
        """Each forward but the first beside the backward of the micro-batch before it."""
        stage.forward(0, None)
        for number in range(len(self.micros) - 1):

            def backward(number: int = number) -> None:
                stage.backward(number, None)

            def forward(number: int = number) -> None:
                stage.forward(number + 1, None)

            lanes.together(backward, forward)
        stage.backward(len(self.micros) - 1, None)


class StageWork:
    """One virtual stage; see `schedule.pipeline.StageRunner`."""

    def __init__(self, work: Work, index: int, backward: bool, split_backward: bool) -> None:
        self._work, self._index = work, index
        self._keeps, self._splits = backward, split_backward
        self._fills = backward and bool({"between", "weight_gradients"} & set(work.overlap)) and not split_backward
        """Whether weight gradients fill waits for messages."""
        self._makes_ahead = self._fills and "between" in work.overlap
        """Whether what backward computes again does so, too."""
        self._late: deque[WeightGradients] = deque()
        """What backward has left to fill waits with, by micro-batch, oldest first."""
        self._open: dict[int, tuple[Tensor | None, GradientEdge | None, Tensor]] = {}
        self._left: dict[int, WeightGradients] = {}
        self._backwards_left = self._passes_left = len(work.micros)

    def received_shape(self, micro: int) -> tuple[int, ...]:
        """Shape of what comes from the stage before."""
        work = self._work
        places = work.micros[micro].sequences
        tokens = (places.batch * places.own_length, work.decoder.spec.hidden)
        carried = work.decoder.carried(self._index, work.weights)
        return tokens if carried == 1 else (carried, *tokens)

    @property
    def dtype(self) -> torch.dtype:
        """Type of what travels between stages."""
        return self._work.decoder.dtype

    @property
    def device(self) -> torch.device:
        """Where what travels is."""
        return device().torch_device

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None:
        """Run one micro-batch through this stage; what goes to the next one."""
        work = self._work
        work.announce(micro)
        queue = WeightGradients() if self._splits or self._fills else None
        with work.clock.phase("forward"), torch.set_grad_enabled(self._keeps), deferring(queue):
            if x is not None and self._keeps:
                x.requires_grad_()
            out, total, nats, parts = work.decoder.stage_tensors(
                self._index, x, work.micros[micro], work.weights, work.step_tokens
            )
            if self._keeps:
                # Where its gradient goes in, not what has left: nothing here reads the values again.
                self._open[micro] = (x, None if out is None else get_gradient_edge(out), total)
            if queue is not None:
                self._left[micro] = queue
            work.sums.add(nats, total, parts)
        return None if out is None else out.detach()

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """Gradients of one micro-batch, given that of what was passed on; the gradient of what was received."""
        work = self._work
        x, out, total = self._open.pop(micro)
        work.backwards_left -= 1
        self._backwards_left -= 1
        if work.sharding is not None:
            work.sharding.begin_backward(self._index, self._backwards_left == 0, work.backwards_left == 0)
        queue = self._left.pop(micro) if self._fills else None
        if queue is not None:
            self._late.append(queue)
        completes = contextlib.nullcontext() if self._splits else self._last_pass(queue)
        with work.clock.phase("backward"), completes, lanes.filling(self.filler):
            roots: list[tuple[Any, Tensor | None]] = [(out, grad)] if out is not None else []
            if total.requires_grad:
                roots.append((total, None))
            torch.autograd.backward([root for root, _ in roots], [each for _, each in roots])
            # This micro-batch's fill the waits of the next one, which begins with messages and nothing to do beside.
            # Where sums begin under the last pass, only that pass may add to gradients.
            last = 0 if work.reduction is None else 1
            while len(self._late) > (self._backwards_left > last):
                self._late.popleft().run_each()
        return None if x is None else x.grad

    @property
    def filler(self) -> lanes.Filler | None:
        """What does one piece of the work that fills waits."""
        return self._fill if self._fills else None

    def _fill(self) -> bool:
        # Backward itself waits for what it computes again, nothing but the step's end for gradients of weights.
        if self._makes_ahead and make_ahead():
            return True
        return any(queue.run_one() for queue in self._late)

    def weight_gradients(self, micro: int) -> None:
        """The weight gradients that `backward` left for later."""
        queue = self._left.pop(micro)
        with self._work.clock.phase("backward"), self._last_pass(queue, only_left=True):
            queue.run()

    @contextlib.contextmanager
    def _last_pass(self, left: WeightGradients | None, only_left: bool = False) -> Iterator[None]:
        """Around what completes a micro-batch's gradients: in the step's last of this stage their sums begin. `left`
        and `only_left`: see `OverlappedSums.begin`."""
        reduction = self._work.reduction
        self._passes_left -= 1
        if self._passes_left > 0 or reduction is None:
            yield
            return
        self._work.passes_left -= 1
        reduction.begin(self._index, self._work.passes_left == 0, left, only_left)
        yield
        reduction.end()


def on_device(decoder: Decoder, batch: Batch, like: MicroBatch | None = None) -> MicroBatch:
    """A batch as the decoder takes it, on this process's device. `like`: one with rows that may stand at its places."""
    where = device().torch_device
    if like is not None and like.sequences.is_plain and like.ids_BS.shape == batch.ids_BS.shape:
        return replace(like, ids_BS=batch.ids_BS.to(where), labels_BS=batch.labels_BS.to(where))

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(where)

    ids_BS, labels_BS = batch.ids_BS.to(where), batch.labels_BS.to(where)
    return decoder.micro_batch(ids_BS, labels_BS, there(batch.positions_BS), there(batch.documents_BS))
