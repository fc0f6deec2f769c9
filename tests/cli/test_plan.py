"""`moesaic plan`: what it prints, and what bad questions get."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.plan.choice import parse_choice
from moesaic.spec.layout import parse_layout

SRC = Path(__file__).resolve().parents[2] / "src"
MIXTRAL = ["mixtral-8x7b", "--gpus", "8"]
RUN = """
[model]
preset = "mixtral-8x7b"
[data]
path = "data"
[train]
seq_len = 2048
global_batch = 32
dtype = "bf16"
"""


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def facts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(printed([*arguments, "--json"], capsys))


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert not shown.out and "Traceback" not in shown.err and last.startswith("moesaic: ")
    return last


@cache
def answer() -> dict[str, Any]:
    """Asked once, in a process of its own that has no torch."""
    blocked = ["torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "tensorboard"]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from moesaic.cli.main import main\n"
        f"sys.exit(main(['plan', *{MIXTRAL!r}, '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_as_others_read_it() -> None:
    found = answer()
    assert {"searched", "seconds", "layouts"} <= found.keys()
    assert found["searched"] > 1000 and found["seconds"] > 0 and len(found["layouts"]) == 10
    seconds = [each["step_seconds"] for each in found["layouts"]]
    assert seconds == sorted(seconds)
    for each in found["layouts"]:
        assert re.fullmatch(r"pp\d+ dp\d+ cp\d+ tp\d+ / edp\d+ ep\d+ etp\d+", each["layout"])
        table = parse_layout(each["layout"])
        assert table.pp * table.tp * table.cp * table.dp == 8  # type: ignore[operator]
        low, high = each["interval_seconds"]
        assert low <= each["step_seconds"] <= high
        assert each["walls"].keys() == {"memory", "communication", "host", "compute"}
        assert each["memory_gib"] * 2**30 == pytest.approx(sum(each["memory_bytes"].values()))
        tokens = 32 * 4096 / each["step_seconds"] / 8
        assert each["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        assert 0 < each["model_tflops_per_gpu"] < 989
    assert found["layouts"][0]["against_best"] is None
    assert "s slower" in found["layouts"][1]["against_best"]


def test_table_is_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([*MIXTRAL, "--top", "3"], capsys).splitlines()
    head = next(line for line in lines if line.startswith("layout"))
    for word in ("options", "s/step", "tokens/s/GPU", "TFLOP/s", "GiB", "mem", "comm", "host"):
        assert word in head
    best = answer()["layouts"][0]
    row = lines[lines.index(head) + 1]
    degrees, _ = parse_choice(re.split(r"\s{2,}", row)[0])
    given = parse_choice(best["layout"])[0]
    assert all(degrees[name] == given[name] for name in ("pp", "cp", "tp", "ep", "etp"))
    assert not re.search(r"\b(pp|dp|cp|tp|edp|ep|etp)1\b", row)
    text = "\n".join(lines)
    for part in ("best: ", "nine times out of ten", "time: ", "memory, GiB: ", "runner-up is ", "note: "):
        assert part in text


def test_fewest(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(["mixtral-8x7b", "--gpus", "64", "--fewest-gpus", "--top", "1"], capsys)
    assert found["gpus"] < 64 and found["layouts"]
    fewer = ["mixtral-8x7b", "--gpus", str(found["gpus"] // 2), "--global-batch", "256"]
    assert "Nothing fits" in refusal(fewer, capsys)
    assert "fits on no number of" in refusal(["deepseek-v3", "--gpus", "8", "--fewest-gpus"], capsys)


def test_why_and_around(capsys: pytest.CaptureFixture[str]) -> None:
    best = answer()["layouts"][0]
    found = facts([*MIXTRAL, "--why", best["layout"]], capsys)
    assert found["legal"] and found["fits"] and found["estimate"]["step_seconds"] == pytest.approx(best["step_seconds"])
    found = facts([*MIXTRAL, "--why", "ep3"], capsys)
    assert not found["legal"] and "8 % 3 = 2" in found["reason"] and found["estimate"] is None
    text = printed([*MIXTRAL, "--why", "dp8 mb1"], capsys)
    assert "it does not fit: " in text and "GiB too many" in text
    found = facts([*MIXTRAL, "--around", best["layout"]], capsys)
    gains = [change["gain"] for change in found["changes"]]
    assert gains and gains == sorted(gains, reverse=True)
    assert "change" in printed([*MIXTRAL, "--around", "tp2 ep8"], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mixtral-8x7c", "--gpus", "8"], r"'mixtral-8x7c'.*Mixtral-8x7B"),
        (["mixtral-8x7b", "--gpus", "8", "--gpu", "h101"], r"'h101'.*did you mean 'h100'"),
        (["mixtral-8x7b"], r"How many accelerators\? Give --gpus N"),
        (["mixtral-8x7b", "--gpus", "0"], r"--gpus"),
        (["mixtral-8x7b", "--gpus", "eight"], r"--gpus"),
        ([*MIXTRAL, "--memory-headroom", "2"], r"--memory-headroom.*0\.9"),
        ([*MIXTRAL, "--stack", "megatrn"], r"'megatrn': did you mean 'megatron'"),
        ([*MIXTRAL, "--stack", "megatron+graph"], r"only \+graphs"),
        ([*MIXTRAL, "--stack", "megatron:banana"], r"'banana' is no release.*megatron:26\.06"),
        ([*MIXTRAL, "--html", "no/such/x.html"], r"--html 'no/such/x.html': there is no folder 'no/such'"),
        ([*MIXTRAL, "--trace", "no/such/x.json"], r"--trace .*no folder"),
        ([*MIXTRAL, "--html", "/"], r"--html '/' is a folder"),
        ([*MIXTRAL, "--launch", "megatron", "--out", "/dev/null/x"], r"--out .*'/dev/null' is no folder"),
        ([*MIXTRAL, "--network", "ethernet"], r"--network"),
        ([*MIXTRAL, "--launch", "megatrom"], r"'megatrom'.*'megatron'"),
        ([*MIXTRAL, "--precision", "fp7"], r"--precision"),
        ([*MIXTRAL, "--gpu", "a100", "--precision", "fp8"], r"has no fp8 matmuls: it can do .*bf16"),
        ([*MIXTRAL, "--imbalance", "0.5"], r"--imbalance"),
        ([*MIXTRAL, "--why", "ep8", "--around", "ep8"], r"--why and --around"),
        ([*MIXTRAL, "--why", "ep8", "--html", "x.html"], r"leave --why and --around out"),
        ([*MIXTRAL, "--around", "ep3"], r"ep3 is not legal: experts % ep"),
        ([*MIXTRAL, "--why", "ep8 deepp"], r"did you mean 'deepep'"),
        ([*MIXTRAL, "--why", "ep8 mb1 mb2"], r"twice"),
        (["mixtral-8x7b", "--gpus", "37", "--global-batch", "36"], r"No layout of 37.*try --gpus 36 or 38"),
        (["gpt2", "--gpus", "8", "--seq-len", "100000"], r"(positions|There is no preset)"),
        (["nowhere.toml"], r"nowhere\.toml"),
        (["mixtral-8x7b", "--gpu", "nowhere.toml"], r"--gpu 'nowhere\.toml': there is no such file of a cluster"),
    ],
)
def test_bad_questions_get_a_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(said, refusal(arguments, capsys))


def test_what_cannot_be_answered_is_refused_before_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--gpu", "a100", "--precision", "fp8"], ["--html", "no/such/x.html"]):
        assert main(["plan", *MIXTRAL, *more]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1  # a search prints how far it is


def test_other_networks_and_padded_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Over EFA dispatch takes a larger share of the step; padded rows need no wait of the host."""
    asked = ["qwen3-30b-a3b", "--gpus", "16", "--why", "dp16 ep16 mb1"]

    def shares(*more: str) -> dict[str, float]:
        parts = facts([*asked, *more], capsys)["estimate"]["time_seconds"]
        return {name: seconds / sum(parts.values()) for name, seconds in parts.items()}

    plain, efa, padded = shares(), shares("--network", "efa"), shares("--stack", "megatron+padded")
    assert efa["dispatch"] > 1.2 * plain["dispatch"]
    assert padded["host"] < plain["host"]


