"""How fast things go: shares of a machine's peaks that software reaches, and fixed costs.

Quantities (FLOPs, bytes, launches) follow from the model and the layout; `Rates` turn them into seconds. They are few,
each has a meaning on its own, and they are the same for every accelerator: peaks and bandwidths come from the
`ClusterSpec`. `dataclasses.replace` changes single ones, for a fit or for a machine that was measured.

Sources, by the letter in a field's line:
a  AIConfigurator's measured tables (PyPI aiconfigurator-core 0.12, Apache-2.0): GEMM, attention, NCCL 2.29 by size.
s  SimuMax 1.2's B200 system file (github.com/MooreThreads/SimuMax): grouped GEMM forward and backward, permutation.
m  Megatron-Core MoE report (arXiv 2603.07685), tables of dispatchers and attention kernels.
g  MegaScale-MoE (arXiv 2505.11432), figures 7 and 13, table 5.
d  DeepSeek's published training trace (github.com/deepseek-ai/profile-data): 96 % of communication hidden.
h  HybridEP's published bandwidths beside DeepEP's (github.com/deepseek-ai/DeepEP, branch hybrid-ep).
b  Megatron-Bridge's published performance tables, small layers without graphs.
w  AWS's runs of Megatron-Bridge over EFA (github.com/awslabs/awsome-distributed-ai, 46 rows of two models).
c  Calculon (SC'23): 2 % to 15 % of compute lost while communication runs.
x  assumed, in the range of published traces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.spec.cluster import ClusterSpec

from .measured import measured
from .workload import Precision


@dataclass(frozen=True)
class Stack:
    """The software that runs a layout. It is part of the key of a rate: one layout of DeepSeek-V3 on GB200 went from
    494 to 970 TFLOP/s per GPU by software alone (Megatron-Core's GB200 guide)."""

    framework: str = "megatron"
    """`megatron` (Megatron-Core and Megatron-Bridge), `megascale`, `torchtitan`, `deepspeed`, `moesaic`, …; those
    without rates of their own get Megatron's."""
    release: str = ""
    """Version or container, as in "25.11"; empty when not known."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs, so that the host does not limit them."""
    balanced: bool = True
    """Routing is forced to be balanced."""
    padded: bool = False
    """Rows of an expert are dropped or padded to a capacity, so that the host knows their counts beforehand."""
    fused: bool = True
    """Routers, permutations and row sums are kernels of their own instead of several framework operations."""


@dataclass(frozen=True)
class Rates:
    """Constants of the closed form: shares of a peak (0 to 1), ratios, and seconds."""

    # ------------------------------------------------------------ matmuls
    gemm_share: float = 0.85
    """Share of the bf16 peak that large matmuls sustain on a slow accelerator. (a, g: 0.73 with attention on H20)"""
    gemm_half_peak: float = 2.9e15
    """Bf16 peak, FLOP/s, at which that share has halved: the faster the matrix units, the more power and data limit
    them in a long run. One curve gives A100 0.77, H100 0.63, B200 0.48. (s: dense rows; g: 0.54 to 0.58 with attention;
    kernels timed alone reach 0.8 on H100 and 0.65 on B200, by a)"""
    fp8_share: float = 0.88
    """Share of the fp8 peak over the share of the bf16 peak, for per-tensor and block scaling. (x: public runs of
    Megatron-Bridge; a: 0.51 / 0.81 on H100 for kernels that quantise as well, which is counted apart here)"""
    mxfp8_share: float = 1.15
    """The same for mxfp8, which draws less power per FLOP. (x: public runs; a: 0.54 / 0.61 on B200 with quantising)"""
    nvfp4_share: float = 0.75
    """The same for nvfp4. (x: public runs; a: 0.35 / 0.65 on B200 with quantising)"""
    weight_gradient_share: float = 0.85
    """Weight-gradient matmuls over the others. (s)"""
    gemm_half_balance: float = 1.0
    """A matmul's smaller weight dimension at which its share has halved, over the machine's balance (the FLOPs it does
    in the time of a byte): narrow matmuls read and write more per FLOP. (a: 80 to 200 columns on H100)"""
    gemm_seconds: float = 4.5e-6
    """Filling and draining the device, per matmul. (a: all shapes of H100 and B200 within some percent)"""
    group_seconds: float = 4.0e-6
    """The same, per further expert of a grouped matmul. (s, a)"""
    unhidden_load: float = 0.5
    """Share of the time to move an expert's weights and rows that its FLOPs do not hide. (s: 128 to 9,832 rows per
    expert on B200; a: 128 to 2,048 on H100; mean error 9 %)"""
    expert_flop_seconds: float = 0.0
    """Seconds of one FLOP of the trainer's experts in forward, from tokens to their sums; 0 where that is not measured
    and the constants above say it."""
    expert_byte_seconds: float = 0.0
    """Beside these, seconds for each byte of the experts' weights, whatever the rows."""
    expert_backward_flop_seconds: float = 0.0
    """The same in backward, of its own FLOPs."""
    expert_backward_byte_seconds: float = 0.0
    # ------------------------------------------------------------ attention core
    attention_share: float = 1.0
    """Rate of the forward of a fused attention core on long sequences over that of large matmuls. (m: 0.65 of H100's
    peak at 16,384; s: dense rows of 131,072 tokens on B200)"""
    attention_half: float = 900.0
    """Positions at which that share has halved. (m: 0.56 at 4096, 0.645 at 16384 on Hopper; Blackwell alike)"""
    attention_half_width: float = 128.0
    """Head width at which that share is half of what very wide heads would reach; 128 is the reference, and heads of 64
    reach two thirds of it, as exponentials take as long. (m)"""
    attention_backward: float = 0.80
    """Rate of its backward over its forward. (m, d)"""
    # ------------------------------------------------------------ memory-bound work and the host
    memory_share: float = 0.80
    """Share of memory bandwidth that elementwise kernels reach. (a)"""
    permute_share: float = 0.4
    """The same for moving rows by index. (s)"""
    loss_share: float = 0.30
    """The same for the loss over the vocabulary. (s)"""
    host_update: float = 1.0
    """1 where optimizer state that waits on the host is updated there, 0 where it comes to the device for it."""
    kernel_seconds: float = 10.0e-6
    """Fixed device time of one small kernel with the gap before it. (s: 30 to 40 µs per operation of several)"""
    graph_kernel_share: float = 0.4
    """What CUDA graphs leave of it. (a: 3 µs)"""
    launch_seconds: float = 7.0e-6
    """Host time of one kernel launch; it overlaps with the device. (x)"""
    framework_work: float = 7.5
    """Host time of a framework's code per kernel (modules, autograd, allocation, scales), over a launch's. (b: layers
    of 4,096 tokens on H100 and B200 without graphs take at least 6 ms in bf16 and 9 ms in fp8, whatever the model)"""
    graph_launch_share: float = 0.1
    """What CUDA graphs leave of it. (x)"""
    split_casts: float = 1.0
    """1 where rows of each expert are quantised by kernels of their own, 0 where equal counts let one do it for all."""
    sync_seconds: float = 1.0e-3
    """A wait of the host for the counts of rows that were dispatched, and of the device until the host has caught up,
    in each forward pass of a layer; a stack with graphs or padded rows has none. (b: what sets apart layers of one size
    with and without them)"""
    other_work: float = 1.0
    """Seconds that memory-bound kernels, but for moving rows, take over what their bytes need: operations that are not
    fused, gaps, uneven work. (g: Fig. 13's "other")"""
    # ------------------------------------------------------------ links
    fast_share: float = 0.75
    """Share of a fast link's bandwidth that all-gather and reduce-scatter reach. (a: 0.75 on H100, 0.77 on B200)"""
    alltoall_ratio: float = 0.88
    """Bandwidth of NCCL's all-to-all over that of its all-gather. (a: 0.66 to 0.72 of the link; g: 0.75 in Fig. 7)"""
    fused_ratio: float = 0.8
    """The same for DeepEP and HybridEP. (m: 0.69 to 0.77 of the link on GB200)"""
    deepep_beyond: float = 0.5
    """What DeepEP reaches of that where a fast domain has several nodes. (h: 450 and 164 GB/s against 484 and 465 for
    dispatch and combine over GB200s of several nodes)"""
    regather: float = 1.0
    """1 where backward gathers again what forward gathered, instead of keeping it (Megatron's sequence parallelism,
    MegaScale-MoE's Fig. 8), 0 where it is kept."""
    regather_norms: float = 1.0
    """1 where tokens gathered for experts are dropped, and gathered again, when the norm before them is recomputed
    (MegaScale-MoE's Fig. 8b), 0 where they are kept as they came."""
    whole_again: float = 1.0
    """1 where recompute of `mlp`, `shared_experts` and `core_attn` repeats the whole of them, the second product and
    what travels too, and that of `moe_act` the activation; 0 where it ends at what backward reads, repeats no message,
    and experts make their activation again in any case (docs/memory.md)."""
    merge_shared: float = 0.0
    """1 where a shared expert takes the rows that dispatch gathers over the same ranks, 0 where it gathers its own."""
    copy_per_rank: float = 0.0
    """1 where `alltoall` sends one copy to each rank that a token needs, 0 where it sends one per choice."""
    network_share: float = 0.81
    """Share of a network card's bandwidth. (m: 0.81 to 0.90 for all-to-all over 16 to 64 H100)"""
    fast_latency: float = 40e-6
    """Seconds of a collective over fast links that carries nothing. (a: 34 to 53 µs on 8 GPUs)"""
    network_latency: float = 60e-6
    """The same with other domains in the group. (x)"""
    exchange_seconds: float = 0.0
    """Seconds beside bytes and latency that sending rows to experts, or back, takes over a network that needs the host
    for every message."""
    row_seconds: float = 0.0
    """Seconds of each row that DeepEP or HybridEP send over such a network, one message each."""
    small_messages: float = 0.0
    """Messages that cost their latency only, beside those of rows, in a pass of dispatch, forward and backward alike.
    moesaic: two forward, counts and choices, and one backward, the gradient of router weights. (its code)"""
    # ------------------------------------------------------------ overlap
    hidden_tensor: float = 0.6
    """Share of tensor-parallel communication hidden under its matmuls where that is asked for. (x)"""
    hidden_shared: float = 0.9
    """Share of a shared expert's time that hides dispatch. (x)"""
    hidden_between: float = 0.5
    """Share of backward's communication that independent operators of the same micro-batch hide. (g: table 5)"""
    hidden_inside: float = 0.6
    """Share of communication that fused kernels hide inside their own matmuls. (g: table 5)"""
    hidden_experts: float = 0.95
    """Share of dispatch that another micro-batch hides. (d: 0.96; m: 0.93)"""
    hidden_gradients: float = 0.9
    """Share of one backward pass that hides the reduction of gradients, and of a forward pass for gathering. (x)"""
    shown_layers: float = 0.0
    """How many of a rank's layers have gradients that nothing hides beside that: 1 where each layer's sum waits for its
    own backward to end, as in moesaic; published shares have it in them. (its code)"""
    slowdown: float = 0.15
    """Seconds lost on both sides per second of communication that runs under compute on fast links. (c)"""
    slowdown_network: float = 0.02
    """The same for gradients and parameters, which mostly cross the network. (c)"""
    # ------------------------------------------------------------ the step
    host_memory: float = 50e9
    """Bytes per second of host memory that an accelerator's share of a node updates parameters with: 400 GB/s for eight
    on two sockets of eight channels of DDR5. (x)"""
    straggler: float = 0.004
    """Waiting for the slowest rank, as a share of the step per doubling of the fast domains whose ranks average
    gradients together. (x)"""
    step_seconds: float = 10e-3
    """Fixed cost of a step: data, gradient norm, counters. (x)"""

    def precision_share(self, precision: Precision) -> float:
        """Share of a precision's own peak over the share of the bf16 peak."""
        return {"fp8": self.fp8_share, "mxfp8": self.mxfp8_share, "nvfp4": self.nvfp4_share}.get(precision, 1.0)

    def sustained(self, peak_bf16: float) -> float:
        """Share of the bf16 peak (FLOP/s) that large matmuls sustain on an accelerator with that peak."""
        return self.gemm_share / (1 + peak_bf16 / self.gemm_half_peak)


_NOT_FUSED = 0.22
"""Speed of framework operations such as `scatter_add` over that of kernels made for moving rows. (g: Megatron-LM's
"other" on H800 in Fig. 13)"""
_MEGASCALE = {
    "straggler": 0.0,
    "other_work": 4.5,
    "fast_share": 0.765,
    "permute_share": 0.8,
    "merge_shared": 1.0,
    "regather": 0.0,
    "alltoall_ratio": 0.76,
    "hidden_between": 0.9,
    "hidden_inside": 0.5,
    "hidden_gradients": 1.0,
    "network_share": 0.87,
    "sync_seconds": 0.0,
    "framework_work": 1.0,
}
"""Of MegaScale-MoE: its links in Fig. 7; "other" work by the size of table 3's iterations; overlap by table 5."""


_SUPERCHIP_HALF_PEAK = 5.5e15
"""`gemm_half_peak` of GB200 and GB300, whose liquid cooling and power hold their clocks. (m: 2,672 TFLOP/s of grouped
mxfp8 matmuls on GB200, attention at 1,324 and 1,083)"""


_SUPERCHIP_HOST_MEMORY = 200e9
"""`host_memory` of GB200 and GB300: one Grace of 512 GB/s, by NVIDIA's data sheet, for two accelerators, at 0.8 of it.
(x; m: 15 to 20 GB of states on the host cost 0.1 to 0.2 s a step)"""


_HOST_NETWORK = {"exchange_seconds": 3.2e-3, "row_seconds": 0.9e-6}
"""Of EFA at 400 Gbit/s per accelerator, whose cards start no message without the host; half at twice the speed. (w: a
layer of 512 tokens a rank takes 18 ms with its four exchanges over two nodes of H100 and 11 ms over two of B300,
whatever the library; each further 1,536 tokens a rank add 5 to 22 ms with DeepEP's ports)"""
_HOST_NETWORK_SPEED = 50e9
"""Bytes per second at which those hold."""


_INSTINCT = 0.75
"""What libraries for AMD Instinct reach of that share. (x)"""


def rates_for(cluster: ClusterSpec, stack: Stack) -> Rates:
    """The rates of a software stack on a cluster; what was measured on the cluster replaces what is published."""
    rates = Rates()
    if stack.framework == "megascale":
        rates = replace(rates, **_MEGASCALE)
    if stack.framework == "moesaic":
        rates = replace(
            rates, copy_per_rank=1.0, regather=0.0, regather_norms=0.0, whole_again=0.0, host_update=0.0,
            small_messages=1.5, shown_layers=1.0,
        )  # fmt: skip
    if stack.graphs:
        rates = replace(
            rates,
            launch_seconds=rates.launch_seconds * rates.graph_launch_share,
            kernel_seconds=rates.kernel_seconds * rates.graph_kernel_share,
        )
    if stack.graphs or stack.padded:
        rates = replace(rates, sync_seconds=0.0)
    if stack.padded:
        rates = replace(rates, split_casts=0.0)
    if not stack.fused:
        rates = replace(rates, permute_share=rates.permute_share * _NOT_FUSED)
    if cluster.gpu.superchip:
        rates = replace(rates, gemm_half_peak=_SUPERCHIP_HALF_PEAK, host_memory=_SUPERCHIP_HOST_MEMORY)
    if cluster.gpu.architecture == "cpu":
        rates = replace(rates, host_memory=cluster.gpu.memory_bandwidth)
    if cluster.network == "efa":
        slower = _HOST_NETWORK_SPEED / cluster.network_bandwidth
        rates = replace(rates, **{name: value * slower for name, value in _HOST_NETWORK.items()})
    if cluster.gpu.architecture.startswith("cdna"):
        rates = replace(rates, gemm_share=rates.gemm_share * _INSTINCT)
    found = measured(cluster, rates)
    if stack.framework != "moesaic":  # what was timed is this package's code
        found = {
            name: value for name, value in found.items() if not name.startswith(("expert_", "attention_", "other_"))
        }
    return replace(rates, **found)
