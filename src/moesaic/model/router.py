"""The router: which experts a token goes to, and with what weights. One router for all families.

Everything is in fp32. The order of operations is in `RouterSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.model.recompute import remembered, same_noise
from moesaic.spec.errors import SpecError
from moesaic.spec.model import RouterSpec

Choose = Callable[[Tensor], Tensor]
"""Expert ids [T, K] from choice scores [T, E]."""


class Routing(NamedTuple):
    """What a router decided for T tokens: chosen experts, their weights, and the logits they come from."""

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor


class Router(nn.Module):
    """Chooses K of E experts for each token.

    Parameters: `weight` [E, D], and `bias` [E] when the family adds one to the logits.
    Buffers: `select_bias` [E] fp32, added to the scores for choosing only; absent unless the family has it or
    `enable_select_bias` made it. `step_counts` [E] int64, choices per expert since the trainer last cleared it (not
    saved).

    `choose`, when set, replaces the choice: it gets the choice scores [T, E] and returns expert ids [T, K] (forced
    balance, forced skew, replay of a recorded routing). Weights still come from the scores.
    """

    def __init__(self, spec: RouterSpec, hidden: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        _check(spec)
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(spec.experts, dtype=dtype, device=device)) if spec.logit_bias else None
        self.step_counts: Tensor
        self.register_buffer(
            "step_counts", torch.zeros(spec.experts, dtype=torch.int64, device=device), persistent=False
        )
        self.select_bias: Tensor | None
        self.register_buffer("select_bias", None)
        if spec.select_bias:
            self.enable_select_bias()
        self.choose: Choose | None = None

    def enable_select_bias(self) -> None:
        """Give the router a selection bias of zeros if it has none, for balancing without an auxiliary loss."""
        if self.select_bias is None:
            device = self.weight.device
            self.register_buffer("select_bias", torch.zeros(self.spec.experts, dtype=torch.float32, device=device))

    def forward(self, x_TD: Tensor) -> Routing:
        """x [T, D] to the routing of its T tokens."""
        choose = remembered(lambda: self.choose)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide), bias)
        if self.spec.score == "sparsemixer":
            with same_noise():
                ids_TK, weights_TK = sparsemixer(logits_TE, self.spec.top_k, self.spec.jitter, self.training, choose)
        else:
            ids_TK, weights_TK = self._score_and_pick(logits_TE, choose)
        if self.spec.norm:
            total = weights_TK.sum(-1, keepdim=True)
            if self.spec.norm_eps:
                total = total + self.spec.norm_eps
            if self.spec.norm_min:
                total = total.clamp(min=self.spec.norm_min)
            weights_TK = weights_TK / total
        if self.spec.scale != 1.0:
            weights_TK = weights_TK * self.spec.scale
        return Routing(ids_TK, weights_TK, logits_TE)

    def _score_and_pick(self, logits_TE: Tensor, choose: Choose | None) -> tuple[Tensor, Tensor]:
        if self.spec.when == "post":
            ids_TK = self._pick(logits_TE.detach(), choose)
            return ids_TK, _score(self.spec.score, logits_TE.gather(1, ids_TK))
        scores_TE = _score(self.spec.score, logits_TE)
        ids_TK = self._pick(scores_TE.detach(), choose)
        return ids_TK, scores_TE.gather(1, ids_TK)

    def _pick(self, choice_TE: Tensor, choose: Choose | None) -> Tensor:
        """The K best experts by score plus selection bias, within the best groups."""
        if self.select_bias is not None:
            choice_TE = choice_TE + self.select_bias
        if choose is not None:
            return choose(choice_TE)
        if self.spec.groups > 1:
            choice_TE = self.keep_groups(choice_TE)
        return choice_TE.topk(self.spec.top_k, dim=-1).indices

    def keep_groups(self, choice_TE: Tensor) -> Tensor:
        """Group-limited choice (DeepSeek-V2 and V3): experts outside the best groups get −∞."""
        spec = self.spec
        grouped = choice_TE.unflatten(-1, (spec.groups, -1))
        value = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = value.topk(spec.groups_kept, dim=-1).indices
        dropped = torch.ones_like(value, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)

    @torch.no_grad()
    def count(self, routing: Routing, real_BS: Tensor | None = None) -> None:
        """Add a routing's choices to `step_counts`, without those of padding (tokens that are not `real_BS`).

        Called once per forward pass, never on recompute.
        """
        ids_TK = routing.ids_TK
        ones_T1 = ids_TK.new_ones(len(ids_TK), 1) if real_BS is None else real_BS.reshape(-1, 1).to(ids_TK.dtype)
        # Not a bincount: on a GPU that waits for the largest id.
        self.step_counts.scatter_add_(0, ids_TK.flatten(), ones_T1.expand_as(ids_TK).flatten())

    def probabilities(self, routing: Routing) -> Tensor:
        """What auxiliary losses call the router's probabilities, [T, E], rows summing to 1.

        Softmax of the logits; for sigmoid routers, the sigmoid scores divided by their sum over all experts
        (DeepSeek-V3, arXiv 2412.19437, equation 19).
        """
        if self.spec.score == "sigmoid":
            scores = routing.logits_TE.sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return routing.logits_TE.softmax(-1)

    def extra_repr(self) -> str:
        return f"experts={self.spec.experts}, top_k={self.spec.top_k}, {self.spec.score} {self.spec.when}"


def _score(kind: str, logits: Tensor) -> Tensor:
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)


def _check(spec: RouterSpec) -> None:
    if not 1 <= spec.top_k <= spec.experts:
        raise SpecError(f"top_k is {spec.top_k} with {spec.experts} experts; it must be from 1 to {spec.experts}")
    if spec.groups > 1:
        per_group, rest = divmod(spec.experts, spec.groups)
        if rest:
            raise SpecError(
                f"{spec.experts} experts do not divide into {spec.groups} groups; "
                f"take a number of groups that divides {spec.experts}"
            )
        if not 1 <= spec.groups_kept <= spec.groups or spec.top_k > spec.groups_kept * per_group:
            raise SpecError(
                f"top_k {spec.top_k} needs experts from {spec.groups_kept} of {spec.groups} groups of {per_group}, "
                f"which hold {spec.groups_kept * per_group}; keep more groups or choose fewer experts"
            )
        if spec.group_score == "best2" and per_group < 2:
            raise SpecError(
                f"groups of {per_group} expert have no best two; use group_score 'max' or fewer than "
                f"{spec.groups} groups"
            )


def sparsemixer(
    logits_TE: Tensor, top_k: int, jitter: float, training: bool, choose: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's router (arXiv 2409.12136): K picks one after another, weights not normalised together.

    For each pick, logits farther below the best than 2 · `jitter` of its size are masked, and the weight is the softmax
    of what is left at the pick; the pick is then removed. In training the pick is sampled from that softmax (Gumbel),
    and, unless it is the best, three times in four its output counts a third, with the gradient of the full weight:
    Heun's third-order estimate of the gradient through the choice. In evaluation the best is taken.

    logits [T, E] to ids [T, K] and weights [T, K]. Draws from the global generator when `training`.
    """
    remaining = logits_TE
    forced_TK = None if choose is None else choose(logits_TE.detach())
    ids, weights = [], []
    for pick in range(top_k):
        best, best_id = remaining.detach().max(-1, keepdim=True)
        size = logits_TE.detach().abs().clamp(min=best)
        far = (best - logits_TE.detach()) / size > 2 * jitter
        near = remaining.masked_fill(far, float("-inf"))
        probabilities = near.softmax(-1)
        chosen = best_id
        if forced_TK is not None:
            chosen = forced_TK[:, pick : pick + 1]
        elif training:
            noise = torch.empty_like(near).exponential_().log_()
            chosen = (near.detach() - noise).argmax(-1, keepdim=True)
        weight = probabilities.gather(1, chosen)
        if training:
            top, top_id = probabilities.detach().max(-1, keepdim=True)
            full = (chosen == top_id) | (torch.rand_like(top) > 0.75)
            weight = weight - (weight * torch.where(full, 0.0, 2 / 3)).detach()
        ids.append(chosen)
        weights.append(weight)
        remaining = remaining.scatter(1, chosen, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)
