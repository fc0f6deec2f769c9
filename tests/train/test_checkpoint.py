"""Checkpoints are whole or absent, whatever fails and whenever."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.train import checkpoint, loop
from moesaic.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    damage,
    find,
    first_difference,
    load_model_checkpoint,
    read,
    save_model_checkpoint,
    write,
)

TINY = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def state(value: float, size: int = 300):
    return {"model": {"a": torch.full((size, 4), value), "b": torch.full((3,), value).bfloat16()}}


def value_in(folder: Path) -> float:
    found = state(-1.0)
    read(folder, found)
    values = torch.cat([tensor.float().flatten() for tensor in found["model"].values()])
    assert bool((values == values[0]).all()), "a checkpoint mixes two states"
    return float(values[0])


@pytest.fixture
def saved(tmp_path):
    """A folder with a good step-1."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, state(1.0), {"trainer.json": "{}"})
    checkpoints.wait()
    return checkpoints


def test_what_is_written_is_a_copy_of_the_moment_of_saving(saved):
    live = state(2.0)
    saved.save(2, live, {})
    live["model"]["a"].fill_(9.0)
    saved.wait()
    assert value_in(saved.folder / "step-2") == 2.0


def test_only_the_newest_are_kept(saved):
    for step in (2, 3, 12):
        saved.save(step, state(float(step)), {})
    saved.wait()
    assert [path.name for path in saved.all()] == ["step-3", "step-12"]
    assert [value_in(path) for path in saved.all()] == [3.0, 12.0]
    assert sorted(os.listdir(saved.folder)) == ["step-12", "step-3"]


