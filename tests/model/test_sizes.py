"""The decoder has the parameters and runs the products that the cost model counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.cost.counts import flops_per_token, parameters
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.spec.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_every_preset_are_those_counted(name: str) -> None:
    spec = load_model_spec(name)
    sizes = {key: p.numel() for key, p in Decoder(spec, device="meta").named_parameters()}
    ahead = sum(size for key, size in sizes.items() if key.startswith("mtp."))
    counted = parameters(spec)
    assert sum(sizes.values()) - ahead == counted.total
    assert ahead == counted.mtp


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
LATENT = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize("config", [{"model_type": "qwen3"}, {"model_type": "deepseek_v3", **LATENT}])
def test_a_training_step_runs_the_products_that_are_counted(config: dict[str, object]) -> None:
    """All but attention's core, whose fused CPU kernel torch's counter does not know."""
    spec = load_model_spec({**TINY, **config})
    model = Decoder(spec)
    model.init_weights(0)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model.loss(ids, ids, step_tokens=32).total.backward()
    counted = flops_per_token(spec, 16)
    assert counter.get_total_flops() == 32 * (counted.total - counted.by_part["attention_core"])
