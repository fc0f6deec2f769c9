"""Recorded routing: the experts that every token of every step went to, in a folder that many ranks write together.

    header.json      what was recorded: model, steps, global_batch, seq_len, and per layer experts and top_k
    layer-<i>.npy    expert ids [steps, global_batch, seq_len, K], uint8 for up to 256 experts, else uint16
    recorded.npy     [steps] uint8: 1 for each step that is whole

Every rank writes the ids of its own tokens at their places, so the files are the same for every layout. Steps that
were not reached take no room where the file system keeps holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.model.forced import Forced
from moesaic.model.router import Router
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.spec.tables import BalanceTable

FORMAT = "moesaic routing 1"


class RoutingFileError(MoesaicError):
    """A recording that cannot be made, read, or used for this run."""


Header = dict[str, Any]


def benchmark_only(balance: BalanceTable) -> list[str]:
    """What of [balance] makes a run one for benchmarks only, for its record; empty for a run that trains as usual."""
    found = []
    if balance.force == "even":
        found.append("experts chosen evenly (balance.force)")
    if balance.force == "skew":
        found.append(f"experts chosen with a random bias of standard deviation {balance.force_std:g} (balance.force)")
    if balance.replay is not None:
        found.append(f"experts as recorded in {balance.replay} (balance.replay)")
    return found


def forced_routing(
    run: RunSpec,
    spec: ModelSpec,
    routers: list[tuple[int, Router]],
    *,
    first: Callable[[str, Callable[[], None]], None],
    is_first: bool,
    resume: bool,
    notes: list[str],
) -> Forced | None:
    """What `[balance] force, record, replay` ask for, on the routers of this process; None if nothing.

    `first(what, function)` runs the function on one rank before any goes on, and `is_first` says which one it is.
    `resume` allows to go on with a recording that is there. What should be known is added to `notes`.

    Raises:
        SpecError: keys that do not fit together.
        RoutingFileError: a recording of another run, or one that cannot be made or read.
    """
    balance, keys = run.balance, run.train
    if balance.force == "none" and balance.record is None and balance.replay is None:
        return None
    header = header_of(run, spec)
    source = sink = None
    if balance.replay is not None:
        source = Replay(Path(balance.replay), header)
    if balance.record is not None:
        path = Path(balance.record)
        first("the recording of routing", lambda: create(path, header, resume))
        sink = Recording(path, is_first)
        notes.append(f"Recording the routing of {keys.steps} steps in {path}, up to {size(header) / 2**20:,.1f} MiB.")
    labels = benchmark_only(balance)
    if labels:
        notes.append(f"For benchmarks only: {'; '.join(labels)}.")
    return Forced(
        routers,
        seq_len=keys.seq_len,
        mode=balance.force,
        std=balance.force_std,
        seed=keys.seed,
        source=source,
        sink=sink,
    )


def header_of(run: RunSpec, spec: ModelSpec) -> Header:
    """What a recording of this run describes."""
    layers = list(enumerate(spec.layers))
    if run.train.mtp_weight:
        layers += [(len(spec.layers) + i, layer) for i, layer in enumerate(spec.mtp)]
    return {
        "format": FORMAT,
        "model": spec.name,
        "steps": run.train.steps,
        "global_batch": run.train.global_batch,
        "seq_len": run.train.seq_len,
        "layers": {
            str(i): {"experts": layer.moe.router.experts, "top_k": layer.moe.router.top_k}
            for i, layer in layers
            if layer.moe is not None
        },
    }


def size(header: Header) -> int:
    """Bytes of a whole recording."""
    tokens = header["steps"] * header["global_batch"] * header["seq_len"]
    return sum(tokens * each["top_k"] * _dtype(each["experts"]).itemsize for each in header["layers"].values())


def create(path: Path, header: Header, resume: bool) -> None:
    """Make the files of a recording, empty; with `resume`, keep those of the same run.

    Raises RoutingFileError when something else is there, or when the disk refuses.
    """
    if path.exists():
        if not resume:
            raise RoutingFileError(f"{path} exists: remove it, or name another folder in balance.record.")
        if (path / "header.json").is_file():
            there = read_header(path)
            changed = [key for key in header if there.get(key) != header[key]]
            if changed:
                raise RoutingFileError(
                    f"{path} holds the routing of another run: {_shown(changed[0], there, header)}. Name another "
                    f"folder in balance.record."
                )
            return
    try:
        path.mkdir(parents=True, exist_ok=True)
        for layer, each in header["layers"].items():
            shape = (header["steps"], header["global_batch"], header["seq_len"], each["top_k"])
            _blank(path / f"layer-{layer}.npy", shape, _dtype(each["experts"]))
        _blank(path / "recorded.npy", (header["steps"],), np.dtype(np.uint8))
        (path / "header.json").write_text(json.dumps(header, indent=1), encoding="utf-8")
    except OSError as error:
        raise RoutingFileError(f"{path}: the recording of routing cannot be made: {error.strerror}.") from error


def read_header(path: Path) -> Header:
    """What a recording describes. Raises RoutingFileError when `path` is none."""
    try:
        header: Header = json.loads((path / "header.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RoutingFileError(
            f"{path} is not a recording of routing: its header.json is unreadable: {error}."
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RoutingFileError(f"{path / 'header.json'} does not say {FORMAT!r}: it is not a recording of routing.")
    return header


class Recording:
    """Writes into the files that `create` made. Ranks write at places of their own, so none waits for another."""

    def __init__(self, path: Path, is_first: bool) -> None:
        self._files: dict[int, tuple[int, int, NDArray[Any]]] = {}
        self._is_first = is_first
        for layer in read_header(path)["layers"]:
            self._files[int(layer)] = _open(path / f"layer-{layer}.npy")
        self._recorded = _open(path / "recorded.npy")

    def write(self, step: int, layer: int, sequences_B: Tensor, places_S: Tensor, ids_BSK: Tensor) -> None:
        """Keep the ids [B, S, K] of the tokens at `places_S` of the sequences `sequences_B` of a step (from 1)."""
        file, start, like = self._files[layer]
        _, batch, length, k = like.shape
        values = ids_BSK.detach().to("cpu").numpy().astype(like.dtype)
        places = places_S.tolist()
        edges = [i for i in range(len(places)) if i == 0 or places[i] != places[i - 1] + 1] + [len(places)]
        for row, sequence in enumerate(sequences_B.tolist()):
            for begin, end in pairwise(edges):
                token = ((step - 1) * batch + sequence) * length + places[begin]
                _write(file, values[row, begin:end].tobytes(), start + token * k * like.itemsize)

    def finish(self, step: int) -> None:
        """Note that a step is whole."""
        if self._is_first:
            file, start, _ = self._recorded
            _write(file, b"\1", start + step - 1)


class Replay:
    """Reads a recording, which must hold what the run described by `wanted` needs.

    Raises RoutingFileError, with both numbers, where it does not.
    """

    def __init__(self, path: Path, wanted: Header) -> None:
        header = read_header(path)
        for key in ("global_batch", "seq_len"):
            if header[key] != wanted[key]:
                raise RoutingFileError(f"{path} was recorded with {_shown(key, header, wanted)}.")
        for layer, each in wanted["layers"].items():
            there = header["layers"].get(layer)
            if there != each:
                what = "no such layer" if there is None else f"{there['top_k']} of {there['experts']} experts"
                raise RoutingFileError(
                    f"{path} was recorded with {header['model']}, another model: its layer {layer} has {what}, and "
                    f"that of {wanted['model']} chooses {each['top_k']} of {each['experts']}."
                )
        self._path = path
        try:
            self._ids = {int(layer): np.load(path / f"layer-{layer}.npy", mmap_mode="r") for layer in wanted["layers"]}
            whole = int(np.load(path / "recorded.npy")[: wanted["steps"]].sum())
        except (OSError, ValueError) as error:
            raise RoutingFileError(f"{path} cannot be read: {error}.") from None
        if whole < wanted["steps"]:
            raise RoutingFileError(
                f"{path} holds {whole} whole steps, and the run has train.steps = {wanted['steps']}: record more, or "
                f"run fewer."
            )
        self._experts = {int(layer): each["experts"] for layer, each in wanted["layers"].items()}

    def read(self, step: int, layer: int, sequences_B: Tensor, places_S: Tensor) -> Tensor:
        """Expert ids [B, S, K] int64 of the tokens at `places_S` of the sequences `sequences_B` of a step (from 1)."""
        rows = self._ids[layer][step - 1]
        ids = np.asarray(rows[np.ix_(sequences_B.cpu().numpy(), places_S.cpu().numpy())]).astype(np.int64)
        if ids.size and ids.max() >= self._experts[layer]:
            raise RoutingFileError(
                f"{self._path} is damaged: it sends a token of layer {layer}, step {step} to expert {ids.max()}, and "
                f"there are {self._experts[layer]}."
            )
        return torch.from_numpy(ids)


def _dtype(experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8) if experts <= 256 else np.dtype(np.uint16)


def _blank(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    made = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    made.flush()


def _open(path: Path) -> tuple[int, int, NDArray[Any]]:
    """A descriptor to write with, where the array starts in the file, and the array as it lies there."""
    try:
        like = np.load(path, mmap_mode="r")
        return os.open(path, os.O_WRONLY), int(like.offset), like
    except (OSError, ValueError) as error:
        raise RoutingFileError(f"{path} cannot be written: {error}.") from None


def _write(file: int, data: bytes, offset: int) -> None:
    """All of the data, at the offset. Not through a map: ranks on several machines share the file's pages."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _shown(key: str, there: Header, here: Header) -> str:
    return f"{key} {there.get(key)}, and this run has {here[key]}"
