"""The weights a run starts from: random ones, a Hugging Face folder's, or a dense model's."""

from __future__ import annotations

import torch

from moesaic.mesh.device import device
from moesaic.mesh.mesh import Mesh
from moesaic.model.decoder import Decoder
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train import upcycle
from moesaic.train.memory import require_memory, require_memory_of_rank


def initial_decoder(
    run: RunSpec, spec: ModelSpec, dtype: torch.dtype, notes: list[str], mesh: Mesh | None = None
) -> Decoder:
    """The decoder of `spec`, or what this rank of `mesh` holds of it, with the weights that `model.init` asks for. What
    should be known is added to `notes`.

    It is in fp32, so that the optimizer's masters start unrounded; `dtype` is what the run computes in.
    Every parameter is first drawn from the seed, so what a source does not give (a new router) is reproducible.

    Raises:
        MoesaicError: the model and its optimizer do not fit into memory, or the source cannot be read or is of another
            model.
    """
    # Gradients, masters and two moments are fp32; parameters in bf16 stand beside their masters.
    size = 16 + (0 if dtype == torch.float32 else dtype.itemsize)
    if mesh is None or mesh.world.size == 1:
        require_memory(spec, size, "with gradients and AdamW's moments")
    else:
        require_memory_of_rank(spec, mesh, size, "with gradients and AdamW's moments")
    # What will be spread is made in main memory: a device has room for its share only.
    sharded = mesh is not None and mesh.layout is not None and mesh.layout.sharding != "none"
    decoder = Decoder(spec, device="cpu" if sharded else device().torch_device, mesh=mesh)
    decoder.init_weights(run.train.seed)
    if run.model.init == "hf":
        from moesaic.hf import import_weights

        notes += import_weights(str(run.model.hf), decoder).notes
    elif run.model.init == "upcycle":
        source = upcycle.load_dense(str(run.model.upcycle_from))
        notes += upcycle.upcycle(source, decoder, run.model.upcycle_noise, run.train.seed)
    return decoder
