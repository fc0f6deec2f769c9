"""A mixture of experts from a dense model (sparse upcycling, arXiv 2212.05055, §3).

Every expert of a layer starts as a copy of the dense layer's MLP, the router is random, everything else is taken over.
Where the weights of a token's experts sum to one, the new model computes what the dense one did.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moesaic.model.decoder import Decoder
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import MlpSpec, ModelSpec, MoeSpec
from moesaic.train.checkpoint import difference, load_model_checkpoint


class UpcycleError(MoesaicError):
    """A dense model that this mixture of experts cannot be made from."""


def load_dense(folder: str | Path) -> Decoder:
    """The dense model in a Hugging Face folder or in one of our checkpoints."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        from moesaic.hf import load_decoder

        return load_decoder(folder, torch.float32)
    return load_model_checkpoint(folder, torch.float32)


@torch.no_grad()
def upcycle(dense: Decoder, target: Decoder, noise: float = 0.0, seed: int = 0) -> list[str]:
    """Overwrite the weights of `target` with those of `dense`. Routers keep the weights they have.

    `noise` adds Gaussian noise of that many standard deviations of each expert tensor, different for every expert, so
    that equal experts can part. Returns sentences on where the result differs from the dense model. Raises UpcycleError
    when the two models do not fit, with the numbers.
    """
    _check(dense.spec, target.spec)
    generator = torch.Generator().manual_seed(seed)
    source = dict(dense.state_dict())
    if dense.spec.tied_embeddings:
        source["head.weight"] = source["embed.weight"]
    notes = _differences(dense.spec, target.spec)
    for name, tensor in target.state_dict().items():
        if name in source:
            _copy(name, source[name], tensor)
    for i, layer in enumerate(target.spec.layers):
        if layer.moe is not None:
            mlp = {k.removeprefix(f"layers.{i}.mlp."): v for k, v in source.items() if k.startswith(f"layers.{i}.mlp.")}
            experts = {
                name.removeprefix(f"layers.{i}.moe."): tensor
                for name, tensor in target.state_dict().items()
                if name.startswith(f"layers.{i}.moe.")
            }
            _fill_experts(i, layer.moe, mlp, experts, noise, generator)
            notes += [note for note in _notes(layer.moe) if note not in notes]
    if target.spec.mtp:
        notes.append("The multi-token prediction blocks start from random weights.")
    return notes


def _fill_experts(
    i: int, moe: MoeSpec, mlp: dict[str, Tensor], experts: dict[str, Tensor], noise: float, generator: torch.Generator
) -> None:
    # A router that scales its normalised weights by s makes s times the MLP; experts made 1/s as large undo that.
    shrink = moe.router.scale if _sums_to_one(moe) else 1.0
    for name, tensor in experts.items():
        if name.startswith("experts."):
            part = name.removeprefix("experts.").removesuffix("_bias")
            key = part + (".bias" if name.endswith("_bias") else ".weight")
            if key not in mlp:
                raise UpcycleError(f"layers.{i}.moe.{name} has no counterpart in the dense model, which has no {key}.")
            copy = mlp[key].float() / (shrink if part == "down" else 1.0)
            for expert in tensor:
                _copy(f"layers.{i}.moe.{name}", copy, expert)
                if noise:
                    drawn = torch.randn(copy.shape, generator=generator) * (noise * float(copy.std()))
                    expert.add_(drawn.to(expert))
        elif name.startswith("shared.") and _mixes_copies(moe):
            _copy(f"layers.{i}.moe.{name}", mlp[name.removeprefix("shared.")], tensor)
        elif name.startswith("shared.down"):
            tensor.zero_()


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


def _copy(name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise UpcycleError(
            f"{name} is {list(source.shape)} in the dense model and {list(target.shape)} in the target; "
            "hidden size, heads and vocabulary must be equal."
        )
    target.copy_(source)
