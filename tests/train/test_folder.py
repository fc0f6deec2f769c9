"""A run's folder has one writer, and a refused run leaves nothing in it."""

from __future__ import annotations

import multiprocessing

import pytest

from moesaic.spec.errors import MoesaicError
from moesaic.train import loop
from moesaic.train.folder import RunError, cache_folder, lock


def _hold(folder, ready, done):
    with lock(folder):
        ready.set()
        done.wait(60)


def test_two_processes_cannot_train_into_one_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RunError, match=rf"Process {other.pid} is training into .*run\.dir"), lock(tmp_path / "run"):
            pass
    finally:
        done.set()
        other.join()
    with lock(tmp_path / "run"):
        pass


def test_a_killed_writer_frees_the_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", ready, done))
    other.start()
    assert ready.wait(60)
    other.kill()
    other.join()
    with lock(tmp_path / "run"):
        pass


def test_a_refused_run_leaves_no_folder(make_run, console, tmp_path):
    with pytest.raises(MoesaicError, match="nowhere"):
        loop.train(make_run("refused", "data.path='nowhere.txt'"), console=console)
    assert not (tmp_path / "refused").exists()


def test_a_file_in_place_of_the_folder_is_refused(make_run, console, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="which is a file"):
        loop.train(make_run("file"), console=console)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("MOESAIC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b" / "moesaic"
