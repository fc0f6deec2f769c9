"""Checkpoints of several ranks: any layout reads what any other wrote, and all ranks fail if one does."""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.mesh.cut import Box, Cut, Piece
from moesaic.mesh.group import Group
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.train import checkpoint
from moesaic.train.checkpoint import CheckpointError, Checkpoints, damage, load_model_checkpoint, read, saved_names
from moesaic.train.sharded_state import Shards, rng_entry, rng_to_read, shards_of
from tests.ranks import Ranks, ranks

FLOAT = {"fp32": torch.float32, "bf16": torch.bfloat16}
_groups: dict[int, Group] = {}


def group_of_all() -> Group:
    """A group for checkpoints alone, made once per process."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return Group.single("checkpoint")
    if size not in _groups:
        _groups[size] = Group.create("checkpoint", [tuple(range(size))], 60.0)
    return _groups[size]


def everywhere(size: int, function: Any, *args: Any) -> list[Any]:
    """function(rank, *args) on `size` ranks; one rank is this process."""
    return [function(0, *args)] if size == 1 else ranks(size).run(function, *args)


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Held:
    """What one rank holds of a tensor: rows start … stop − 1 of a piece."""

    cut: Cut
    start: int
    stop: int


@dataclass(frozen=True)
class Placed:
    """A tensor and what each rank holds of it; None: nothing, not even its name."""

    name: str
    dtype: str
    held: tuple[Held | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return next(held.cut.shape for held in self.held if held is not None)


SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def placements(draw: Any, shape: tuple[int, ...], size: int) -> tuple[Held | None, ...]:
    """A tensor of `shape` over `size` ranks: some hold it; among those, copies, row ranges, and up to two cuts."""
    holders = draw(st.permutations(range(size)))[: draw(st.sampled_from([n for n in (1, 2, 4) if n <= size]))]
    dims = draw(st.permutations(range(len(shape))))[:2]
    ways = ["copies"] + ["rows"] * bool(shape) + list(dims)
    degrees = dict.fromkeys(ways, 1)
    for _ in range(len(holders).bit_length() - 1):
        degrees[draw(st.sampled_from(ways))] *= 2
    segments = {dim: draw(st.sampled_from([1, 2])) if shape[dim] % 2 == 0 else 1 for dim in dims}
    held: list[Held | None] = [None] * size
    for number, rank in enumerate(holders):
        index = {}
        for way, degree in degrees.items():
            number, index[way] = divmod(number, degree)
        cut = Cut(shape, tuple(Piece(dim, degrees[dim], index[dim], segments[dim]) for dim in dims))
        rows = cut.local_shape[0] if shape else 1
        share = -(-rows // degrees.get("rows", 1))
        start = share * index.get("rows", 0)
        held[rank] = Held(cut, min(start, rows), min(start + share, rows))
    return tuple(held)


@st.composite
def resharding(draw: Any) -> tuple[int, int, list[Placed], list[Placed]]:
    """The same tensors on n and on m ranks."""
    n, m = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    before, after = [], []
    for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=4))):
        name, dtype = f"layers.{number}.weight", draw(st.sampled_from(sorted(FLOAT)))
        before.append(Placed(name, dtype, draw(placements(shape, n))))
        after.append(Placed(name, dtype, draw(placements(shape, m))))
    return n, m, before, after


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that goes by this name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))).to(dtype)


def local(held: Held, tensor: Tensor) -> Tensor:
    """What is held of `tensor`, found without boxes."""
    piece = held.cut.take(tensor)
    return piece[held.start : held.stop].clone() if tensor.ndim else piece.clone()


def tensors_of(rank: int, placed: list[Placed]) -> dict[str, tuple[Held, Tensor]]:
    """What `rank` holds: weights, moments and the update count, by their names on disk."""
    found = {}
    for each in placed:
        held = each.held[rank]
        if held is None:
            continue
        kinds = {f"model.{each.name}": FLOAT[each.dtype]}
        kinds |= {f"optimizer.{each.name}.{moment}": torch.float32 for moment in ("exp_avg", "exp_avg_sq")}
        for name, dtype in kinds.items():
            found[name] = (held, local(held, whole(name, each.shape, dtype)))
        name = f"optimizer.{each.name}.step"
        found[name] = (Held(Cut(()), 0, 1), torch.tensor(float(crc32(name.encode()) % 100)))
    return found


def nested(tensors: dict[str, tuple[Held, Tensor]]) -> dict[str, Any]:
    """The state whose leaves are those tensors."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    parts = {name: (held.cut, x, (held.start, held.stop)) for name, (held, x) in tensors.items()}
    for name, shards in shards_of(parts).items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            state["model"][rest] = shards
        else:
            parameter, _, moment = rest.rpartition(".")
            leaf: Tensor = tensors[name][1] if moment == "step" else shards
            state["optimizer"].setdefault(parameter, {})[moment] = leaf
    return state


