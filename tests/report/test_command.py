from moesaic.cli.main import main


def test_the_command_writes_the_page_and_says_where(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    assert str(run_dir / "report.html") in capsys.readouterr().out
    assert (run_dir / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


def test_a_folder_without_a_run_is_bad_input(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
