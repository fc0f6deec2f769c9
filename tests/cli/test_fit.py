"""`moesaic fit`: one rank's step without memory, beside the planner, and what a layout that does not fit gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "deepseek-tiny.toml")
FOUR = ["--world", "4", "--set", "layout.pp=2", "--set", "layout.ep=2", "--set", "layout.micro_batch=2"]


def facts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["fit", EXAMPLE, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_both_columns(capsys):
    assert main(["fit", EXAMPLE, *FOUR, "--rank", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("pp2 dp2 cp1 tp1 / edp1 ep2 etp1", "rank 3, stage 1", "dry run", "planner", "optimizer", "backward"):
        assert part in text


def test_state_is_what_the_planner_counts(capsys):
    for each in facts([*FOUR, "--all-stages"], capsys)["ranks"]:
        for name in ("parameters", "gradients", "optimizer"):
            assert each["categories"][name]["dry_run"] == each["categories"][name]["planner"] > 0


def test_every_stage_of_the_pipeline_of_a_rank(capsys):
    found = facts([*FOUR, "--rank", "3", "--all-stages"], capsys)
    assert [(each["rank"], each["stage"]) for each in found["ranks"]] == [(1, 0), (3, 1)]


def test_worse_routing_keeps_more(capsys):
    sizes = [
        facts([*FOUR, "--routing", routing], capsys)["ranks"][0]["kept"]["experts"]["dry_run"]
        for routing in ("natural", "worst")
    ]
    # Two ranks share the experts: at worst one has all rows.
    assert sizes[1] == 2 * sizes[0]


def test_a_rank_that_does_not_fit_is_refused_with_the_way_out(capsys, tmp_path):
    text = Path(EXAMPLE).read_text() + '\n[cluster]\ngpu = "h100"\n'
    run = tmp_path / "run.toml"
    run.write_text(text)
    assert main(["fit", str(run), *FOUR]) == 0
    assert "fits H100" in capsys.readouterr().out
    large = ["--set", "train.seq_len=4194304", "--set", "model.max_position_embeddings=4194304"]
    assert main(["fit", str(run), *FOUR, *large]) == 2
    error = capsys.readouterr().err
    assert "rank 0 needs" in error and "its activations take" in error and "predicted" in error


def test_a_rank_beyond_the_world_is_refused(capsys):
    assert main(["fit", EXAMPLE, *FOUR, "--rank", "4"]) == 2
    assert "rank 4 is not one of the 4 ranks" in capsys.readouterr().err
