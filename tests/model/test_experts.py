"""The experts' autograd function against a plain loop over tokens, differentiated by torch."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups
from moesaic.model import expert_blocks, expert_workers
from moesaic.model.activations import CLAMP_ALPHA, CLAMP_LIMIT
from moesaic.model.deferred import WeightGradients, deferring
from moesaic.model.expert_memory import Pool
from moesaic.model.expert_workers import run_experts, share_out
from moesaic.model.experts import Experts
from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]


def reference(experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """One token and one choice at a time, with nothing but differentiable torch operations."""
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda g: torch.relu(g) ** 2,
    }
    up_EGD = experts.get_parameter(experts.up_name)
    up_bias = getattr(experts, experts.up_name + "_bias")
    rows = []
    for t in range(x_TD.shape[0]):
        total = torch.zeros_like(x_TD[t])
        for k in range(ids_TK.shape[1]):
            e, w = int(ids_TK[t, k]), weights_TK[t, k]
            x = x_TD[t] * w if experts.weights_on_input else x_TD[t]
            h = up_EGD[e] @ x
            if up_bias is not None:
                h = h + up_bias[e]
            if not experts.kind.gated:
                a = functions[experts.kind.activation](h)
            else:
                gate, up = h.chunk(2)
                if experts.kind.activation == "swiglu_clamped":
                    gate = gate.clamp(max=CLAMP_LIMIT)
                    a = gate * torch.sigmoid(CLAMP_ALPHA * gate) * (up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1)
                else:
                    a = functions[experts.kind.activation](gate) * up
            y = experts.down[e] @ a
            if experts.down_bias is not None:
                y = y + experts.down_bias[e]
            total = total + (y if experts.weights_on_input else w * y)
        rows.append(total)
    return torch.stack(rows)


def build(experts: int, top_k: int, width: int, hidden: int, *, scale: float = 1.0, **options) -> Experts:
    apply = options.pop("apply", "output")
    moe = MoeSpec(router=RouterSpec(experts=experts, top_k=top_k, apply=apply), expert=MlpSpec(width=width, **options))
    module = Experts(moe, hidden, torch.float64)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=scale)
    return module


def whole_spec(experts: int, top_k: int, width: int, apply: str = "output") -> MoeSpec:
    return MoeSpec(router=RouterSpec(experts=experts, top_k=top_k, apply=apply), expert=MlpSpec(width=width, bias=True))


def expert_groups(ep: int = 1, ep_rank: int = 0, etp: int = 1, etp_rank: int = 0) -> ExpertGroups:
    """The mesh as one rank sees it, for what needs no communication."""
    return ExpertGroups(
        Group("ep", tuple(range(ep)), ep_rank),
        Group("etp", tuple(range(etp)), etp_rank),
        Group.single("edp"),
        Group("ep_etp", tuple(range(ep * etp)), ep_rank * etp + etp_rank),
    )


def compare(module: Experts, tokens: int, top_k: int, choices: int | None = None) -> None:
    experts, hidden, _ = module.down.shape
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(tokens, choices or experts)
    ids = scores.topk(top_k, -1).indices
    weights = torch.rand(tokens, top_k, dtype=torch.float64, requires_grad=True)
    inputs = [x, weights, *module.parameters()]
    grad_y = torch.randn(tokens, hidden, dtype=torch.float64)
    y = module(x, ids, weights)
    grads = torch.autograd.grad(y, inputs, grad_y)
    expected = reference(module, x, ids, weights)
    expected_grads = torch.autograd.grad(expected, inputs, grad_y, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(y, expected)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("apply", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "gated"), [(a, True) for a in ACTIVATIONS] + [("relu2", False), ("gelu", False)]
)
def test_every_kind_of_expert_equals_the_token_loop(activation, gated, bias, apply):
    torch.manual_seed(0)
    scale = 3.0 if activation == "swiglu_clamped" else 0.5  # large enough for the clamps to act
    module = build(5, 2, 6, 4, scale=scale, activation=activation, gated=gated, bias=bias, apply=apply)
    compare(module, tokens=7, top_k=2)


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 40), experts=st.integers(1, 9), data=st.data(), seed=st.integers(0, 2**31))
def test_any_routing_equals_the_token_loop(tokens, experts, data, seed):
    """Also no tokens at all, experts without tokens, and every choice on few experts."""
    top_k = data.draw(st.integers(1, experts))
    choices = data.draw(st.integers(top_k, experts))
    torch.manual_seed(seed)
    module = build(experts, top_k, 3, 4, scale=0.5)
    if tokens == 0:
        y = module(
            torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, top_k, dtype=torch.long), torch.zeros(0, top_k)
        )
        y.sum().backward()
        assert y.shape == (0, 4) and not module.down.grad.any()
        return
    compare(module, tokens, top_k, choices)


def test_rows_in_several_products_and_blocks(monkeypatch):
    monkeypatch.setattr(expert_blocks, "ROWS_PER_PRODUCT", 5)
    monkeypatch.setattr(expert_blocks, "BYTES_PER_ELEMENTWISE_BLOCK", 1)
    torch.manual_seed(0)
    for apply in ("output", "input"):
        compare(build(3, 2, 4, 4, scale=0.5, bias=True, apply=apply), tokens=60, top_k=2)


def test_accumulating_in_place_adds_to_the_gradients_that_stand_there():
    torch.manual_seed(0)
    module = build(4, 2, 6, 5, scale=0.5, bias=True)
    x, ids, weights = torch.randn(9, 5).double(), torch.rand(9, 4).topk(2, -1).indices, torch.rand(9, 2)
    for _ in range(2):
        module(x, ids, weights).square().sum().backward()
    twice = [p.grad.clone() for p in module.parameters()]
    module.zero_grad(set_to_none=False)
    module.accumulate_in_place = True
    buffers = [p.grad for p in module.parameters()]
    for _ in range(2):
        module(x, ids, weights).square().sum().backward()
    for p, buffer, want in zip(module.parameters(), buffers, twice, strict=True):
        assert p.grad is buffer
        torch.testing.assert_close(p.grad, want)


@pytest.mark.parametrize("apply", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_products_equal_the_expert_loop(monkeypatch, gated, bias, apply):
    torch.manual_seed(0)
    module = build(6, 2, 8, 16, scale=0.3, gated=gated, bias=bias, apply=apply).float()
    ids = torch.rand(20, 4).topk(2, -1).indices  # experts 4 and 5 stay empty
    grad, results = torch.randn(20, 16), []
    x_TD, weights_TK = torch.randn(20, 16), torch.rand(20, 2)
    for grouped in (False, True):
        monkeypatch.setattr(Experts, "uses_grouped_products", lambda *_, chosen=grouped: chosen)
        x, w = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        y = module(x, ids, w)
        results.append([y, *torch.autograd.grad(y, [x, w, *module.parameters()], grad)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("apply", ["output", "input"])
def test_choices_of_experts_elsewhere_are_left_out(monkeypatch, grouped, apply):
    """A third of the experts, with biases, against all of them under weights that are zero for the others."""
    monkeypatch.setattr(Experts, "uses_grouped_products", lambda *_: grouped)
    torch.manual_seed(0)
    whole = build(6, 3, 8, 16, scale=0.3, bias=True).float()
    part = Experts(whole_spec(6, 3, 8, apply), 16, groups=expert_groups(ep=3, ep_rank=1))
    whole.weights_on_input = apply == "input"
    for name, parameter in part.named_parameters():
        parameter.data.copy_(whole.get_parameter(name)[2:4])
    x_TD, weights_TK, grad = torch.randn(20, 16), torch.rand(20, 3), torch.randn(20, 16)
    ids_TK = torch.stack([torch.randperm(6)[:3] for _ in range(20)])
    here_TK = (ids_TK >= 2) & (ids_TK < 4)
    results = []
    # What a whole layer gives for the experts here: y of all choices less y of those elsewhere.
    for module, ids in ((part, torch.where(here_TK, ids_TK - 2, -1)), (part, ids_TK - 2)):
        x, w = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        y = module(x, ids, w)
        results.append([y, *torch.autograd.grad(y, [x, w, *module.parameters()], grad)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    expected = torch.zeros_like(x_TD)
    for t, k in here_TK.nonzero().tolist():
        expected[t] += whole(x_TD[t : t + 1], ids_TK[t : t + 1, k : k + 1], weights_TK[t : t + 1, k : k + 1])[0]
    torch.testing.assert_close(results[0][0], expected, rtol=1e-5, atol=1e-5)
    assert not results[0][2][~here_TK].any()
    assert results[0][2][here_TK].all()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_cut_experts_add_up_and_one_of_them_adds_the_bias(monkeypatch, grouped, deferred):
    monkeypatch.setattr(Experts, "uses_grouped_products", lambda *_: grouped)
    torch.manual_seed(0)
    whole = build(3, 2, 16, 16, scale=0.3, bias=True).float()
    x_TD, weights_TK, grad = torch.randn(9, 16), torch.rand(9, 2), torch.randn(9, 16)
    ids_TK = torch.stack([torch.randperm(3)[:2] for _ in range(9)])

    def run(module):
        x, w, queue = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_(), WeightGradients()
        with deferring(queue if deferred else None):
            y = module(x, ids_TK, w)
        y.backward(grad)
        queue.run()
        return y.detach(), x.grad, w.grad

    parts = [Experts(whole_spec(3, 2, 16), 16, groups=expert_groups(etp=2, etp_rank=r)) for r in range(2)]
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.data.copy_(parameter.cut.take(whole.get_parameter(name).data))
    for got, want in zip(zip(*map(run, parts), strict=True), run(whole), strict=True):
        torch.testing.assert_close(sum(got), want, rtol=1e-5, atol=1e-5)
    for name, parameter in whole.named_parameters():
        grads = [part.get_parameter(name).grad for part in parts]
        if name == "down_bias":
            torch.testing.assert_close(grads[0], parameter.grad)
            assert not grads[1].any()
        else:
            for part, got in zip(parts, grads, strict=True):
                want = part.get_parameter(name).cut.take(parameter.grad)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_worker_threads_give_the_same_result_as_one_thread():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            module = build(8, 3, 16, 8, scale=0.5)
            x = torch.randn(200, 8, dtype=torch.float64, requires_grad=True)
            ids, w = torch.rand(200, 8).topk(3, -1).indices, torch.rand(200, 3, requires_grad=True)
            y = module(x, ids, w)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, w, *module.parameters()])])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@given(
    counts=st.lists(st.integers(0, 60), max_size=30),
    left_out=st.sets(st.integers(0, 29)),
    most=st.integers(0, 40),
    per_product=st.integers(1, 50),
)
def test_bundles_have_every_row_once(counts, left_out, most, per_product):
    """Rows of experts that follow one another, none of others between; more than `most` only of one expert alone."""
    edges = [0, *itertools.accumulate(counts)]
    spans = [(e, edges[e], edges[e + 1]) for e in range(len(counts)) if counts[e] and e not in left_out]
    most = min(most, per_product)
    found: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_blocks, "ROWS_PER_PRODUCT", per_product)
        made = list(expert_blocks.bundles(spans, most))
    seen: set[int] = set()
    for bundle in made:
        rows = bundle.rows.stop - bundle.rows.start
        assert rows == sum(bundle.counts) and min(bundle.counts) > 0
        assert rows <= per_product and (rows <= most or len(bundle.experts) == 1)
        assert bundle.again == (bundle.experts[0] in seen)
        start = bundle.rows.start
        for e, count in zip(bundle.experts, bundle.counts, strict=True):
            found += [(e, row) for row in range(start, start + count)]
            start += count
        seen |= set(bundle.experts)
    assert found == [(e, row) for e, a, b in spans for row in range(a, b)]


@pytest.mark.parametrize("apply", ["output", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_together_give_what_each_gives_alone(monkeypatch, dtype, apply):
    torch.manual_seed(0)
    module = build(12, 3, 64, 32, scale=0.2, bias=True, apply=apply).to(dtype)
    x = torch.randn(90, 32).to(dtype).requires_grad_()
    ids, w = torch.rand(90, 12).topk(3, -1).indices, torch.rand(90, 3, requires_grad=True)

    def run() -> list[Tensor]:
        y = module(x, ids, w)
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, w, *module.parameters()])]

    together = run()
    monkeypatch.setattr(expert_blocks, "BYTES_PER_BUNDLE", 0)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(together, run(), strict=True):
        scale = float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding * scale)


@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=40), workers=st.integers(1, 8))
def test_neighbours_go_to_one_worker_unless_that_is_uneven(counts, workers):
    edges = [0, *itertools.accumulate(counts)]
    spans = [(e, edges[e], edges[e + 1]) for e in range(len(counts))]
    shares, imbalance = share_out(spans, workers)
    _, scattered = expert_workers._largest_first(spans, workers)
    assert imbalance <= scattered + expert_workers.NEARLY_AS_EVEN
    assert imbalance <= expert_workers.MAX_IMBALANCE or scattered > expert_workers.MAX_IMBALANCE
    if len(set(counts)) == 1 and len(counts) % workers == 0:
        assert [e for share in shares for e, _, _ in share] == list(range(len(counts)))


@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=40), workers=st.integers(1, 8))
def test_experts_are_shared_out_once_each_and_within_the_greedy_bound(counts, workers):
    """No worker has more than the mean and the rows of one expert, whichever rule was taken."""
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    spans = [(e, edges[e], edges[e + 1]) for e in range(len(counts))]
    shares, imbalance = share_out(spans, workers)
    assert sorted(span for share in shares for span in share) == spans
    busiest = max(sum(end - start for _, start, end in share) for share in shares)
    assert imbalance == pytest.approx(busiest * workers / sum(counts))
    assert busiest <= max(counts) + sum(counts) / workers


def test_kept_memory_is_reused_only_after_its_graph_is_gone():
    torch.manual_seed(0)
    module = build(4, 2, 6, 5, scale=0.5)
    ids, weights = torch.rand(9, 4).topk(2, -1).indices, torch.rand(9, 2)
    inputs = [torch.randn(9, 5, dtype=torch.float64) for _ in range(3)]

    def grads(outputs):
        return [torch.autograd.grad(y.square().sum(), [*module.parameters()], retain_graph=True) for y in outputs]

    one_by_one = [grads([module(x, ids, weights)])[0] for x in inputs]
    together = [module(x, ids, weights) for x in inputs]  # three graphs alive at once, each run backward twice
    for _ in range(2):
        for got, want in zip(grads(together), one_by_one, strict=True):
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g, w)


def test_the_pool_hands_out_memory_again_when_nothing_refers_to_it():
    pool, like = Pool(), torch.empty(0)
    first, second = pool.take((10, 4), like), pool.take((10, 4), like)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    part = first[2]
    del first, second
    assert pool.take((10, 4), like).data_ptr() != part.data_ptr() - 2 * 4 * 4  # a view still holds the first
    del part
    third, fourth = pool.take((9, 4), like), pool.take((10, 4), like)
    assert {third.data_ptr(), fourth.data_ptr()} == places
    assert pool.take((1000, 4), like).shape == (1000, 4)


@pytest.mark.parametrize("threads", [1, 2])
def test_training_after_inference_mode(threads):
    """Memory that is used again must not carry the marks of inference mode into training, in any thread."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        module = build(4, 2, 6, 5, scale=0.5)
        x = torch.randn(12, 5, dtype=torch.float64)
        ids = torch.stack((torch.arange(12) % 4, (torch.arange(12) + 1) % 4), 1)  # even, so that workers share it
        weights = torch.rand(12, 2)
        with torch.inference_mode():
            inferred = module(x, ids, weights)
        y = module(x, ids, weights)
        y.sum().backward()
        assert torch.equal(inferred, y)
    finally:
        torch.set_num_threads(before)


