"""Tiny models of three families, and steps of training data with uneven documents, for the layout-invariance suite."""

from __future__ import annotations

import functools
from typing import Any

import torch

from moesaic.model.losses import IGNORED, LossWeights
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import ModelSpec
from moesaic.train.data import Batch

_COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _COMMON
    | {
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
    },
    "deepseek_v3": _COMMON
    | {
        "model_type": "deepseek_v3",
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
}
SEQ_LEN = 16
GLOBAL_BATCH = 8
STEPS = 3
WEIGHTS = LossWeights(z=0.01, batch_aux=0.02, sequence_aux=0.03, mtp=0.3)
BIAS_UPDATE = {"deepseek_v3": 1e-3}


@functools.cache
def model(name: str) -> ModelSpec:
    """The ModelSpec of a tiny model."""
    return load_model_spec(CONFIGS[name])


def micro_batches(step: int, micro_batch: int) -> list[Batch]:
    """The micro-batches of a step: rows of documents of uneven lengths, some with filling at their end."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, _COMMON["vocab_size"], (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    documents = torch.zeros(GLOBAL_BATCH, SEQ_LEN, dtype=torch.int64)
    positions = torch.zeros_like(documents)
    for row in range(GLOBAL_BATCH):
        ends = torch.randint(0, 2, (SEQ_LEN,), generator=generator) * (torch.rand(SEQ_LEN, generator=generator) < 0.3)
        documents[row] = ends.cumsum(0)
        if row % 3 == 1:
            documents[row, SEQ_LEN - row :] = -1
        start = 0
        for i in range(SEQ_LEN):
            if i and documents[row, i] != documents[row, i - 1]:
                start = i
            positions[row, i] = i - start
    labels = ids[:, 1:].clone()
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    labels[documents < 0] = IGNORED
    batches = []
    for first in range(0, GLOBAL_BATCH, micro_batch):
        rows = slice(first, first + micro_batch)
        tokens = int((labels[rows] != IGNORED).sum())
        batches.append(Batch(ids[rows, :-1], labels[rows], positions[rows], documents[rows], tokens, 0))
    return batches
