import pytest
import torch
import torch.nn.functional as F

from moesaic.mesh.mesh import Mesh
from moesaic.model import losses
from moesaic.model.losses import LossWeights, balance_loss, cross_entropy, routing_losses
from moesaic.model.router import Router, Routing
from moesaic.model.sequences import Sequences
from moesaic.spec.model import RouterSpec


def _problem(tokens: int = 37, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(19, 8, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(19, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 19, (tokens,), generator=generator)
    return x, weight, bias, labels


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_and_gradients_equal_torch(
    chunks: int, with_bias: bool, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "LOGIT_BYTES", 19 * 4 * 40 // chunks)
    x, weight, bias, labels = _problem()
    if ignored != "none":
        labels[:: 3 if ignored == "some" else 1] = -100
    inputs = [x, weight, bias] if with_bias else [x, weight]
    scaled, nats = cross_entropy(x, weight, labels, bias_V=bias if with_bias else None, scale=0.3, logits_divisor=1.7)
    expected = F.cross_entropy(F.linear(x, weight, bias if with_bias else None) / 1.7, labels, reduction="sum")
    torch.testing.assert_close(nats, expected.detach())
    torch.testing.assert_close(scaled, expected * 0.3)
    got = torch.autograd.grad(scaled * 2.0, inputs)
    wanted = torch.autograd.grad(expected * 0.6, inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_of_cross_entropy_agree_with_finite_differences() -> None:
    x, weight, bias, labels = _problem(5, torch.float64)
    labels[2] = -100
    assert torch.autograd.gradcheck(
        lambda x, w, b: cross_entropy(x, w, labels, bias_V=b, scale=0.2)[0], (x, weight, bias)
    )


def test_logits_of_any_size_stay_finite() -> None:
    x = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    scaled, nats = cross_entropy(x, weight, torch.tensor([1]))
    scaled.backward()
    assert float(nats) == pytest.approx(2e4)
    assert x.grad is not None and x.grad.isfinite().all()


def test_bf16_loss_is_computed_in_fp32() -> None:
    x, weight, _, labels = _problem(dtype=torch.bfloat16)
    scaled, nats = cross_entropy(x, weight, labels, scale=1 / 37)
    exact = F.cross_entropy(F.linear(x.float(), weight.float()), labels, reduction="sum")
    assert nats.dtype == torch.float32
    torch.testing.assert_close(nats, exact.detach(), rtol=2e-3, atol=0)
    scaled.backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunks", [1, 3])
def test_bf16_products_in_hardware_give_the_same_gradients(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies bf16 itself: products in bf16, sums over chunks and the loss in fp32."""
    monkeypatch.setattr(losses, "LOGIT_BYTES", 19 * 4 * 40 // chunks)
    monkeypatch.setattr(losses, "compute_dtype", lambda tensor: tensor.dtype)
    x, weight, bias, labels = _problem(dtype=torch.bfloat16)
    scaled, nats = cross_entropy(x, weight, labels, bias_V=bias, scale=0.1)
    wide = [part.detach().float().requires_grad_() for part in (x, weight, bias)]
    expected = F.cross_entropy(F.linear(*wide), labels, reduction="sum") * 0.1
    assert scaled.dtype == nats.dtype == torch.float32
    torch.testing.assert_close(scaled, expected, rtol=5e-3, atol=0)
    got = torch.autograd.grad(scaled, (x, weight, bias))
    for a, b in zip(got, torch.autograd.grad(expected, wide), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.01)


def test_never_more_logits_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGIT_BYTES", 20 * 19 * 4)
    x, weight, _, labels = _problem(50)
    rows: list[int] = []
    plain = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        rows.append(a.shape[0])
        return plain(a, b, **out)

    monkeypatch.setattr(torch, "mm", watched)
    cross_entropy(x, weight, labels)
    assert rows == [20, 20, 10]


def _router(experts: int, top_k: int, score: str = "softmax") -> Router:
    return Router(RouterSpec(experts=experts, top_k=top_k, score=score), 4, dtype=torch.float32, device="cpu")


def _routing(ids: list[list[int]], experts: int, sharpness: float = 0.0) -> Routing:
    """Choices `ids`, with logits that point at them."""
    ids_TK = torch.tensor(ids)
    logits = torch.zeros(len(ids), experts).scatter_(1, ids_TK, sharpness)
    return Routing(ids_TK, torch.ones_like(ids_TK, dtype=torch.float32), logits.requires_grad_())


def _terms(
    routers: list[tuple[Router, Routing]], weights: LossWeights, trained_B: torch.Tensor, step_tokens: int
) -> dict[str, torch.Tensor]:
    """The terms of rows of equal length, without padding, on one rank."""
    sequences = Sequences(len(trained_B), len(routers[0][1].ids_TK) // len(trained_B))
    return routing_losses(routers, weights, trained_B, step_tokens, sequences, Mesh.single())


ALL = LossWeights(z=1.0, batch_aux=1.0, sequence_aux=1.0, global_aux=1.0)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (6, 6)])
def test_balance_is_one_whatever_the_number_of_experts_and_choices(experts: int, top_k: int) -> None:
    ids = [[(t * top_k + k) % experts for k in range(top_k)] for t in range(experts)]
    router = _router(experts, top_k).eval()
    terms = _terms([(router, _routing(ids, experts, 3.0))], ALL, torch.tensor([experts]), experts)
    for name in ("batch_aux", "sequence_aux", "global_aux"):
        assert float(terms[name].detach()) == pytest.approx(1.0, abs=1e-5)


def test_collapse_onto_one_expert_costs_the_number_of_experts() -> None:
    router = _router(8, 1).eval()
    terms = _terms([(router, _routing([[3]] * 10, 8, 30.0))], ALL, torch.tensor([10]), 10)
    assert terms["batch_aux"].item() == pytest.approx(8.0, rel=1e-4)


def test_pooling_layers_hides_a_collapse_that_a_loss_per_layer_shows() -> None:
    """Four layers of four experts, each layer collapsed onto another expert: every layer is as bad as it can be.

    Pooled over layers, each expert got a quarter of all choices, and transformers' loss is that of perfect balance.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = [(_router(4, 1).eval(), _routing([[e]] * 16, 4, 30.0)) for e in range(4)]
    pooled = load_balancing_loss_func(tuple(routing.logits_TE for _, routing in layers), 4, 1)
    balanced = [[t % 4] for t in range(16)]
    logits = tuple(_routing(balanced, 4, 30.0).logits_TE for _ in range(4))
    assert pooled.item() == pytest.approx(load_balancing_loss_func(logits, 4, 1).item(), rel=1e-5)
    ours = _terms(layers, LossWeights(batch_aux=1.0), torch.tensor([16]), 16)["batch_aux"]
    assert ours.item() == pytest.approx(4.0, rel=1e-4)


def test_one_layer_is_transformers_loss_divided_by_top_k() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    routing = Routing(logits.topk(3).indices, torch.ones(40, 3), logits)
    ours = _terms([(_router(8, 3), routing)], LossWeights(batch_aux=1.0), torch.tensor([40]), 40)["batch_aux"]
    assert ours.item() == pytest.approx(float(load_balancing_loss_func((logits,), 8, 3)) / 3, rel=1e-5)


@pytest.mark.parametrize("term", ["sequence_aux", "z"])
def test_losses_over_rows_do_not_depend_on_how_rows_are_grouped(term: str) -> None:
    router = _router(6, 2)
    logits = torch.randn(4 * 5, 6, generator=torch.Generator().manual_seed(0))
    ids = logits.topk(2).indices
    trained = torch.tensor([5, 2, 4, 3])
    only = LossWeights(**{term: 1.0})

    def rows(first: int, last: int) -> torch.Tensor:
        part = slice(first * 5, last * 5)
        routing = Routing(ids[part], torch.ones(len(ids[part]), 2), logits[part])
        return _terms([(router, routing)], only, trained[first:last], 14)[term]

    torch.testing.assert_close(rows(0, 4), rows(0, 1) + rows(1, 3) + rows(3, 4))


def test_sequence_loss_is_equation_17_of_deepseek_v3() -> None:
    router = _router(6, 2, "sigmoid")
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    scores = logits.sigmoid()
    ids = scores.topk(2).indices
    routing = Routing(ids, scores.gather(1, ids), logits)
    total = 0.0
    for i in range(6):
        f = 6 / (2 * 9) * sum(i in row for row in ids.tolist())
        p = sum(float(scores[t, i] / scores[t].sum()) for t in range(9)) / 9
        total += f * p
    ours = _terms([(router, routing)], LossWeights(sequence_aux=1.0), torch.tensor([9]), 9)["sequence_aux"]
    assert ours.item() == pytest.approx(total, rel=1e-5)


def test_global_loss_uses_the_counts_of_the_step() -> None:
    router = _router(4, 1)
    router.step_counts.copy_(torch.tensor([10, 0, 0, 30]))
    routing = _routing([[0]] * 5, 4, 1.0)
    ours = _terms([(router, routing)], LossWeights(global_aux=1.0), torch.tensor([5]), 20)["global_aux"]
    mean = routing.logits_TE.detach().softmax(-1).mean(0)
    assert ours.item() == pytest.approx(float(4 * (0.25 * mean[0] + 0.75 * mean[3])) * 5 / 20, rel=1e-5)


def test_global_loss_of_given_counts_does_not_depend_on_how_rows_are_grouped() -> None:
    """Rows with more and with fewer trained tokens, some of them filled up."""
    router = _router(6, 2)
    router.step_counts.copy_(torch.tensor([7, 1, 0, 3, 5, 4]))
    logits = torch.randn(4 * 5, 6, generator=torch.Generator().manual_seed(0))
    trained = torch.tensor([5, 2, 4, 0])
    documents = torch.zeros(4, 5, dtype=torch.int64)
    documents[1, 3:] = documents[3, 1:] = -1

    def total(rows: int) -> float:
        found = 0.0
        for first in range(0, 4, rows):
            here = slice(first, first + rows)
            part = logits.view(4, 5, 6)[here].flatten(0, 1)
            routing = Routing(part.topk(2).indices, torch.ones(len(part), 2), part)
            sequences = Sequences(rows, 5, documents=documents[here])
            terms = routing_losses(
                [(router, routing)], LossWeights(global_aux=1.0), trained[here], 11, sequences, Mesh.single()
            )
            found += float(terms["global_aux"])
        return found

    assert total(1) == pytest.approx(total(4), rel=1e-6)
    assert total(2) == pytest.approx(total(4), rel=1e-6)


def test_z_loss_is_the_mean_square_of_log_partition() -> None:
    routing = _routing([[0], [1], [1]], 4, 2.0)
    ours = _terms([(_router(4, 1), routing)], LossWeights(z=1.0), torch.tensor([3]), 6)["z"]
    value = float(torch.tensor([2.0, 0, 0, 0]).exp().sum().log()) ** 2
    assert ours.item() == pytest.approx(value * 3 / 6, rel=1e-5)


def test_balance_pushes_probability_away_from_the_busy_expert() -> None:
    routing = _routing([[0], [0], [0], [1]], 4)
    losses_ = _terms([(_router(4, 1), routing)], LossWeights(batch_aux=1.0), torch.tensor([4]), 4)
    losses_["batch_aux"].backward()
    slope = routing.logits_TE.grad
    assert slope is not None
    assert (slope[:, 0] > 0).all() and (slope[:, 2:] < 0).all()


def test_one_loss_per_leading_dimension() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    counts = torch.tensor([[3, 3], [6, 0]])
    torch.testing.assert_close(balance_loss(probabilities, counts), torch.tensor([1.0, 2.0]))
