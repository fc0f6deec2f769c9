"""A job whose gradients are summed under backward and sent in bf16: it trains as one without, and says what it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.jobs import Job, job_folder

pytestmark = pytest.mark.long


def test_a_job_says_that_gradients_are_compressed_and_trains_alike(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    steps = ["train.steps=4", "train.dtype=fp32", 'layout.overlap=["gradients", "parameters"]']
    plain = Job(folder, "plain", 2, *steps)
    assert plain.end() == 0, plain.said()
    small = Job(folder, "small", 2, *steps, 'layout.compression=["gradients"]')
    assert small.end() == 0, small.said()
    rows = [json.loads(line) for line in small.metrics.read_text().splitlines()]
    assert [row["compression"] for row in rows] == [["gradients"]] * 4
    assert "compression" not in plain.metrics.read_text()
    assert "Compressed, which changes results a little: gradients (layout.compression)." in small.said()
    assert "layout.overlap 'parameters' has no effect: no weights are sharded" in plain.said()
    assert small.losses(4) == pytest.approx(plain.losses(4), rel=1e-3) and small.losses(4) != plain.losses(4)


def test_compression_without_copies_of_parameters_is_said_to_have_no_effect(tmp_path: Path) -> None:
    job = Job(job_folder(tmp_path), "one", 1, "train.steps=1", 'layout.compression=["gradients"]')
    assert job.end() == 0, job.said()
    assert "layout.compression 'gradients' has no effect" in job.said()
    assert "compression" not in job.metrics.read_text()
