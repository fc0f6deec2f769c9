import errno
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moesaic.report import ReportError, read_run, write_report
from moesaic.report.balance import final_loads
from moesaic.report.facts import dead_experts

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Fails on a tag that is not closed in order; collects addresses, scripts and the visible text."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.data, self.text = [], [], [], []
        self.kind = None

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        self.kind = dict(attrs).get("type") if tag == "script" else None

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            if self.kind == "application/json":
                self.data.append(json.loads(data))
        elif "style" not in self.open:
            self.text.append(data)


def check(path):
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return page, checker


def test_the_page_is_well_formed_and_needs_no_network(run_dir):
    page, checker = check(write_report(run_dir))
    assert checker.addresses and all(address.startswith("data:image/png") for address in checker.addresses)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert checker.data


def test_numbers_of_the_metrics_are_on_the_page(run_dir):
    _, checker = check(write_report(run_dir))
    text = " ".join(checker.text)
    assert f"{8.1 / 40**0.5:.3f}" in text
    assert "bigram 4.500 and unigram 6.500" in text
    assert "7 of 8" in text
    assert "layer 1 expert 3" in text
    assert "25.0%" in text and "50.0%" in text
    assert "Above the clipping limit of 1.5 in 1 of 40 steps." in text
    assert "tiny" in text


def test_text_from_files_cannot_become_markup(run_dir):
    (run_dir / "run.toml").write_text('[run]\nname = "<img src=x onerror=alert(1)></script>"\n')
    page, checker = check(write_report(run_dir))
    assert "<img" not in page
    assert "print('</script>')" in "".join(checker.text)


def test_a_run_with_only_the_fixed_keys_has_a_page(tmp_path, make_rows):
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds")
    rows = [{key: row[key] for key in keys} for row in make_rows(1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(write_report(tmp_path))


def test_a_loss_that_is_not_finite_is_named(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": NaN}\n')
    _, checker = check(write_report(run_dir))
    assert "not finite at step 41" in " ".join(checker.text)


def test_loads_at_the_end_are_sums_over_the_last_tenth(run_dir):
    record = read_run(run_dir)
    assert final_loads(record) == [("0", [400.0, 404.0, 408.0, 412.0]), ("1", [400.0, 404.0, 408.0, 0.0])]
    assert dead_experts(record) == ["layer 1 expert 3"]


def test_many_experts_keep_the_page_small(tmp_path, make_rows):
    rows = make_rows(100, experts=256, layers=12)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = check(write_report(tmp_path))
    assert len(page) < 4_000_000


def test_reports_need_no_torch(run_dir):
    code = (
        "import sys; from moesaic.report import write_report; write_report(sys.argv[1]); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True)


def test_a_full_disk_is_a_sentence_and_leaves_no_part(run_dir, monkeypatch):
    def full(self, text, **_):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(run_dir.iterdir())
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ReportError, match=r"report\.html could not be written: No space left on device"):
        write_report(run_dir)
    assert sorted(run_dir.iterdir()) == before
