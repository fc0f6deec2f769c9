"""`moesaic train` and `moesaic generate` as commands: exit codes and what they print."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from moesaic.cli.main import main

RUN = """
[model]
model_type = "mixtral"
vocab_size = 257
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
num_local_experts = 4
num_experts_per_tok = 2
max_position_embeddings = 64
[data]
path = "text.txt"
validation_fraction = 0.1
[layout]
micro_batch = 2
[train]
steps = 3
seq_len = 16
global_batch = 4
threads = 1
tune_malloc = false
checkpoint_every = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text("the router sends a token to two experts of four. " * 200)
    Path("run.toml").write_text(RUN)
    yield tmp_path
    torch.set_num_threads(threads)


def test_a_run_a_report_and_a_sample(folder, capsys):
    assert main(["train", "run.toml", "--set", "run.dir=out"]) == 0
    assert Path("out/report.html").is_file() and "Report: out/report.html" in capsys.readouterr().out
    assert main(["generate", "out", "--prompt", "the", "--tokens", "5", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the")
    assert main(["generate", "out/checkpoints/step-3", "--prompt", "the", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == first


def test_a_signal_is_exit_code_3_and_resume_finishes(folder, monkeypatch):
    from moesaic.train import loop

    real = loop.train_step

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        assert main(["train", "run.toml", "--set", "run.dir=out"]) == 3
    assert main(["train", "run.toml", "--set", "run.dir=out", "--resume"]) == 0


DEEPEP = "dispatcher_backend=deepep"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "run.toml", "--set", "train.stepz=3"], "steps"),
        (["train", "run.toml", "--set", "layout.ep=2"], "processes"),
        (
            ["train", "run.toml", *(f"--set=layout.{key}" for key in ("ep=2", "dispatcher=flex", DEEPEP))],
            "needs the package deep_ep, which does not import",
        ),
        (["train", "run.toml", "--set", "data.path=missing.txt"], "missing.txt"),
        (["train", "run.toml", "--set", "model.num_attention_heads=3"], "3"),
        (["train", "run.toml", "--set", "model.num_experts_per_tok=5"], "5"),
        (["train", "run.toml", "--set", "train.seq_len=100000"], "100"),
        (["train", "run.toml", "--set", "model.vocab_size=100"], "100"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["generate", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, expected, folder, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error and len(error.strip().splitlines()) == 1
    assert not Path("runs").exists(), "nothing is left behind"


def test_a_non_finite_loss_is_exit_code_4(folder, capsys):
    divergent = ["train.lr=1e38", "train.clip=0", "train.warmup_steps=0", "run.dir=out"]
    assert main(["train", "run.toml", *(word for text in divergent for word in ("--set", text))]) == 4
    assert "Step 1: after its update the weights" in capsys.readouterr().err
