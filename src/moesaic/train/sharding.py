"""Weights, gradients and moments spread over the ranks that hold the same piece (FSDP2).

Dense parameters are spread over the data group (dp × cp), experts over edp, each over `replicas` copies of a smaller
group if asked. Three levels, each with what the one before spreads:

    optimizer     moments and masters; weights are gathered once a step, gradients are summed after the last micro-batch
    gradients     gradients too: summed and spread after every micro-batch
    parameters    weights too: gathered before a layer runs, forward and backward, and dropped after it
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from moesaic.mesh.collectives import reduce_scatter, send_to_all
from moesaic.mesh.cut import Cut
from moesaic.mesh.device import device
from moesaic.mesh.group import Group, byte_count
from moesaic.mesh.mesh import Mesh
from moesaic.mesh.messages import Exchange
from moesaic.mesh.reduction import PendingScatter, reduce_scatter_compressed
from moesaic.mesh.traffic import count
from moesaic.model.decoder import Decoder
from moesaic.model.layer import Layer


@dataclass(frozen=True)
class Held:
    """What this rank stores of a parameter: rows `start` to `stop` (along dimension 0) of its piece `cut` of the whole.

    `spread` is the group over which the piece's rows are spread; None where every rank keeps the whole piece.
    """

    cut: Cut
    start: int
    stop: int
    spread: Group | None = None


class Sharding:
    """FSDP2 around a decoder's layers. `held` says for every parameter what is stored here.

    With level `none`, or where no other rank holds the same pieces, nothing is wrapped.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        level: str,
        replicas: int,
        dtype: torch.dtype,
        *,
        ahead: bool = False,
        under_backward: bool = False,
        compress: bool = False,
    ) -> None:
        self.level, self._compress = level, compress
        self._modules: list[tuple[FSDPModule, int | None]] = []
        self.held: dict[str, Held] = {}
        self._policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != torch.float32:
            self._policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        self._meshes: dict[int, tuple[DeviceMesh, Group]] = {}
        self._replicas = replicas
        self._mesh = mesh
        # A gradient that is summed once a step need not be there before the optimizer. Streams do that by themselves,
        # and where FSDP2 adds to a sum or sums it over replicas it has to be there.
        defers = under_backward and level == "optimizer" and replicas == 1 and not mesh.world.needs_device
        self._channels = mesh.gradient_channels() if defers and mesh.world.size > 1 else {}
        self._scatters: list[PendingScatter] = []
        groups: dict[str, Group] = {}
        if level != "none":
            groups = self._wrap(decoder)
        if ahead:
            self._gather_ahead(decoder)
        for name, cut in decoder.cuts.items():
            rows = cut.local_shape[0] if cut.shape else 1
            group = groups.get(name)
            if group is None:
                self.held[name] = Held(cut, 0, rows)
            else:
                share = -(-rows // group.size)
                start, stop = min(rows, share * group.rank), min(rows, share * (group.rank + 1))
                self.held[name] = Held(cut, start, stop, group)

    @property
    def is_on(self) -> bool:
        """Whether anything is spread."""
        return bool(self._modules)

    def gathered(self) -> tuple[list[Tensor], list[Tensor]]:
        """Whole weights, and whole gradients of them, that are here at the moment."""
        weights, gradients = list[Tensor](), list[Tensor]()
        for module, _ in self._modules:
            group = module._get_fsdp_state()._fsdp_param_group
            for each in group.fsdp_params if group is not None else ():
                weights += each.all_gather_outputs
                whole = getattr(each, "_unsharded_param", None)
                sums = [each.unsharded_accumulated_grad, None if whole is None else whole.grad]
                weights += [] if whole is None else [whole]
                gradients += [one for one in sums if one is not None]
        return weights, gradients

    def begin_step(self) -> None:
        """Before the first pass of a step. FSDP2 visits all of a rank's stages after every backward, and would drop the
        weights of one that is still marked as done from the step before."""
        for module, _ in self._modules:
            self._mark(module, done=False)

    def begin_backward(self, stage: int, last_of_stage: bool, last: bool) -> None:
        """Before a backward pass of virtual stage `stage`: whether it is the step's last through that stage, and the
        last on this rank."""
        for module, of_stage in self._modules:
            if of_stage in (None, stage):
                self._mark(module, last if of_stage is None else last_of_stage)

    def end_backward(self) -> None:
        """After the last backward of a step: wait for sums of gradients that are under way."""
        for scatter in self._scatters:
            scatter.wait()
        self._scatters.clear()

    def _mark(self, module: FSDPModule, done: bool) -> None:
        """Whether the next backward through a module is the step's last."""
        if self.level == "optimizer":
            module.set_requires_gradient_sync(done, recurse=False)
        if self.level in ("optimizer", "gradients"):
            module.set_reshard_after_backward(done, recurse=False)

    def _wrap(self, decoder: Decoder) -> dict[str, Group]:
        """Wrap layers and the rest; the group over which each wrapped parameter is spread."""
        spread: dict[str, Group] = {}
        unspread: set[nn.Parameter] = set()
        blocks: list[tuple[int, nn.Module, Layer]] = [
            (stage, decoder.layers[i], decoder.layers[i]) for stage, each in decoder.stages.items() for i in each.layers
        ]
        for block in decoder.mtp:
            layer = block.get_submodule("layer")
            assert isinstance(layer, Layer)
            blocks.append((next(stage for stage, each in decoder.stages.items() if each.mtp), block, layer))
        names = {parameter: name for name, parameter in decoder.named_parameters()}
        inside = {p for _, _, layer in blocks if layer.moe is not None for p in layer.moe.experts.parameters()}
        self._join_copies()
        for stage, _, layer in blocks:
            if layer.moe is None:
                continue
            experts = layer.moe.experts
            edp = self._mesh.expert(layer.moe.router.spec.experts).edp
            parameters = list(experts.parameters())
            if edp.size == 1 or edp.size == self._replicas:
                unspread.update(parameters)
                continue
            group = self._fully_shard(experts, stage, edp, set())
            spread |= {names[p]: group for p in parameters}
        data = self._mesh.data
        if data.size > 1 and data.size != self._replicas:
            for stage, module, _ in blocks:
                self._fully_shard(module, stage, data, unspread)
            # Embedding and head may belong to two of this rank's stages: they wait for the last backward of all.
            group = self._fully_shard(decoder, None, data, unspread)
            spread |= {name: group for p, name in names.items() if p not in inside}
            register_fsdp_forward_method(decoder, "stage_tensors")
        return spread

    def _gather_ahead(self, decoder: Decoder) -> None:
        """Gather the weights of the next layer while one computes, forward as well as backward.

        On NCCL FSDP2 gathers on a stream of its own and only has to be told what comes next; without streams the
        gathering has to be left pending too.
        """
        wrapped = {module for module, _ in self._modules}
        for each in decoder.stages.values():
            in_order = [decoder.layers[i] for i in each.layers]
            units = [[m for m in (layer, *layer.modules()) if m in wrapped] for layer in in_order]
            units = [list(dict.fromkeys(unit)) for unit in units]
            for unit, after in itertools.pairwise(units):
                if unit and after:
                    unit[0].set_modules_to_forward_prefetch(after)  # type: ignore[operator, union-attr]
                    after[0].set_modules_to_backward_prefetch(unit)  # type: ignore[operator, union-attr]
        if not self._mesh.world.needs_device:
            for module, _ in self._modules:
                module._set_unshard_async_op(True)

    def _join_copies(self) -> None:
        """Make the groups of all copies. A pipeline stage may lack the experts that another has, but all ranks have to
        make equally many groups."""
        if self._replicas > 1:
            for group in (self._mesh.data, *(each.edp for each in self._mesh.experts_by_count.values())):
                if group.size not in (1, self._replicas):
                    self._device_mesh(group)

    def _fully_shard(self, module: nn.Module, stage: int | None, group: Group, ignored: set[nn.Parameter]) -> Group:
        mesh, shard_group = self._device_mesh(group)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.level == "parameters",
            mp_policy=self._policy,
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if not group.needs_device:
            module.set_custom_all_gather(_Gather(shard_group))  # type: ignore[arg-type]
        if self._compress or not group.needs_device:
            own = self._channels.get(id(group))
            scatter = _ReduceScatter(own or shard_group, self._compress, None if own is None else self._scatters)
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        self._modules.append((module, stage))
        return shard_group

    def _device_mesh(self, group: Group) -> tuple[DeviceMesh, Group]:
        """The mesh FSDP2 wants over a group, and the group over which parameters are spread."""
        if id(group) not in self._meshes:
            kind = "cpu" if device().kind == "meta" else device().kind
            assert group.handle is not None
            if self._replicas == 1:
                made = DeviceMesh.from_group(group.handle, kind, mesh_dim_names=(group.name,)), group
            else:
                made = _with_replicas(group, self._replicas, kind)
            self._meshes[id(group)] = made
        return self._meshes[id(group)]


def _with_replicas(group: Group, replicas: int, kind: str) -> tuple[DeviceMesh, Group]:
    """Neighbours in the group share one copy: consecutive stretches of it are spread over, and copies lie across."""
    size = group.size // replicas
    rows = [group.ranks[i * size : (i + 1) * size] for i in range(replicas)]
    columns = [group.ranks[i::size] for i in range(size)]
    across = Group.create(f"{group.name} replicas", columns, group.timeout_seconds)
    shard = Group.create(f"{group.name} shard", rows, group.timeout_seconds)
    assert across.handle is not None and shard.handle is not None
    mesh = DeviceMesh.from_group(
        [across.handle, shard.handle], kind, torch.tensor(rows), mesh_dim_names=("replicas", "shard")
    )
    return mesh, shard


class _Buffers:
    """Memory of FSDP2's collectives, and the group whose name they count and fail under."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Works(dist.Work):  # type: ignore[misc]
    """Messages under way as FSDP2 knows them: it waits for nothing else."""

    def __init__(self, works: Exchange) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        """Block until all have arrived and left."""
        self._works.wait()
        return True


class _Gather(_Buffers):
    """All-gather by plain messages."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        n = self.group.size
        count("all-gather", self.group.name, byte_count(input_tensor) * (n - 1))
        with self.group.naming("all-gather of parameters"):
            # FSDP2 may hand in its own slice of the output.
            works = send_to_all(input_tensor, list(output_tensor.view(n, -1)), self.group)
            if async_op:
                return _Works(works)
            works.wait()
            return None


class _ReduceScatter(_Buffers):
    """Reduce-scatter with sums in rank order; with `compress` it travels in bf16. With a list `left` the sum is not
    there at the end of the call, but after what the call appends has been waited for."""

    def __init__(self, group: Group, compress: bool, left: list[PendingScatter] | None = None) -> None:
        super().__init__(group)
        self._compress, self._left = compress, left

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        parts = input_tensor.view(self.group.size, -1)
        if self._left is not None:
            self._left.append(PendingScatter(parts, output_tensor, self.group, compress=self._compress))
            return None
        summed = reduce_scatter_compressed if self._compress else reduce_scatter
        output_tensor.view(-1).copy_(summed(parts, self.group))
        return None
