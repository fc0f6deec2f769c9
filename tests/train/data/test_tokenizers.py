"""Tokenizers: exact round trips, and byte counts that add up to the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data import BytesTokenizer, DataError, JsonTokenizer, load_tokenizer
from moesaic.train.data.tokenizers import byte_level_alphabet, bytes_from_offsets

anything = st.text(st.characters(exclude_categories=("Cs",)), max_size=80)


@settings(deadline=None, max_examples=200)
@given(text=anything)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode("utf-8")
    assert tokenizer.decode([*ids, 256]) == text
    assert tokenizer.bytes_of([*ids, 256]) == len(text.encode("utf-8"))
    [(batch, covered)] = tokenizer.encode_batch([text])
    assert batch.tolist() == ids and covered is None


def test_broken_characters_are_replaced_not_raised() -> None:
    assert BytesTokenizer().decode([0xE4, 0x41, 256]) == "\ufffdA"


def test_byte_alphabet_is_that_of_gpt2() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_level_alphabet() == {char: byte for byte, char in bytes_to_unicode().items()}


@settings(deadline=None, max_examples=200)
@given(text=anything)
def test_byte_level_round_trip_and_bytes(byte_level_file: Path, text: str) -> None:
    tokenizer = JsonTokenizer(byte_level_file)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_table is not None
    assert tokenizer.bytes_of(ids) == len(text.encode("utf-8"))
    [(batch, covered)] = tokenizer.encode_batch([text])
    assert batch.tolist() == ids and covered is None


@settings(deadline=None, max_examples=200)
@given(text=anything)
def test_bytes_of_other_tokenizers_add_up_to_the_text(metaspace_file: Path, text: str) -> None:
    tokenizer = JsonTokenizer(metaspace_file)
    assert tokenizer.bytes_table is None
    [(ids, covered)] = tokenizer.encode_batch([text])
    assert covered is not None and covered.shape == ids.shape
    assert int(covered.sum()) == (len(text.encode("utf-8")) if ids.size else 0)


def test_bytes_of_each_token_from_offsets() -> None:
    # "aé🙂 b": 1, 2, 4, 1, 1 bytes. The second token shares the emoji with the third; the space is dropped.
    covered = bytes_from_offsets("aé🙂 b", [(0, 2), (2, 3), (2, 3), (4, 5)])
    assert covered.tolist() == [3, 4, 0, 2]
    assert bytes_from_offsets("ab  ", [(0, 1), (1, 2)]).tolist() == [1, 3]
    wide = bytes_from_offsets(" " * 70_000 + "ab", [(70_000, 70_001), (70_001, 70_002)])
    assert int(wide.astype(np.int64).sum()) == 70_002


def test_special_tokens_spelt_out_in_text_stay_text(byte_level_file: Path) -> None:
    tokenizer = JsonTokenizer(byte_level_file)
    assert tokenizer.document_end == 0
    text = "a<|endoftext|>b"
    assert 0 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, *tokenizer.encode("a")]) == "a"


def test_encodes_like_transformers(byte_level_file: Path, texts: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_file=str(byte_level_file))
    tokenizer = JsonTokenizer(byte_level_file)
    for text in texts[:3]:
        assert tokenizer.encode(text) == oracle(text, add_special_tokens=False)["input_ids"]


def test_stored_truncation_padding_and_template_are_switched_off(byte_level_file: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(byte_level_file))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a text that is longer than four tokens"
    assert JsonTokenizer(tmp_path).encode(text) == JsonTokenizer(byte_level_file).encode(text)


def test_document_end_comes_from_the_config_beside_it(byte_level_file: Path, tmp_path: Path) -> None:
    config = json.loads(byte_level_file.read_text())
    config["added_tokens"].append(dict(config["added_tokens"][0], id=320, content="<|done|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    assert JsonTokenizer(tmp_path).document_end == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|done|>"}}))
    tokenizer = JsonTokenizer(tmp_path)
    assert (tokenizer.document_end, tokenizer.vocab_size) == (320, 321)


def test_save_and_load_again(byte_level_file: Path, tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(byte_level_file)
    tokenizer.save(tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again.fingerprint == tokenizer.fingerprint
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.document_end


def test_split_before_the_byte_level_keeps_the_table(texts: list[str], tmp_path: Path) -> None:
    # The arrangement of Llama-3 and Qwen: an own pattern, digits apart, then bytes without GPT-2's pattern.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.bytes_table is not None and tokenizer.document_end is None
    for text in [*texts, "a <tool>1234"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.bytes_of(ids) == len(text.encode())


def test_prefix_space_and_normalizers_rule_out_the_table(byte_level_file: Path, tmp_path: Path) -> None:
    for change in ({"pre_tokenizer": {"add_prefix_space": True}}, {"normalizer": {"type": "NFC"}}):
        config = json.loads(byte_level_file.read_text())
        for key, value in change.items():
            config[key] = (config[key] or {}) | value
        (tmp_path / "tokenizer.json").write_text(json.dumps(config))
        tokenizer = JsonTokenizer(tmp_path)
        assert tokenizer.bytes_table is None
        [(_, covered)] = tokenizer.encode_batch(["e\u0301 text"])
        assert covered is not None and int(covered.sum()) == len("e\u0301 text".encode())


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("tokeniser.json", None, r"no tokenizer at .*tokeniser\.json.*did you mean 'tokenizer\.json'"),
        ("tokenizer.json", "not json", r"not a Hugging Face tokenizer\.json"),
        ("tokenizer.json", "{}", r"not a Hugging Face tokenizer\.json"),
        (".", None, r"no tokenizer\.json in .* \(1 files\)\. It holds an older kind"),
    ],
)
def test_bad_tokenizers_get_a_sentence(tmp_path: Path, name: str, content: str | None, wanted: str) -> None:
    (tmp_path / ("merges.txt" if name == "." else "tokenizer.json")).write_text(content or "x")
    with pytest.raises(DataError, match=wanted):
        load_tokenizer(tmp_path / name)
