"""The first module that produced a NaN is named."""

import pytest
import torch
from torch import nn

from moesaic.train.nonfinite import explain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def test_a_forward_nan_names_the_innermost_first_module():
    net = model()
    with torch.no_grad():
        net[1].second.weight[0, 0] = float("nan")
    found = explain(net, [lambda: net(torch.ones(2, 4)).sum()])
    assert "`1.second.weight` hold NaN" in found
    assert "first module to produce it was `1.second`, in the forward pass" in found


def test_the_micro_batch_is_named():
    net = model()
    inputs = [torch.ones(2, 4), torch.full((2, 4), float("inf"))]
    found = explain(net, [lambda x=x: net(x).sum() for x in inputs])
    assert "was `0.first`, in the forward pass in micro-batch 2 of 2" in found


def test_a_loss_alone():
    net = model()
    assert "not the loss" in explain(net, [lambda: net(torch.ones(2, 4)).sum() / torch.zeros(())])


def test_a_backward_infinity_names_where_it_came_back():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).abs().sqrt()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Root(), nn.Linear(4, 1))
    found = explain(net, [lambda: net(torch.ones(2, 4)).sum()])
    assert "forward pass was finite" in found and "came back to `1`" in found


def test_nothing_to_find():
    net = model()
    assert "again gave finite numbers" in explain(net, [lambda: net(torch.ones(2, 4)).sum()])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hooks_are_gone_afterwards(value):
    net = model()
    explain(net, [lambda: net(torch.full((2, 4), value)).sum()])
    assert all(not module._forward_hooks for module in net.modules())
