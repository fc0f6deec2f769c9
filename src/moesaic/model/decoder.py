"""The whole model: embedding, layers, norm, head; logits for sampling, losses for training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.model.init import init_weights
from moesaic.model.kernels import linear
from moesaic.model.layer import Layer
from moesaic.model.losses import IGNORED, NO_WEIGHTS, LossParts, LossWeights, cross_entropy, routing_losses
from moesaic.model.mtp import MtpBlock, ahead, mtp_labels
from moesaic.model.norms import make_norm
from moesaic.model.router import Router, Routing
from moesaic.model.sequences import Sequences
from moesaic.spec.errors import MoesaicError
from moesaic.spec.model import ModelSpec


class Embedding(nn.Module):
    """A table [rows, D] looked up by integers."""

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] to rows [..., D]."""
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """Holds `weight` [V, D] unless it is tied to the embedding, and `bias` [V] if the model has one."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if not spec.tied_embeddings:
            self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden, dtype=dtype, device=device))
        if spec.head_bias:
            self.bias = nn.Parameter(torch.empty(spec.vocab, dtype=dtype, device=device))


class Decoder(nn.Module):
    """A decoder-only language model as described by a `ModelSpec`.

    Weights are uninitialised until `init_weights` or an import fills them. Between modules tokens are `x_TD`, the B · S
    tokens of a batch row after row.
    """

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab, spec.hidden, dtype=dtype, device=device)
        self.positions = None
        if spec.learned_positions:
            self.positions = Embedding(spec.max_positions, spec.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Layer(layer, spec, dtype=dtype, device=device) for layer in spec.layers)
        self.norm = make_norm(spec.norm, spec.hidden, spec.norm_eps, spec.norm_bias, dtype=dtype, device=device)
        self.head = Head(spec, dtype=dtype, device=device)
        self.mtp = nn.ModuleList(MtpBlock(layer, spec, dtype=dtype, device=device) for layer in spec.mtp)

    def init_weights(self, seed: int, *, scale_residual: bool = False) -> None:
        """Random weights: normal with the model's `init_std`, norms 1, biases 0; see `init.init_weights`.

        With `scale_residual`, projections into the residual stream are smaller by sqrt(2 · layers).
        """
        init_weights(self, seed, self.spec.init_std, len(self.spec.layers) if scale_residual else 0)

    def routers(self) -> list[tuple[int, Router]]:
        """The routers with their layer index; those of prediction blocks count on after the last layer."""
        blocks = [*self.layers, *(block.layer for block in self.mtp)]
        return [(i, layer.moe.router) for i, layer in enumerate(blocks) if layer.moe is not None]

    def enable_select_bias(self) -> None:
        """Give every router a selection bias, for balancing without an auxiliary loss."""
        for _, router in self.routers():
            router.enable_select_bias()

    def forward(self, ids_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, V].

        `positions_BS` defaults to 0 … S − 1; `documents_BS` numbers packed documents, which do not see each other;
        negative numbers mark padding, which routing statistics leave out.
        """
        return self.logits(self.hidden(ids_BS, positions_BS, documents_BS)).unflatten(0, ids_BS.shape)

    def hidden(self, ids_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to hidden states [T, D] after the final norm."""
        sequences = Sequences.of(ids_BS, positions_BS, documents_BS)
        return self._run(ids_BS, sequences)[0]

    def logits(self, x_TD: Tensor) -> Tensor:
        """Hidden states [..., D] after the final norm to logits [..., V]."""
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
        """Loss of one micro-batch as its share of a step with `step_tokens` trained tokens in all.

        `labels_BS` holds the token to predict at each position, −100 where none is trained.
        """
        sequences = Sequences.of(ids_BS, positions_BS, documents_BS)
        x_TD, routings = self._run(ids_BS, sequences)
        trained_B = (labels_BS != IGNORED).sum(1)
        scale = 1.0 / step_tokens
        total, nats = self._cross_entropy(x_TD, labels_BS, scale)
        parts: dict[str, Tensor] = {}
        if self.mtp and weights.mtp:
            mtp, more = self._mtp_loss(x_TD, ids_BS, labels_BS, sequences, scale)
            routings += more
            total = total + weights.mtp * mtp
            parts["mtp"] = mtp.detach()
        terms = routing_losses(routings, weights, trained_B, step_tokens, sequences.real)
        for name, term in terms.items():
            total = total + getattr(weights, name) * term
            parts[name] = term.detach()
        return LossParts(total, nats, int(trained_B.sum()), parts)

    def _run(self, ids_BS: Tensor, sequences: Sequences) -> tuple[Tensor, list[tuple[Router, Routing]]]:
        """Hidden states after the final norm, and the routing of each mixture layer, counted once."""
        x_TD = self._embed(ids_BS)
        if self.positions is not None:
            x_TD = x_TD + self._learned_positions(sequences)
        routings: list[tuple[Router, Routing]] = []
        for layer in self.layers:
            x_TD, routing = layer(x_TD, sequences)
            self._note(layer, routing, sequences, routings)
        return self.norm(x_TD), routings

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
            router.count(routing, sequences.real)
        routings.append((router, routing))

    def _embed(self, ids_BS: Tensor) -> Tensor:
        if ids_BS.device.type == "cpu":  # elsewhere looking would wait for the device, and the lookup itself checks
            largest, smallest = int(ids_BS.max()), int(ids_BS.min())
            if largest >= self.spec.vocab or smallest < 0:
                wrong = largest if largest >= self.spec.vocab else smallest
                raise MoesaicError(
                    f"token id {wrong} is outside the vocabulary of {self.spec.vocab} (ids 0 to "
                    f"{self.spec.vocab - 1}); use the tokenizer of this model or a model with a larger vocabulary"
                )
        x_TD = self.embed(ids_BS.flatten())
        return x_TD if self.spec.embedding_scale == 1.0 else x_TD * self.spec.embedding_scale

    def _learned_positions(self, sequences: Sequences) -> Tensor:
        assert self.positions is not None
        last = int(sequences.positions.max())
        if last >= self.spec.max_positions:
            raise MoesaicError(
                f"position {last} is beyond the {self.spec.max_positions} learned positions of this model; "
                f"use sequences of at most {self.spec.max_positions} tokens"
            )
        rows = sequences.positions.expand(sequences.batch, sequences.length)
        return self.positions(rows.flatten())

    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head.weight is None else self.head.weight

    def _cross_entropy(self, x_TD: Tensor, labels_BS: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return cross_entropy(
            x_TD,
            self._head_weight(),
            labels_BS.flatten(),
            bias_V=self.head.bias,
            scale=scale,
            logits_divisor=self.spec.logits_divisor,
        )

    def _mtp_loss(
        self, x_TD: Tensor, ids_BS: Tensor, labels_BS: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, list[tuple[Router, Routing]]]:
        """Mean over prediction blocks of their cross entropy (equation 25), and their routings."""
        losses: list[Tensor] = []
        routings: list[tuple[Router, Routing]] = []
        for depth, block in enumerate(self.mtp, start=1):
            ahead_TD = self._embed(ahead(ids_BS, depth, 0, sequences.documents))
            x_TD, routing = block(x_TD, ahead_TD, sequences)
            self._note(block.get_submodule("layer"), routing, sequences, routings)
            labels = mtp_labels(labels_BS, depth, sequences.documents)
            losses.append(self._cross_entropy(x_TD, labels, scale)[0])
        return torch.stack(losses).mean(), routings
