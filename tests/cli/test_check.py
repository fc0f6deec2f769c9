"""`moesaic check` and `moesaic explain`: what a run file amounts to, and what is wrong with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.spec.run import parse_run

CHAPTER = Path(__file__).resolve().parents[2] / "docs" / "run-file.md"

TINY = """
[model]
preset = "Mixtral-8x7B"
hidden_size = 64
intermediate_size = 32
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
num_hidden_layers = 2
vocab_size = 300

[data]
path = "text"

[train]
steps = 10
seq_len = 16
global_batch = 4
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words " * 100)
    (tmp_path / "tiny.toml").write_text(TINY)
    return "tiny.toml"


def test_check_prints_what_a_step_amounts_to(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", run_file, "--set", "layout.micro_batch=2"]) == 0
    shown = capsys.readouterr().out
    # By hand: embedding and head 2·300·64, final norm 64; per layer q,o 2·64·64, k,v 2·64·32, two norms, router
    # 8·64, and per expert 3·64·32, of which two are active.
    rest, expert = 2 * 300 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 + 8 * 64), 3 * 64 * 32
    assert f"{rest + 2 * 8 * expert:,} in all" in shown
    assert "4 sequences of 16 = 64 tokens, 2 micro-batches of 2" in shown
    assert "10 steps = 640 tokens" in shown
    assert "1 files, 600 bytes" in shown
    assert "tiny (mixtral)" in shown


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.hiden_size=64", ["'hiden_size'", "'hidden_size'"]),
        ("model.preset=Mixtral-8x8B", ["'Mixtral-8x8B'", "'Mixtral-8x7B'"]),
        ("model.num_experts_per_tok=9", ["9", "8"]),
        ("model.num_attention_heads=3", ["3", "2"]),
        ("model.vocab_size=100", ["257", "100"]),
        ("data.path=texts", ["texts", "'text'"]),
        ("data.tokenizer=bpe:many", ["'bpe:many'", "bpe:8192"]),
        ("data.tokenizer=nowhere", ["nowhere"]),
        ("train.stpes=3", ["'train.stpes'", "'steps'"]),
    ],
)
def test_check_says_what_is_wrong(
    override: str, parts: list[str], run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", run_file, "--set", override]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_check_of_data_without_text(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text" / "a.txt").write_text("")
    assert main(["check", run_file]) == 2
    assert "0 bytes" in capsys.readouterr().err


def test_explain_one_key_and_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["explain", "layout.micro_batch"]) == 0
    shown = capsys.readouterr().out
    assert "layout.micro_batch" in shown and "sequences" in shown and "default  1" in shown
    assert main(["explain", "train"]) == 0
    assert "train.warmup_steps" in capsys.readouterr().out


def test_the_handbook_lists_every_key_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--markdown"]) == 0
    assert CHAPTER.read_text(encoding="utf-8").endswith(capsys.readouterr().out)


def test_the_run_file_of_the_handbook_is_right() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", CHAPTER.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(parse_run(tomllib.loads(text)).model_spec().layers) == 2
