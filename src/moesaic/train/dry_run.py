"""One rank's training step without memory, network or data: the real code on tensors that have shapes only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from moesaic.cost.workload import Workload
from moesaic.mesh.device import without_device
from moesaic.mesh.dry import expecting
from moesaic.mesh.group import forget_connections
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train.data.dataset import Batch
from moesaic.train.metrics import Stopwatch
from moesaic.train.shapes_only import ShapesOnly
from moesaic.train.state import TrainState
from moesaic.train.step import train_step
from moesaic.train.supposed import Supposed


def dry_run(run: RunSpec, spec: ModelSpec, layout: Layout, rank: int, imbalance: float = 1.0):
    keys = run.train
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[keys.dtype]
    work = Workload(spec, keys.seq_len, keys.global_batch, mtp=keys.mtp_weight > 0)
    with without_device(), _ranks(rank, layout.world), ShapesOnly():
        mesh = Mesh.create(layout, 60.0, spec.tied_embeddings, ranks_per_node=8)
        decoder = Decoder(spec, device="meta", mesh=mesh)
        if run.balance.bias_update:
            decoder.enable_select_bias()
        supposed = Supposed(work, layout, mesh, imbalance)
        supposed.watch(decoder)
        with expecting(supposed):
            state = TrainState.of(
                decoder, dtype, sharding=layout.sharding, replicas=layout.replicas,
                beta1=keys.beta1, beta2=keys.beta2, eps=keys.eps, weight_decay=keys.weight_decay,
            )
            weights = LossWeights(
                z=run.balance.z_loss, batch_aux=run.balance.batch_aux, sequence_aux=run.balance.sequence_aux,
                global_aux=run.balance.global_aux, mtp=keys.mtp_weight,
            )
            count = micro_batches(layout, keys.global_batch)
            shape = (layout.micro_batch, keys.seq_len)
            batches = [
                Batch(torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty(shape, dtype=torch.int64, device="meta"), None, None, shape[0]*shape[1], 0)
                for _ in range(count)
            ]
            from meter_wip import Meter, _storage
            import meter_wip
            meter_wip._storage = lambda t: (t._local_tensor if hasattr(t, "_local_tensor") else t).untyped_storage()
            opt = state.optimizer
            m = Meter(decoder, {"parameters": list(decoder.parameters())+list(decoder.buffers()), "masters": opt.masters.values(), "optimizer": [t for s in opt.state().values() for t in s.values()]})
            clock = m.clock() if hasattr(m, "clock") else Stopwatch()
            class Clock(Stopwatch):
                @contextlib.contextmanager
                def phase(self, name):
                    with m.phase(name):
                        yield
            with m.on() if hasattr(m,"on") else m:
                train_step(decoder, opt, batches, step=1, lr=0.1, weights=weights, clip=keys.clip, bias_update=run.balance.bias_update, clock=Clock(), sharding=state.sharding)
            return m


def micro_batches(layout: Layout, global_batch: int) -> int:
    """As many micro-batches as it takes until a rank holds no more than before."""
    enough = 2 * layout.pp + 2 if layout.virtual_stages == 1 else 3 * layout.pp
    return min(layout.micro_batches(global_batch), enough)


@contextlib.contextmanager
def _ranks(rank: int, world: int) -> Iterator[None]:
    """A process group in which this process is `rank` of `world` and nothing is sent."""
    if world == 1:
        yield
        return
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    FSDPParamGroup._validate_no_meta_params = lambda self: None

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_connections()
