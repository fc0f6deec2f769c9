"""From run files to batches: bytes, resuming, micro-batches, formats, and what bad settings get."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.spec.run import RunSpec
from moesaic.train.data import Batch, BytesTokenizer, DataError, JsonTokenizer, TokenDataset, build_data
from moesaic.train.data.megatron import write_megatron
from moesaic.train.data.packing import Sequences
from moesaic.train.data.split import whole
from moesaic.train.data.store import TokenStore

MakeRun = Callable[..., RunSpec]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 4))
    return path


def joined(batches: list[Batch]) -> tuple[list[list[int]], list[list[int]]]:
    return (
        torch.cat([batch.ids_BS for batch in batches]).tolist(),
        torch.cat([batch.labels_BS for batch in batches]).tolist(),
    )


def one_epoch(dataset: TokenDataset) -> list[Batch]:
    assert len(dataset) % dataset.global_batch == 0
    return [batch for step in range(len(dataset) // dataset.global_batch) for batch in dataset.batches(step)]


def test_batch_is_what_the_decoder_takes(corpus: Path, tmp_path: Path, make_run: MakeRun) -> None:
    data = build_data(make_run(corpus), 257, tmp_path / "cache")
    batches = data.train.batches(0)
    assert [tuple(batch.ids_BS.shape) for batch in batches] == [(2, 8), (2, 8)]
    for batch in batches:
        assert batch.positions_BS is not None and batch.documents_BS is not None
        for tensor in (batch.ids_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS):
            assert tensor.dtype == torch.int64 and tensor.shape == (2, 8)
        assert batch.tokens == int((batch.labels_BS != -100).sum())
        real = batch.labels_BS[batch.labels_BS != -100]
        assert batch.bytes == int((real < 256).sum())
    plain = build_data(make_run(corpus, document_mask=False), 257, tmp_path / "cache").train.batches(0)[0]
    assert plain.positions_BS is None and plain.documents_BS is None


@settings(deadline=None, max_examples=30)
@given(
    sequences=st.integers(1, 30),
    global_batch=st.integers(1, 12),
    micro_batch=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
    resume_at=st.integers(0, 10),
)
def test_steps_are_the_same_for_any_micro_batch_and_after_any_resume(
    sequences: int, global_batch: int, micro_batch: int, seed: int, resume_at: int
) -> None:
    length = np.array([sequences * 4 + 1])
    store = TokenStore(np.arange(length[0]), np.array([0]), length)

    def dataset(micro: int) -> TokenDataset:
        return TokenDataset(
            Sequences(whole(store), 4), vocab=1000, global_batch=global_batch, micro_batch=micro, seed=seed
        )

    uncut, cut = dataset(global_batch), dataset(micro_batch)
    resumed = dataset(micro_batch)
    for step in range(resume_at, resume_at + 3):
        batches = cut.batches(step)
        assert [len(batch.ids_BS) for batch in batches[:-1]] == [min(micro_batch, global_batch)] * (len(batches) - 1)
        assert joined(batches) == joined(uncut.batches(step)) == joined(resumed.batches(step))
    # The endless row of sequences has each sequence once in every epoch.
    row = [number for step in range(30) for number in cut.sequence_numbers(step).tolist()]
    for epoch in range(len(row) // sequences):
        assert sorted(row[epoch * sequences : (epoch + 1) * sequences]) == list(range(sequences))


@pytest.mark.parametrize("tokenizer", ["bytes", "byte_level", "metaspace", "bpe:280"])
def test_bytes_of_all_labels_are_the_text(
    tmp_path: Path, make_run: MakeRun, tokenizer: str, byte_level_file: Path, metaspace_file: Path
) -> None:
    text = "A text of one document, with ümlauts and 🙂 in it; long enough for some sequences.\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    name = {"byte_level": str(byte_level_file), "metaspace": str(metaspace_file)}.get(tokenizer, tokenizer)
    run = make_run(tmp_path / "a.txt", tokenizer=name, global_batch=1, micro_batch=1)
    data = build_data(run, 512, tmp_path / "cache")
    assert data.tokenizer is not None and data.train.knows_bytes
    [ids] = data.train.document_tokens()
    [(encoded, covered)] = data.tokenizer.encode_batch([text])
    assert ids.tolist() == [*encoded.tolist(), data.tokenizer.document_end]
    covered = np.append(covered if covered is not None else data.tokenizer.bytes_table[encoded], 0)
    assert int(covered.sum()) == len(text.encode())
    # All but the first token, which nothing predicts, and the dropped tail.
    kept = (len(ids) - 1) // 8 * 8
    batches = one_epoch(data.train)
    assert sum(batch.bytes for batch in batches) == len(text.encode()) - covered[0] - covered[1 + kept :].sum()
    assert sum(batch.tokens for batch in batches) == kept


def test_all_formats_give_the_same_batches(tmp_path: Path, texts: list[str], make_run: MakeRun) -> None:
    import datasets

    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number}.md").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    write_megatron(tmp_path / "pair", [[*text.encode(), 256] for text in texts], dtype=np.uint16)
    expected = None
    for name in ("text", "a.jsonl", "a.parquet", "saved", "pair", "pair.idx", "pair.bin"):
        data = build_data(make_run(tmp_path / name, seed=3), 257, tmp_path / "cache")
        assert isinstance(data.tokenizer, BytesTokenizer)
        found = [(joined(data.train.batches(step)), sum(b.bytes for b in data.train.batches(step))) for step in (0, 5)]
        expected = expected or found
        assert found == expected, name


def test_train_and_validation_share_no_document(
    corpus: Path, tmp_path: Path, make_run: MakeRun, texts: list[str]
) -> None:
    data = build_data(make_run(corpus, validation_fraction=0.2), 257, tmp_path / "cache")
    assert data.validation is not None
    both = [
        bytes(ids[:-1].tolist()).decode() for side in (data.train, data.validation) for ids in side.document_tokens()
    ]
    assert Counter(both) == Counter(texts * 4)
    assert any(notice.startswith("validation: ") for notice in data.notices)
    other_seed = build_data(make_run(corpus, validation_fraction=0.2, seed=9), 257, tmp_path / "cache")
    assert other_seed.validation is not None
    for one, other in zip(data.validation.once(), other_seed.validation.once(), strict=True):
        assert torch.equal(one.ids_BS, other.ids_BS)
    assert not torch.equal(data.train.batches(0)[0].ids_BS, other_seed.train.batches(0)[0].ids_BS)


def test_validation_covers_every_token_once(corpus: Path, tmp_path: Path, make_run: MakeRun) -> None:
    data = build_data(make_run(corpus, validation_path=str(corpus), micro_batch=3), 257, tmp_path / "cache")
    assert data.validation is not None
    batches = list(data.validation.once())
    assert sum(batch.tokens for batch in batches) == data.validation.tokens - data.validation.documents
    assert sum(len(batch.ids_BS) for batch in batches) == len(data.validation)
    some = list(data.validation.once(4))
    assert [len(batch.ids_BS) for batch in some] == [3, 1]
    assert torch.equal(some[0].ids_BS, batches[0].ids_BS)


def test_a_limited_validation_is_a_sample_of_all_documents() -> None:
    length = np.array([4001])
    store = TokenStore(np.arange(4001), np.array([0]), length)
    dataset = TokenDataset(Sequences(whole(store), 4), vocab=5000, global_batch=8, micro_batch=8, seed=0)
    first = np.concatenate([batch.ids_BS[:, 0].numpy() for batch in dataset.once(100)])
    # 100 of 1,000 sequences drawn without order: their mean place is 500 with a standard deviation of 27.
    assert len(set(first)) == 100 and abs(first.mean() / 4 - 500) < 5 * 27


def test_unpacked_documents(corpus: Path, tmp_path: Path, make_run: MakeRun, texts: list[str]) -> None:
    data = build_data(make_run(corpus, pack=False, seq_len=600, global_batch=1), 257, tmp_path / "cache")
    assert len(data.train) == 4 * len(texts)
    seen = Counter()
    for batch in one_epoch(data.train):
        [row], [documents] = batch.ids_BS.tolist(), batch.documents_BS.tolist()
        seen[bytes(i for i, d in zip(row, documents, strict=True) if d == 0 and i < 256).decode()] += 1
    assert seen == Counter(texts * 4)


def test_filling_stays_marked_without_document_masks(corpus: Path, tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(corpus, pack=False, document_mask=False, seq_len=600, global_batch=1)
    plain = one_epoch(build_data(run, 257, tmp_path / "cache").train)
    run = make_run(corpus, pack=False, seq_len=600, global_batch=1)
    for batch, masked in zip(plain, one_epoch(build_data(run, 257, tmp_path / "cache").train), strict=True):
        assert torch.equal(batch.documents_BS, masked.documents_BS), "one document a row, masked or not"
        assert batch.places == batch.tokens < 600


def test_trained_tokenizer_is_kept_and_saved(corpus: Path, tmp_path: Path, make_run: MakeRun) -> None:
    for _ in range(2):
        data = build_data(make_run(corpus, tokenizer="bpe:300"), 300, tmp_path / "cache")
    assert isinstance(data.tokenizer, JsonTokenizer) and data.tokenizer.vocab_size == 300
    assert len(list((tmp_path / "cache").glob("tokens-*/"))) == 1
    data.tokenizer.save(tmp_path / "run")
    assert JsonTokenizer(tmp_path / "run").fingerprint == data.tokenizer.fingerprint


def test_megatron_tokens_of_an_unknown_tokenizer(tmp_path: Path, make_run: MakeRun, byte_level_file: Path) -> None:
    write_megatron(tmp_path / "pair", [[5, 310, 7, 0]] * 20)
    data = build_data(make_run(tmp_path / "pair"), 512, tmp_path / "cache")
    assert data.tokenizer is None and not data.train.knows_bytes and data.train.batches(0)[0].bytes == 0
    assert any("no bits per byte" in notice for notice in data.notices)
    data = build_data(make_run(tmp_path / "pair", tokenizer=str(byte_level_file)), 512, tmp_path / "cache")
    assert data.train.knows_bytes and data.train.batches(0)[0].bytes > 0
    with pytest.raises(DataError, match="token id 310 is beyond the model's vocabulary of 300"):
        build_data(make_run(tmp_path / "pair"), 300, tmp_path / "cache")


def test_ids_are_checked_in_batches_too() -> None:
    store = TokenStore(np.array([1, 2, 99, 3, 4]), np.array([0]), np.array([5]))
    dataset = TokenDataset(Sequences(whole(store), 4), vocab=50, global_batch=1, micro_batch=1, seed=0)
    with pytest.raises(DataError, match="token id 99"):
        dataset.batches(0)


def test_content_tells_whether_the_tokens_are_the_same(
    corpus: Path, tmp_path: Path, make_run: MakeRun, texts: list[str]
) -> None:
    def content(path: Path, cache: str = "cache", **data: object) -> str:
        return build_data(make_run(path, **data), 257, tmp_path / cache).content

    first = content(corpus)
    (tmp_path / "copy.jsonl").write_text(corpus.read_text())
    same = [content(corpus), content(tmp_path / "copy.jsonl"), content(corpus, "other"), content(corpus, seed=5)]
    assert same == [first] * 4
    # The same tokens, cut into documents elsewhere.
    joined = "".join(texts * 4)
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": joined}) + "\n")
    contents = {
        first,
        content(corpus, add_document_end=False),
        content(tmp_path / "other.jsonl", add_document_end=False),
        content(corpus, validation_path=str(tmp_path / "other.jsonl")),
    }
    write_megatron(tmp_path / "pair", [[1, 2, 3], [4] * 20], dtype=np.uint16)
    contents.add(content(tmp_path / "pair"))
    write_megatron(tmp_path / "pair", [[1, 2, 3], [4] * 19 + [5]], dtype=np.uint16)
    contents.add(content(tmp_path / "pair"))
    assert len(contents) == 6 and "" not in contents


def test_notices_say_what_was_found(corpus: Path, tmp_path: Path, make_run: MakeRun) -> None:
    data = build_data(make_run(corpus, validation_fraction=0.2, steps=1000), 257, tmp_path / "cache")
    text = "\n".join(data.notices)
    assert f"jsonl, 1 file, {corpus.stat().st_size / 1000:.1f} kB in {corpus}" in text
    assert "of 20 documents held out" in text
    assert "sequences of 8, seen " in text and "times in 1,000 steps" in text


def test_bad_settings_get_a_sentence(corpus: Path, tmp_path: Path, make_run: MakeRun, metaspace_file: Path) -> None:
    cache = tmp_path / "cache"
    cases: list[tuple[RunSpec, int, str]] = [
        (make_run(None), 257, r"data\.path is not set"),
        (make_run(corpus), 256, r"document end of tokenizer bytes is id 256.*add_document_end = false"),
        (
            make_run(corpus, seq_len=100_000),
            257,
            r"training data has [\d,]+ tokens, but one sequence.*train\.seq_len to",
        ),
        (make_run(corpus, tokenizer="none.json"), 257, "no tokenizer at none.json"),
        (make_run(corpus, tokenizer="bpe:many"), 257, 'has no size; write "bpe:8192"'),
        (make_run(corpus, validation_path=str(corpus), validation_fraction=0.5), 257, "keep one of them"),
        (make_run(corpus, validation_path="none.jsonl"), 257, r"data path none\.jsonl does not exist"),
        (make_run(corpus, text_key="txt"), 257, "line 1 of .* has no 'txt': did you mean 'text'"),
    ]
    for run, vocab, wanted in cases:
        with pytest.raises(DataError, match=wanted):
            build_data(run, vocab, cache)


def test_tokenizer_without_document_end_is_said(
    corpus: Path, tmp_path: Path, make_run: MakeRun, metaspace_file: Path
) -> None:
    config = json.loads(metaspace_file.read_text())
    config["added_tokens"] = [entry for entry in config["added_tokens"] if entry["content"] != "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    data = build_data(make_run(corpus, tokenizer=str(tmp_path)), 512, tmp_path / "cache")
    assert any("no token that ends a document" in notice for notice in data.notices)
