"""Sums of gradients that begin while the step's last backward is still running.

Gradients are summed in buckets, in the order in which backward completes them: from the last layer to the first, dense
and expert parameters apart, because other ranks hold them. A bucket begins when all its parameters have their gradient
and the bucket before it has begun, so ranks begin in one order, whatever completes a gradient when (weight gradients
that were left for later may come in any order). Its groups have connections of their own and never wait for what the
layers send. `Optimizer.sum_gradients` waits for what has begun and sums the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.mesh.group import Group
from moesaic.mesh.reduction import PendingSum
from moesaic.model.decoder import Decoder
from moesaic.model.deferred import WeightGradients
from moesaic.model.experts import Experts
from moesaic.spec.errors import MoesaicError
from moesaic.train.gradients import BUCKET_BYTES, GradientSums

LEAST_BUCKET_BYTES = 2**20
"""Buckets are an eighth of a group's gradients, at least this and at most what one sum takes: the last one begins when
backward is over, so a small model too needs several."""


@dataclass
class _Bucket:
    """Parameters of one stage (None: of several, or complete only after it) that are summed together."""

    names: list[str]
    group: Group
    compress: bool
    stage: int | None
    missing: set[str] = field(default_factory=set)
    taken: list[str] = field(default_factory=list)
    sum: PendingSum | None = None
    given: list[tuple[Tensor, int]] = field(default_factory=list)
    """The gradients in the sum, and their versions."""


class OverlappedSums:
    """Begins the sums of `sums` under backward. `masters` are the tensors whose `.grad` is summed.

    Parameters that FSDP2 spreads are left to it. Every rank has to make one, in one order: it makes groups.
    """

    def __init__(self, decoder: Decoder, sums: GradientSums, masters: dict[str, nn.Parameter]) -> None:
        self._masters = masters
        self._parameters = dict(decoder.named_parameters())
        self._bucket_of: dict[str, _Bucket] = {}
        self._queues: dict[int | None, list[_Bucket]] = {}
        self._under_way: list[_Bucket] = []
        """In the order in which they began."""
        self._open: tuple[int | None, ...] = ()
        self._left: WeightGradients | None = None
        self._fill(decoder, sums)
        for name in self._bucket_of:
            self._parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._came([name]))
        for prefix, module in decoder.named_modules():
            if isinstance(module, Experts):
                own = [f"{prefix}.{name}" for name, _ in module.named_parameters()]
                module.after_accumulation = partial(self._came, [name for name in own if name in self._bucket_of])

    def _fill(self, decoder: Decoder, sums: GradientSums) -> None:
        """Deal the parameters to buckets, from the last to the first. Buckets begin in the order of their last
        parameters."""
        channels = sums.mesh.gradient_channels()
        stages = _stages_of(decoder)
        together: dict[tuple[int | None, int], list[str]] = {}
        place: dict[str, int] = {}
        for name in reversed(list(self._parameters)):
            group = sums.first_group(name)
            if group is None or isinstance(self._parameters[name], DTensor):
                continue
            first, _, rest = name.partition(".")
            stage = stages.get(f"layers.{rest.split('.')[0]}" if first == "layers" else first)
            together.setdefault((stage, id(group)), []).append(name)
            place[name] = len(place)
        for (stage, _), names in together.items():
            group = sums.first_group(names[0])
            assert group is not None
            for part in self._parted(names):
                bucket = _Bucket(part, channels[id(group)], sums.travels_compressed(group), stage, set(part))
                self._bucket_of |= dict.fromkeys(part, bucket)
                self._queues.setdefault(stage, []).append(bucket)
        for queue in self._queues.values():
            queue.sort(key=lambda bucket: place[bucket.names[-1]])

    def _parted(self, names: list[str]) -> Iterator[list[str]]:
        sizes = [self._masters[name].numel() * 4 for name in names]
        limit = min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, sum(sizes) // 8))
        part: list[str] = []
        filled = 0
        for name, size in zip(names, sizes, strict=True):
            if part and filled + size > limit:
                yield part
                part, filled = [], 0
            part.append(name)
            filled += size
        yield part

    @property
    def begun(self) -> list[list[str]]:
        """Parameters of the sums under way, in the order in which these began."""
        return [list(bucket.taken) for bucket in self._under_way]

    def begin(self, stage: int, last: bool, left: WeightGradients | None = None, only_left: bool = False) -> None:
        """Before the step's last pass that gives gradients to a virtual stage, `last` if it is the rank's last.

        `left`: where weight gradients are left in it. `only_left`: what is not there has its gradient already.
        """
        self._open, self._left = (stage, None) if last else (stage,), left
        if left is not None and only_left:
            self._complete([name for name, bucket in self._bucket_of.items() if bucket.stage == stage], left)

    def end(self) -> None:
        """After that pass: what got no gradient in it gets none any more."""
        self._left = None
        for stage in self._open:
            self._complete([name for name, bucket in self._bucket_of.items() if bucket.stage == stage])
        self._open = ()

    def wait(self) -> set[str]:
        """Wait for the sums and forget them; the parameters that are summed over the first of their groups.

        Raises MoesaicError if a gradient was added to after its sum had begun.
        """
        for bucket in self._under_way:
            assert bucket.sum is not None
            flat = bucket.sum.wait()
            parts = flat.split([gradient.numel() for gradient, _ in bucket.given])
            for name, (gradient, version), part in zip(bucket.taken, bucket.given, parts, strict=True):
                if self._masters[name].grad is not gradient or gradient._version != version:
                    raise MoesaicError(f"the gradient of {name} was added to after its sum over ranks had begun")
                gradient.copy_(part.view_as(gradient))
        begun = {name for bucket in self._under_way for name in bucket.taken}
        self._under_way = []
        for queue in self._queues.values():
            for bucket in queue:
                bucket.sum, bucket.taken, bucket.given, bucket.missing = None, [], [], set(bucket.names)
        return begun

    def _came(self, names: list[str]) -> None:
        """Gradients were added to. In the last pass through their stage they are complete, unless more is left; what
        several stages use is complete at the end only, and would begin at another place on another rank."""
        self._complete([name for name in names if self._bucket_of[name].stage in self._open[:1]], self._left)

    @torch.no_grad()
    def _complete(self, names: list[str], left: WeightGradients | None = None) -> None:
        """These parameters have their gradients, those with uses in `left` excepted: begin the buckets that can."""
        stages = set()
        for name in names:
            if left is None or not left.uses(self._parameters[name]):
                self._bucket_of[name].missing.discard(name)
                stages.add(self._bucket_of[name].stage)
        for stage in stages:
            for bucket in self._queues[stage]:
                if bucket.missing:
                    break
                if bucket.sum is None:
                    self._start(bucket)
        self._advance()

    def _start(self, bucket: _Bucket) -> None:
        found = [(name, self._masters[name].grad) for name in bucket.names]
        bucket.taken = [name for name, gradient in found if gradient is not None]
        bucket.given = [(gradient, gradient._version) for _, gradient in found if gradient is not None]
        if bucket.taken:
            flat = torch.cat([gradient.reshape(-1) for gradient, _ in bucket.given])
            bucket.sum = PendingSum(flat, bucket.group, compress=bucket.compress)
            self._under_way.append(bucket)

    def _advance(self) -> None:
        """Second halves begin in the order of the first, over each group: messages have no names."""
        stuck: set[int] = set()
        for bucket in self._under_way:
            assert bucket.sum is not None
            if id(bucket.group) not in stuck and not bucket.sum.advance():
                stuck.add(id(bucket.group))


def _stages_of(decoder: Decoder) -> dict[str, int]:
    """Which virtual stage uses a module, by the start of its name. What several use is not in it, nor, where weight
    gradients may be left for later, what is used several times: it is complete at the end of backward."""
    layout = decoder.mesh.layout
    leaves = layout is not None and (
        layout.schedule == "zero_bubble" or bool({"between", "weight_gradients"} & set(layout.overlap))
    )
    users: dict[str, list[int]] = {}
    for stage, each in decoder.stages.items():
        tied = each.head and decoder.spec.tied_embeddings
        used = {
            "embed": [each.embed, each.mtp, tied],
            "mtp": [each.mtp],
            "norm": [each.head, each.mtp],
            "head": [each.head, each.mtp],
        }
        for name, by in used.items():
            times = sum(map(bool, by))
            users.setdefault(name, []).extend([stage] * (times if leaves else min(times, 1)))
        for i in each.layers:
            users[f"layers.{i}"] = [stage]
    return {name: stages[0] for name, stages in users.items() if len(stages) == 1}
