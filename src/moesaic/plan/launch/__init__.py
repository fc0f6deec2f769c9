"""Launch files: one plan becomes the files with which another stack, or this one, starts it.

What a target has no word for is refused where the run would be another one or would not start, and otherwise noted at
the top of the files. Nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesaic.spec.errors import SpecError, nearest

from . import bridge, deepspeed, megatron, nanotron, run_file, torchtitan
from .flags import check_flags
from .plan import Plan, plain_name

__all__ = ["TARGETS", "Plan", "check_flags", "launch_files", "plain_name", "write_launch_files"]

TARGETS: dict[str, Callable[[Plan], dict[str, str]]] = {
    "megatron": megatron.files,
    "bridge": bridge.files,
    "torchtitan": torchtitan.files,
    "deepspeed": deepspeed.files,
    "nanotron": nanotron.files,
    "run-file": run_file.files,
}
"""Writers by the name of the stack that they write for."""


def launch_files(target: str, plan: Plan) -> dict[str, str]:
    """The files with which `target` runs the plan: names and texts.

    Raises:
        SpecError: an unknown target, or something of the plan that it cannot run.
    """
    if target not in TARGETS:
        raise SpecError(f"There is no launch target {target!r}; {nearest(target, TARGETS)}")
    return TARGETS[target](plan)


def write_launch_files(target: str, plan: Plan, folder: Path) -> list[Path]:
    """Writes the files of a target into a folder, which is made if need be; files of the same names are replaced.

    Raises:
        SpecError: as `launch_files`, before anything is written, or the folder cannot be written to.
    """
    files = launch_files(target, plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{str(folder)!r} cannot be written to: {error.strerror}.") from None
    return [folder / name for name in files]
