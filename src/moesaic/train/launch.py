"""From the environment that torchrun gives a process to its place in a mesh, and out again.

`join` refuses what cannot run before any process group exists, finds ranks that disagree, and makes the groups.
`report` and `leave` end a process of several: each reason is printed once, and no dead peer can hold the living.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

import moesaic
from moesaic.cost.recompute import idle_words
from moesaic.dispatch import LIBRARIES
from moesaic.mesh import collectives
from moesaic.mesh.device import device
from moesaic.mesh.group import CommunicationError, Group, forget_connections, progress
from moesaic.mesh.mesh import Mesh
from moesaic.mesh.nodes import check_nodes, ranks_per_node_here
from moesaic.spec.errors import MoesaicError, SpecError
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.legal import fewest_ranks
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import refuse_cut_experts_with_libraries
from moesaic.spec.run import RunSpec
from moesaic.train import process
from moesaic.train.assembly import Assembly, Facts, JobError, difference
from moesaic.train.options import chosen_layout

__all__ = ["JobError", "Launch", "Place", "agree", "join", "leave", "report"]

T = TypeVar("T")

_START_SECONDS = 60.0
"""The least time that processes have to start: importing from a shared disk may take longer than any step."""
_SUSPECTS = 4


@dataclass(frozen=True)
class Place:
    """This process among those of the job, as the launcher numbers them. `restarts` counts on this machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0

    @classmethod
    def here(cls) -> Place:
        """From torchrun's environment variables; one process where WORLD_SIZE is not set.

        Raises:
            SpecError: some of them are set and others not, or they are not numbers that fit together.
        """
        world = _number("WORLD_SIZE", 1)
        restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)
        if world == 1:
            return cls(restarts=restarts)
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise SpecError(
                f"WORLD_SIZE is {world}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
                f"start with torchrun, or unset WORLD_SIZE to train in one process."
            )
        place = cls(_number("RANK", 0), world, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), restarts)
        if place.rank >= world:
            raise SpecError(f"RANK is {place.rank}, but WORLD_SIZE is {world}: ranks go from 0 to {world - 1}.")
        return place


