"""The machines of a run: an accelerator's peaks and links, and how many of them stand together.

Bandwidths are in bytes per second and one direction, memory in bytes, rates in FLOP/s of dense matrices.
"""

from __future__ import annotations

from pydantic import Field

from .model import Spec


class GpuSpec(Spec):
    """One accelerator as its maker publishes it."""

    name: str
    vendor: str
    peak_flops: dict[str, float]
    """Dense FLOP/s by precision: fp32, tf32, bf16, fp8, fp4; what is absent the accelerator cannot do."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second to its own memory."""
    link_bandwidth: float
    """Bytes per second and direction to the others of its domain, all of them together (NVLink, xGMI)."""
    domain: int
    """Accelerators that reach each other over that link: 8 in an HGX node, up to 72 in an NVL72 rack."""
    gpus_per_node: int
    nic_bandwidth: float
    """Bytes per second and direction to other domains, per accelerator, in the maker's reference machine."""
    host_bandwidth: float
    """Bytes per second and direction between the accelerator and host memory."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each figure is from."""


class ClusterSpec(Spec):
    """Equal accelerators and their links. A figure that is None is the accelerator's own."""

    gpu: GpuSpec
    gpus: int
    domain: int | None = None
    nic_bandwidth: float | None = None
    rates: dict[str, list[list[float]]] = Field(default_factory=dict)
    """Measured on these very machines by `moesaic calibrate`, for the cost model; empty where none were."""

    @property
    def fast_domain(self) -> int:
        """Accelerators that share the fast link."""
        return min(self.domain or self.gpu.domain, self.gpus)

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second and direction of one accelerator to other domains."""
        return self.gpu.nic_bandwidth if self.nic_bandwidth is None else self.nic_bandwidth
