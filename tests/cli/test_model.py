"""`moesaic model`: the figures that scripts read, and what bad input gets."""

from __future__ import annotations

import json

import pytest

from moesaic.cli.main import main
from moesaic.spec.presets import PRESETS


def test_json_has_the_promised_keys(capsys):
    assert main(["model", "Mixtral-8x7B", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == "Mixtral-8x7B"
    assert facts["parameters"]["total"] == 46_702_792_704
    assert sum(facts["parameters"]["by_part"].values()) == facts["parameters"]["total"]
    assert facts["flops_per_token"]["total"] == pytest.approx(79.7e9, rel=2e-3)
    assert sum(facts["flops_per_token"]["by_part"].values()) == facts["flops_per_token"]["total"]
    assert facts["checkpoint_bytes"] == 2 * 46_702_792_704
    assert facts["seq_len"] == 4096 and facts["mtp"] is None


def test_sequence_length_changes_only_attention(capsys):
    main(["model", "MegaScale-MoE-352B", "--seq-len", "8192", "--json"])
    long = json.loads(capsys.readouterr().out)["flops_per_token"]
    main(["model", "MegaScale-MoE-352B", "--seq-len", "4096", "--json"])
    short = json.loads(capsys.readouterr().out)["flops_per_token"]
    assert long["total"] == pytest.approx(282.5e9, rel=2e-3)
    assert long["by_part"]["attention_core"] == 2 * short["by_part"]["attention_core"]
    assert long["by_part"]["experts"] == short["by_part"]["experts"]


def test_table_shows_parts_notes_and_source(capsys):
    assert main(["model", "deepseek-v3"]) == 0
    text = capsys.readouterr().out
    for word in ("671.03 B", "249.81 GFLOP", "shared experts", "Multi-token prediction", "Source:"):
        assert word in text
    main(["model", "352B"])
    assert "inferred" in capsys.readouterr().out


def test_list_names_every_preset(capsys):
    assert main(["model", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS)
    main(["model", "--list", "--json"])
    assert json.loads(capsys.readouterr().out) == list(PRESETS)


def test_a_path_works_like_a_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["OLMoE-1B-7B"]))
    assert main(["model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == 6_919_161_856


@pytest.mark.parametrize(
    "arguments", [["model"], ["model", "mixtral-9x7b"], ["model", "Mixtral-8x7B", "--seq-len", "0"]]
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("moesaic: ") and "Traceback" not in captured.err
