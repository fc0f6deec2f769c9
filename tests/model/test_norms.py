import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.model.norms import LayerNorm, RMSNorm, rms_norm


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 9), weighted=st.booleans())
def test_gradients_of_rms_norm_agree_with_finite_differences(rows: int, width: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 10 + width)
    x = torch.randn(2, rows, width, dtype=torch.float64, generator=generator).add_(0.3).requires_grad_()
    weight = torch.randn(width, dtype=torch.float64, generator=generator).requires_grad_() if weighted else None
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))


def test_rms_norm_equals_torch_in_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 64) * 5
    norm = RMSNorm(64, 1e-6, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-6), rtol=1e-6, atol=1e-6)


def test_statistics_of_bf16_rows_are_taken_in_fp32() -> None:
    # 300² overflows fp16 and loses the small entries in bf16; in fp32 the mean square is exact enough.
    x = torch.full((1, 4096), 0.01, dtype=torch.bfloat16)
    x[0, 0] = 300.0
    y = rms_norm(x, None, 0.0)
    exact = x.double() * x.double().square().mean().rsqrt()
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)


def test_rms_norm_of_zeros_is_zero_with_finite_gradients() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, None, 1e-6).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_layer_norm_has_zero_mean_and_unit_variance_before_weight_and_bias() -> None:
    torch.manual_seed(0)
    norm = LayerNorm(16, 0.0, True, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        norm.weight.fill_(2.0)
        assert norm.bias is not None
        norm.bias.fill_(3.0)
    y = norm(torch.randn(5, 16, dtype=torch.float64) * 4 + 1)
    torch.testing.assert_close(y.mean(-1), torch.full((5,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.full((5,), 4.0, dtype=torch.float64))
