"""The memory meter: kept bytes are the planner's, module by module; totals are those of tensors counted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.train import loop, metered
from moesaic.train.meter import Meter
from tests.ranks import ranks
from tests.train.kept import KINDS, counted, measured, model_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2, all-gather": {"ep": 2, "dispatcher": "allgather"},
    "ep2, all-to-all": {"ep": 2, "dispatcher": "alltoall"},
    "etp2": {"etp": 2},
    "tp2": {"tp": 2, "micro_batch": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "cp2, ulysses": {"cp": 2},
    "cp2, ring": {"cp": 2, "cp_kind": "ring"},
}


def by_layer(kept: dict[tuple[int, str], int], layer: int) -> dict[str, int]:
    return {module: size for (number, module), size in kept.items() if number == layer}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_what_the_planner_counts_in_each_module(kind: str) -> None:
    kept, expected = measured(0, kind, {}), counted(kind, {}, 1)
    for layer in (0, 1):
        assert by_layer(kept, layer) == expected


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_does_each_of_two_ranks(layout: str) -> None:
    keys = LAYOUTS[layout]
    for kind in ("grouped queries, shared expert", "latent attention, shared expert", "latent attention, dense"):
        if KINDS[kind].moe is None and keys.keys() & {"ep", "etp"}:
            continue
        expected = counted(kind, keys, 2)
        for kept in ranks(2).run(measured, kind, keys):
            for layer in (0, 1):
                assert by_layer(kept, layer) == expected, (layout, kind)


def test_outside_of_layers_the_head_keeps_its_input_and_the_loss_its_gradients() -> None:
    kept = by_layer(measured(0, "grouped queries, dense", {}), -1)
    tokens, hidden, vocab, fp32 = 112, 64, 53, 4
    assert kept["head"] == fp32 * tokens * (hidden + 1)
    assert kept["loss"] == fp32 * hidden * (tokens + vocab)
    assert kept["positions"] == 2 * fp32 * tokens * 16  # cosines and sines of 16 dimensions


def test_peaks_are_those_of_tensors_made_and_freed_by_hand() -> None:
    decoder = Decoder(model_of("grouped queries, dense"))
    held = sum(p.numel() * 4 for p in decoder.parameters())
    parameter = nn.Parameter(torch.zeros(1000))
    with Meter(decoder, {"parameters": [*decoder.parameters(), parameter]}) as meter:
        with meter.phase("forward"):
            first, second = torch.zeros(500), torch.zeros(250)
            del first
            view = second[:10]
            second.add_(1)
            third = parameter * second.new_ones(1000)
        with meter.phase("backward"):
            third.sum().backward()
            del third, view
        with meter.phase("optimizer"):
            pass
    peaks, held = meter.peaks(), held + 4000
    # The first two together are 3,000 bytes; then the second, ones and their product 9,000.
    assert peaks["forward"].total == held + 9000
    assert peaks["forward"].categories["activations"] == 9000
    assert peaks["optimizer"].categories["gradients"] == 4000
    assert peaks["optimizer"].total == held + 4000 + 1000
    assert sum(peaks["backward"].categories.values()) == peaks["backward"].total


def test_a_metered_run_trains_the_same_and_leaves_a_record(make_run, console, tmp_path, assert_same_run) -> None:
    assert loop.train(make_run("plain"), console=console) == 0
    assert loop.train(make_run("metered", "run.memory_steps=2"), console=console) == 0
    assert_same_run(tmp_path / "metered", tmp_path / "plain")
    record = json.loads((tmp_path / "metered" / "memory.json").read_text())
    assert record["step"] == 2
    (rank,) = record["ranks"]
    assert {"forward", "backward", "optimizer", "checkpoint"} <= rank["peaks"].keys()
    found, said = rank["peaks"]["backward"]["categories"], rank["predicted"]
    assert found["parameters"] >= said["weights"] > 0
    assert found["optimizer"] == said["optimizer"]
    assert "Memory in step 2" in console.file.getvalue()
    assert not (tmp_path / "plain" / "memory.json").exists()


def test_out_of_memory_is_a_sentence_with_the_consumers_and_a_way_out(make_run, console, tmp_path, monkeypatch) -> None:
    run = make_run("wide", "run.memory_steps=1")
    assert loop.train(run, console=console) == 0
    (rank,) = json.loads((tmp_path / "wide" / "memory.json").read_text())["ranks"]
    limit = int(max(peak["total"] for peak in rank["peaks"].values()) * 0.9)
    monkeypatch.setattr(metered, "LIMIT_BYTES", limit)
    with pytest.raises(MoesaicError, match=r"Memory ran out in forward of step 1 .*most went to .*layout\.") as caught:
        loop.train(make_run("narrow", "run.memory_steps=1"), console=console)
    assert caught.value.exit_code == 1
    record = json.loads((tmp_path / "narrow" / "out-of-memory-0.json").read_text())
    assert record["limit_bytes"] == limit < record["bytes"]
    sizes = list(record["consumers"].values())
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == record["bytes"]
    seconds = [way["seconds"] for way in record["ways_out"]]
    assert seconds == sorted(seconds) and all(way["bytes"] <= limit for way in record["ways_out"])
