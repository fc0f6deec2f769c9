"""A run's folder: who may write there, what was written, and what happens when there is no room."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from moesaic.mesh.device import device
from moesaic.spec.errors import MoesaicError
from moesaic.spec.run import RunSpec
from moesaic.train.checkpoint import DISK_FULL, Checkpoints


class RunError(MoesaicError):
    """A run that cannot start, or cannot go on, in its folder."""


def refuse_to_overwrite(folder: Path, resume: bool) -> None:
    """Raises RunError when `folder` holds a run and is not to be resumed."""
    if resume or not folder.exists():
        return
    if not folder.is_dir():
        raise RunError(f"run.dir is {folder}, which is a file: name a folder with --set run.dir=….")
    traces = [name for name in ("run.toml", "metrics.jsonl", "checkpoints") if (folder / name).exists()]
    if traces:
        raise RunError(
            f"{folder} already holds a run ({', '.join(traces)}): go on with it by --resume, or choose another folder "
            "with --set run.dir=…."
        )


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Nobody else trains into `folder` meanwhile. The kernel frees the lock when the process ends, however it ends.

    Raises RunError when another process holds it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(
                f"Process {file.read().strip() or '(unknown)'} is training into {folder}: wait for it or stop it, or "
                "choose another folder with --set run.dir=…."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            # A run refused before its first step leaves no empty folder behind.
            if made and list(folder.iterdir()) == [path]:
                path.unlink()
                for each in made:
                    with contextlib.suppress(OSError):
                        each.rmdir()


def out_of_room(error: BaseException, run: RunSpec) -> str | None:
    """The sentence for a full disk or exhausted memory, None for any other error."""
    kept = last_checkpoint(Checkpoints(Path(run.run.dir) / "checkpoints", 0))
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"The disk is full: {run.run.dir} could not be written. {kept} Make room and go on with --resume."
    if device().is_out_of_memory(error):
        return (
            f"Memory ran out at {device().peak_memory_bytes() / 2**30:.1f} GiB. {kept} Lower layout.micro_batch "
            f"(now {run.layout.micro_batch}) or train.seq_len (now {run.train.seq_len}) and go on with --resume."
        )
    return None


def cache_folder() -> Path:
    """Where tokenised data is kept between runs: MOESAIC_CACHE, or `moesaic` in the user's cache folder."""
    if os.environ.get("MOESAIC_CACHE"):
        return Path(os.environ["MOESAIC_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"


def write_resolved(folder: Path, run: RunSpec) -> None:
    """run.toml with every key filled in, whole or not at all."""
    temporary = folder / ".tmp-run.toml"
    temporary.write_text(run.to_toml(), encoding="utf-8")
    temporary.replace(folder / "run.toml")


def changes(path: Path, run: RunSpec) -> list[str]:
    """One sentence for each key that differs from the run that wrote the checkpoint, since results depend on them."""
    try:
        before = tomllib.loads((path / "run.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return [f"{path} has no readable run.toml, so changed keys cannot be named."]
    now = tomllib.loads(run.to_toml())
    found = []
    for table in ("model", "data", "layout", "train", "balance"):
        old, new = before.get(table, {}), now.get(table, {})
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                was, is_ = (repr(side[key]) if key in side else "absent" for side in (old, new))
                found.append(f"{table}.{key} was {was} when {path.name} was written and is {is_} now.")
    return found


def last_checkpoint(checkpoints: Checkpoints) -> str:
    """A sentence that names the newest valid checkpoint."""
    newest = checkpoints.newest()[0]
    return f"The last checkpoint is {newest}." if newest else "No checkpoint had been written yet."
