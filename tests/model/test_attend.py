import pytest
import torch

from moesaic.model.attend import attend
from moesaic.model.sequences import Sequences


def _brute_force(q, k, v, segments, scale, window, sinks):
    """One query at a time, over the keys it may see."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
    start = 0
    for length in segments:
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            for h in range(q.shape[1]):
                scores = k[first : i + 1, h // group] @ q[i, h] * scale
                if sinks is not None:
                    scores = torch.cat((sinks[h : h + 1], scores))
                share = scores.softmax(0)
                out[i, h] = share[-(i + 1 - first) :] @ v[first : i + 1, h // group]
        start += length
    return out


def _inputs(tokens: int, heads: int, groups: int, width: int, value_width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, width), (tokens, groups, width), (tokens, groups, value_width)]
    return [torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 200])
@pytest.mark.parametrize("segments", [(6, 6), (12,), (5, 1, 6)])
@pytest.mark.parametrize("value_width", [4, 6, 3])
def test_attention_equals_one_query_at_a_time(segments, window, with_sinks, value_width) -> None:
    q, k, v = _inputs(12, 4, 2, 4, value_width)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    out = attend(q, k, v, segments, scale=0.7, window=window, sinks=sinks)
    expected = _brute_force(q, k, v, segments, 0.7, window, sinks)
    torch.testing.assert_close(out, expected)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [7, 130, 150])
def test_a_window_much_shorter_than_the_segment_runs_in_blocks(window: int, with_sinks: bool) -> None:
    # 128 is the least block: 300 tokens are three blocks, the last one partly empty.
    q, k, v = _inputs(600, 2, 1, 4, 4)
    sinks = torch.tensor([0.5, -0.5], dtype=torch.float64) if with_sinks else None
    segments = (300, 300)
    out = attend(q, k, v, segments, scale=0.5, window=window, sinks=sinks)
    distance = torch.arange(300)[:, None] - torch.arange(300)[None]
    mask = (distance >= 0) & (distance < window)
    for rows in (slice(0, 300), slice(300, 600)):
        scores = torch.einsum("qhd,kd->hqk", q[rows], k[rows, 0]) * 0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat((sinks[:, None, None].expand(2, 300, 1), scores), -1)
        share = scores.softmax(-1)[..., -300:]
        torch.testing.assert_close(out[rows], torch.einsum("hqk,kd->qhd", share, v[rows, 0]))


def test_bf16_attention_is_close_to_fp32() -> None:
    q, k, v = (x.detach().float() for x in _inputs(16, 2, 2, 8, 8))
    out = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), (16,), scale=0.35)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attend(q, k, v, (16,), scale=0.35), rtol=0, atol=0.05)


def test_segments_end_with_rows_documents_and_chunks() -> None:
    assert Sequences(2, 5).segments() == (5, 5)
    documents = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, 4]])
    assert Sequences(2, 5, None, documents).segments() == (2, 3, 4, 1)
    assert Sequences(2, 5).segments(chunk=2) == (2, 2, 1, 2, 2, 1)
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]])
    assert Sequences(2, 5, positions, documents).segments(chunk=2) == (2, 2, 1, 2, 2, 1)


def test_equal_documents_in_neighbouring_rows_stay_apart() -> None:
    assert Sequences(2, 3, None, torch.zeros(2, 3, dtype=torch.int64)).segments() == (3, 3)
