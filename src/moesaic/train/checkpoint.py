"""Checkpoints that are whole or absent.

A checkpoint is a folder `step-N`:

    .metadata, *.distcp   weights, moments, random state   torch.distributed.checkpoint; see `open_state`
    model.json            the ModelSpec
    trainer.json          step, tokens and seconds so far, compute type, versions; training only: data, threads
    run.toml              the run file as resolved (training only)
    complete.json         the size of every file above; written last

It is written under a name that starts with a dot, forced to the disk, and renamed. So whenever the process or the
machine dies, `checkpoints/` holds only whole `step-N` folders, and left-overs that the next start removes. A folder
whose files do not have the sizes of `complete.json` is not taken for a checkpoint.

Several ranks write one checkpoint: each its own boxes of the tensors (`sharded_state`), the first everything else.
They must all see the same folder. Who wrote it leaves no trace in it but the number of files, so any number of ranks
with any layout reads it.

Weights are saved in the precision in which they are trained: the fp32 masters when the run computes in bf16.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moesaic import __version__
from moesaic.mesh.collectives import gather_objects
from moesaic.mesh.group import CommunicationError, Group
from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec
from moesaic.train.memory import require_memory
from moesaic.train.sharded_state import Shards
from moesaic.train.together import RanksFailed, causes, reason, together, where

State = dict[str, Any]
"""Nested dicts with tensors at the leaves; with several ranks, Shards where a tensor is cut."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or a user's share of it, that is full."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CheckpointError(MoesaicError):
    """A checkpoint that cannot be written, read, or used with this model."""


