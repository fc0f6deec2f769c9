"""Random transformers models as the oracle of the tests, and the comparison with ours."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import torch
import transformers
from tiny_models import Tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SEQUENCE = 23
BATCH = 2

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def oracle(tiny: Tiny) -> PreTrainedModel:
    """A transformers model in fp32 and evaluation mode, every parameter and buffer random, computed by its plainest
    code paths."""
    config = AutoConfig.for_model(tiny.model_type, **tiny.config)
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(tiny.name.encode()))
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                randomise(name, tensor)
    return _long_factors(model.eval())


def _long_factors(model: PreTrainedModel) -> PreTrainedModel:
    """transformers 5.24 computes PhiMoE's LongRoPE without the sequence's length, and so never takes the factors for
    long sequences, as the published model and its own definition do; here it is told the length."""
    rotary = getattr(model.model, "rotary_emb", None)
    if getattr(rotary, "rope_type", "") == "longrope":
        rotary.rope_init_fn = partial(ROPE_INIT_FUNCTIONS["longrope"], seq_len=SEQUENCE)
    return model


def randomise(name: str, tensor: Tensor) -> None:
    """Norm weights around 1, matrices at a scale that keeps activations near 1, everything else at 0.5."""
    if "norm" in name and name.endswith("weight"):
        tensor.normal_(1.0, 0.3)
    elif "e_score_correction_bias" in name:
        tensor.normal_(0.0, 0.2)
    elif tensor.dim() < 2 or "embed" in name:
        tensor.normal_(0.0, 0.5)
    else:
        tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5)


def reload(folder: Path) -> tuple[PreTrainedModel, dict[str, object]]:
    """What transformers reads from a folder, and what it says about the keys."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    return _long_factors(model.eval()), info


def token_ids(vocab: int) -> Tensor:
    """A batch of random tokens."""
    return torch.randint(0, vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(7))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value."""
    largest = theirs.abs().max().item()
    return (ours - theirs).abs().max().item() / max(largest, 1e-30)
