"""Tokenizers trained on the user's text."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moesaic.train.data import DataError, JsonTokenizer, train_bpe


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_bytes((text * 20).encode())
    return tmp_path / "in"


def test_bytes_exact_and_of_the_size_asked_for(corpus: Path, tmp_path: Path, texts: list[str]) -> None:
    path = train_bpe(corpus, 300, tmp_path / "out")
    tokenizer = JsonTokenizer(path)
    assert path == tmp_path / "out" / "tokenizer.json"
    assert tokenizer.vocab_size == 300 and tokenizer.document_end == 0
    assert tokenizer.bytes_table is not None
    for text in [*texts, "\0\x7f\u0800 never seen 🏳️‍🌈", "<|endoftext|>"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.bytes_of(ids) == len(text.encode())
    assert len(tokenizer.encode(texts[0])) < len(texts[0].encode())


def test_trained_once_and_again_when_something_changes(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    train_bpe(corpus, 280, out)
    before = out.stat().st_mtime_ns
    train_bpe(corpus, 280, out)
    assert out.stat().st_mtime_ns == before
    train_bpe(corpus, 290, out)
    assert JsonTokenizer(out).vocab_size == 290
    (corpus / "more.txt").write_text("and more and more")
    changed = out.stat().st_mtime_ns
    train_bpe(corpus, 290, out)
    assert out.stat().st_mtime_ns != changed


def test_same_files_give_the_same_tokenizer(corpus: Path, tmp_path: Path) -> None:
    one = train_bpe(corpus, 300, tmp_path / "one.json")
    two = train_bpe(sorted(corpus.iterdir()), 300, tmp_path / "two.json")
    assert one.read_bytes() == two.read_bytes()


def test_a_full_disk_leaves_no_part(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **_: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be written: No space left"):
        train_bpe(corpus, 280, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.lock"]


def test_bad_sizes_and_files_get_a_sentence(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 100 is too small.* 257"):
        train_bpe(corpus, 100, tmp_path)
    with pytest.raises(DataError, match=r"vocabulary of 99,999,999,999 is too large"):
        train_bpe(corpus, 99_999_999_999, tmp_path)
    with pytest.raises(DataError, match=r"gives only \d+ different BPE tokens, fewer than the 5,000 asked for"):
        train_bpe(corpus, 5000, tmp_path)
    with pytest.raises(DataError, match="is empty"):
        train_bpe([], 300, tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        train_bpe([tmp_path / "none"], 300, tmp_path)
