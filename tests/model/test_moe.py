import pytest
import torch
import torch.nn.functional as F

from moesaic.model.init import init_weights
from moesaic.model.mlp import Mlp
from moesaic.model.moe import Moe
from moesaic.spec.model import MlpSpec, MoeSpec, RouterSpec


def _moe(**fields: object) -> Moe:
    fields.setdefault("router", RouterSpec(experts=5, top_k=2, norm=True))
    fields.setdefault("expert", MlpSpec(width=7))
    moe = Moe(MoeSpec(**fields), 6, dtype=torch.float32, device="cpu")
    init_weights(moe, seed=0, std=0.5)
    return moe


def _expert(moe: Moe, e: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (moe.experts.get_parameter("gate_up")[e] @ x).chunk(2)
    return moe.experts.down[e] @ (F.silu(gate) * up)


def _shared(moe: Moe, x: torch.Tensor) -> torch.Tensor:
    assert moe.shared is not None
    gate, up = (moe.shared.gate_up.weight @ x).chunk(2)
    return moe.shared.down.weight @ (F.silu(gate) * up)


@pytest.mark.parametrize("combine", ["none", "sum", "sigmoid_gate", "learned"])
@pytest.mark.parametrize("apply", ["output", "input"])
def test_a_mixture_equals_a_loop_over_tokens(combine: str, apply: str) -> None:
    router = RouterSpec(experts=5, top_k=2, score="sigmoid", apply=apply)
    shared = {} if combine == "none" else {"shared": MlpSpec(width=4), "shared_combine": combine}
    moe = _moe(router=router, **shared)
    x_TD = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    y_TD, (ids, weights, _) = moe(x_TD)
    for t, x in enumerate(x_TD):
        y = torch.zeros(6)
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            y = y + (_expert(moe, e, w * x) if apply == "input" else w * _expert(moe, e, x))
        if combine == "sum":
            y = y + _shared(moe, x)
        elif combine == "sigmoid_gate":
            assert moe.shared_gate is not None and moe.shared_gate.bias is None
            y = y + torch.sigmoid(moe.shared_gate.weight[0] @ x) * _shared(moe, x)
        elif combine == "learned":
            assert moe.shared_gate is not None
            routed, plain = (moe.shared_gate.weight @ x + moe.shared_gate.bias).softmax(0)
            y = routed * y + plain * _shared(moe, x)
        torch.testing.assert_close(y_TD[t], y, rtol=1e-4, atol=1e-5)


def test_a_shared_expert_is_the_sum_of_narrower_ones() -> None:
    wide = Mlp(MlpSpec(width=6), 5, dtype=torch.float64, device="cpu")
    init_weights(wide, seed=0, std=0.5)
    x = torch.randn(4, 5, dtype=torch.float64)
    total = torch.zeros_like(x)
    for part in (slice(0, 2), slice(2, 6)):
        narrow = Mlp(MlpSpec(width=part.stop - part.start), 5, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            gate, up = wide.gate_up.weight.chunk(2)
            narrow.gate_up.weight.copy_(torch.cat((gate[part], up[part])))
            narrow.down.weight.copy_(wide.down.weight[:, part])
        total = total + narrow(x)
    torch.testing.assert_close(wide(x), total)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"])
def test_gradients_of_the_dense_block(activation: str, gated: bool) -> None:
    mlp = Mlp(MlpSpec(width=3, activation=activation, gated=gated, bias=True), 4, dtype=torch.float64, device="cpu")
    init_weights(mlp, seed=0, std=0.7)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()))


def test_router_and_gate_receive_gradients() -> None:
    moe = _moe(shared=MlpSpec(width=4), shared_combine="sigmoid_gate")
    moe(torch.randn(6, 6))[0].square().sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
