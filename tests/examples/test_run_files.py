"""Every run file of examples/ trains, in the order that its comments give."""

import math
import random
import shutil
import string
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.report import read_run

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    *("--set", "train.steps=3", "--set", "train.warmup_steps=1", "--set", "train.eval_every=0"),
    *("--set", "train.global_batch=2", "--set", "layout.micro_batch=2", "--set", "train.seq_len=32"),
    *("--set", "train.eval_batches=1"),
]
LETTERS = string.ascii_letters + string.digits + string.punctuation + " "


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with examples/ and some text under the names that the run files use."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("src", "tests"):
        (folder / name).mkdir()
        # A text of its own, so that losses do not follow the sources: many letters, none of them often.
        drawn = random.Random(7)
        for number in range(20):
            lines = ("".join(drawn.choices(LETTERS, k=60)) for _ in range(200))
            (folder / name / f"text{number}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def inside(work, monkeypatch):
    monkeypatch.chdir(work)
    monkeypatch.setenv("MOESAIC_CACHE", str(work / "cache"))


def train(name: str, *sets: str) -> None:
    assert main(["check", f"examples/{name}.toml"]) == 0
    assert main(["train", f"examples/{name}.toml", *SHORT, *(each for key in sets for each in ("--set", key))]) == 0


def first_and_last(name: str) -> tuple[float, float]:
    losses = [loss for _, loss in read_run(Path("runs") / name).series("loss")]
    return losses[0], losses[-1]


def test_every_run_file_is_tried_here():
    names = {path.stem for path in (ROOT / "examples").glob("*.toml")}
    assert names == {
        "demo", "mixtral-tiny", "deepseek-tiny", "finetune", "upcycle-dense", "upcycle", "long-context"
    }  # fmt: skip


def test_long_context_at_fewer_tokens():
    """Its 32,768 tokens take minutes a step; `recompute` is as in the file."""
    train("long-context", "train.seq_len=256", "model.num_hidden_layers=3")


def test_deepseek_tiny():
    train("deepseek-tiny")


def test_mixtral_tiny_then_finetune():
    train("mixtral-tiny")
    assert main(["report", "runs/mixtral-tiny"]) == 0
    assert main(["export", "runs/mixtral-tiny", "runs/mixtral-tiny-hf"]) == 0
    train("finetune")
    # Fine-tuning starts where the other run ended, not at the loss of random weights.
    assert first_and_last("mixtral-tiny")[0] == pytest.approx(math.log(257), abs=0.1)
    assert first_and_last("finetune")[0] < first_and_last("mixtral-tiny")[0] - 0.02


def test_upcycle_starts_at_the_loss_of_the_dense_model():
    train("upcycle-dense")
    train("upcycle")
    dense, mixture = read_run(Path("runs/upcycle-dense")), read_run(Path("runs/upcycle"))
    assert mixture.series("loss")[0][1] < dense.series("loss")[0][1]
