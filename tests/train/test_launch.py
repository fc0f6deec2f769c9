"""Joining a job of several processes and leaving it: what is refused, who says so, and who waits for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic
from moesaic.mesh.group import Group
from moesaic.spec.errors import SpecError
from moesaic.spec.run import parse_run
from moesaic.spec.toml import read_toml
from moesaic.train import launch
from moesaic.train.assembly import difference
from tests.train.launched import RUN

SIZES = {
    **dict.fromkeys(("illegal", "lr_differs", "code_differs", "leaders", "stops_in_step"), 4),
    **dict.fromkeys(
        (
            *("file_is_missing", "file_is_wrong", "rank_is_missing", "data_differs", "group_disagrees", "healthy"),
            *("one_fails_alone", "one_has_a_defect", "all_fail_alike", "one_dies_at_work", "one_stops_at_work"),
            *("long_work", "dies_in_step", "raises_in_step", "dies_at_once"),
        ),
        2,
    ),
}


class Ended:
    """How the ranks of one case ended: exit codes, and the lines on their standard error."""

    def __init__(self, ranks: list[tuple[int, str, str]]) -> None:
        self.codes = [code for code, _, _ in ranks]
        self.out = [out.split() for _, out, _ in ranks]
        self.said = [[line for line in err.splitlines() if line.startswith("moesaic: ")] for _, _, err in ranks]
        self.other = [[line for line in err.splitlines() if not line.startswith("moesaic: ")] for _, _, err in ranks]

    def refused_once(self) -> str:
        """The one sentence of a job that was refused, which rank 0 prints."""
        assert set(self.codes) == {2}
        assert [len(lines) for lines in self.said] == [1] + [0] * (len(self.codes) - 1)
        assert not any(self.other)
        return self.said[0][0]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("launched")
    cases = [[name, name, size, {}] for name, size in SIZES.items()]
    cases.append(["anew", "healthy", 2, {"TORCHELASTIC_RESTART_COUNT": "1"}])
    for name in ("healthy", "lr_differs", "dies_in_step"):
        cases.append([f"{name} without agent", name, SIZES[name], {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launched.py")), json.dumps(cases)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(moesaic.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = {name: Ended(ranks) for name, ranks in json.loads(done.stdout).items()}
    found["folder"] = folder  # type: ignore[assignment]
    return found


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("case", "restarts"), [("healthy", "0"), ("anew", "1"), ("healthy without agent", "0")])
def test_a_healthy_job(ended, case, restarts):
    job = ended[case]
    assert job.codes == [0, 0] and not any(job.said) and not any(job.other)
    for words in job.out:
        assert " ".join(words) == f"pp1 dp2 cp1 tp1 / edp1 ep2 etp1 3 {restarts} True 0"


def test_an_illegal_layout_is_refused_once_and_before_any_group(ended):
    sentence = ended["illegal"].refused_once()
    assert "experts % ep = 4 % 3 = 1" in sentence and "Nearest legal for 4 processes" in sentence
    assert not any(ended["illegal"].out), "a process group was made"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("lr_differs", ("train.lr", "0.25 on rank 0", "0.5 on rank 2")),
        ("lr_differs without agent", ("train.lr", "0.25 on rank 0", "0.5 on rank 2")),
        ("code_differs", ("the source of moesaic", "'aaaa' on rank 0", "'bbbb' on ranks 2, 3")),
        ("data_differs", ("the data", "'y' on rank 0", "'x' on rank 1")),
        ("group_disagrees", ("the seed", "0 on rank 0", "1 on rank 1")),
        ("file_is_missing", ("Rank 1: ", "'elsewhere.toml' does not exist")),
        ("file_is_wrong", ("train.stepz", "did you mean 'steps'")),
        ("one_fails_alone", ("Rank 1: There is no cache here.",)),
        ("all_fail_alike", ("moesaic: data.path is missing.",)),
    ],
)
def test_bad_input_is_said_once_and_ends_all_ranks(ended, case, parts):
    sentence = ended[case].refused_once()
    assert all(part in sentence for part in parts), sentence


def test_torchrun_gets_the_sentence_for_its_summary(ended):
    said = json.loads((ended["folder"] / "lr_differs-0-error").read_text())
    assert "train.lr" in said["message"]["message"] and int(said["message"]["extraInfo"]["timestamp"]) > 0


def test_a_defect_keeps_its_traceback_and_ends_the_others(ended):
    job = ended["one_has_a_defect"]
    assert job.codes == [1, 1]
    assert job.other[1][0].startswith("Traceback") and not job.other[0]
    assert all("Rank 1: ZeroDivisionError" in lines[0] for lines in job.said)


def test_a_rank_that_does_not_start_is_named(ended):
    job = ended["rank_is_missing"]
    assert job.codes == [1, -9]
    assert "Rank 1 of 2 did not start within 1 s" in job.said[0][0]


@pytest.mark.parametrize(("case", "victim"), [("one_dies_at_work", 1), ("one_stops_at_work", 0)])
def test_a_rank_that_dies_or_hangs_before_the_groups_is_named(ended, case, victim):
    job = ended[case]
    assert job.codes[victim] == -9 and job.codes[1 - victim] == 1
    assert f"rank {victim} has shown no sign of life" in job.said[1 - victim][0]


def test_work_may_take_longer_than_the_time_limit(ended):
    assert ended["long_work"].codes == [0, 0]


def test_node_leaders_go_first(ended):
    turn = [int(words[0]) for words in ended["leaders"].out]
    assert {turn[0], turn[2]} == {1, 2} and {turn[1], turn[3]} == {3, 4}


@pytest.mark.parametrize("case", ["dies_in_step", "dies_in_step without agent"])
def test_a_rank_killed_in_a_step_ends_the_others_who_name_group_and_step(ended, case):
    job = ended[case]
    assert job.codes == [1, -9]
    assert "Rank 0: " in job.said[0][0] and "group world" in job.said[0][0] and "in step 7" in job.said[0][0]


def test_a_rank_that_hangs_in_a_step_is_named_by_all_others(ended):
    job = ended["stops_in_step"]
    assert job.codes == [1, -9, 1, 1]
    for rank in (0, 2, 3):
        (line,) = job.said[rank]
        assert f"Rank {rank}: " in line and "group world" in line and "in step 7" in line and "within 5 s" in line
        assert "rank 1 was last heard of" in line


def test_an_exception_in_a_step_names_rank_and_step(ended):
    job = ended["raises_in_step"]
    assert job.codes == [1, 1]
    assert job.said[1] == ["moesaic: Rank 1: ZeroDivisionError: by hand (in step 7)"]
    assert job.other[1][0].startswith("Traceback")


# ---------------------------------------------------------------- one process


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)

    def make(*sets: str):
        return parse_run(read_toml(tmp_path / "run.toml"), sets)

    return make


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_joins_nothing(run):
    job = launch.join(run())
    assert job.mesh.world.size == 1 and job.layout.world == 1 and job.is_first and job.restarts == 0
    assert job.settle("x", lambda: 3) == job.first("x", lambda: 3) == job.leaders_first("x", lambda: 3) == 3
    assert not job.anyone(False) and job.anyone(True)
    job.agree({"x": 1})
    job.close()


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        (("layout.ep=2",), "--nproc-per-node 2 -m moesaic train"),
        (("layout.tp=2", "layout.dp=2", "layout.ep=4"), "--nproc-per-node 4 -m moesaic train"),
        (("layout.ep=3",), "nearest are"),
    ],
)
def test_one_process_says_how_to_start_several(run, sets, needed):
    with pytest.raises(SpecError, match="process") as caught:
        launch.join(run(*sets))
    assert needed in str(caught.value)


def test_half_an_environment_is_refused(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set: start with torchrun"):
        launch.join(run())
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SpecError, match="WORLD_SIZE is 'two'"):
        launch.join(run())


def test_a_group_of_one_agrees():
    launch.agree(Group.single("alone"), {"anything": 1})


def test_the_first_difference_is_told_with_all_who_differ():
    facts = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": 3}]
    assert difference(facts[:1]) is None and difference([facts[0], dict(facts[0])]) is None
    sentence = difference(facts)
    assert sentence is not None
    assert "disagree on b: it is 2 on rank 0 and 3 on ranks 1, 3 (and differs again on rank 2)" in sentence


def test_threads_are_shared_out_and_torchruns_default_is_said(run, monkeypatch):
    monkeypatch.setattr(launch.process, "physical_cores", lambda: 8)
    set_to: list[int] = []
    monkeypatch.setattr(launch.process, "set_threads", lambda n: set_to.append(n) or n)
    four = launch.Place(0, 4, 0, 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch._threads(0, four) == (2, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads, note = launch._threads(0, four)
    assert threads == 1 and note is not None and "OMP_NUM_THREADS to 2" in note
    assert launch._threads(3, four) == (3, None)
    assert set_to == [2, 1, 3]
