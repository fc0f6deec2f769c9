"""How fast things go: shares of a machine's peaks that software reaches, and fixed costs.

Quantities (FLOPs, bytes, launches) follow from the model and the layout; a `Rates` turns them into seconds. Its fields
are few, have a meaning on their own, and are the same for every accelerator unless the stack says otherwise: peaks and
bandwidths come from the `ClusterSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Stack:
    """The software that runs a layout. It is part of the key of a rate: one layout of DeepSeek-V3 on GB200 went from
    494 to 970 TFLOP/s per GPU by software alone (Megatron-Core's GB200 guide)."""

    framework: str = "megatron"
    """`megatron` (Megatron-Core and Megatron-Bridge), `megascale`, `torchtitan`, `deepspeed`, `moesaic`."""
    release: str = ""
    """Version or container, as in "25.11"; empty when not known."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs, so that the host does not limit them."""
    balanced: bool = True
    """Routing is forced to be balanced, or padded to equal counts."""


@dataclass(frozen=True)
class Rates:
    """Constants of the closed form. Shares are of a peak, seconds are seconds."""

    gemm_share: float = 0.80
    attention_share: float = 0.55
    memory_share: float = 0.80
    launch_seconds: float = 6e-6


def rates_for(cluster: ClusterSpec, stack: Stack) -> Rates:
    """The rates of a software stack on a cluster; `dataclasses.replace` changes single ones."""
    return Rates()
