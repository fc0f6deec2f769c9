"""The whole model: embedding, layers, norm, head; logits for sampling, losses for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.mesh.cut import cut_of
from moesaic.mesh.mesh import Mesh
from moesaic.model.init import init_weights
from moesaic.model.kernels import linear
from moesaic.model.layer import Layer
from moesaic.model.losses import IGNORED, NO_WEIGHTS, LossParts, LossWeights, routing_losses
from moesaic.model.mtp import MtpBlock, ahead, mtp_labels
from moesaic.model.norms import make_norm
from moesaic.model.recompute import run_again
from moesaic.model.router import Router, Routing
from moesaic.model.sequences import Sequences
from moesaic.model.vocabulary import Embedding, Head, head_loss
from moesaic.spec.errors import MoesaicError
from moesaic.spec.layout import Stage
from moesaic.spec.model import ModelSpec


class Layers(nn.Module):
    """The decoder layers that are here, under their numbers in the whole model."""

    def __init__(self, layers: dict[int, Layer]) -> None:
        super().__init__()
        self.indices = tuple(layers)
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __getitem__(self, index: int) -> Layer:
        return self.get_submodule(str(index))  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Layer]:
        return (self[index] for index in self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class MicroBatch:
    """Whole rows, the same on all ranks that share them: ids [B, S], labels [B, S] (−100: not trained)."""

    ids_BS: Tensor
    labels_BS: Tensor
    sequences: Sequences


class Decoder(nn.Module):
    """A decoder-only language model as described by a `ModelSpec`, or what one rank of a mesh holds of it.

    Weights are uninitialised until `init_weights` or an import fills them. Between modules tokens are `x_TD`, this
    rank's own of the B · S tokens of a batch, row after row. `embed`, `norm` and `head` are None on pipeline stages
    without them; parameters keep the names that they have in the whole model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.mesh = mesh = mesh or Mesh.single()
        layout = mesh.layout
        whole = Stage(embed=True, layers=tuple(range(len(spec.layers))), mtp=bool(spec.mtp), head=True)
        self.all_stages = (whole,) if layout is None else layout.stages
        self.stages = dict(list(enumerate(self.all_stages))[mesh.pp.rank :: mesh.pp.size])
        here = self.stages.values()
        tied = spec.tied_embeddings
        self.embed: Embedding | None = None
        self.positions: Embedding | None = None
        self.norm: nn.Module | None = None
        self.head: Head | None = None
        if any(stage.embed or stage.mtp or (stage.head and tied) for stage in here):
            self.embed = Embedding(spec.vocab, spec.hidden, dtype=dtype, device=device, split=mesh.tp)
        if spec.learned_positions and any(stage.embed for stage in here):
            self.positions = Embedding(spec.max_positions, spec.hidden, dtype=dtype, device=device)
        self.layers = Layers(
            {
                i: Layer(spec.layers[i], spec, dtype=dtype, device=device, mesh=mesh)
                for stage in here
                for i in stage.layers
            }
        )
        # The final norm comes before whatever is first of prediction blocks and head.
        self.norm_stage = next(i for i, stage in enumerate(self.all_stages) if stage.mtp or stage.head)
        if self.norm_stage in self.stages:
            self.norm = make_norm(spec.norm, spec.hidden, spec.norm_eps, spec.norm_bias, dtype=dtype, device=device)
        if any(stage.head for stage in here):
            self.head = Head(spec, dtype=dtype, device=device, split=mesh.tp)
        blocks = spec.mtp if any(stage.mtp for stage in here) else ()
        self.mtp = nn.ModuleList(MtpBlock(layer, spec, dtype=dtype, device=device, mesh=mesh) for layer in blocks)
        self.units: dict[int, tuple[tuple[int, ...], ...]] = {
            index: self._units(stage) for index, stage in self.stages.items()
        }
        """Of each stage the layers that run together: more than one where backward runs them again together."""
        self.cuts = {name: cut_of(parameter) for name, parameter in self.named_parameters()}

    def _units(self, stage: Stage) -> tuple[tuple[int, ...], ...]:
        """Tells layers what they compute again where that is not the same for all."""
        if stage.recompute is None:
            return tuple((i,) for i in stage.layers)
        for unit in stage.recompute.units:
            for i in unit.layers:
                self.layers[i].recompute = frozenset(unit.words if len(unit.layers) == 1 else ())
        for block in self.mtp if stage.mtp else ():
            layer = block.get_submodule("layer")
            assert isinstance(layer, Layer)
            layer.recompute = frozenset(stage.recompute.others)
        return tuple(unit.layers for unit in stage.recompute.units)

    def init_weights(self, seed: int, *, scale_residual: bool = False) -> None:
        """Random weights: normal with the model's `init_std`, norms 1, biases 0; see `init.init_weights`.

        With `scale_residual`, projections into the residual stream are smaller by sqrt(2 · layers).
        """
        residual_layers = len(self.spec.layers) if scale_residual else 0
        init_weights(self, seed, self.spec.init_std, residual_layers, self.cuts)

    def routers(self) -> list[tuple[int, Router]]:
        """The routers that are here with their layer index; those of prediction blocks count on after the layers."""
        blocks = [(i, self.layers[i]) for i in self.layers.indices]
        blocks += [(len(self.spec.layers) + j, block.get_submodule("layer")) for j, block in enumerate(self.mtp)]  # type: ignore[misc]
        return [(i, layer.moe.router) for i, layer in blocks if layer.moe is not None]

    def enable_select_bias(self) -> None:
        """Give every router a selection bias, for balancing without an auxiliary loss."""
        for _, router in self.routers():
            router.enable_select_bias()

    def forward(self, ids_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, V], in one process.

        `positions_BS` defaults to 0 … S − 1; `documents_BS` numbers packed documents, which do not see each other;
        negative numbers mark padding, which routing statistics leave out.
        """
        return self.logits(self.hidden(ids_BS, positions_BS, documents_BS)).unflatten(0, ids_BS.shape)

    def hidden(self, ids_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to hidden states [T, D] after the final norm, in one process."""
        sequences = Sequences.of(ids_BS, positions_BS, documents_BS)
        units = [(i,) for i in range(len(self.layers))]
        x_TD = self._run_layers(self._first(ids_BS, sequences), units, sequences, [])
        assert self.norm is not None
        return self.norm(x_TD)  # type: ignore[no-any-return]

    def logits(self, x_TD: Tensor) -> Tensor:
        """Hidden states [..., D] after the final norm to logits [..., V], in one process."""
        assert self.head is not None
        logits = linear(x_TD, self._head_weight(), self.head.bias)
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def loss(
        self,
        ids_BS: Tensor,
        labels_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        *,
        weights: LossWeights = NO_WEIGHTS,
        step_tokens: int,
    ) -> LossParts:
        """Loss of one micro-batch as its share of a step with `step_tokens` trained tokens in all; without a pipeline.

        `labels_BS` holds the token to predict at each position, −100 where none is trained.
        """
        micro = self.micro_batch(ids_BS, labels_BS, positions_BS, documents_BS)
        return self.run_stage(0, None, micro, weights=weights, step_tokens=step_tokens)[1]

    def micro_batch(
        self, ids_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None
    ) -> MicroBatch:
        """Whole rows, with what all layers share about their places."""
        return MicroBatch(ids_BS, labels_BS, Sequences.of(ids_BS, positions_BS, documents_BS, self.mesh))

    def run_stage(
        self, index: int, x: Tensor | None, micro: MicroBatch, *, weights: LossWeights, step_tokens: int
    ) -> tuple[Tensor | None, LossParts]:
        """Virtual stage `index`: what comes from the stage before (None at the first) to what the next one gets (None
        at the last), and this stage's part of the loss.

        What travels is x_TD, or [1 + blocks, T, D] from the stage of the prediction blocks on, all normalised.
        """
        x, total, nats, parts = self.stage_tensors(index, x, micro, weights, step_tokens)
        return x, LossParts(total, nats, int((micro.labels_BS != IGNORED).sum()), parts)

    def stage_tensors(
        self, index: int, x: Tensor | None, micro: MicroBatch, weights: LossWeights, step_tokens: int
    ) -> tuple[Tensor | None, Tensor, Tensor, dict[str, Tensor]]:
        """As `run_stage`, with the fields of LossParts as plain tensors, which wrappers of this module can see."""
        stage, sequences = self.stages[index], micro.sequences
        routings: list[tuple[Router, Routing]] = []
        if stage.embed:
            x = self._first(micro.ids_BS, sequences)
        assert x is not None
        ahead_TD: list[Tensor] = []
        if x.dim() == 3:
            x, *ahead_TD = x.unbind(0)
        x = self._run_layers(x, self.units[index], sequences, routings)
        if index == self.norm_stage:
            assert self.norm is not None
            x = self.norm(x)
        if stage.mtp and self.mtp and weights.mtp:
            ahead_TD = self._run_blocks(x, micro, routings)

        trained_B = (micro.labels_BS != IGNORED).sum(1)
        total, nats, parts = None, x.new_zeros(()), {}
        if stage.head:
            scale = 1.0 / step_tokens
            total, nats = self._cross_entropy(x, sequences.own(micro.labels_BS), scale)
            if ahead_TD:
                mtp = self._mtp_loss(ahead_TD, micro, scale)
                total = total + weights.mtp * mtp
                parts["mtp"] = mtp.detach()
        terms = routing_losses(
            routings, weights, trained_B, step_tokens, sequences, self.mesh, self._mixture_layers(weights)
        )
        for name, term in terms.items():
            weighted = getattr(weights, name) * term
            total = weighted if total is None else total + weighted
            parts[name] = term.detach()
        if total is None:
            total = x.new_zeros(())
        if stage.head:
            return None, total, nats, parts
        return (torch.stack((x, *ahead_TD)) if ahead_TD else x), total, nats, parts

    def carried(self, index: int, weights: LossWeights) -> int:
        """How many hidden states per token travel from virtual stage `index` − 1 to `index`."""
        blocks = any(stage.mtp for stage in self.all_stages[:index])
        return 1 + (len(self.spec.mtp) if blocks and weights.mtp else 0)

    def _mixture_layers(self, weights: LossWeights) -> int:
        blocks = self.spec.mtp if weights.mtp else ()
        return sum(layer.moe is not None for layer in (*self.spec.layers, *blocks))

    def _first(self, ids_BS: Tensor, sequences: Sequences) -> Tensor:
        """Embeddings [T, D] of own tokens."""
        x_TD = self._embed(ids_BS, sequences)
        return x_TD if self.positions is None else x_TD + self._learned_positions(sequences)

    def _run_layers(
        self, x_TD: Tensor, units: Iterable[Sequence[int]], sequences: Sequences, routings: list[tuple[Router, Routing]]
    ) -> Tensor:
        for unit in units:
            layers = [self.layers[i] for i in unit]
            if len(layers) == 1:
                x_TD, routing = layers[0](x_TD, sequences)
                self._note(layers[0], routing, sequences, routings)
                continue
            x_TD, *parts = run_again(partial(_in_a_row, layers, sequences), x_TD)
            for layer in layers:
                if layer.moe is not None:
                    self._note(layer, Routing(*parts[:3]), sequences, routings)
                    del parts[:3]
        return x_TD

    def _note(
        self,
        layer: nn.Module,
        routing: Routing | None,
        sequences: Sequences,
        routings: list[tuple[Router, Routing]],
    ) -> None:
        """Counting here, outside the layer, keeps a layer that is recomputed in backward from counting twice."""
        if routing is None:
            return
        assert isinstance(layer, Layer) and layer.moe is not None
        router = layer.moe.router
        if self.training:
            router.count(routing, sequences.own_real)
        routings.append((router, routing))

    def _embed(self, ids_BS: Tensor, sequences: Sequences) -> Tensor:
        assert self.embed is not None
        if ids_BS.device.type == "cpu":  # elsewhere looking would wait for the device, and the lookup itself checks
            largest, smallest = int(ids_BS.max()), int(ids_BS.min())
            if largest >= self.spec.vocab or smallest < 0:
                wrong = largest if largest >= self.spec.vocab else smallest
                raise MoesaicError(
                    f"token id {wrong} is outside the vocabulary of {self.spec.vocab} (ids 0 to "
                    f"{self.spec.vocab - 1}); use the tokenizer of this model or a model with a larger vocabulary"
                )
        x_TD = self.embed(sequences.part(ids_BS).flatten(), sequences.batch)
        return x_TD if self.spec.embedding_scale == 1.0 else x_TD * self.spec.embedding_scale

    def _learned_positions(self, sequences: Sequences) -> Tensor:
        assert self.positions is not None
        last = int(sequences.positions.max())
        if last >= self.spec.max_positions:
            raise MoesaicError(
                f"position {last} is beyond the {self.spec.max_positions} learned positions of this model; "
                f"use sequences of at most {self.spec.max_positions} tokens"
            )
        rows = sequences.own(sequences.positions).expand(sequences.batch, -1)
        return self.positions(rows.flatten())  # type: ignore[no-any-return]

    def _head_weight(self) -> Tensor:
        assert self.head is not None
        if self.head.weight is not None:
            return self.head.weight
        assert self.embed is not None
        return self.embed.weight

    def _cross_entropy(self, x_TD: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        assert self.head is not None
        return head_loss(
            x_TD,
            self._head_weight(),
            labels.flatten(),
            vocab=self.spec.vocab,
            first_row=self.head.first_row,
            tp=self.mesh.tp,
            bias_V=self.head.bias,
            scale=scale,
            logits_divisor=self.spec.logits_divisor,
        )

    def _run_blocks(self, x_TD: Tensor, micro: MicroBatch, routings: list[tuple[Router, Routing]]) -> list[Tensor]:
        """The normalised state [T, D] of each prediction block."""
        states: list[Tensor] = []
        for depth, block in enumerate(self.mtp, start=1):
            next_ids = ahead(micro.ids_BS, depth, 0, micro.sequences.documents)
            x_TD, routing = block(x_TD, self._embed(next_ids, micro.sequences), micro.sequences)
            self._note(block.get_submodule("layer"), routing, micro.sequences, routings)
            states.append(x_TD)
        return states

    def _mtp_loss(self, states: list[Tensor], micro: MicroBatch, scale: float) -> Tensor:
        """Mean over prediction blocks of their cross entropy (equation 25)."""
        losses = []
        for depth, x_TD in enumerate(states, start=1):
            labels = mtp_labels(micro.labels_BS, depth, micro.sequences.documents)
            losses.append(self._cross_entropy(x_TD, micro.sequences.own(labels), scale)[0])
        return torch.stack(losses).mean()


def _in_a_row(layers: Sequence[Layer], sequences: Sequences, x_TD: Tensor) -> tuple[Tensor, ...]:
    """x [T, D] after all `layers`, followed by the three tensors of each routing."""
    parts: list[Tensor] = []
    for layer in layers:
        x_TD, routing = layer(x_TD, sequences)
        parts += routing or ()
    return x_TD, *parts