def _save(rank: int, folder: str, placed: list[Placed]) -> None:
    group = group_of_all()
    checkpoints = Checkpoints(Path(folder), 2, group)
    tensors = tensors_of(rank, placed)
    checkpoints.save(3, nested(tensors), {"trainer.json": "{}"})
    for _, x in tensors.values():
        x.fill_(-1.0)
    if group.size > 1:  # training goes on over other groups
        for _ in range(5):
            dist.all_reduce(torch.ones(100))
    checkpoints.wait()


def _differences(rank: int, folder: str, placed: list[Placed]) -> list[str]:
    expected = tensors_of(rank, placed)
    found = {name: (held, torch.full_like(x, float("nan"))) for name, (held, x) in expected.items()}
    read(Path(folder) / "step-3", nested(found), group_of_all())
    return [name for name in expected if not torch.equal(expected[name][1], found[name][1])]


@settings(max_examples=40)
@given(resharding())
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(case: tuple[int, int, list[Placed], list[Placed]]) -> None:
    n, m, before, after = case
    with tempfile.TemporaryDirectory() as folder:
        everywhere(n, _save, folder, before)
        assert os.listdir(folder) == ["step-3"] and damage(Path(folder) / "step-3") is None
        metadata = dcp.FileSystemReader(Path(folder) / "step-3").read_metadata()
        for name, stored in metadata.state_dict_metadata.items():
            elements = sum(chunk.sizes.numel() for chunk in stored.chunks)
            assert elements == stored.size.numel(), f"{name}: every element is written once, whoever holds it"
        assert everywhere(m, _differences, folder, after) == [[]] * m


def test_one_process_writes_whole_tensors_as_it_always_did(tmp_path: Path) -> None:
    a, b = whole("a", (4, 3), torch.float32), whole("b", (2,), torch.float32)
    checkpoint.write(tmp_path / "step-1", {"model": {"a": a, "b": b}}, {})
    checkpoint.write(
        tmp_path / "step-2", {"model": shards_of({"a": (Cut((4, 3)), a, None), "b": (Cut((2,)), b, None)})}, {}
    )
    seen = []
    for folder in (tmp_path / "step-1", tmp_path / "step-2"):
        assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp", "complete.json"]
        seen.append(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert seen[0] == seen[1]


def test_boxes_that_do_not_match_the_local_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"boxes hold 6 elements and the local tensor 4"):
        shards_of({"a": (Cut((3, 2)), torch.zeros(2, 2), None)})
    with pytest.raises(ValueError, match="does not fit"):
        Shards((3, 2), torch.zeros(2, 2), [Box((2, 0), (2, 2), (0, 0))])
    with pytest.raises(NotImplementedError, match="compute with the local tensor"):
        shards_of({"a": (Cut((3, 2)), torch.zeros(3, 2), None)})["a"] + 1


