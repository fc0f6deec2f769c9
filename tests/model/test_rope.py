import math

import pytest
import torch

from moesaic.model.rope import inverse_frequencies, rope_table, rotate
from moesaic.model.sequences import Sequences
from moesaic.spec.errors import SpecError
from moesaic.spec.model import RopeSpec


def _table(positions: list[int], interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(RopeSpec(dim=8, theta=100.0, interleaved=interleaved), torch.tensor([positions]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_rotation_is_multiplication_of_complex_pairs(interleaved: bool, offset: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 12, dtype=torch.float64)
    cos, sin = (part.double() for part in _table([0, 3, 1, 7, 2], interleaved))
    y = rotate(x, cos, sin, interleaved, offset)
    angles = torch.tensor([0.0, 3, 1, 7, 2]).double()[:, None, None] * 100.0 ** (-torch.arange(4) / 4)
    turn = torch.polar(torch.ones_like(angles), angles)
    inner, got = x[..., offset : offset + 8], y[..., offset : offset + 8]
    if interleaved:
        expected = torch.view_as_real(torch.view_as_complex(inner.unflatten(-1, (4, 2)).contiguous()) * turn)
        torch.testing.assert_close(got, expected.flatten(-2), rtol=0, atol=1e-5)
    else:
        z = torch.complex(inner[..., :4].contiguous(), inner[..., 4:].contiguous()) * turn
        torch.testing.assert_close(got, torch.cat((z.real, z.imag), -1), rtol=0, atol=1e-5)
    assert torch.equal(y[..., :offset], x[..., :offset])
    assert torch.equal(y[..., offset + 8 :], x[..., offset + 8 :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_rotation(interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = (part.double() for part in _table([4, 0, 9], interleaved))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, interleaved, 1), (x,))


def test_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at_q: int, at_k: int) -> float:
        return float((rotate(q, *_table([at_q])) * rotate(k, *_table([at_k]))).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


def test_bf16_is_rotated_with_fp32_angles() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 2, 8)
    table = _table([1000, 2001, 3002, 4003])
    y = rotate(x.bfloat16(), *table)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), rotate(x, *table), rtol=0, atol=0.03)


def test_linear_scaling_is_slower_positions() -> None:
    plain, _ = inverse_frequencies(RopeSpec(dim=8))
    scaled, magnitude = inverse_frequencies(RopeSpec(dim=8, kind="linear", params={"factor": 4.0}))
    torch.testing.assert_close(scaled, plain / 4)
    assert magnitude == 1.0


def test_ntk_alpha_stretches_the_slowest_wave_by_alpha() -> None:
    # theta · alpha^(d / (d − 2)): the slowest pair, exponent (d − 2) / d, slows by alpha; the fastest is unchanged.
    plain, _ = inverse_frequencies(RopeSpec(dim=16))
    scaled, _ = inverse_frequencies(RopeSpec(dim=16, kind="ntk_alpha", params={"alpha": 50.0}))
    assert float(plain[-1] / scaled[-1]) == pytest.approx(50.0, rel=1e-4)
    assert float(plain[0]) == float(scaled[0])


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    numbers = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, _ = inverse_frequencies(RopeSpec(dim=128, theta=500000.0))
    scaled, _ = inverse_frequencies(RopeSpec(dim=128, theta=500000.0, kind="llama3", params=numbers))
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_yarn_magnitude_is_that_of_the_paper() -> None:
    # arXiv 2309.00071, equation 15: sqrt(1/t) = 0.1 ln(s) + 1.
    spec = RopeSpec(dim=64, kind="yarn", params={"factor": 40.0, "original_max_position_embeddings": 4096})
    frequencies, magnitude = inverse_frequencies(spec)
    assert magnitude == pytest.approx(0.1 * math.log(40) + 1)
    plain, _ = inverse_frequencies(RopeSpec(dim=64))
    torch.testing.assert_close(frequencies[0], plain[0])
    torch.testing.assert_close(frequencies[-1], plain[-1] / 40)


def test_equal_mscales_cancel_in_the_table() -> None:
    numbers = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
    assert inverse_frequencies(RopeSpec(dim=64, kind="yarn", params=numbers))[1] == 1.0


def test_a_missing_number_is_named() -> None:
    with pytest.raises(SpecError, match=r"'factor'.*\['beta_fast'\]"):
        inverse_frequencies(RopeSpec(dim=8, kind="yarn", params={"beta_fast": 32}))


LONGROPE = RopeSpec(
    dim=8,
    kind="longrope",
    params={
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_mscale": 1.25,
        "long_mscale": 1.5,
        "original_max_position_embeddings": 6,
    },
)


def test_longrope_chooses_its_set_by_the_length_of_each_document() -> None:
    documents = torch.tensor([[0] * 8, [1] * 3 + [2] * 5])
    positions = torch.tensor([[*range(8)], [*range(3), *range(5)]])
    cos, _ = Sequences(2, 8, positions, documents).rope(LONGROPE, "")
    plain, _ = inverse_frequencies(RopeSpec(dim=8))
    long = (positions[0, :, None] * plain / torch.tensor([2.0, 3.0, 4.0, 5.0])).cos() * 1.5
    short = (positions[1, :, None] * plain / torch.tensor([1.0, 1.1, 1.2, 1.3])).cos() * 1.25
    torch.testing.assert_close(cos[0, :, 0, :4], long)
    torch.testing.assert_close(cos[1, :, 0, :4], short)


@pytest.mark.parametrize("rows", [5, 9])
def test_longrope_equals_transformers(rows: int) -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    numbers = {key: value for key, value in LONGROPE.params.items() if "mscale" not in key}
    config = Phi3Config(
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=24,
        original_max_position_embeddings=6,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **numbers},
        pad_token_id=None,
    )
    positions = torch.arange(rows)[None]
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions)
    magnitude = math.sqrt(1 + math.log(4) / math.log(6))
    spec = RopeSpec(dim=8, kind="longrope", params={**numbers, "attention_factor": magnitude})
    ours_cos, ours_sin = rope_table(spec, positions)
    torch.testing.assert_close(ours_cos[:, :, 0], cos)
    torch.testing.assert_close(ours_sin[:, :, 0, 4:], sin[..., 4:])
