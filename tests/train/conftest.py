"""A tiny run that takes a second, and ways to look into what it left."""

from __future__ import annotations

import io
import json
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console

from moesaic.spec.run import RunSpec, parse_run

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A few hundred short documents of made-up words, with enough order in them to be learned."""
    drawn = random.Random(5)
    words = ["tok", "expert", "router", "gate", "load", "sum", "of", "the", "all"]
    path = tmp_path_factory.mktemp("text") / "words.jsonl"
    lines = [json.dumps({"text": " ".join(drawn.choices(words, k=drawn.randint(5, 30)))}) for _ in range(300)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def make_run(text_file, tmp_path):
    """make_run("name", "train.steps=3", …, model={…}) is a RunSpec whose results go to tmp_path/name."""

    def make(name: str, *sets: str, model: dict | None = None) -> RunSpec:
        tables = {
            "model": model or MIXTRAL,
            "data": {"path": str(text_file), "validation_fraction": 0.05},
            "layout": {"micro_batch": 2},
            "train": {
                "steps": 6,
                "seq_len": 32,
                "global_batch": 4,
                "lr": 1e-2,
                "warmup_steps": 2,
                "eval_every": 3,
                "eval_batches": 2,
                "checkpoint_every": 2,
                "keep_checkpoints": 2,
                "threads": 1,
                "tune_malloc": False,
            },
            "run": {"dir": str(tmp_path / name)},
        }
        return parse_run(tables, list(sets), name=name)

    return make


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint, by its full name."""
    reader = dcp.FileSystemReader(folder)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


def check_same_run(folder: Path, expected: Path, step: int = 6) -> None:
    """Weights, moments, random state and the numbers of every step are equal bit for bit."""
    ours, theirs = (read_tensors(run / "checkpoints" / f"step-{step}") for run in (folder, expected))
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    numbers = ("step", "loss", "total_loss", "loss_parts", "grad_norm", "lr", "tokens", "total_tokens", "expert_load")
    rows = [[{k: row[k] for k in numbers} for row in read_metrics(run)] for run in (folder, expected)]
    assert rows[0] == rows[1]
    held_out = [[row.get("validation_loss") for row in read_metrics(run)] for run in (folder, expected)]
    assert held_out[0] == held_out[1]


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def tensors():
    return read_tensors


@pytest.fixture
def metrics():
    return read_metrics


@pytest.fixture
def assert_same_run():
    return check_same_run
