"""The rooms and the arrows between them: who may import whom, who works without torch, how large a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "moesaic"

# Each room may import itself, the rooms listed, and everything those may import.
ARROWS: dict[str, set[str]] = {
    "spec": set(),
    "cost": {"spec"},
    "plan": {"cost"},
    "mesh": {"spec"},
    "dispatch": {"mesh"},
    "model": {"dispatch"},
    "hf": {"model"},
    "schedule": {"model"},
    "train": {"schedule", "hf", "cost"},
    "tune": {"train", "plan"},
    "post": {"train"},
    "balance": {"cost"},
    "report": {"cost"},
    "cli": {"plan", "tune", "post", "balance", "report"},
}
WITHOUT_TORCH = [room for room in ("spec", "cost", "plan", "report", "cli") if any((SRC / room).glob("*.py"))]
MAX_LINES = 500


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def reachable(room: str) -> set[str]:
    seen, todo = {room}, [room]
    while todo:
        for other in ARROWS[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything that a file imports, at its top or inside a function.

    `from package import name` counts as package.name, since the name may be a module.
    """
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def test_every_room_is_known() -> None:
    rooms = {path.relative_to(SRC).parts[0] for path in files() if path.parent != SRC}
    assert rooms <= ARROWS.keys()


def test_arrows_have_no_cycle() -> None:
    for room, others in ARROWS.items():
        assert not any(room in reachable(other) for other in others), room


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for path in files():
        if path.parent == SRC:
            continue
        room = path.relative_to(SRC).parts[0]
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "moesaic" and len(parts) > 1 and parts[1] in ARROWS and parts[1] not in reachable(room):
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {name}, but {room} may not")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_room_works_without_torch(room: str) -> None:
    modules = [module_of(path) for path in files() if path.relative_to(SRC).parts[0] == room]
    # A None in sys.modules makes every import of that name fail, as if it were not installed.
    blocked = ["torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "tensorboard"]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC.parent)}
    )
    assert done.returncode == 0, done.stderr


def test_the_device_is_asked_in_one_place() -> None:
    wrong = []
    for path in files():
        if path == SRC / "mesh" / "device.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda"):
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno}")
        wrong += [f"{path.relative_to(SRC)}:{line}" for line, name in imports(path) if name.startswith("torch.cuda")]
    assert not wrong, f"torch.cuda belongs in mesh/device.py: {wrong}"


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(SRC)): n for path in files() if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_names_say_something() -> None:
    assert not [path for path in files() if path.stem in {"utils", "util", "misc", "common", "helpers"}]
