"""What this project's trainer keeps for backward is what the planner counts, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moesaic.cost.activations import layer_kept
from moesaic.cost.habits import MOESAIC
from moesaic.cost.recompute import idle_words
from moesaic.cost.workload import Columns, Workload
from moesaic.model.decoder import Decoder
from moesaic.model.expert_memory import Pool
from moesaic.spec.layout import single
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import RECOMPUTE
from tests.cost.kinds import KINDS
from tests.ranks import ranks
from tests.train import kept

TOKENS = 128


class Made(TorchDispatchMode):
    """Remembers the storage of every tensor that an operation gives, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.found.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return out

    def alive(self, known: set[int]) -> int:
        """Bytes of the storages that are still there and not `known`."""
        return sum(
            size for address, (storage, size) in self.found.items() if address not in known and not storage.expired()
        )


@functools.cache
def decoder(name: str, layers: int) -> Decoder:
    made = Decoder(ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(KINDS[name],) * layers))
    made.init_weights(0)
    return made


def bytes_held(name: str, layers: int, words: Collection[str]) -> int:
    model = decoder(name, layers)
    for layer in model.layers:
        layer.recompute = frozenset(words)
    return held_in_forward(model)


def held_in_forward(model: Decoder) -> int:
    """Bytes that a forward pass made and that are still there before its backward pass, whoever holds them."""
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    ids = torch.arange(TOKENS)[None] * 7 % 53
    with pytest.MonkeyPatch.context() as patch, Made() as made:
        # Not from a pool, whose memory has a little room.
        patch.setattr(Pool, "take", lambda self, shape, like: like.new_empty(shape))
        loss = model.loss(ids, ids.roll(-1, 1), step_tokens=TOKENS)
    assert loss.total.requires_grad
    return made.alive(known)


def bytes_counted(name: str, words: Collection[str]) -> dict[tuple[str, str], float]:
    """The rows of the planner's table for one layer."""
    model = ModelSpec(name="t", family="moesaic", vocab=53, hidden=64, layers=(KINDS[name],))
    columns = Columns.of([replace(single(model), recompute=tuple(word for word in RECOMPUTE if word in words))])
    rows = layer_kept(model, KINDS[name], Workload(model, TOKENS, 1, precision="fp32"), columns, MOESAIC)
    return {(row.module, row.tensor): float(row.left(columns)[0]) for row in rows}


def check(name: str, words: Collection[str]) -> None:
    held, counted = bytes_held(name, 2, words) - bytes_held(name, 1, words), bytes_counted(name, words)
    assert held == sum(counted.values()), (name, words, {what: size for what, size in counted.items() if size})


@pytest.mark.parametrize("name", KINDS)
def test_one_layer_more_keeps_the_bytes_of_the_table(name: str) -> None:
    check(name, ())


SHORT = ("grouped queries, dense", "latent attention, shared expert")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in KINDS]
)
def test_recompute_drops_the_bytes_of_the_table(name: str) -> None:
    for word in RECOMPUTE:
        check(name, (word,))


@pytest.mark.long
@settings(max_examples=60)
@given(st.sampled_from(list(KINDS)), st.sets(st.sampled_from(RECOMPUTE[:-1]), min_size=2))
def test_so_does_any_set_of_words(name: str, words: set[str]) -> None:
    check(name, words)


CHEAP = RECOMPUTE[:6]
SPREAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("grouped queries, shared expert", {"tp": 2}, CHEAP),
    ("grouped queries, dense", {"tp": 2}, CHEAP),
    ("latent attention, shared expert", {"tp": 2}, CHEAP),
    ("latent attention without a query rank", {"tp": 2}, ("layernorm", "moe")),
    ("grouped queries, shared expert", {"tp": 2, "overlap": ["tensor"]}, CHEAP),
    ("grouped queries, dense", {"tp": 2, "overlap": ["tensor"]}, ()),
    ("latent attention, shared expert", {"tp": 2, "overlap": ["tensor"]}, CHEAP),
    ("latent attention without a query rank", {"tp": 2, "overlap": ["tensor"]}, ("layernorm", "moe")),
    ("grouped queries, dense", {"cp": 2}, CHEAP),
    ("latent attention, dense", {"cp": 2}, CHEAP),
    ("latent attention, dense", {"cp": 2, "cp_kind": "ring"}, ("layernorm", "mla_up_proj", "mlp")),
    ("grouped queries, shared expert", {"ep": 2, "dispatcher": "alltoall"}, CHEAP),
    ("latent attention, shared expert", {"ep": 2, "dispatcher": "alltoall"}, ("layernorm", "moe", "core_attn")),
    ("latent attention, shared expert", {"ep": 2, "dispatcher": "allgather"}, ("full",)),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "keys", "words"), SPREAD, ids=str)
def test_so_does_each_of_two_ranks(name: str, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    keys = keys | {"recompute": list(words)}
    counted = kept.counted(name, keys, 2)
    for measured in ranks(2).run(kept.measured, name, keys):
        found = {module: size for (layer, module), size in measured.items() if layer == 1 and size}
        assert sum(found.values()) == sum(counted.values()), (found, counted)


def test_what_frees_memory_at_all() -> None:
    plain = sum(bytes_counted("latent attention, shared expert", ()).values())
    freed = {
        word: plain - sum(bytes_counted("latent attention, shared expert", (word,)).values()) for word in RECOMPUTE
    }
    assert {word for word, size in freed.items() if size <= 0} == {"moe_act", "mlp", "loss"}


def test_words_that_free_nothing_are_named() -> None:
    model = ModelSpec(
        name="t", family="moesaic", vocab=53, hidden=64, layers=(KINDS["latent attention, shared expert"],)
    )

    def idle(*words: str) -> list[str]:
        return [text.split("'")[1] for text in idle_words(replace(single(model), recompute=words), model, TOKENS)]

    assert idle("layernorm", "core_attn", "moe_act", "mlp", "shared_experts", "mla_up_proj", "loss") == [
        "moe_act", "mlp", "loss",
    ]  # fmt: skip
    assert idle("shared_experts", "moe") == ["shared_experts"]
    assert idle("layernorm", "full") == ["layernorm"]