TINY = {
    "model_type": "mixtral",
    "vocab_size": 33,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


def _save_model(rank: int, folder: str, state: dict[str, Tensor]) -> None:
    """Every parameter cut in rows over the ranks."""
    size = dist.get_world_size()
    parts = {}
    for name, tensor in state.items():
        cut = Cut(tuple(tensor.shape), (Piece(0, size, rank),))
        parts[name] = (cut, cut.take(tensor), None)
    spec = load_model_spec(TINY)
    texts = checkpoint.describe(spec, torch.float32, step=1, tokens=0, seconds=0.0)
    checkpoint.write(Path(folder) / "step-1", {"model": shards_of(parts)}, texts, group_of_all())


def test_one_process_loads_a_model_that_many_wrote(tmp_path: Path) -> None:
    decoder = Decoder(load_model_spec(TINY))
    decoder.init_weights(5)
    state = {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}
    ranks(2).run(_save_model, str(tmp_path), state)
    found = load_model_checkpoint(tmp_path).state_dict()
    assert state.keys() == found.keys()
    assert [name for name in state if not torch.equal(state[name], found[name])] == []


# ---------------------------------------------------------------- random state


def _rng(rank: int, folder: str, save: bool) -> tuple[list[int], list[str]]:
    group = group_of_all()
    rng = {"cpu": torch.full((5,), rank + 1 if save else 9, dtype=torch.uint8)}
    path = Path(folder) / "step-1"
    notes: list[str] = []
    if save:
        checkpoint.write(path, {"rng": rng_entry(rng, group)}, {}, group)
    else:
        entry, notes = rng_to_read(path, saved_names(path), rng, group)
        read(path, {"rng": entry}, group)
    return rng["cpu"].tolist(), notes


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2)])
def test_random_state_is_each_ranks_own_and_is_left_alone_when_their_number_changes(
    n: int, m: int, tmp_path: Path
) -> None:
    everywhere(n, _rng, str(tmp_path), True)
    for rank, (values, notes) in enumerate(everywhere(m, _rng, str(tmp_path), False)):
        assert values == [rank + 1 if n == m else 9] * 5
        assert len(notes) == (n != m) and all("drawn anew" in note for note in notes)


# ---------------------------------------------------------------- failures


def _state(rank: int, size: int, value: float) -> dict[str, Any]:
    cut = Cut((40 * size, 50), (Piece(0, size, rank),))
    return {"model": shards_of({"a": (cut, torch.full(cut.local_shape, value), None)})}


def _save_with(rank: int, folder: str, harm: str, who: int, step: int) -> str | None:
    """Saves `step` while `harm` is done to one rank; what that raised here."""
    group = group_of_all()
    path = Path(folder)
    if harm == "other disk" and rank == who:
        path = path.with_name("elsewhere")
    checkpoints = Checkpoints(path, 1, group)
    with ExitStack() as stack:
        if rank == who:
            _harm(stack, harm)
        state = _state(rank, group.size, float(step))
        if harm == "no tensors" and rank == who:
            state = {"model": {}}
        checkpoints.save(step, state, {"trainer.json": "{}"})
        try:
            checkpoints.wait()
        except CheckpointError as error:
            return str(error)
    return None


def _harm(stack: ExitStack, harm: str) -> None:
    refused = OSError(errno.EACCES, "Permission denied", "it")
    if harm == "a file":
        stack.enter_context(patch.object(dcp.FileSystemWriter, "write_data", side_effect=refused))
    elif harm == "a full file":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    elif harm == "text":
        stack.enter_context(patch.object(checkpoint, "_write_text", side_effect=refused))
    elif harm in ("mkdir", "rename"):
        stack.enter_context(patch.object(os, harm, side_effect=refused))


