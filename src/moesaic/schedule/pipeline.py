"""Runs one rank's actions of a pipeline: micro-batches through its stages, activations and gradients over its links."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.dispatch.parts import cutting
from moesaic.mesh import collectives, lanes
from moesaic.mesh.group import CommunicationError, Group
from moesaic.mesh.mesh import Links
from moesaic.schedule.orders import Action, Kind, Pair, received, sent, single_actions
from moesaic.spec.errors import MoesaicError

UNREAD = 2
"""How many messages of one link may be on their way while their sender works on. More save no time in any order as
long as equal actions take equal time, and each costs the memory of one activation."""

Message = tuple[int, int]
"""Micro-batch and sending stage."""


class StageRunner(Protocol):
    """The computation of one virtual stage. What it returns to be sent must not change afterwards."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations that it receives."""

    @property
    def device(self) -> torch.device:
        """Where it wants them."""

    def received_shape(self, micro: int) -> tuple[int, ...]:
        """Shape of the activations that it receives. Not asked of the first stage."""

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None:
        """Activations of the stage before (None in the first) to those for the next (None in the last)."""

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of what forward returned (None in the last stage) to that of what it received (None in the first).

        Where weight gradients are actions of their own they may be left for `weight_gradients`.
        """

    def weight_gradients(self, micro: int) -> None:
        """Add the weight gradients that `backward` left."""


def run_pipeline(
    work: Sequence[Action | Pair],
    runners: Mapping[int, StageRunner],
    links: Links,
    pp_rank: int,
    pp_size: int,
    *,
    around: Callable[[Action], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Do `work` (see `orders`) in order and return when all that was sent has been read.

    `runners` are this rank's virtual stages by number; every rank has equally many, and stage i lives on rank
    i % pp_size, this process being `pp_rank`. Forwards alone, without backwards, are fine too. `around(action)` is
    entered around the computation of each action, not around waiting. The two actions of a pair run in lanes
    (`mesh.lanes`): both get what they need first, and what both made is sent at the end.

    Raises MoesaicError, before anything is sent, when a runner or a link is missing or a stage belongs to another
    rank; CommunicationError, which names rank, link and action, when a neighbour cannot be reached.
    """
    last = pp_size * len(runners) - 1
    actions = single_actions(work)
    _check(actions, runners, links, pp_rank, pp_size)
    shapes: dict[Message, tuple[torch.Size, torch.dtype]] = {}
    # Nothing else runs in the waits of these; the others, paired forward and backward, need no overlap of their own.
    alone = {each.micro for each in work if not isinstance(each, Pair)}

    def activations(message: Message) -> Tensor:
        micro, stage = message[0], runners[message[1] + 1]
        return torch.empty(stage.received_shape(micro), dtype=stage.dtype, device=stage.device)

    def gradients(message: Message) -> Tensor | None:
        """Like the activations that this rank sent; None as long as it has not."""
        micro, stage = message[0], message[1] - 1
        if (micro, stage) not in shapes:
            return None
        shape, dtype = shapes.pop((micro, stage))
        return torch.empty(shape, dtype=dtype, device=runners[stage].device)

    forward = _Way("F", links.forward_in, links.forward_out, received(actions, "F", last + 1), activations, pp_rank)
    backward = _Way("B", links.backward_in, links.backward_out, received(actions, "B", last + 1), gradients, pp_rank)
    if actions:
        forward.listen(actions[0])

    def take(action: Action) -> Tensor | None:
        kind, micro, stage = action
        if kind == "F" and stage > 0:
            return forward.take(action, (micro, stage - 1))
        if kind == "B" and stage < last:
            return backward.take(action, (micro, stage + 1))
        return None

    def compute(action: Action, given: Tensor | None) -> Tensor | None:
        runner = runners[action.stage]
        with around(action), cutting(action.micro in alone):
            if action.kind == "F":
                return runner.forward(action.micro, given)
            if action.kind == "B":
                return runner.backward(action.micro, given)
            runner.weight_gradients(action.micro)
            return None

    def give(action: Action, made: Tensor | None) -> None:
        kind, micro, stage = action
        if kind == "W" or stage == (last if kind == "F" else 0):
            return
        if made is None:
            raise MoesaicError(f"pipeline rank {pp_rank}: {action} returned nothing to send; it must return a tensor")
        if kind == "F":
            shapes[micro, stage] = made.shape, made.dtype
            backward.listen(action)
            forward.give(action, made.detach())
        else:
            backward.give(action, made.detach())

    for each in work:
        if isinstance(each, Pair):
            given = {action: take(action) for action in each}
            made: dict[Action, Tensor | None] = {}

            def lane(action: Action, given: dict[Action, Any] = given, made: dict[Action, Any] = made) -> None:
                made[action] = compute(action, given.pop(action))

            lanes.together(partial(lane, each.backward), partial(lane, each.forward))
            for action in each:
                give(action, made[action])
        else:
            give(each, compute(each, take(each)))
    forward.finish()
    backward.finish()


