"""What training stacks store and keep, where they differ: a few switches, and bytes of tensors that exist.

`MEGATRON` follows Megatron-Core with Transformer Engine as its public recipes run it, `MOESAIC` this project's own
trainer, `TORCHTITAN` plain PyTorch modules, `MEGASCALE` the layer that its paper lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Habits:
    """Switches and constants. Every one names a tensor that is there or is not."""

    layer: Literal["megatron", "megascale", "sar"] = "megatron"
    """Which tensors a layer keeps: Megatron-Core's (`activations`), or those of MegaScale-MoE's operator list, all or
    after its selective rematerialisation (`sar`)."""
    loss: Literal["fused", "fp32", "chunks"] = "fused"
    """`fused`: the loss overwrites its bf16 logits with their gradient. `fp32`: it keeps an fp32 copy of them.
    `chunks`: some tokens at a time make logits, loss and gradients of the head's input and matrix, which wait for
    backward."""
    chunk: int = 128 * MIB
    """Bytes of the logits of one such chunk."""
    weight_before_down: bool = True
    """An expert's activation is multiplied by its router weight before the down projection, so that the expert's output
    is not kept for the router's backward (arXiv 2603.07685, "memory-efficient permutation")."""
    rows: bool = True
    """Experts keep copies of rows and their activation. Else they keep the tokens that a dispatcher brought, each once,
    and backward gathers rows and computes the activation again."""
    padded_values: bool = False
    """Latent attention's values, and with them its output, are padded to the width of queries for the kernel."""
    fused_norms: bool = True
    """Norms before grouped-query attention and dense MLPs are one operation with the projection that follows; recompute
    of `layernorm` then leaves their outputs. (Latent attention and experts have norms of their own.)"""
    sequence_parallel: bool = True
    """Between modules a tensor group shares out its tokens. Else each of its ranks keeps all of them there."""
    gathers_again: bool = True
    """Backward gathers the input of matmuls cut by tp again. Else a rank keeps it gathered, that of all its group's
    tokens."""
    flash: bool = True
    """The attention core never stores its scores. Else it keeps their softmax, S values per head and token."""
    drops_core: bool = False
    """Recompute of `core_attn` drops the core's output as well as its log-sums, which the core's backward reads too;
    and an expert block's gated output is dropped by `moe` alone, since making it again would communicate."""
    dropout: bool = False
    """Dropout above 0 after attention and after the block, and in the core where it is not a flash kernel: one byte of
    mask per value, and in the core its output. Recipes of this decade train without."""
    placeholders: bool = True
    """Backward hands autograd a bf16 tensor in place of each weight gradient that it added to the main gradients; one
    per distinct shape of weight stays for the whole run (Transformer Engine, `get_dummy_wgrad`)."""
    quantized_weights: bool = True
    """With fp8 or mxfp8 matmuls, layer weights are stored in fp8 only, once by rows and once by columns (Megatron's
    `--fp8-param-gather`). Else both copies stand beside the bf16 weights."""
    cut_block_projection: bool = True
    """The projection before a prediction block's layer is cut by tp. Else every rank of a tensor group has it whole."""
    gathers_masters: bool = False
    """With sharding, weights are gathered from their fp32 masters (FSDP2), which an offloaded optimizer leaves on the
    device, and which are all that is stored of a sharded weight. Else shards of weights stand beside them."""
    exact: bool = False
    """The peak is looked for at the moments that this project's trainer passes through (`moments`), each beside what is
    still kept then; with a loss in chunks. Else a rank keeps everything until head or most demanding layer have run."""
    grouped_products: bool = True
    """Experts run all their rows at once, in tensors. Else, on a processor, one after the other in scratch, which is no
    tensor of a step, and add gradients of weights to their sums as they go; `exact` alone looks at it."""
    vocabulary_multiple: int = 128
    """The vocabulary is padded to a multiple of this times tp."""
    workspace: int = 32 * MIB
    """Bytes of one matmul library workspace (cuBLAS on Hopper and later)."""
    workspaces: int = 3
    """PyTorch's cuBLAS and cuBLASLt handles and Transformer Engine's own."""
    grouped_workspaces: int = 4
    """More of them with grouped matmuls, one per stream."""
    deepep_buffer: int = GIB
    """DeepEP's NVLink and RDMA buffers, outside the allocator: fixed by channels and hidden width. (Assumed.)"""
    reserved_share: float = 0.05
    """What the caching allocator holds beyond the peak of allocated bytes, over that peak: 0.03 to 0.09 in SimuMax's
    published per-rank B200 measurements."""
    context: int = 900 * MIB
    """CUDA context (about 0.5 GiB) and NCCL's channels (392 MiB for groups of 4 to 8, AIConfigurator's table); neither
    is the allocator's."""


MEGATRON = Habits()
MOESAIC = Habits(
    loss="chunks",
    rows=False,
    padded_values=True,
    fused_norms=False,
    gathers_again=False,
    drops_core=True,
    placeholders=False,
    quantized_weights=False,
    cut_block_projection=False,
    gathers_masters=True,
    exact=True,
    vocabulary_multiple=1,
    workspaces=2,
)
TORCHTITAN = Habits(
    loss="fp32", fused_norms=False, placeholders=False, quantized_weights=False, vocabulary_multiple=1, workspaces=2
)
MEGASCALE = replace(TORCHTITAN, layer="sar")

_BY_FRAMEWORK = {"moesaic": MOESAIC, "torchtitan": TORCHTITAN, "megascale": MEGASCALE}


def habits_for(framework: str) -> Habits:
    """The habits of a framework by the name in `Stack.framework`; those not known get Megatron's."""
    return _BY_FRAMEWORK.get(framework, MEGATRON)
