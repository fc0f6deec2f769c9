"""Which peers exist, where each one runs, and what a reader must know about its numbers.

Imports nothing but the standard library: the parent of a benchmark, `make_envs.py` and the workers all read it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ENVS = Path(os.environ.get("MOESAIC_PEERS", Path.home() / ".cache" / "moesaic" / "peers"))


@dataclass(frozen=True)
class Peer:
    """One row of a benchmark."""

    name: str
    title: str
    env: str
    """Folder of its virtual environment; "base" is the interpreter that runs the benchmark."""
    adapter: str
    """Module under `benchmarks.peers.adapters` with `layer(shape, dtype, variant)` and `model(...)`."""
    variant: str = ""
    note: str = ""
    fp32_is_bf16: bool = False
    """Its rows under fp32 compute the experts in bf16, so they are shown and never compared with."""
    works: tuple[str, ...] = ("layer", "step")


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("moesaic", "moesaic", "base", "ours"),
        Peer("hf_eager", "transformers Mixtral, eager", "base", "hf", "eager"),
        Peer("hf_grouped", "transformers Mixtral, grouped_mm", "base", "hf", "grouped_mm"),
        Peer(
            "torchtitan",
            "torchtitan MoE",
            "torchtitan",
            "titan",
            note="computes its experts in bf16 whatever the dtype of its parameters",
            fp32_is_bf16=True,
        ),
        Peer(
            "torchtitan_fp32",
            "torchtitan MoE, bf16 casts removed by us",
            "torchtitan",
            "titan",
            "no_cast",
            note="the same layer with its three bf16 casts left out, so that fp32 is fp32",
        ),
        Peer("megatron_sequential", "Megatron-Core MoELayer, sequential", "megatron", "megatron", "sequential"),
        Peer(
            "megatron_grouped",
            "Megatron-Core MoELayer, moe_grouped_gemm",
            "megatron",
            "megatron",
            "grouped",
            note="without Transformer Engine its local spec builds SequentialMLP for this setting too",
            works=("layer",),
        ),
        Peer("deepspeed", "DeepSpeed MoE, no drop", "deepspeed", "deepspeed_moe"),
        Peer("automodel", "NeMo Automodel MoE, torch_mm", "automodel", "automodel"),
        Peer("litgpt", "litgpt LLaMAMoE", "litgpt", "litgpt_moe"),
    )
}

# What `make_envs.py` installs, without dependencies, on top of an environment that has torch and transformers.
# triton is imported at start by torchtitan's and Megatron-Core's MoE code; it does nothing on a CPU.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torchtitan": (
        "torchtitan==0.3.0",
        "triton",
        "torchdata",
        "tyro",
        "einops",
        "spmd_types==0.2.3",
        "torch_checkpointing",
        "docstring-parser",
        "shtab",
        "typeguard",
    ),
    "megatron": ("megatron-core==0.19.2", "triton", "einops"),
    "deepspeed": ("deepspeed==0.19.8", "hjson", "py-cpuinfo", "psutil", "einops", "msgpack", "ninja"),
    "transformers": ("accelerate", "psutil"),  # without accelerate it lays out no model over several ranks
    "automodel": ("nemo-automodel==0.7.0",),
    "litgpt": (
        "litgpt==0.5.13",
        "lightning",
        "lightning-utilities",
        "torchmetrics",
        "psutil",
        "jsonargparse<=4.41",
        "typeshed_client",
        "importlib_resources",
    ),
}


def interpreter(peer: Peer, envs: Path) -> Path:
    """The Python that runs `peer`; a path that does not exist means its environment was never made."""
    return Path(sys.executable) if peer.env == "base" else envs / peer.env / "bin" / "python"
