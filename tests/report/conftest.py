"""A small run's folder, written by hand, as the trainer would leave it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def make_rows(steps: int = 40, experts: int = 4, layers: int = 2) -> list[dict]:
    """Rows of metrics with a falling loss, in which expert 3 of layer 1 never gets a token."""
    rows = []
    for step in range(1, steps + 1):
        load = {str(layer): [100 + expert for expert in range(experts)] for layer in range(layers)}
        load["1"][-1] = 0
        row = {
            "step": step,
            "loss": 8.0 / step**0.5,
            "grad_norm": 1.0 + 1.0 / step,
            "lr": 1e-3,
            "tokens": 400,
            "tokens_per_second": 1000.0,
            "seconds": 0.4,
            "expert_load": load,
            "load_max_over_mean": {"0": 1.01, "1": 1.5},
            "dead_experts": {"0": 0, "1": 1},
            "dropped_tokens": 0,
            "seconds_by_phase": {"data": 0.1, "forward": 0.1, "backward": 0.2},
            "peak_memory_bytes": 2**28,
        }
        if step % 10 == 0:
            row |= {"validation_loss": 8.1 / step**0.5, "validation_bits_per_byte": 2.5}
        rows.append(row)
    return rows


@pytest.fixture(name="make_rows")
def make_rows_fixture():
    return make_rows


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    lines = [json.dumps(row) + "\n" for row in make_rows()]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "run.toml").write_text('[train]\nclip = 1.5\n[run]\nname = "tiny"\n')
    (tmp_path / "baselines.json").write_text('{"unigram": {"loss": 6.5}, "bigram": {"loss": 4.5}}')
    (tmp_path / "sample.txt").write_text("if a < b and c:\n    print('</script>')\n")
    return tmp_path