def test_a_damaged_newer_folder_does_not_push_a_good_one_out(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step-100").mkdir()
    for step in (1, 2):
        checkpoints.save(step, state(float(step)), {})
    checkpoints.wait()
    assert checkpoints.newest()[0].name == "step-2"
    assert [path.name for path in checkpoints.all()] == ["step-2", "step-100"]


def test_keep_zero_keeps_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in range(4):
        checkpoints.save(step, state(1.0), {})
    checkpoints.wait()
    assert len(checkpoints.all()) == 4


CALLS = ["open", "fsync", "rename", "mkdir"]


@pytest.mark.parametrize("name", CALLS)
def test_a_full_disk_at_any_write_leaves_the_old_checkpoint(saved, name, monkeypatch):
    """Each call that touches the disk fails in turn with 'no space left', until an attempt meets none that fails."""
    for nth in range(1, 30):
        failing = FailingCalls(name, nth, saved.folder)
        with monkeypatch.context() as patch:
            failing.install(patch)
            saved.save(2, state(2.0), {"trainer.json": "{}", "run.toml": ""})
            saved_well = True
            try:
                saved.wait()
            except CheckpointError as error:
                saved_well = False
                assert "disk is full" in str(error) and "--resume" in str(error) and error.exit_code == 2
        assert saved_well or failing.failed
        assert not list(saved.folder.glob(".tmp-step*")), "the temporary folder is removed"
        newest, passed_over = saved.newest()
        assert passed_over == []
        assert value_in(newest) == {"step-1": 1.0, "step-2": 2.0}[newest.name]
        assert damage(saved.folder / "step-1") is None and value_in(saved.folder / "step-1") == 1.0
        if not failing.failed:
            assert saved_well and nth > 1
            return
    pytest.fail(f"{name} never ran out of calls to fail")


class FailingCalls:
    """Makes the nth call of one function on files under `folder` raise ENOSPC."""

    def __init__(self, name, nth, folder):
        self.name, self.left, self.folder, self.failed = name, nth, str(folder), False

    def hit(self, target) -> None:
        if not isinstance(target, int) and self.folder not in os.fspath(target):
            return
        self.left -= 1
        if self.left == 0:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device", str(target))

    def refuse(self, target, _text) -> None:
        self.hit(target)

    def install(self, patch) -> None:
        import builtins

        owner = builtins if self.name == "open" else os
        real = getattr(owner, self.name)

        def failing(target, *args, **kwargs):
            if self.name != "open" or any(set(str(mode)) & set("wax") for mode in args[:1]):
                self.hit(target)
            return real(target, *args, **kwargs)

        patch.setattr(owner, self.name, failing)


def test_a_disk_that_fills_within_a_file(saved):
    """A file-size limit stops the write in the middle of the tensors, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        saved.save(2, state(2.0, size=100_000), {})
        with pytest.raises(CheckpointError, match=r"could not be written.*step-1"):
            saved.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(saved.folder) == ["step-1"] and value_in(saved.folder / "step-1") == 1.0


def test_a_defect_is_not_blamed_on_the_disk(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_text", lambda *_: 1 // 0)
    saved.save(2, state(2.0), {})
    with pytest.raises(ZeroDivisionError):
        saved.wait()
    assert os.listdir(saved.folder) == ["step-1"]


def test_what_went_wrong_is_known_without_waiting_and_told_once(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_text", FailingCalls("text", 1, saved.folder).refuse)
    saved.check()
    saved.save(2, state(2.0), {"trainer.json": "{}"})
    saved._thread.join()
    assert saved.failed
    with pytest.raises(CheckpointError, match=r"disk is full.*step-1"):
        saved.check()
    assert not saved.failed
    saved.check()
    saved.wait()


def test_a_failed_save_stops_the_run_with_a_sentence_and_a_resumed_run_is_the_same(
    make_run, console, tmp_path, monkeypatch, assert_same_run
):
    assert loop.train(make_run("straight"), console=console) == 0
    run = make_run("full")
    real = checkpoint._write_text

    def failing(path, text):
        if "step-4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_text", failing)
        with pytest.raises(CheckpointError, match=r"The disk is full.*step-2"):
            loop.train(run, console=console)
    assert loop.train(run, resume=True, console=console) == 0
    assert_same_run(tmp_path / "full", tmp_path / "straight")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda p: (p / "complete.json").unlink(), "complete.json is missing"),
        (lambda p: (p / "trainer.json").write_text("{ }  "), "trainer.json has 5 bytes and should have 2"),
        (lambda p: next(p.glob("*.distcp")).unlink(), "is missing"),
        (lambda p: (p / "complete.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_harmed_checkpoint_is_passed_over(saved, harm, expected):
    saved.save(2, state(2.0), {"trainer.json": "{}"})
    saved.wait()
    harm(saved.folder / "step-2")
    newest, passed_over = saved.newest()
    assert newest.name == "step-1"
    assert expected in passed_over[0]


def test_leftovers_are_removed_and_never_taken_for_checkpoints(saved):
    (saved.folder / ".tmp-step-9").mkdir()
    (saved.folder / "step-x").mkdir()
    assert saved.newest()[0].name == "step-1"
    saved.remove_leftovers()
    assert sorted(os.listdir(saved.folder)) == ["step-1", "step-x"]


def test_find_takes_a_run_its_checkpoints_or_one_of_them(saved):
    expected = saved.folder / "step-1"
    assert find(saved.folder.parent) == find(saved.folder) == find(expected) == expected
    for path in (saved.folder / "step-7", saved.folder.parent / "nothing"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            find(path)


def test_a_model_round_trips_bit_for_bit_in_both_types(tmp_path):
    spec = load_model_spec(TINY)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = Decoder(spec, dtype=dtype)
        decoder.init_weights(3)
        save_model_checkpoint(decoder, spec, tmp_path / str(dtype))
        back = load_model_checkpoint(tmp_path / str(dtype))
        assert back.spec == spec
        for (name, a), (_, b) in zip(decoder.state_dict().items(), back.state_dict().items(), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        wide = load_model_checkpoint(tmp_path / str(dtype), torch.float32)
        assert torch.equal(wide.embed.weight, decoder.embed.weight.float())


def test_the_first_difference_is_named():
    spec = load_model_spec(TINY)
    assert first_difference(spec, load_model_spec(TINY | {"router_aux_loss_coef": 0.5})) is None
    assert first_difference(spec, load_model_spec(TINY | {"vocab_size": 65})) == (
        "vocab is 64 in the checkpoint and 65 here"
    )
    assert "layers has 1 entries in the checkpoint and 2 here" in first_difference(
        spec, load_model_spec(TINY | {"num_hidden_layers": 2})
    )


def test_a_missing_tensor_is_a_sentence(tmp_path):
    write(tmp_path / "step-1", state(1.0), {})
    wanted = state(0.0)
    wanted["model"]["c"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"cannot be read.*model\.c"):
        read(tmp_path / "step-1", wanted)


@pytest.mark.long
@pytest.mark.slow
def test_sigkill_at_any_point_leaves_a_checkpoint_that_resumes_bit_for_bit(
    make_run, console, tmp_path, assert_same_run
):
    """Real processes that kill themselves with SIGKILL: in a step, and at each stage of writing a checkpoint."""
    points = [
        "step 3",
        "write .tmp-step-4/complete.json",
        "rename .tmp-step-4",
        "renamed .tmp-step-4",
        "renamed step-2",
        "metrics_torn 3",
    ]
    runs = {"straight": ""} | {f"killed_{i}": point for i, point in enumerate(points)}
    plan = []
    for name, point in runs.items():
        run = make_run(name)
        (tmp_path / f"{name}.toml").write_text(run.to_toml())
        plan.append([str(tmp_path / f"{name}.toml"), point])
    driver = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, str(driver), json.dumps(plan)],
        capture_output=True,
        text=True,
        timeout=1500,
        env=_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    deaths = json.loads(done.stdout.splitlines()[-1])
    assert deaths == dict.fromkeys(points, "killed")
    for name in runs:
        assert_same_run(tmp_path / name, tmp_path / "straight")


def _environment() -> dict[str, str]:
    import moesaic

    source = str(Path(moesaic.__file__).parents[1])
    return os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
