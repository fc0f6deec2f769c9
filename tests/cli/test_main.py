"""Exit codes and messages of the command line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic
from moesaic.cli import main as cli
from moesaic.cli.main import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["moesaic", moesaic.__version__]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage: moesaic " + name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["chek"], "check"),
        (["check"], "argument"),
        (["check", "x.toml", "--sat"], "--sat"),
        (["check", "no-such.toml"], "'no-such.toml' does not exist"),
        (["explain", "train.sede"], "did you mean 'seed'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_ctrl_c_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", lambda target: interrupted)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "moesaic: interrupted.\n"


def test_exit_code_of_a_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda target: lambda: 3)
    assert main(["train"]) == 3


def test_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs_torch() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "_load", lambda target: needs_torch)
    assert main(["train"]) == 2
    assert "pip install 'moesaic[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out/file", None])
def test_a_full_disk_is_one_line(
    name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(cli, "_load", lambda target: full)
    assert main(["report"]) == 2
    shown = capsys.readouterr().err
    assert "No space left on device" in shown and shown.count("\n") == 1


def test_letters_that_the_terminal_lacks_are_no_error() -> None:
    done = run_python("-X", "utf8=0", "-c", "import sys; sys.stdout.reconfigure(encoding='ascii');"
                      "from moesaic.cli.main import run; sys.argv[1:] = ['explain', 'train.steps']; run()")  # fmt: skip
    assert done.returncode == 0 and "\\u2265 1" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "run", "--seed", "9" * 30],
        ["generate", "run", "--seed", "-1"],
        ["generate", "run", "--temperature", "nan"],
        *(["export", "run", "out", "--max-shard-gb", value] for value in ("nan", "inf", "-1", "0")),
        ["model", "Mixtral-8x7B", "--seq-len", "9" * 400],
    ],
)
def test_numbers_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"moesaic: Invalid value for '{arguments[-2]}'")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_load", lambda target: defect)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = Path(moesaic.__file__).parent.parent
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(source)}
    )


def test_python_m_moesaic_is_the_same_command() -> None:
    done = run_python("-m", "moesaic", "explain", "nothing.like.it")
    assert done.returncode == 2
    assert done.stderr.startswith("moesaic: unknown key") and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["model", "Mixtral-8x7B", "--json"], ["explain"]])
def test_commands_that_need_no_torch_do_not_load_it(arguments: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; from moesaic.cli.main import main; sys.exit(main({arguments!r}))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