@dataclass
class Launch:
    """This process's place in a job that has started.

    `restarts` is how often torchrun started it anew, the largest number of all machines: above 0 the run goes on from
    its last checkpoint. `notes` are sentences for the user.
    """

    mesh: Mesh
    layout: Layout
    place: Place
    restarts: int
    threads: int
    notes: list[str] = field(default_factory=list)
    assembly: Assembly | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.place.rank == 0

    def settle(self, what: str, function: Callable[[], T]) -> T:
        """function() of this rank, once all ranks have come back from theirs; if it fails on any rank, a MoesaicError
        on all. For work without collectives that may fail on some ranks only, or take as long as it likes."""
        return function() if self.assembly is None else self.assembly.settle(what, function)

    def first(self, what: str, function: Callable[[], T]) -> T:
        """What function() gives on rank 0, which alone runs it; errors as in `settle`. The value is pickled."""
        return function() if self.assembly is None else self.assembly.first(what, function)

    def leaders_first(self, what: str, function: Callable[[], T]) -> T:
        """function() of this rank, run on the first rank of each node before the others; errors as in `settle`."""
        return function() if self.assembly is None else self.assembly.leaders_first(what, function)

    def agree(self, facts: Facts) -> None:
        """Raises JobError, naming the first differing fact, the ranks and both values, unless all ranks bring the same
        `facts` (plain data by a name that fits into a sentence)."""
        if self.assembly is not None:
            self.assembly.agree(facts)

    def anyone(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: the same answer on all, such as whether to stop after this step."""
        return any(collectives.gather_counts(int(flag), self.mesh.world))

    def close(self) -> None:
        """Take leave of healthy peers: returns when all ranks are here, and forgets the groups."""
        if self.assembly is None:
            return
        collectives.barrier(self.mesh.world)
        self.assembly.close()
        dist.destroy_process_group()
        forget_connections()
        _state.launch = _state.assembly = None


def join(run: RunSpec, model: ModelSpec | None = None) -> Launch:
    """Take this process's place in the job: the layout, checked; the ranks, in agreement; the groups.

    In one process there is nothing to join. `model` is `run.model_spec()`, if it was made before.

    Raises:
        SpecError: the layout is not legal for this many processes (the same sentence on all ranks, before any group
            exists), or takes several and this is one.
        JobError: something is wrong on some of the ranks, or they disagree.
        CommunicationError: a rank did not start, or died, within `run.timeout_seconds`.
    """
    place = Place.here()
    timeout = run.run.timeout_seconds
    if place.world == 1:
        layout, notes = _layout(run, model, place)
        threads, note = _threads(run.train.threads, place)
        return Launch(Mesh.single(layout), layout, place, place.restarts, threads, notes + ([note] if note else []))

    faulthandler.enable()
    assembly = _assemble(place, timeout)
    layout, notes = assembly.settle("the layout", lambda: _layout(run, model, place))
    assembly.settle("its device", lambda: _take_device(place))
    assembly.agree(_facts(run, layout, place))
    restarts = assembly.largest(place.restarts)
    threads, note = _threads(run.train.threads, place)
    _make_default_group(assembly, place, timeout)
    mesh = Mesh.create(layout, timeout, (model or run.model_spec()).tied_embeddings)
    launch = Launch(mesh, layout, place, restarts, threads, notes + ([note] if note else []), assembly)
    experts = mesh.experts_by_count.values()
    if layout.dispatcher == "hierarchical" and all(g.ep_across is None or g.ep_across.size == 1 for g in experts):
        launch.notes.append("The hierarchical dispatcher is alltoall here: all expert-parallel ranks are on one node.")
    if restarts and place.rank == 0:
        launch.notes.append(f"Started anew by torchrun ({restarts} so far), on {place.world} processes: {layout}.")
    _state.launch = launch
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    return launch


def agree(group: Group, facts: Facts) -> None:
    """As `Launch.agree`, among the ranks of a group and by a collective; ranks in the sentence are numbers in it."""
    sentence = difference(collectives.gather_objects(json.loads(json.dumps(facts)), group))
    if sentence is not None:
        raise JobError(sentence)


# ---------------------------------------------------------------- joining


class _State:
    """What `report` and `leave` know of this process."""

    assembly: Assembly | None = None
    launch: Launch | None = None


_state = _State()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or (name == "WORLD_SIZE" and int(text) < 1):
        raise SpecError(f"{name} is {text!r}, but the launcher sets it to a number: start with torchrun, or unset it.")
    return int(text)


def _assemble(place: Place, timeout: float) -> Assembly:
    """The meeting of all ranks, at the address that the launcher gave."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    start = max(timeout, _START_SECONDS)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=start)))  # type: ignore[no-untyped-call]
        assembly = Assembly(store, place.rank, place.world, timeout, place.local_rank == 0, start)
    except MoesaicError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise CommunicationError(
            f"Rank {place.rank}: the {place.world} ranks could not meet at {where} (MASTER_ADDR and MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error
    _state.assembly = assembly
    return assembly


def _layout(run: RunSpec, model: ModelSpec | None, place: Place) -> tuple[Layout, list[str]]:
    """The layout of the run on these processes and sentences about it, or the way to start as many as it takes."""
    table, keys, world = run.layout, run.train, place.world
    model = model or run.model_spec()
    refuse_cut_experts_with_libraries(table)
    library = LIBRARIES.get(table.dispatcher_backend if table.dispatcher == "flex" else table.dispatcher)
    if library is not None:
        library.check(device().kind, keys.dtype)
    needed = fewest_ranks(table) if table.dp == "auto" else table.pp * table.dp * table.cp * table.tp
    if world == 1 and needed > 1:
        # A layout that no number of processes makes legal should not send anybody to torchrun.
        layout = resolve_layout(table, model, needed, seq_len=keys.seq_len, global_batch=keys.global_batch)
        raise SpecError(
            f"the layout {layout} takes {needed} processes{' or a multiple' if table.dp == 'auto' else ''}, but this "
            f"is one: run it with `torchrun --nproc-per-node {needed} -m moesaic {_command()}`."
        )
    ranks_per_node = ranks_per_node_here(world)
    layout, notes = chosen_layout(run, model, world, ranks_per_node)
    check_nodes(layout, ranks_per_node)
    return layout, notes + list(idle_words(layout, model, keys.seq_len))


def _command() -> str:
    """The command line after `moesaic`, to be repeated."""
    return shlex.join(sys.argv[1:]) if sys.argv[1:2] == ["train"] else "train FILE"


def _take_device(place: Place) -> None:
    here = device()
    if here.kind == "cpu":
        return
    count = torch.accelerator.device_count()
    if count > 1 and place.local_rank >= count:
        raise SpecError(
            f"this machine has {count} accelerator{'s' if count != 1 else ''}, but {place.local_world} processes: "
            f"start torchrun with --nproc-per-node {count}."
        )
    torch.accelerator.set_device_index(here.torch_device)


def _facts(run: RunSpec, layout: Layout, place: Place) -> Facts:
    """What must be the same on all ranks: what runs, and every key of the run file."""
    facts: Facts = {
        "the version of moesaic": moesaic.__version__,
        "the source of moesaic (a hash)": source_hash(),
        "the version of torch": torch.__version__,
        "the kind of device": device().kind,
        "the number of processes": place.world,
        "the layout": str(layout),
        "the dispatcher and the overlap": f"{layout.dispatcher}, {', '.join(layout.overlap) or 'no overlap'}",
        "the chunks of each number of experts, and of heads": (*layout.inside_chunks, layout.heads_in),
    }
    if layout.dispatcher == "hierarchical":  # groups are made by nodes
        facts["the number of processes on a machine"] = ranks_per_node_here(place.world)
    for table, keys in run.model_dump().items():
        facts.update({f"{table}.{key}": value for key, value in keys.items()})
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


@functools.cache
def source_hash() -> str:
    """A hash of the names and contents of the package's source files."""
    root = Path(moesaic.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _threads(asked: int, place: Place) -> tuple[int, str | None]:
    """Sets this process's threads: those asked for, OMP_NUM_THREADS, or its share of the machine's physical cores."""
    share = max(1, process.physical_cores() // place.local_world)
    text = os.environ.get("OMP_NUM_THREADS", "")
    named = int(text) if text.isdecimal() and int(text) > 0 else None
    threads = process.set_threads(asked or named or share)
    if place.local_world > 1 and not asked and named == 1 < share and device().kind == "cpu":
        return threads, (
            f"Every rank uses 1 thread, as torchrun sets OMP_NUM_THREADS to 1, though each could have {share}: set "
            f"train.threads or OMP_NUM_THREADS to {share}."
        )
    return threads, None


def _make_default_group(assembly: Assembly, place: Place, timeout: float) -> None:
    backend = "gloo" if device().kind == "cpu" else "nccl"
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", assembly.store),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        name = f"{backend.upper()}_SOCKET_IFNAME"
        raise CommunicationError(
            f"Rank {place.rank}: {backend} could not connect the {place.world} ranks within {timeout:g} s "
            f"({str(error).splitlines()[0][:200]}): on several machines, name their common network in {name}."
        ) from error


# ---------------------------------------------------------------- leaving


def among_several() -> bool:
    """Whether the launcher's environment makes this process one of several."""
    try:
        return Place.here().world > 1
    except SpecError:
        return False


def report(message: str, code: int, error: BaseException | None = None) -> None:
    """Print why this process ends, in one line, such that the log of the job has each reason once.

    What is wrong on all ranks alike is printed by rank 0. An error of this rank alone, or one that came before the
    ranks had met, is told to the others first where that is still possible. torchrun's own summary gets the sentence
    too.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as one fails
    place = Place.here()
    settled = getattr(error, "everywhere", False) or isinstance(error, CommunicationError)
    if _state.assembly is None and not settled:
        try:
            _assemble(place, _START_SECONDS).settle("its start", functools.partial(_refuse, message, code))
        except CommunicationError:
            pass
        except MoesaicError as shared:
            message, error = str(shared), shared
    if getattr(error, "everywhere", False):
        if place.rank == 0:
            _say(message, code)
        return
    if isinstance(error, CommunicationError):
        message += _suspects(place.rank, waited="no answer" in message)
    elif error is not None and not isinstance(error, MoesaicError) and progress.step is not None:
        message += f" (in step {progress.step})"
    if _state.assembly is None or _state.assembly.say_once(message):
        if error is not None and not isinstance(error, MoesaicError):
            sys.stderr.write("".join(traceback.format_exception(error)))
        _say(message if message.startswith(f"Rank {place.rank}:") else f"Rank {place.rank}: {message}", code)


def leave(code: int) -> NoReturn:
    """End the process. After a failure at once, since tearing down groups would wait for ranks that are gone."""
    launch = _state.launch
    if code in (0, 3):
        if launch is not None and dist.is_initialized():
            # A peer that dies now changes nothing: everything is written.
            closing = threading.Thread(target=_close_quietly, args=(launch,), daemon=True)
            closing.start()
            closing.join(launch.assembly.timeout_seconds if launch.assembly else 0.0)
            if closing.is_alive():
                _exit_now(code)
        sys.exit(code)
    _exit_now(code)


def _close_quietly(launch: Launch) -> None:
    try:
        launch.close()
    except (MoesaicError, RuntimeError, ValueError):
        pass


def _exit_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


def _refuse(message: str, code: int) -> None:
    raise JobError(message, code)


def _suspects(me: int, waited: bool) -> str:
    """A clause on the ranks that have fallen silent or behind, as far as their signs of life tell. They lag, so that
    who is behind can be told only after having `waited` for the time limit."""
    if _state.assembly is None:
        return ""
    silent_after = 2.5 * _state.assembly.interval
    found: list[str] = []
    for rank, sign in _state.assembly.signs().items():
        if rank == me:
            continue
        if sign.age > silent_after:
            step = "" if sign.step is None else f", then in step {sign.step}"
            found.append(f"rank {rank} was last heard of {sign.age:.0f} s ago{step}")
        elif waited and sign.step is not None and progress.step is not None and sign.step < progress.step:
            found.append(f"rank {rank} is still in step {sign.step}")
    if not found:
        return ""
    more = f", and {len(found) - _SUSPECTS} more" if len(found) > _SUSPECTS else ""
    return f" Look at these: {'; '.join(found[:_SUSPECTS])}{more}."


def _say(message: str, code: int) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"moesaic: {message}\n")
    sys.stderr.flush()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        said: dict[str, Any] = {
            "message": message,
            "errorCode": code,
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        try:
            Path(path).write_text(json.dumps({"message": said}), encoding="utf-8")
        except OSError:
            pass


def _terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM outside the loop: the end, unless this process is about to say why it fails."""
    if sys.exception() is None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