class _Way:
    """What comes to this rank and what leaves it in one direction. Without links it hands over to itself."""

    def __init__(
        self,
        kind: Kind,
        incoming: Group | None,
        outgoing: Group | None,
        expected: Sequence[Message],
        empty: Callable[[Message], Tensor | None],
        pp_rank: int,
    ) -> None:
        self._carries = "activations" if kind == "F" else "gradients"
        self._incoming, self._outgoing, self._pp_rank = incoming, outgoing, pp_rank
        self._expected, self._empty = deque(expected), empty
        self._coming: Any = None
        self._unread: deque[tuple[Any, Action]] = deque()
        self._here: dict[Message, Tensor] = {}

    def listen(self, action: Action) -> None:
        """Await the next message, if its shape is known and no other is awaited already."""
        if self._incoming is None or self._coming is not None or not self._expected:
            return
        buffer = self._empty(self._expected[0])
        if buffer is not None:
            with self._naming("receive", self._incoming, action):
                self._coming = collectives.irecv(buffer, self._incoming, source=1 - self._incoming.rank)

    def take(self, action: Action, message: Message) -> Tensor:
        """The message that `action` needs, which is the next one; the one after it is awaited from now on."""
        if self._incoming is None:
            return self._here.pop(message)
        assert self._expected[0] == message
        self.listen(action)
        with self._naming("receive", self._incoming, action):
            tensor: Tensor = self._coming.wait()
        self._coming = None
        self._expected.popleft()
        self.listen(action)
        return tensor

    def give(self, action: Action, tensor: Tensor) -> None:
        """Send the result of `action`; wait while more than `UNREAD` messages have not been read."""
        if self._outgoing is None:
            self._here[action.micro, action.stage] = tensor
            return
        with self._naming("send", self._outgoing, action):
            self._unread.append((collectives.isend(tensor, self._outgoing, to=1 - self._outgoing.rank), action))
        self.finish(UNREAD)

    def finish(self, unread: int = 0) -> None:
        """Wait until at most `unread` messages have not been read."""
        while len(self._unread) > unread:
            sending, action = self._unread.popleft()
            assert self._outgoing is not None
            with self._naming("send", self._outgoing, action):
                sending.wait()

    @contextlib.contextmanager
    def _naming(self, verb: str, link: Group, action: Action) -> Iterator[None]:
        try:
            yield
        except (CommunicationError, RuntimeError) as error:
            whose = "for" if verb == "receive" else "of"
            raise CommunicationError(
                f"Pipeline rank {self._pp_rank} could not {verb} the {self._carries} {whose} {action} over link "
                f"{link.name} (ranks {', '.join(map(str, link.ranks))}): {error}"
            ) from error


def _check(
    actions: Sequence[Action], runners: Mapping[int, StageRunner], links: Links, pp_rank: int, pp_size: int
) -> None:
    stages = pp_size * len(runners)
    mine = set(range(pp_rank, stages, pp_size))
    if set(runners) != mine:
        raise MoesaicError(
            f"pipeline rank {pp_rank} of {pp_size} with {len(runners)} virtual stages has stages {sorted(mine)}, but "
            f"was given runners for {sorted(runners)}; stage i lives on rank i % {pp_size}"
        )
    for action in actions:
        if action.stage not in mine:
            raise MoesaicError(
                f"pipeline rank {pp_rank} of {pp_size} was told to do {action}, which lives on rank "
                f"{action.stage % pp_size}; give each rank its own order"
            )
    if pp_size == 1:
        return
    needed = {
        "forward_in": received(actions, "F", stages),
        "forward_out": sent(actions, "F", stages),
        "backward_in": received(actions, "B", stages),
        "backward_out": sent(actions, "B", stages),
    }
    missing = [name for name, messages in needed.items() if messages and getattr(links, name) is None]
    if missing:
        raise MoesaicError(
            f"pipeline rank {pp_rank} of {pp_size} has no link {', '.join(missing)}; make the links of the mesh with "
            f"virtual_stages = {len(runners)}"
        )
