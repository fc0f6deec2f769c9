"""Plans to write launch files for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.cost.workload import Workload
from moesaic.plan.launch import Plan
from moesaic.spec.cluster import ClusterSpec, GpuSpec
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import resolve_layout
from moesaic.spec.tables import LayoutTable

_RATES: dict[str, Any] = {
    "memory_bytes": 80e9,
    "memory_bandwidth": 3e12,
    "link_bandwidth": 450e9,
    "gpus_per_node": 8,
    "nic_bandwidth": 50e9,
    "host_bandwidth": 60e9,
}
H100 = GpuSpec(
    name="H100", vendor="NVIDIA", architecture="hopper", peak_flops={"bf16": 989e12, "fp8": 1979e12}, domain=8, **_RATES
)
GB200 = GpuSpec(
    name="GB200",
    vendor="NVIDIA",
    architecture="blackwell",
    peak_flops={"bf16": 2.5e15, "fp8": 5e15, "fp4": 10e15},
    domain=72,
    **(_RATES | {"gpus_per_node": 4}),
)
MI300X = GpuSpec(name="MI300X", vendor="AMD", peak_flops={"bf16": 1.3e15, "fp8": 2.6e15}, domain=8, **_RATES)


def plan(
    model: str = "deepseek-v3",
    gpus: int = 256,
    gpu: GpuSpec = H100,
    seq_len: int = 4096,
    global_batch: int = 2048,
    work: dict[str, Any] | None = None,
    with_options: dict[str, Any] | None = None,
    **table: Any,
) -> Plan:
    """A plan; `table` is of a run file's layout, `with_options` what a run file has no key for yet."""
    spec = load_model_spec(model)
    layout = resolve_layout(LayoutTable(**table), spec, gpus, seq_len=seq_len, global_batch=global_batch)
    workload = Workload(spec, seq_len, global_batch, **(work or {}))
    return Plan(workload, replace(layout, **(with_options or {})), ClusterSpec(gpu=gpu, gpus=gpus), "a-plan")


def example() -> Plan:
    """DeepSeek-V3 on 256 H100, as `docs/launch.md` shows it."""
    made = plan(
        tp=2,
        pp=8,
        virtual_stages=4,
        ep=32,
        stages="Et*2|(tt|)*29t|mL",
        sharding="optimizer",
        work={"precision": "fp8", "moment_bytes": 2},
        with_options={
            "dispatcher": "deepep",
            "recompute": ("layernorm", "mla_up_proj", "moe_act"),
            "overlap": ("gradients", "parameters", "experts", "weight_gradients"),
        },
    )
    return replace(made, name="deepseek-v3-256-h100")
