"""Run files and small texts for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moesaic.spec.run import RunSpec

TEXTS = [
    "The first document.\nIt has two lines.\n",
    "Ein zweites, mit Umlauten: äöü ß – und 日本語 und 🙂.\r\n\ttabs\tand trailing spaces   \n",
    "short",
    "def f(x):\n    return x ** 2  # indented\n\n\n    <|endoftext|> is spelt out here\n" * 5,
    "x",
]


@pytest.fixture
def texts() -> list[str]:
    return list(TEXTS)


@pytest.fixture
def make_run() -> Callable[..., RunSpec]:
    """A run with `data` keys by name and `seq_len`, `global_batch`, `micro_batch`, `seed`, `steps`."""

    def make(
        path: Path | str | None,
        *,
        seq_len: int = 8,
        global_batch: int = 4,
        micro_batch: int = 2,
        seed: int = 0,
        steps: int = 3,
        **data: Any,
    ) -> RunSpec:
        if path is not None:
            data["path"] = str(path)
        tables = {
            "data": {"validation_fraction": 0.0} | data,
            "layout": {"micro_batch": micro_batch},
            "train": {"seq_len": seq_len, "global_batch": global_batch, "seed": seed, "steps": steps},
        }
        return RunSpec.model_validate(tables)

    return make


@pytest.fixture(scope="session")
def byte_level_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with room for some merges, made by the tokenizers library alone."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def metaspace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of SentencePiece's kind: NFKC, spaces as ▁, unknown characters fall back to bytes."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<unk>", "</s>", *fallback], show_progress=False)
    backend.train_from_iterator([TEXTS[0]], trainer)
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    backend.save(str(path))
    return path