HARMS = {
    "a file": "Permission denied",
    "a full file": "",
    "mkdir": "Permission denied",
    "text": "Permission denied",
    "rename": "Permission denied",
    "other disk": "run.dir must be on a disk that all machines share",
    "no tensors": "",
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_fails_on_one_rank_fails_on_all_with_one_sentence_and_the_next_save_works(
    harm: str, tmp_path: Path
) -> None:
    size = 4
    folder = tmp_path / "checkpoints"
    ranks(size).run(_save_with, str(folder), "", 0, 1)
    who = 0 if harm in ("mkdir", "text", "rename") else 2
    sentences = ranks(size).run(_save_with, str(folder), harm, who, 2)
    if harm == "other disk":
        seen_by = "rank 0: "
        sentences[who] = sentences[0] if "elsewhere" in sentences[who] else None
    else:
        # What is missing is seen by nobody in particular, where the plans are joined.
        seen_by = "" if harm == "no tensors" else f"rank {who}: "
    assert sentences[0] is not None and sentences == [sentences[0]] * size
    assert seen_by in sentences[0] and HARMS[harm] in sentences[0]
    assert f"the last good checkpoint is {folder / 'step-1'}" in sentences[0]
    assert os.listdir(folder) == ["step-1"] and damage(folder / "step-1") is None
    assert ranks(size).run(_save_with, str(folder), "", 0, 2) == [None] * size
    assert os.listdir(folder) == ["step-2"] and damage(folder / "step-2") is None


def _read_with(rank: int, folder: str, who: int) -> str | None:
    state = _state(rank, dist.get_world_size(), 0.0)
    if rank == who:
        state["model"] |= shards_of({"b": (Cut((2,)), torch.zeros(2), None)})
    try:
        read(Path(folder) / "step-1", state, group_of_all())
    except CheckpointError as error:
        return str(error)
    return None


def test_what_cannot_be_read_on_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    ranks(2).run(_save_with, str(tmp_path), "", 0, 1)
    first, second = ranks(2).run(_read_with, str(tmp_path), 1)
    reason = "rank 1: Missing key in checkpoint state_dict: model.b"
    assert first == second == f"{tmp_path / 'step-1'} cannot be read: {reason}."
    assert ranks(2).run(_read_with, str(tmp_path), -1) == [None, None]


def _newest(rank: int, folder: str) -> tuple[Path | None, list[str]]:
    own = Path(folder) if rank == 0 else Path(folder) / "not there"
    return Checkpoints(own, 1, group_of_all()).agreed_newest()


def test_all_ranks_go_on_from_what_the_first_finds(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "step-4", {"a": torch.zeros(2)}, {})
    (tmp_path / "step-5").mkdir()
    first, second = ranks(2).run(_newest, str(tmp_path))
    assert first == second and first[0] == tmp_path / "step-4" and "complete.json is missing" in first[1][0]


def _die_while_saving(rank: int, folder: str, point: str, who: int) -> tuple[str, int] | None:
    checkpoints = Checkpoints(Path(folder), 1, group_of_all())
    checkpoints.save(1, _state(rank, 2, 1.0), {"trainer.json": "{}"})
    checkpoints.wait()

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    targets = {
        "plan": (Shards, "__create_write_items__"),
        "tensors": (Shards, "__get_tensor_shard__"),
        "files": (os, "fsync"),
        "rename": (os, "rename"),
    }
    if rank == who:
        setattr(*targets[point], die)
    checkpoints.save(2, _state(rank, 2, 2.0), {"trainer.json": "{}"})
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error), error.exit_code
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("point", "who"), [("plan", 1), ("tensors", 0), ("files", 1), ("rename", 0)])
def test_a_rank_that_is_killed_while_saving_leaves_no_checkpoint_and_the_other_says_so(
    point: str, who: int, tmp_path: Path
) -> None:
    pool = Ranks(2)
    try:
        for pipe in pool._pipes:  # `run` would end the survivor with the other
            pipe.send((_die_while_saving, (str(tmp_path), point, who)))
        fine, value = pool._pipes[1 - who].recv()
    finally:
        pool.stop()
    assert fine, value
    sentence, exit_code = value
    assert exit_code == 1 and "could not be written" in sentence and "group checkpoint" in sentence
    assert [path.name for path in Checkpoints(tmp_path, 1).all()] == ["step-1"]
    found = {"model": {"a": torch.zeros(80, 50)}}
    read(tmp_path / "step-1", found)
    assert bool((found["model"]["a"] == 1.0).all())