# ---------------------------------------------------------------- writing


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` stay (0 keeps all).

    `save` copies the state and returns; a thread writes it. An error in the thread is raised by the next call of
    `check`, `save` or `wait`, as a CheckpointError; the checkpoints before it are untouched.

    With several ranks, `group` joins all of them over the CPU and serves nothing else, because the threads talk over
    it while training goes on. Its time limit bounds how long ranks wait for the slowest disk. All ranks call `save` and
    `wait` at the same steps, and either none or all raise the same sentence.
    """

    def __init__(self, folder: Path, keep: int, group: Group | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.group = group or Group.single("checkpoint")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, state: State, files: dict[str, str]) -> None:
        """Begin to save `state` and the small text `files` as `step-<step>`. Returns when the state is copied."""
        self.wait()
        copy = _clone(state)
        self._thread = threading.Thread(target=self._write, args=(step, copy, files), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint being written is on the disk, on all ranks. Raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if _is_defect(error):
                raise error
            raise _not_saved(self.folder, error, self.group) from error

    def check(self) -> None:
        """Raise what went wrong in the thread, if that is known already. With several ranks, nothing: see `failed`."""
        if self.failed and self.group.size == 1:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether something is known to have gone wrong in the thread.

        Ranks learn it at different moments. Several of them first agree that one has, then all call `wait`.
        """
        return self._error is not None

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest valid checkpoint, and one sentence for each newer folder that is not valid."""
        passed_over: list[str] = []
        for path in reversed(self.all()):
            reason = damage(path)
            if reason is None:
                return path, passed_over
            passed_over.append(f"{path} is not a whole checkpoint ({reason}); looking for an older one.")
        return None, passed_over

    def agreed_newest(self) -> tuple[Path | None, list[str]]:
        """`newest` as the first rank sees it, on every rank, so that all go on from one step. All ranks call this."""
        seen = self.newest() if self.group.rank == 0 else None
        found: tuple[Path | None, list[str]] = gather_objects(seen, self.group)[0]
        return found

    def all(self) -> list[Path]:
        """The `step-N` folders, oldest first."""
        found = [p for p in self.folder.glob("step-*") if p.is_dir() and re.fullmatch(r"step-\d+", p.name)]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def remove_leftovers(self) -> None:
        """Delete what interrupted writes left behind. On other ranks than the first, nothing."""
        if self.group.rank != 0:
            return
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, state: State, files: dict[str, str]) -> None:
        try:
            write(self.folder / f"step-{step}", state, files, self.group)
            together(self.group, self._rotate if self.group.rank == 0 else None)
        except BaseException as error:  # torch reports failed writes as a BaseException
            self._error = error

    def _rotate(self) -> None:
        if self.keep == 0:
            return
        # Damaged folders neither count nor go: they must not push a good one out.
        for path in [path for path in self.all() if damage(path) is None][: -self.keep]:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            going = self.folder / f".tmp-old-{path.name}"
            os.rename(path, going)
            shutil.rmtree(going, ignore_errors=True)


def write(folder: Path, state: State, files: dict[str, str], group: Group | None = None) -> None:
    """Write a checkpoint to `folder`, replacing one that is there. On any error the temporary folder is removed.

    All ranks of `group` call this with their parts of the state; the first writes `files`. Returns when the checkpoint
    is whole and in its place. One process raises what the disk raises; torch wraps it in
    `dcp.api.CheckpointException`, a BaseException. Several raise that or RanksFailed, whichever rank it was, or
    CommunicationError.
    """
    group = group or Group.single("checkpoint")
    first = group.rank == 0
    temporary = folder.parent / f".tmp-{folder.name}"
    # No rank may still be clearing away an earlier attempt.
    together(group)
    try:
        together(group, partial(_make_empty, temporary) if first else None)
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        if group.handle is None:
            with _one_process():
                dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            with group.naming("saving"):
                dcp.save(state, storage_writer=writer, process_group=group.handle)
        together(group, partial(_complete, temporary, folder, files, group) if first else None)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(temporary: Path, folder: Path, files: dict[str, str], group: Group) -> None:
    """Add what one rank writes to the tensors of all, and put the checkpoint in its place."""
    if group.size > 1:
        _require_all_tensors(temporary, group)
    for name, text in files.items():
        _write_text(temporary / name, text)
    sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    _write_text(temporary / "complete.json", json.dumps({"bytes": sizes}, indent=1))
    _sync_folder(temporary)
    if folder.exists():
        old = folder.parent / f".tmp-old-{folder.name}"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except BaseException:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temporary, folder)
    _sync_folder(folder.parent)


def _require_all_tensors(temporary: Path, group: Group) -> None:
    """Refuse a checkpoint of which this rank does not see all files."""
    ends: dict[str, int] = {}
    for place in dcp.FileSystemReader(temporary).read_metadata().storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = temporary / name
        if not path.is_file() or path.stat().st_size < end:
            raise CheckpointError(
                f"{name}, which another rank has written, is not to be seen: run.dir must be on a disk that all "
                "machines share"
            )


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Force the folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clone(state: Any) -> Any:
    if isinstance(state, Shards):
        return state.copy_to_cpu()
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    return {key: _clone(value) for key, value in state.items()}


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """torch warns that no process group exists; here that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_defect(error: BaseException) -> bool:
    """Whether neither the disk nor another rank is to blame, so that no advice about either would help."""
    known = (OSError, MoesaicError, RanksFailed, dcp.api.CheckpointException)
    return not any(isinstance(each, known) for each in causes(error))


def _not_saved(folder: Path, error: BaseException, group: Group) -> CheckpointError:
    full = any(isinstance(e, OSError) and e.errno in DISK_FULL for e in causes(error))
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = -1
    full = full or 0 <= free < 1 << 20
    kept = Checkpoints(folder, 0).newest()[0]
    kept_text = f"the last good checkpoint is {kept}" if kept else "there is no earlier checkpoint"
    if full:
        return CheckpointError(
            f"The disk is full: a checkpoint could not be written to {folder} ({where(error, group)}"
            f"{max(free, 0) / 2**20:.1f} MiB free); {kept_text}. Make room, or lower train.keep_checkpoints, and go on "
            "with --resume."
        )
    found = CheckpointError(
        f"A checkpoint could not be written to {folder} ({where(error, group)}{reason(error)}); {kept_text}. Mend that "
        "and go on with --resume."
    )
    if any(isinstance(e, CommunicationError) for e in causes(error)):
        found.exit_code = CommunicationError.exit_code
    return found


# ---------------------------------------------------------------- reading


def damage(folder: Path) -> str | None:
    """What keeps `folder` from being a whole checkpoint, or None."""
    marker = folder / "complete.json"
    if not marker.is_file():
        return "complete.json is missing"
    try:
        sizes = list(json.loads(marker.read_text())["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"complete.json cannot be read: {error}"
    for name, size in sizes:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes and should have {size}"
    return None


def find(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest valid one of a run's folder or of its `checkpoints/`.

    Raises CheckpointError when there is none.
    """
    path = Path(path)
    if (path / "complete.json").exists() or re.fullmatch(r"step-\d+", path.name):
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint at {path}: the folder does not exist.")
        reason = damage(path)
        if reason is not None:
            raise CheckpointError(f"{path} is not a whole checkpoint: {reason}. Use an older one of {path.parent}.")
        return path
    for folder in (path / "checkpoints", path):
        newest = Checkpoints(folder, 0).newest()[0]
        if newest is not None:
            return newest
    raise CheckpointError(f"There is no checkpoint at {path}: give a step-N folder, or a run's folder that holds one.")


def tokenizer_folder(folder: Path) -> Path | None:
    """Where the tokenizer of a checkpoint was saved: in it (an import), or in its run's folder; None if nowhere."""
    for place in (folder / "tokenizer", folder.parent.parent / "tokenizer"):
        if place.is_dir():
            return place
    return None


def read_spec(folder: Path) -> ModelSpec:
    """The ModelSpec of a checkpoint. Raises CheckpointError when its model.json is missing or of another version."""
    try:
        return ModelSpec.model_validate_json((folder / "model.json").read_text())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{folder / 'model.json'} does not describe a model: {first}.") from error


def read_progress(folder: Path) -> dict[str, Any]:
    """What trainer.json says: step, tokens, seconds, dtype, versions."""
    try:
        progress: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
        if progress["dtype"] not in _DTYPES or any(progress[key] < 0 for key in ("step", "tokens", "seconds")):
            raise ValueError("a value is not one that training writes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'trainer.json'} cannot be read: {error!r}.") from error
    return progress


def read(folder: Path, state: State, group: Group | None = None) -> None:
    """Load a checkpoint into the tensors of `state`, which names what is wanted: whole tensors, or Shards of them.

    With a `group` all its ranks call this, each for what it holds; either none or all raise. Raises CheckpointError
    with torch's own reason when a tensor is missing or has another shape.
    """
    group = group or Group.single("checkpoint")

    def load() -> None:
        with _one_process():
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)

    try:
        together(group, load)
    except (KeyboardInterrupt, CommunicationError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{folder} cannot be read: {where(error, group)}{reason(error)}.") from error


def saved_names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint, `model.` and the like included. Raises CheckpointError."""
    try:
        return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception as error:
        raise CheckpointError(f"{folder / '.metadata'} cannot be read: {error}.") from error


def first_difference(saved: ModelSpec, wanted: ModelSpec) -> str | None:
    """The first architectural difference between two models as `path is A in the checkpoint and B here`, or None.

    Names, notes, the original config, and what only matters for starting or balancing do not count.
    """
    skipped = {"name", "family", "notes", "hf_config", "init_std", "balance_coefficient", "document_end"}
    return difference(saved.model_dump(exclude=skipped), wanted.model_dump(exclude=skipped), "the checkpoint")


def difference(a: Any, b: Any, place_of_a: str, path: str = "") -> str | None:
    """The first difference between two nests of dicts and lists, as `path is A in <place_of_a> and B here`, or None."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(key, a[key], b.get(key)) for key in a]
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list):
        if len(a) != len(b):
            return f"{path} has {len(a)} entries in {place_of_a} and {len(b)} here"
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    else:
        shown = [("absent" if v is None else "present" if isinstance(v, dict) else repr(v)) for v in (a, b)]
        return None if a == b else f"{path} is {shown[0]} in {place_of_a} and {shown[1]} here"
    found = (difference(x, y, place_of_a, f"{path}.{key}" if path else key) for key, x, y in pairs)
    return next((each for each in found if each), None)


# ---------------------------------------------------------------- models alone


def model_state(decoder: Decoder, masters: dict[str, Tensor] | None = None) -> State:
    """Parameters (or their fp32 `masters`) and persistent buffers by name: live tensors."""
    return {name: (masters or {}).get(name, tensor) for name, tensor in decoder.state_dict(keep_vars=True).items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32` or `bf16`."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def describe(spec: ModelSpec, dtype: torch.dtype, **progress: Any) -> dict[str, str]:
    """The texts of model.json and trainer.json."""
    trainer = {**progress, "dtype": dtype_name(dtype), "moesaic": __version__, "torch": torch.__version__}
    return {"model.json": spec.model_dump_json(indent=1), "trainer.json": json.dumps(trainer, indent=1)}


