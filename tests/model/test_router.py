import itertools

import pytest
import torch

from moesaic.model.router import Router, sparsemixer
from moesaic.spec.errors import SpecError
from moesaic.spec.model import RouterSpec


def _router(hidden: int = 6, **switches: object) -> Router:
    router = Router(RouterSpec(**switches), hidden, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(generator=generator)
        if router.select_bias is not None:
            router.select_bias.normal_(std=0.5, generator=generator)
    return router


def _one_token(router: Router, x: torch.Tensor) -> dict[int, float]:
    """The definition for one token, over all sets of experts: expert → weight."""
    spec = router.spec
    logits = (router.weight @ x).detach()
    if router.bias is not None:
        logits = logits + router.bias.detach()
    score = torch.sigmoid if spec.score == "sigmoid" else lambda z: torch.softmax(z, 0)
    base = logits if spec.when == "post" else score(logits)
    choice = base if router.select_bias is None else base + router.select_bias
    allowed = list(range(spec.experts))
    if spec.groups > 1:
        size = spec.experts // spec.groups
        members = [allowed[g * size : (g + 1) * size] for g in range(spec.groups)]
        count = 1 if spec.group_score == "max" else 2
        values = [sum(sorted((float(choice[e]) for e in m), reverse=True)[:count]) for m in members]
        best = sorted(range(spec.groups), key=lambda g: -values[g])[: spec.groups_kept]
        allowed = [e for g in best for e in members[g]]
    picked = max(itertools.combinations(allowed, spec.top_k), key=lambda s: sum(float(choice[e]) for e in s))
    ids = list(picked)
    weights = score(logits[ids]) if spec.when == "post" else base[ids]
    if spec.norm:
        weights = weights / max(float(weights.sum()) + spec.norm_eps, spec.norm_min)
    return {e: float(w) * spec.scale for e, w in zip(ids, weights, strict=True)}


SWITCHES = {
    "softmax, not normalised": {"experts": 6, "top_k": 3},
    "softmax, normalised": {"experts": 6, "top_k": 2, "norm": True},
    "softmax over the chosen": {"experts": 6, "top_k": 2, "when": "post", "logit_bias": True},
    "sigmoid of the chosen": {"experts": 6, "top_k": 1, "score": "sigmoid", "when": "post", "apply": "input"},
    "sigmoid with selection bias": {
        "experts": 6,
        "top_k": 3,
        "score": "sigmoid",
        "select_bias": True,
        "norm": True,
        "norm_eps": 1e-20,
        "scale": 2.5,
    },
    "groups by their two best": {
        "experts": 12,
        "top_k": 3,
        "score": "sigmoid",
        "select_bias": True,
        "groups": 4,
        "groups_kept": 2,
        "norm": True,
    },
    "groups by their best": {
        "experts": 12,
        "top_k": 3,
        "groups": 4,
        "groups_kept": 2,
        "group_score": "max",
        "scale": 16.0,
    },
    "sum not below a floor": {"experts": 6, "top_k": 1, "select_bias": True, "norm": True, "norm_min": 0.9},
    "all experts": {"experts": 4, "top_k": 4, "norm": True},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_routing_equals_its_definition_token_by_token(name: str) -> None:
    router = _router(**SWITCHES[name])
    x = torch.randn(25, 6, generator=torch.Generator().manual_seed(0))
    ids, weights, logits = router(x)
    assert ids.dtype == torch.int64 and weights.dtype == logits.dtype == torch.float32
    for t in range(len(x)):
        expected = _one_token(router, x[t])
        got = dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


def test_selection_bias_changes_the_choice_but_not_the_weight() -> None:
    router = _router(experts=4, top_k=1, score="sigmoid", select_bias=True)
    x = torch.randn(10, 6)
    assert router.select_bias is not None
    router.select_bias.copy_(torch.tensor([0.0, 100.0, 0.0, 0.0]))
    ids, weights, logits = router(x)
    assert (ids == 1).all()
    torch.testing.assert_close(weights[:, 0], logits[:, 1].sigmoid())


def test_a_bias_can_be_added_to_a_family_without_one() -> None:
    router = _router(experts=4, top_k=2)
    before = router(torch.ones(3, 6)).ids_TK
    assert "select_bias" not in router.state_dict()
    router.enable_select_bias()
    assert torch.equal(router.state_dict()["select_bias"], torch.zeros(4))
    assert torch.equal(router(torch.ones(3, 6)).ids_TK, before)


def test_bf16_tokens_are_routed_in_fp32() -> None:
    router = _router(experts=4, top_k=2)
    x = torch.randn(9, 6).bfloat16()
    for got, wanted in zip(router(x), router(x.float()), strict=True):
        assert torch.equal(got, wanted)


def test_forced_choice_keeps_the_weights_of_the_scores() -> None:
    router = _router(experts=4, top_k=2, norm=True)
    router.choose = lambda scores: torch.tensor([[3, 0]]).expand(len(scores), 2)
    ids, weights, logits = router(torch.randn(5, 6))
    assert ids.tolist() == [[3, 0]] * 5
    torch.testing.assert_close(weights, logits[:, [3, 0]].softmax(-1))


def test_counts_add_up_until_cleared() -> None:
    router = _router(experts=4, top_k=2)
    for _ in range(2):
        router.count(router(torch.randn(7, 6)))
    assert int(router.step_counts.sum()) == 2 * 7 * 2
    assert "step_counts" not in router.state_dict()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_probabilities_sum_to_one(score: str) -> None:
    router = _router(experts=5, top_k=2, score=score)
    probabilities = router.probabilities(router(torch.randn(8, 6)))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(8))


@pytest.mark.parametrize("training", [False, True])
def test_sparsemixer_equals_the_published_code(training: bool) -> None:
    """Values, choices, random draws and gradients, against transformers."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer as published

    logits = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)).mul_(0.3).requires_grad_()
    torch.manual_seed(7)
    ids, weights = sparsemixer(logits, 2, 0.1, training)
    torch.manual_seed(7)
    their_weights, their_ids = published(logits, 0.1, training)
    assert torch.equal(ids, their_ids)
    # They write 1/3 as 0.3333, and draw once more before deciding which second picks count a third.
    torch.testing.assert_close(weights[:, 0], their_weights[:, 0], rtol=2e-4, atol=1e-6)
    ratio = (weights[:, 1] / their_weights[:, 1]).detach()
    near = torch.tensor([[1 / 3], [1.0], [3.0]])
    torch.testing.assert_close(near[(near - ratio).abs().argmin(0), 0], ratio, rtol=4e-4, atol=0)
    assert training or torch.allclose(ratio, torch.ones(400))
    slope = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((weights * slope).sum(), logits)
    (wanted,) = torch.autograd.grad((their_weights * slope).sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"experts": 4, "top_k": 5}, "top_k is 5 with 4 experts"),
        ({"experts": 4, "top_k": 0}, "top_k is 0"),
        ({"experts": 10, "top_k": 1, "groups": 4}, "10 experts do not divide into 4 groups"),
        ({"experts": 8, "top_k": 3, "groups": 4, "groups_kept": 1}, "hold 2"),
        ({"experts": 4, "top_k": 1, "groups": 4, "groups_kept": 1}, "no best two"),
    ],
)
def test_impossible_routers_are_refused(switches: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _router(**switches)
