"""AdamW over fp32 masters.

Parameters in fp32 are their own masters. A bf16 parameter has an fp32 master: the optimizer steps the master, and the
parameter is the master rounded. Gradients of bf16 parameters are added up in fp32 as they come out of backward, so
accumulation over micro-batches loses nothing and no bf16 gradient outlives its own backward.

Where `packed` says that state is stored in fewer bytes or on the host, the update unpacks it parameter by parameter.

A parameter that is spread over ranks (see `sharding`) is fp32 where it is stored, and this rank's rows of it are the
master; what computes is made from it when it is gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from moesaic.model.experts import Experts
from moesaic.train.gradients import GradientSums
from moesaic.train.overlapped import OverlappedSums
from moesaic.train.packed import Packed, Storing


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices yes (stacks of them too); biases, norms and other vectors no."""
    return parameter.ndim >= 2 and not name.endswith("bias")


class Optimizer:
    """AdamW (arXiv 1711.05101) for the parameters of `model`.

    With `dtype` bf16, a model built in fp32 computes in bf16 from here on: its weights become the masters, unrounded,
    and its parameters their rounded copies. Set the learning rate with `step(lr)`. `masters` maps parameter names to
    the fp32 tensors that are stepped; after `sum_gradients` their `.grad` is where gradients are read and clipped.
    `sums` says over which ranks gradients are summed; without it there is one rank. `storing` says how state is kept
    between steps; masters that it splits or sends away have no values then, only their shape and their `.grad`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        sums: GradientSums | None = None,
        storing: Storing | None = None,
    ) -> None:
        self.sums = sums
        self._betas, self._eps, self._decay = (beta1, beta2), eps, weight_decay
        self.overlap: OverlappedSums | None = None
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        self._spread: dict[str, DTensor] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                self._spread[name] = parameter
                self.masters[name] = nn.Parameter(parameter.to_local().detach())
                continue
            same = parameter.dtype == torch.float32 == (dtype or parameter.dtype)
            self.masters[name] = parameter if same else self._make_master(parameter, dtype or parameter.dtype)
        # Without hooks in the way, experts can add to a gradient in place instead of making one to be added.
        for module in model.modules():
            if isinstance(module, Experts):
                plain = not any(isinstance(p, DTensor) for p in module.parameters())
                module.accumulate_in_place = plain and all(p.dtype == torch.float32 for p in module.parameters())
        self._rounded = [
            name
            for name, parameter in self.parameters.items()
            if parameter is not self.masters[name] and name not in self._spread
        ]
        dry = any(master.is_meta for master in self.masters.values())
        self.packed = self._pack(storing or Storing())
        self._rounded = [name for name in self._rounded if name not in self.packed]
        here = {name: master for name, master in self.masters.items() if name not in self.packed}
        groups: list[dict[str, Any]] = [
            {"params": [m for n, m in here.items() if decays(n, m)], "weight_decay": weight_decay},
            {"params": [m for n, m in here.items() if not decays(n, m)], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw: torch.optim.AdamW | None = None
        if groups:
            self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=eps, fused=not dry)
            for group in self._adamw.param_groups:
                group["fused"] = True  # which the constructor refuses where tensors have no memory
        # The moments exist from the start, so that a checkpoint of step 0 and one of step 1000 have the same keys.
        for master in here.values():
            assert self._adamw is not None
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }

    def _pack(self, storing: Storing) -> dict[str, Packed]:
        """The parameters whose state is not simply there. Of those that may go, the largest go first."""
        away: set[str] = set()
        if storing.host is not None:
            left = storing.fraction * sum(master.numel() for master in self.masters.values())
            for name, master in sorted(self.masters.items(), key=lambda item: -item[1].numel()):
                if master.numel() <= left:
                    away.add(name)
                    left -= master.numel()
        everything = storing.split or storing.moments != torch.float32
        return {
            name: Packed(
                self.parameters[name],
                master,
                storing,
                stays=master is self.parameters[name] or name in self._spread,
                away=name in away,
            )
            for name, master in self.masters.items()
            if everything or name in away
        }

    def _make_master(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().float())
        parameter.data = master.detach().to(dtype)

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        return master

    def gradients(self) -> dict[str, Tensor]:
        """The fp32 gradients that exist, by name (a prediction block without a loss has none)."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def sum_gradients(self) -> None:
        """Complete the gradients that backward left, with those of the other ranks. Called once per step."""
        for name, parameter in self._spread.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                self.masters[name].grad = parameter.grad.to_local()
        if self.sums is None:
            return
        if self.sums.embedding and self.masters[self.sums.embedding].grad is None:
            # A copy that nothing used here still has to take part in the sum over copies.
            master = self.masters[self.sums.embedding]
            master.grad = torch.zeros_like(master)
        begun = self.overlap.wait() if self.overlap is not None else ()
        self.sums.sum(self.gradients(), begun)

    def clip(self, limit: float) -> float:
        """The 2-norm of all gradients together; if it exceeds `limit` > 0, all are scaled by one coefficient.

        The coefficient is limit / (norm + 1e-6), as in `torch.nn.utils.clip_grad_norm_`. A non-finite norm scales
        nothing: the caller stops.
        """
        gradients = self.gradients()
        if self.sums is not None:
            norm = self.sums.norm(gradients)
        else:
            norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) if gradients else 0.0
        if limit > 0 and math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(list(gradients.values()), limit / (norm + 1e-6))
        return norm

    def step(self, lr: float) -> None:
        """One AdamW update of all masters with learning rate `lr`; parameters in bf16 get the rounded masters."""
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._step_packed(lr)
        self.round_masters()

    @torch.no_grad()
    def _step_packed(self, lr: float) -> None:
        """Parameter by parameter; the state of the next comes and that of the one before goes meanwhile."""
        todo = [(name, each) for name, each in self.packed.items() if each.master.grad is not None]
        beta1, beta2 = self._betas
        for place, (name, each) in enumerate(todo):
            each.ask()
            if place + 1 < len(todo):
                todo[place + 1][1].ask()
            master, first, second = each.load()
            assert each.master.grad is not None
            adamw(
                [master], [each.master.grad], [first], [second], [], [each.updates], fused=True, amsgrad=False,
                maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=self._eps,
                weight_decay=self._decay if decays(name, master) else 0.0,
            )  # fmt: skip
            each.store(master, first, second)
            if place > 0:
                todo[place - 1][1].settle()
        if todo:
            todo[-1][1].settle()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set every bf16 parameter to its rounded master."""
        if self._rounded:
            targets: list[Tensor] = [self.parameters[name].detach() for name in self._rounded]
            torch._foreach_copy_(targets, [self.masters[name].detach() for name in self._rounded])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The moments and the update count of each parameter that is not packed, by its name: live tensors."""
        if self._adamw is None:
            return {}
        state = self._adamw.state
        return {name: dict(state[master]) for name, master in self.masters.items() if name not in self.packed}

    def saved(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """All masters, and moments and update counts, by parameter, in fp32 however they are stored: live tensors, and
        copies in main memory of what is packed. Copies that are read into go to `take`."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = self.state()
        for name, master in self.masters.items():
            weights[name] = master
            if name in self.packed:
                copies = self.packed[name].copies()
                weights[name] = copies.pop("master", master)
                moments[name] = {"step": self.packed[name].updates, **copies}
        return weights, {name: moments[name] for name in self.masters}

    def take(self, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
        """Go on from what `saved` returned, whose tensors have been read into."""
        for name, each in self.packed.items():
            copies = {kind: moments[name][kind] for kind in ("exp_avg", "exp_avg_sq")}
            each.take(copies if each.stays else copies | {"master": weights[name].detach()})
        self.round_masters()