def test_workers_leave_the_number_of_threads_of_others_alone():
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        run_experts([(e, e, e + 1) for e in range(3)], lambda spans, out: None, torch.zeros(3, 2), torch.float32)
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own():
    def body(spans, out):
        out.add_(1)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        spans, like = [(0, 0, 3), (1, 3, 6)], torch.zeros(6, 2)
        expected = run_experts(spans, body, like, torch.float32)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # waiting for threads that are not there would never end
            os._exit(0 if torch.equal(run_experts(spans, body, like, torch.float32), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_worker_waits_for_the_others():
    failing, finished, before = threading.Event(), [], torch.get_num_threads()

    def body(spans, out):
        if spans[0][0] == 0:
            failing.set()
            raise ValueError("expert 0")
        failing.wait()
        for _ in range(100):
            out.add_(torch.randn(64, 64).mm(torch.randn(64, 64)).mean())
        finished.append(spans)

    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="expert 0"):
            run_experts([(0, 0, 3), (1, 3, 6)], body, torch.zeros(6, 2), torch.float32)
        assert finished
    finally:
        torch.set_num_threads(before)


def test_gradients_that_somebody_keeps_are_not_overwritten():
    torch.manual_seed(0)
    module = build(4, 2, 6, 5, scale=0.5)
    ids, weights = torch.rand(9, 4).topk(2, -1).indices, torch.rand(9, 2)
    kept, copies = [], []
    for _ in range(3):
        module(torch.randn(9, 5, dtype=torch.float64), ids, weights).square().sum().backward()
        kept += [p.grad[1:] for p in module.parameters()]
        copies += [p.grad[1:].clone() for p in module.parameters()]
        module.zero_grad(set_to_none=True)
    for got, want in zip(kept, copies, strict=True):
        assert torch.equal(got, want)


def test_bf16_rounds_once_and_stays_near_fp32():
    torch.manual_seed(0)
    module = build(6, 3, 16, 32, scale=0.2).to(torch.bfloat16)
    exact = build(6, 3, 16, 32).float()
    exact.load_state_dict({k: v.float() for k, v in module.state_dict().items()})
    x = torch.randn(50, 32).bfloat16()
    ids, weights = torch.rand(50, 6).topk(3, -1).indices, torch.rand(50, 3)
    grad = torch.randn(50, 32).bfloat16()
    got, want = module(x, ids, weights), exact(x.float(), ids, weights)
    got.backward(grad)
    want.backward(grad.float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    for p, q in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=3e-2, atol=3e-2 * float(q.grad.abs().max()))
