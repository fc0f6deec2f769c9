"""Memory that a process has beside the tensors of a step: bounds that hold by counting bytes."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from moesaic.model.expert_blocks import BYTES_PER_ELEMENTWISE_BLOCK
from moesaic.model.expert_memory import WORKSPACE
from moesaic.model.experts import Experts
from moesaic.spec.layout import resolve_layout
from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec
from moesaic.train.loop import train
from moesaic.train.resident import resident, scratch_bytes


@pytest.mark.parametrize(
    ("threads", "gated", "top_k", "hidden", "width"),
    [(1, True, 1, 24, 20), (2, True, 1, 24, 20), (2, False, 1, 24, 20), (1, True, 4, 24, 20), (1, True, 4, 512, 16)],
)
def test_experts_work_in_what_their_threads_need(threads, gated, top_k, hidden, width):
    """Even routing goes to workers, uneven routing to all threads within a product: scratch does not add up. Several
    choices of a token are computed together."""
    tokens, count = 512, 4
    moe = MoeSpec(router=RouterSpec(experts=count, top_k=top_k), expert=MlpSpec(width=width, gated=gated))
    found: list[int] = []

    def run() -> None:
        torch.set_num_threads(threads)
        experts = Experts(moe, hidden)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        for ids_T in (torch.arange(tokens) % count, torch.zeros(tokens, dtype=torch.int64)):
            x_TD = torch.randn(tokens, hidden, requires_grad=True)
            ids_TK = (ids_T[:, None] + torch.arange(top_k)) % count
            experts(x_TD, ids_TK, torch.rand(tokens, top_k, requires_grad=True)).sum().backward()
        found.append(sum(flat.nbytes for flat in WORKSPACE.tensors()))

    before = torch.get_num_threads()
    thread = threading.Thread(target=run)  # whose scratch nobody has used
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    full, even = scratch_bytes(moe, hidden, tokens), scratch_bytes(moe, hidden, tokens // threads)
    # One thread had all rows once; the others no more than those of their own experts.
    assert full - BYTES_PER_ELEMENTWISE_BLOCK <= found[0] <= full + (threads - 1) * even


def test_saving_holds_the_state_and_one_copy_of_it(make_run, console, tmp_path):
    """Gradients are gone by then, and so is what experts had ready; the update itself makes nothing of their size."""
    run = make_run("saved", "run.memory_steps=2", "train.eval_every=0")
    assert train(run, console=console) == 0
    record = json.loads((tmp_path / "saved/memory.json").read_text())
    assert record["step"] == 2
    peaks = record["ranks"][0]["peaks"]
    state = peaks["checkpoint"]["categories"]
    held = sum(state[name] for name in ("parameters", "optimizer", "workspaces", "other"))
    layout = resolve_layout(run.layout, run.model_spec(), 1, seq_len=32, global_batch=4)
    (expected,) = resident(run, run.model_spec(), layout, 1)
    assert state["parameters"] + state["optimizer"] == pytest.approx(expected.state, rel=0.02)
    assert state["gradients"] == 0
    assert peaks["checkpoint"]["total"] - held <= expected.copy * 1.1
    assert peaks["optimizer"]["categories"]["temporaries"] <= 0.02 * expected.state


def test_a_copy_counts_on_top_of_a_step_only_if_steps_follow(make_run):
    """The last checkpoint is made when activations are gone; an earlier one may be on its way during the next step."""
    peaks = {}
    for every in (2, 6):
        run = make_run(f"every-{every}", f"train.checkpoint_every={every}", "train.seq_len=64")
        layout = resolve_layout(run.layout, run.model_spec(), 1, seq_len=64, global_batch=4)
        (found,) = resident(run, run.model_spec(), layout, 1)
        peaks[every] = found.peak
        assert found.copy == 3 * predicted_weights(run)
        assert peaks[every] >= found.step + found.scratch
    assert peaks[2] - peaks[6] == pytest.approx(found.copy)


def predicted_weights(run) -> float:
    from moesaic.model.decoder import Decoder

    return sum(p.nbytes for p in Decoder(run.model_spec()).parameters())
