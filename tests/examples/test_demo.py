import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.spec.run import load_run

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_is_kept_and_made_again_when_the_limit_changes(demo, tmp_path):
    path = tmp_path / "text.jsonl"
    first = demo.collect(path, 200_000)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = [row["name"] for row in rows]
    assert names == sorted(names) and len(names) > 5
    assert 100_000 < sum(len(row["text"].encode()) for row in rows) <= 200_000
    stamp = path.stat().st_mtime_ns
    assert demo.collect(path, 200_000).split(" (")[0] == first.split(" (")[0]
    assert path.stat().st_mtime_ns == stamp
    demo.collect(path, 100_000)
    assert path.stat().st_size < 120_000


def test_the_demo_model_has_the_size_that_its_run_file_says():
    from moesaic.cost.counts import parameters

    run = load_run(ROOT / "examples" / "demo.toml")
    spec = run.model_spec()
    assert 10e6 <= parameters(spec).total <= 30e6
    assert all(layer.moe.router.experts >= 8 for layer in spec.layers)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_killed_twice_ends_as_the_undisturbed_one(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "kill_demo.py"), "--kills", "2", "--dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all equal, bit for bit" in result.stdout

    log = (tmp_path / "undisturbed" / "log.txt").read_text()
    for wanted in (
        "unigram",
        "bigram",
        "this model",
        "32 of 32 experts alive",
        "report.html",
        "metrics.jsonl",
        "step-",
    ):
        assert wanted in log
    page = (tmp_path / "undisturbed" / "run" / "report.html").read_text(encoding="utf-8")
    assert "Load per expert" in page and "class Stack" in page
