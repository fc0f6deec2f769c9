"""`moesaic layout`: who is where, every legal layout, and what an illegal one gets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import legal_layouts


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["layout", *arguments]) == 0
    return capsys.readouterr().out


def facts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(printed([*arguments, "--json"], capsys))


CHAPTER = Path(__file__).resolve().parents[2] / "docs" / "layout.md"
DEEPSEEK = ["DeepSeek-V3", "--layout", "pp2 dp2 cp2 tp2 / ep8", "--gpus-per-node", "4"]


def test_ranks_groups_and_stages(capsys):
    text = printed(DEEPSEEK, capsys)
    for part in (
        "pp2 dp2 cp2 tp2 / edp1 ep8 etp1",
        "16 ranks on 4 nodes of 4",
        "256 experts: 32 on each of 8 ranks, 1 copy per stage",
        "stages Et*31|t*30mL",
        "layers 31–60, prediction blocks, head and loss",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    # rank, node, pp, dp, cp, tp, edp, ep, etp of the seventh rank, by hand: 6 = 1·4 + 1·2 + 0.
    assert ["6", "1", "0", "1", "1", "0", "0", "6", "0"] in rows
    assert any(row[:3] == ["tp", "2", "8"] and "none" in row for row in rows)
    assert any(row[:3] == ["ep", "8", "2"] and "all" in row for row in rows)


def test_json_has_every_rank_and_group(capsys):
    found = facts(DEEPSEEK, capsys)
    assert found["world"] == 16 and found["nodes"] == 4 and len(found["ranks"]) == 16
    names = ("rank", "node", "pp", "dp", "cp", "tp", "edp", "ep", "etp")
    assert found["ranks"][6] == dict(zip(names, (6, 1, 0, 1, 1, 0, 0, 6, 0), strict=True))
    groups = found["groups"]
    assert groups["sequence"]["ranks"][1] == [4, 5, 6, 7] and groups["sequence"]["cross_nodes"] == []
    assert groups["data"]["ranks"][0] == [0, 2, 4, 6] and groups["data"]["axes"] == ["dp", "cp"]
    assert groups["ep"]["cross_nodes"] == groups["ep"]["ranks"] == [list(range(8)), list(range(8, 16))]
    assert [stage["pp"] for stage in found["stages"]] == [0, 1]


def test_only_some_groups_may_cross_nodes(capsys):
    arguments = ["Mixtral-8x7B", "--layout", "dp3 tp2", "--gpus-per-node", "3"]
    assert facts(arguments, capsys)["groups"]["tp"]["cross_nodes"] == [[2, 3]]
    assert "1 of 3: [2,3]" in printed(arguments, capsys)


def test_expert_counts_that_differ_have_their_own_columns(tmp_path, capsys):
    config = {
        "model_type": "moesaic",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": [2, 4],
        "num_experts_per_tok": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = facts([str(tmp_path), "--layout", "dp4 / ep4"], capsys)
    assert [(entry["ep"], entry["edp"]) for entry in found["experts"]] == [(2, 2), (4, 1)]
    last = found["ranks"][3]
    assert (last["edp-2"], last["ep-2"], last["edp-4"], last["ep-4"]) == (1, 1, 0, 3)
    assert found["groups"]["edp-2"]["ranks"] == [[0, 2], [1, 3]]


def test_the_handbook_shows_what_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    blocks = [block for block in CHAPTER.read_text().split("```") if block.startswith("\n$ moesaic layout")]
    assert len(blocks) == 2
    for block in blocks:
        command, *shown = block.strip().splitlines()
        main(shlex.split(command)[2:])
        captured = capsys.readouterr()
        printed_words = " ".join((captured.out + captured.err).split())
        for line in shown:
            assert " ".join(line.replace("…", "").split()) in printed_words


@pytest.mark.parametrize("world", [1, 4, 12])
def test_all_lists_every_legal_layout(world, capsys):
    expected = [str(layout) for layout in legal_layouts(load_model_spec("Mixtral-8x7B"), world)]
    lines = printed(["Mixtral-8x7B", "--world", str(world), "--all"], capsys).splitlines()
    assert lines[:-1] == expected
    assert lines[-1].startswith(f"{len(expected)} legal layout")
    assert json.loads(printed(["Mixtral-8x7B", "--world", str(world), "--all", "--json"], capsys)) == expected


RUN = """
[model]
preset = "Mixtral-8x7B"
num_hidden_layers = 4
[layout]
tp = 2
ep = 4
[train]
seq_len = 128
global_batch = 8
"""


def test_a_run_file_its_folder_and_its_options(tmp_path: Path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    for source in (file, tmp_path):
        assert facts([str(source)], capsys)["layout"] == "pp1 dp2 cp1 tp2 / edp1 ep4 etp1"
    assert facts([str(file), "--world", "8"], capsys)["layout"] == "pp1 dp4 cp1 tp2 / edp2 ep4 etp1"
    cluster = ["--set", "cluster.nodes=2", "--set", "cluster.gpus_per_node=8"]
    found = facts([str(file), *cluster, "--set", "layout.pp=2"], capsys)
    assert (found["layout"], found["nodes"]) == ("pp2 dp4 cp1 tp2 / edp2 ep4 etp1", 2)
    options = ["layout.cp_kind=ring", "layout.virtual_stages=2", "layout.order=dp-outer", "layout.stages=E|tt|tt|L"]
    sets = [word for option in options for word in ("--set", option)]
    text = printed([str(file), "--layout", "pp2 dp1 cp2 tp2 / ep4", *sets], capsys)
    assert "ring context parallelism, schedule interleaved, order dp-outer" in " ".join(text.split())
    assert "stages E|t*2|t*2|L" in text
    # Sequence and batch of the run count, so its list is shorter than that of the model alone.
    everything = json.loads(printed([str(file), "--world", "16", "--all", "--json"], capsys))
    assert everything and all(int(text.split()[1][2:]) <= 8 for text in everything)


def test_many_ranks_are_cut_short(capsys):
    text = printed(["Mixtral-8x7B", "--world", "256", "--set", "layout.ep=8"], capsys)
    assert "The first 64 of 256 ranks are shown; --json has all." in text and "… (32)" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["Mixtral-8x7B", "--layout", "pp2 dp2 tp2 / ep3"], ["8 % 3 = 2", "Nearest legal for 8", "ep4 etp1"]),
        (["Mixtral-8x7B", "--world", "6", "--layout", "dp4"], ["1·4·1·1 = 4, but the world is 6", "Nearest"]),
        (["Mixtral-8x7B", "--layout", "dp4 / edp2 ep4"], ["gives edp2", "makes it edp1"]),
        (["Mixtral-8x7B", "--layout", "dq4"], ["'dq4'", "'dp'"]),
        (["Mixtral-8x7B", "--layout", "dp1 tp16"], ["kv_heads % tp = 8 % 16"]),
        (["Mixtral-8x7B", "--set", "layout.dp=0"], ["layout.dp is 0", "at least 1"]),
        (["Mixtral-8x7B", "--set", "train.seq_len=1021", "--layout", "tp2"], ["1021 tokens", "1020 or 1022"]),
        (["Mixtral-8x7B", "--set", "layout.stages=Et"], ["places 1 of 't'", "has 32"]),
        (["Mixtral-8x7B", "--world", "0"], ["--world"]),
        (["Mixtral-9x7B"], ["Mixtral-8x7B"]),
        (["nowhere.toml"], ["nowhere.toml"]),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments, parts, capsys):
    assert main(["layout", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("moesaic: ") and "Traceback" not in captured.err and captured.out == ""
    for part in parts:
        assert part in captured.err
