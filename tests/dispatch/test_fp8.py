"""Numbers of 8 bits against all that e4m3 can hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.dispatch.fp8 import (
    GROUP_TOKENS,
    dequantize_per_channel,
    dequantize_per_token,
    group_of,
    groups_of,
    quantize_per_channel,
    quantize_per_token,
)


def e4m3() -> Tensor:
    """All finite numbers of e4m3, from its definition: bias 7, no infinities, two codes that are not a number."""
    found = []
    for code in range(256):
        sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            continue
        size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found.append(sign * size)
    return torch.tensor(found, dtype=torch.float64)


def per_token(x_TD: Tensor) -> Tensor:
    """There and back."""
    return dequantize_per_token(*quantize_per_token(x_TD), x_TD.dtype)


def per_channel(x_TD: Tensor, group_tokens: int = GROUP_TOKENS) -> Tensor:
    """There and back."""
    codes, scales = quantize_per_channel(x_TD, group_tokens)
    return dequantize_per_channel(codes, scales, group_of(x_TD, group_tokens), x_TD.dtype)


def error(x: Tensor, y: Tensor) -> float:
    """2-norm of the difference over that of x."""
    return float((x - y).norm() / x.norm())


def test_each_element_becomes_the_nearest_e4m3_number() -> None:
    x = torch.randn(300, 17, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 17)
    codes, scale_T = quantize_per_token(x)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scale_T.shape == (300,)
    torch.testing.assert_close(scale_T, x.abs().amax(1) / 448)
    scaled = (x / scale_T[:, None]).double()
    nearest = (scaled[..., None] - e4m3()).abs().amin(-1)
    got = (per_token(x).double() / scale_T[:, None].double() - scaled).abs()
    torch.testing.assert_close(got, nearest, rtol=0, atol=1e-4)


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 20),
    channels=st.integers(1, 9),
    power=st.integers(-120, 120),
    spread=st.floats(0, 8),
    seed=st.integers(0, 99),
    by_channel=st.booleans(),
)
def test_the_error_is_bounded(
    tokens: int, channels: int, power: int, spread: float, seed: int, by_channel: bool
) -> None:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=made) * 10 ** (spread * torch.randn(tokens, channels, generator=made))
    x = (x.clamp(-1e6, 1e6) * 2.0 ** min(power, 100)).float()
    if by_channel:
        _, scale_GD = quantize_per_channel(x, 7)
        back, scale = per_channel(x, 7), scale_GD[group_of(x, 7)]
        assert len(scale_GD) == groups_of(tokens, 7) == math.ceil(tokens / 7)
    else:
        back, scale = per_token(x), quantize_per_token(x)[1][:, None]
    bound = torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 * scale.double())
    # Rounding of the quotient and of the product in fp32.
    assert bool(((back.double() - x.double()).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("back", [per_token, per_channel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_signs_and_nothing_at_all(back: object, dtype: torch.dtype) -> None:
    assert callable(back)
    assert not back(torch.zeros(3, 4, dtype=dtype)).any()
    for shape in ((0, 4), (3, 0)):
        assert back(torch.zeros(shape, dtype=dtype)).shape == shape
    x = torch.tensor([[1.0, -1.0], [448.0, -448.0]], dtype=dtype)
    found = back(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found[1], x[1])
    assert found.sign().equal(x.sign())


@pytest.mark.parametrize("back", [per_token, per_channel])
def test_the_smallest_and_the_largest_numbers(back: object) -> None:
    assert callable(back)
    info = torch.finfo(torch.float32)
    for x in (info.tiny, info.tiny * 448, info.smallest_normal / 64, 1e-45, info.max):
        found = back(torch.full((2, 2), x))
        assert found.isfinite().all()
        assert bool(((found.double() - x).abs() <= max(2.0**-4 * x, 2.0**-10 * info.tiny)).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_as_not_a_number_and_spoils_only_its_own_scale(bad: float) -> None:
    x = torch.ones(300, 3)
    x[5, 1] = bad
    token = per_token(x)
    assert token[5, 1].isnan() and token[torch.arange(300) != 5].equal(x[torch.arange(300) != 5])
    channel = per_channel(x)
    assert channel[5, 1].isnan() and channel[:, [0, 2]].equal(x[:, [0, 2]]) and channel[128:].equal(x[128:])


def test_an_outlier_costs_only_those_that_share_its_scale() -> None:
    """A token (or a channel) a million times as large as the others makes those vanish where all share one scale."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    one = per_token(x)
    loud = x.clone()
    loud[3] *= 1e6
    others = torch.arange(256) != 3
    assert per_token(loud)[others].equal(one[others])
    together = per_token(loud.view(1, -1)).view_as(loud)
    assert not together[others].any() and error(x[others], one[others]) < 0.03

    loud = x.clone()
    loud[:, 3] *= 1e6
    others = torch.arange(64) != 3
    assert per_channel(loud)[:, others].equal(per_channel(x)[:, others])
    assert error(loud[:, others], per_channel(loud)[:, others]) < 0.03
    assert error(x[:, others], per_token(loud)[:, others]) > 0.5


def test_gradients_whose_channels_differ_lose_less_by_channel() -> None:
    """Channels from 1 to 10⁻⁷: those that one scale per token leaves in e4m3's subnormal range, or none."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(0, -7, 64)
    worst = {back: max(error(x[:, c], back(x)[:, c]) for c in range(64)) for back in (per_token, per_channel)}
    assert worst[per_channel] < 0.035 and worst[per_token] > 0.9