def test_notes_on_what_published_runs_do_not_cover(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("beyond the 1,536" in note for note in answer()["notes"])
    asked = ["mixtral-8x7b", "--gpus", "2048", "--stack", "megatron:0.13", "--top", "1"]
    notes = " ".join(facts(asked, capsys)["notes"])
    assert "2,048 accelerators are beyond the 1,536" in notes and "release 0.13 tells no date" in notes


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing, by how much, and ways out; the first is taken, and works."""
    text = refusal(["mixtral-8x7b", "--gpus", "4", "--memory-headroom", "0.5"], capsys)
    numbers = re.search(r"needs ([\d.]+) GiB of the ([\d.]+) GiB .* ([\d.]+) GiB too many, most of it gradients", text)
    assert numbers is not None
    need, may, lack = map(float, numbers.groups())
    assert need - may == pytest.approx(lack, abs=0.11)
    ways = re.search(r"try (.*)\.$", text)
    assert ways is not None
    assert len(ways[1].split(", or ")) == 3
    first = ways[1].split(", or ")[0].split()
    asked = ["mixtral-8x7b", "--gpus", "4", "--memory-headroom", "0.5", "--global-batch", "16", *first, "--top", "1"]
    assert facts(asked, capsys)["layouts"]


# ---------------------------------------------------------------- run files and files of clusters


def run_file(folder: Path, cluster: str = "", layout: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(f"{RUN}\n{cluster}\n{layout}")
    return str(path)


def test_a_run_file_says_what_is_trained_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path, '[cluster]\ngpu = "h200"\nnodes = 2\ngpus_per_node = 4')
    found = facts([path, "--top", "1"], capsys)
    assert (found["model"], found["gpu"], found["gpus"]) == ("Mixtral-8x7B", "H200 SXM", 8)
    assert (found["seq_len"], found["global_batch"], found["precision"]) == (2048, 32, "bf16")
    # The command line stands above the file.
    found = facts([path, "--gpus", "16", "--gpu", "b200", "--seq-len", "4096", "--top", "1"], capsys)
    assert (found["gpus"], found["seq_len"]) == (16, 4096) and "B200" in found["gpu"]


def test_a_run_file_without_numbers_of_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Give --gpus N" in refusal([run_file(tmp_path)], capsys)
    assert "Give --gpus N" in refusal([run_file(tmp_path, '[cluster]\ngpu = "h100"')], capsys)
    assert "'h101'" in refusal([run_file(tmp_path, '[cluster]\ngpu = "h101"\nnodes = 1')], capsys)
    found = facts([run_file(tmp_path, layout="[layout]\ntp = 2\nep = 8\ndp = 4"), "--top", "1"], capsys)
    assert found["gpus"] == 8


def test_a_file_of_ones_own_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[cluster]\ngpu = "h100"\ngpus = 16\n\n[gpu]\nname = "mine"\nmemory_gib = 140.0\n')
    found = facts(["mixtral-8x7b", "--gpu", str(path), "--top", "1"], capsys)
    assert (found["gpu"], found["gpus"]) == ("mine", 16)
    assert facts(["mixtral-8x7b", "--gpu", str(path), "--gpus", "8", "--top", "1"], capsys)["gpus"] == 8
    path.write_text('[cluster]\ngpu = "h100"\ngpuss = 16\n')
    assert "gpuss" in refusal(["mixtral-8x7b", "--gpu", str(path)], capsys)


# ---------------------------------------------------------------- files that are written


def test_launch_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "launch"
    printed([*MIXTRAL, "--top", "1", "--launch", "megatron", "--out", str(out)], capsys)
    text = "\n".join(path.read_text() for path in out.iterdir())
    degrees = parse_choice(answer()["layouts"][0]["layout"])[0]
    assert re.search(rf"--expert-model-parallel-size[ =]{degrees['ep']}\b", text)
    assert "nothing to launch" in refusal([*MIXTRAL, "--why", "ep3", "--launch", "megatron", "--out", str(out)], capsys)


def test_trace_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, page = tmp_path / "step.json", tmp_path / "plan.html"
    printed([*MIXTRAL, "--top", "1", "--trace", str(trace), "--html", str(page)], capsys)
    events = json.loads(trace.read_text())
    assert events["traceEvents"] if isinstance(events, dict) else events
    assert "<html" in page.read_text()
