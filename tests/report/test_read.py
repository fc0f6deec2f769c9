import json

import pytest

from moesaic.report import ReportError, read_run
from moesaic.spec.errors import MoesaicError


def test_a_line_cut_off_by_a_crash_is_left_out_and_mentioned(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    record = read_run(run_dir)
    assert len(record.rows) == 40
    assert any("1 line" in text for text in record.warnings)


def test_a_step_written_again_after_a_resume_counts_once_and_the_later_row_wins(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "loss": 0.25}) + "\n")
    record = read_run(run_dir)
    assert [row["step"] for row in record.rows] == list(range(1, 41))
    assert record.last("loss") == 0.25


def test_series_skip_what_is_missing_or_not_finite(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": NaN}\n')
    record = read_run(run_dir)
    assert len(record.series("loss")) == 40
    assert [step for step, _ in record.series("validation_loss")] == [10, 20, 30, 40]
    assert record.series("load_max_over_mean", "1")[0] == (1, 1.5)
    assert record.series("no_such", "key") == []


@pytest.mark.parametrize("content", [None, "", '{"st'])
def test_a_folder_without_a_complete_step_is_refused_with_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=r"metrics\.jsonl"):
        read_run(tmp_path)
    assert issubclass(ReportError, MoesaicError)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ReportError, match="not a folder"):
        read_run(tmp_path / "nowhere")


def test_unreadable_companions_are_mentioned_and_do_not_stop_the_report(run_dir):
    (run_dir / "run.toml").write_text("[train\n")
    (run_dir / "baselines.json").write_text("{")
    record = read_run(run_dir)
    assert record.run == {} and record.baselines == {}
    assert len(record.warnings) == 2