def save_model_checkpoint(decoder: Decoder, spec: ModelSpec, folder: str | Path) -> None:
    """Write the weights of `decoder` alone as a checkpoint that `train`, `generate` and `export` can start from.

    Raises CheckpointError when the disk refuses; then nothing is left behind.
    """
    folder = Path(folder)
    dtype = next(p.dtype for p in decoder.parameters() if p.is_floating_point())
    try:
        write(folder, {"model": model_state(decoder)}, describe(spec, dtype, step=0, tokens=0, seconds=0.0))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        first = next((e for e in causes(error) if isinstance(e, OSError)), error)
        raise CheckpointError(f"{folder} could not be written: {first}. What was there before is unchanged.") from error


def load_model_checkpoint(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a checkpoint (see `find` for what `folder` may be), with weights in `dtype`, by default the type
    it was trained in. `decoder.spec` is its ModelSpec. Raises CheckpointError."""
    path = find(folder)
    spec = read_spec(path)
    dtype = dtype or _DTYPES[read_progress(path)["dtype"]]
    require_memory(spec, dtype.itemsize, f"as {dtype_name(dtype)}")
    decoder = Decoder(spec, dtype=dtype)
    if any(name.endswith(".router.select_bias") for name in saved_names(path)):
        decoder.enable_select_bias()
    read(path, {"model": model_state(decoder)})
    return decoder
