"""The aux-loss-free bias of arXiv 2408.15664 and the load figures."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.train.balancing import Load, update_select_bias


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=64), st.floats(1e-5, 1.0))
def test_bias_moves_by_the_sign_of_mean_minus_count(counts, rate):
    bias = torch.zeros(len(counts))
    update_select_bias(bias, torch.tensor(counts), rate)
    mean = sum(counts) / len(counts)
    expected = [0.0 if c * len(counts) == sum(counts) else (rate if c < mean else -rate) for c in counts]
    assert torch.equal(bias, torch.tensor(expected))


def test_balanced_experts_are_left_alone():
    bias = torch.tensor([0.5, -0.25, 0.0])
    update_select_bias(bias, torch.tensor([7, 7, 7]), 0.1)
    assert bias.tolist() == [0.5, -0.25, 0.0]


def test_repeated_updates_balance_a_skewed_router():
    """Expert 0 is wanted by everybody; the bias must bring it down to its share, as the paper's figure 1 shows."""
    torch.manual_seed(0)
    scores_TE = torch.sigmoid(torch.randn(4096, 8))
    scores_TE[:, 0] += 0.5
    bias_E = torch.zeros(8)
    for _ in range(400):
        counts_E = torch.bincount((scores_TE + bias_E).topk(2, 1).indices.flatten(), minlength=8)
        update_select_bias(bias_E, counts_E, 0.005)
    assert counts_E.max() / counts_E.float().mean() < 1.1


def test_load_figures():
    load = Load.of({"3": torch.tensor([6, 0, 2, 0])})
    assert load.shares["3"] == [0.75, 0.0, 0.25, 0.0]
    assert load.max_over_mean["3"] == 3.0
    assert load.dead["3"] == 2
