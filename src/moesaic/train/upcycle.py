"""A mixture of experts from a dense model (sparse upcycling, arXiv 2212.05055, §3).

Every expert of a layer starts as a copy of the dense layer's MLP, the router is random, everything else is taken over.
Where the weights of a token's experts sum to one, the new model computes what the dense one did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from moesaic.mesh.cut import Cut
from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import MlpSpec, ModelSpec, MoeSpec
from moesaic.train.checkpoint import difference, find
from moesaic.train.stored import StoredModel


class UpcycleError(MoesaicError):
    """A dense model that this mixture of experts cannot be made from."""


@dataclass(frozen=True)
class DenseModel:
    """A model whose weights are read one by one, so that a rank with a share of the target needs no room for it."""

    spec: ModelSpec
    names: Collection[str]
    read: Callable[[str], Tensor]
    """The whole weight of that name."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, decoder: Decoder) -> DenseModel:
        """A whole model in memory."""
        state = decoder.state_dict()
        return cls(decoder.spec, state.keys(), state.__getitem__)


def load_dense(folder: str | Path) -> DenseModel:
    """The dense model in a Hugging Face folder or in one of our checkpoints. Raises MoesaicError if there is none."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        from moesaic.hf.load import plan_import
        from moesaic.spec.families import load_model_spec

        plan = plan_import(folder, load_model_spec(folder))
        return DenseModel(plan.spec, plan.names, plan.read, plan.report.notes)
    stored = StoredModel(find(folder))
    return DenseModel(stored.spec, stored.outlines.keys(), stored.read)


@torch.no_grad()
def upcycle(dense: Decoder | DenseModel, target: Decoder, noise: float = 0.0, seed: int = 0) -> list[str]:
    """Overwrite the weights of `target`, or of a rank's share of it, with those of `dense`. Routers keep the weights
    they have.

    `noise` adds Gaussian noise of that many standard deviations of each expert tensor, different for every expert, so
    that equal experts can part; each expert draws its own from `seed`, whatever the layout. Returns sentences on where
    the result differs from the dense model. Raises UpcycleError when the two models do not fit, with the numbers.
    """
    if isinstance(dense, Decoder):
        dense = DenseModel.of(dense)
    _check(dense.spec, target.spec)
    notes = [*dense.notes, *_differences(dense.spec, target.spec)]
    for name, tensor in target.state_dict().items():
        cut = target.cuts.get(name, Cut(tuple(tensor.shape)))
        layer = _layer_of(name)
        moe = None if layer is None else target.spec.layers[layer].moe
        source = "embed.weight" if name == "head.weight" and dense.spec.tied_embeddings else name
        if source in dense.names:
            _copy(name, dense.read(source), tensor, cut)
        elif moe is not None:
            _fill_part(name, moe, dense, tensor, cut, noise, seed)
    for layer_spec in target.spec.layers:
        if layer_spec.moe is not None:
            notes += [note for note in _notes(layer_spec.moe) if note not in notes]
    if target.spec.mtp:
        notes.append("The multi-token prediction blocks start from random weights.")
    return notes


def _layer_of(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


def _fill_part(name: str, moe: MoeSpec, dense: DenseModel, tensor: Tensor, cut: Cut, noise: float, seed: int) -> None:
    """Fill a weight of a mixture that the dense model has no equal of, if it comes from its MLP."""
    layer, _, part = name.partition(".moe.")
    if part.startswith("experts."):
        _fill_experts(name, _expert(name, moe, dense), tensor, cut, noise, seed)
    elif part.startswith("shared.") and _mixes_copies(moe):
        _copy(name, dense.read(f"{layer}.mlp.{part.removeprefix('shared.')}"), tensor, cut)
    elif part.startswith("shared.down"):
        tensor.zero_()


def _expert(name: str, moe: MoeSpec, dense: DenseModel) -> Tensor:
    """What every expert of the stack `name` starts as."""
    layer, _, part = name.partition(".moe.experts.")
    kind = part.removesuffix("_bias")
    key = kind + (".bias" if part.endswith("_bias") else ".weight")
    if f"{layer}.mlp.{key}" not in dense.names:
        raise UpcycleError(f"{name} has no counterpart in the dense model, which has no {key}.")
    # A router that scales its normalised weights by s makes s times the MLP; experts made 1/s as large undo that.
    shrink = moe.router.scale if kind == "down" and _sums_to_one(moe) else 1.0
    return dense.read(f"{layer}.mlp.{key}").float() / shrink


def _fill_experts(name: str, copy: Tensor, tensor: Tensor, cut: Cut, noise: float, seed: int) -> None:
    each = Cut(cut.shape[1:], tuple(replace(piece, dim=piece.dim - 1) for piece in cut.pieces if piece.dim > 0))
    deviation = noise * float(copy.std())
    for number, expert in enumerate(tensor, cut.start(0)):
        _copy(name, copy, expert, each)
        if noise:
            # A generator for each expert, so that a rank draws for those it holds and no others.
            digest = hashlib.sha256(f"{seed}/upcycle/{name}/{number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            expert.add_(each.take(torch.randn(copy.shape, generator=generator) * deviation).to(expert))


def _sums_to_one(moe: MoeSpec) -> bool:
    """Whether the weights of a token's experts sum to one, before the router's scale."""
    return moe.router.norm or (moe.router.when == "post" and moe.router.score == "softmax")


def _mixes_copies(moe: MoeSpec) -> bool:
    """Whether the shared expert should be a copy of the MLP too: any mix of two copies is the MLP again."""
    return (
        moe.shared_combine == "learned" and moe.shared is not None and _mlp_difference(moe.shared, moe.expert) is None
    )


def _notes(moe: MoeSpec) -> list[str]:
    notes = []
    if moe.router.apply == "input":
        notes.append("Router weights multiply the experts' input, so the first loss differs from the dense model's.")
    elif not _sums_to_one(moe):
        notes.append(
            "The chosen experts' weights do not sum to one (the router does not normalise), so the first loss is "
            "higher than the dense model's."
        )
    if moe.shared is None or _mixes_copies(moe):
        return notes
    notes.append("The shared expert starts with a zero output projection, so that it adds nothing at first.")
    if moe.shared_combine == "learned":
        notes.append("The learned mix with the shared expert halves the experts' share at first.")
    return notes


def _check(dense: ModelSpec, target: ModelSpec) -> None:
    if dense.moe_layers:
        raise UpcycleError(
            f"{dense.name} already has experts, in {len(dense.moe_layers)} of {len(dense.layers)} layers; "
            "give a dense model."
        )
    if len(dense.layers) != len(target.layers):
        raise UpcycleError(
            f"{dense.name} has {len(dense.layers)} layers and {target.name} has {len(target.layers)}; "
            "they must have equally many."
        )
    if not target.moe_layers:
        raise UpcycleError(f"{target.name} has no experts to fill; describe a model with experts in [model].")
    for i in target.moe_layers:
        mlp, moe = dense.layers[i].mlp, target.layers[i].moe
        assert mlp is not None and moe is not None
        found = _mlp_difference(mlp, moe.expert)
        if found:
            raise UpcycleError(f"layer {i}: {found}; an expert that is a copy of the dense MLP must have its shape.")


def _differences(dense: ModelSpec, target: ModelSpec) -> list[str]:
    """A sentence if something else than the MLPs differs, such as the base of the rotary embedding."""
    other = {"name", "family", "notes", "hf_config", "init_std", "balance_coefficient", "document_end", "mtp", "layers"}

    def outline(spec: ModelSpec) -> dict[str, object]:
        layers = [{"attention": layer.attention.model_dump()} for layer in spec.layers]
        return spec.model_dump(exclude=other) | {"layers": layers}

    if dense.tied_embeddings:
        other.add("tied_embeddings")  # two copies of one matrix are as good as one
    found = difference(outline(dense), outline(target), "the dense model")
    return [f"{found}, so the first loss differs from the dense model's."] if found else []


def _mlp_difference(mlp: MlpSpec, expert: MlpSpec) -> str | None:
    for key in ("width", "gated", "activation", "bias"):
        if getattr(mlp, key) != getattr(expert, key):
            return f"the dense MLP's {key} is {getattr(mlp, key)!r} and the experts' is {getattr(expert, key)!r}"
    return None


def _copy(name: str, source: Tensor, target: Tensor, cut: Cut) -> None:
    """Copies this rank's piece of `source`."""
    if tuple(source.shape) != cut.shape:
        raise UpcycleError(
            f"{name} is {list(source.shape)} in the dense model and {list(cut.shape)} in the target; "
            "hidden size, heads and vocabulary must be equal."
        )
    target.copy_(cut.take(source))
