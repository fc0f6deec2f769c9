"""Work that several ranks do together: it is done on all of them or has failed on all of them, with one reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moesaic.mesh import collectives
from moesaic.mesh.group import CommunicationError, Group
from moesaic.spec.errors import MoesaicError


class RanksFailed(Exception):
    """What went wrong, by place in the group: the same on every rank. `failures` is shaped like that of torch's
    CheckpointException."""

    def __init__(self, failures: dict[int, tuple[BaseException, None]]) -> None:
        super().__init__("; ".join(f"place {place}: {error}" for place, (error, _) in failures.items()))
        self.failures = failures


def together(group: Group, work: Callable[[], None] | None = None) -> None:
    """Do `work` here, where there is any, and return when every rank of the group has done its own.

    Raises RanksFailed on all ranks if it failed on any; CommunicationError if one cannot be asked. In a group of one
    process, what `work` raises.
    """
    failure: BaseException | None = None
    try:
        if work is not None:
            work()
    except (KeyboardInterrupt, CommunicationError):
        raise  # the other ranks see the connection close
    except BaseException as error:  # torch reports failed reads and writes as a BaseException
        if group.handle is None:
            raise
        failure = error
    if group.handle is None:
        return
    outcomes = collectives.gather_objects(None if failure is None else _portable(failure), group)
    failures = {place: (error, None) for place, error in enumerate(outcomes) if error is not None}
    if failures:
        raise RanksFailed(failures) from failure


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what was collected from its ranks, and what caused it."""
    while error is not None:
        yield error
        for wrapped in getattr(error, "failures", {}).values():
            if isinstance(wrapped, tuple) and isinstance(wrapped[0], BaseException):
                yield from causes(wrapped[0])
        error = error.__cause__ or error.__context__


def reason(error: BaseException) -> str:
    """One line that says what went wrong, without a full stop."""
    found = list(causes(error))
    told: BaseException | None = next((e for e in found if isinstance(e, MoesaicError)), None)
    told = told or next((e for e in found if isinstance(e, OSError)), None)
    told = told or next((e for e in reversed(found) if str(e).strip()), error)
    text = str(told).strip()
    return text.splitlines()[0].rstrip(".") if text else type(told).__name__


def where(error: BaseException, group: Group) -> str:
    """`rank 2: ` for an error of rank 2, empty in a group of one and for an error that all ranks have."""
    # The outermost: what one rank alone did has failures of its own, of its place 0.
    places = sorted(next((e.failures for e in causes(error) if hasattr(e, "failures")), {}))
    if group.handle is None or not places or len(places) == group.size:
        return ""
    return f"rank{'s' if len(places) > 1 else ''} {', '.join(str(group.ranks[place]) for place in places)}: "


def _portable(error: BaseException) -> BaseException:
    """An error that says the same and can be sent to another process, whatever it was made of."""
    system = next((e for e in causes(error) if isinstance(e, OSError) and e.errno is not None), None)
    return OSError(system.errno, system.strerror, system.filename) if system else RuntimeError(reason(error))
