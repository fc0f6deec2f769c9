"""Every run file that people copy is right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from moesaic.spec.run import load_run, parse_run, require_single_process

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example(path: Path) -> None:
    run = load_run(path)
    require_single_process(run)
    # A folder to start from exists only after the runs named in the file.
    if run.model.hf is None:
        assert run.train.seq_len <= run.model_spec().max_positions


def test_run_file_of_the_handbook() -> None:
    chapter = (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", chapter, flags=re.DOTALL)
    assert len(parse_run(tomllib.loads(text)).model_spec().layers) == 2
