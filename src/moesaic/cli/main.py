"""The `moesaic` command: its subcommands, and what an error looks like.

Command modules import heavy rooms inside their functions, so that `--help` and the commands that need no torch
start at once.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from moesaic import __version__
from moesaic.spec.errors import MoesaicError

COMMANDS = {
    "model": "moesaic.cli.model:model",
    "explain": "moesaic.cli.explain:explain",
    "check": "moesaic.cli.check:check",
    "layout": "moesaic.cli.layout:layout",
    "plan": "moesaic.cli.plan:plan",
    "fit": "moesaic.cli.fit:fit",
    "accuracy": "moesaic.cli.accuracy:accuracy",
    "calibrate": "moesaic.cli.calibrate:calibrate",
    "train": "moesaic.cli.train:train",
    "generate": "moesaic.cli.generate:generate",
    "report": "moesaic.cli.report:report",
    "import": "moesaic.cli.import_export:import_",
    "export": "moesaic.cli.import_export:export",
}
"""Command name → module:function. A function returns None or an exit code."""

TRAIN_EXTRA = {"torch", "safetensors", "tokenizers", "datasets", "pyarrow", "tensorboard"}


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit code: 0 done, 2 bad input or refused, 3 stopped by a signal after
    saving, 4 stopped for a non-finite loss, 1 anything else."""
    try:
        result = _app()(list(arguments) or ["--help"], prog_name="moesaic", standalone_mode=False)
    except MoesaicError as error:
        return _fail(str(error), error.exit_code, error)
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAIN_EXTRA:
            raise
        return _fail(f"this command needs {error.name}, which is not installed: pip install 'moesaic[train]'.", 2)
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}.", 2)
        if error.errno not in _NO_ROOM:
            raise
        return _fail(f"{error.strerror}: what was being written is not whole. Make room and try again.", 2)
    except Exception as error:
        if not _is_usage_error(error):
            raise
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    if result == _INTERRUPTED:
        return _fail("interrupted.", 1)
    return result if isinstance(result, int) else 0


def run() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter, or a path that is not UTF-8, is no reason to stop.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main(sys.argv[1:])
    except Exception as error:
        code = 1
        among = _among_several()
        if among is None:
            raise
        among.report(f"{type(error).__name__}: {error}", code, error)
    among = _among_several()
    if among is not None:
        among.leave(code)
    sys.exit(code)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = 130
"""What typer returns for Ctrl-C that no command handled."""


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_top)
    for name, target in COMMANDS.items():
        app.command(name)(_load(target))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesaic {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plans, trains, measures and rebalances mixture-of-experts language models."""


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _is_usage_error(error: Exception) -> bool:
    # Typer raises click's exceptions, of the click package or of its own copy, depending on its version.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _fail(message: str, code: int, error: Exception | None = None) -> int:
    among = _among_several()
    if among is None:
        print(f"moesaic: {message}", file=sys.stderr)
    else:
        among.report(message, code, error)
    return code


def _among_several() -> Any:
    """The module that speaks for one process of several; None where this is the only one."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return None
    try:
        launch: Any = importlib.import_module("moesaic.train.launch")
    except ModuleNotFoundError:
        return None
    return launch if launch.among_several() else None
