"""What the words in a published table's cells mean: hardware, precision, dispatcher, graphs, overlap, recompute, stack.

Every function takes cells as printed and never fails: what it does not know it says in words, and the caller decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.cost.workload import Precision

GPUS = (
    "GB300", "GB200", "B300", "B200", "H200", "H100", "H800", "H20", "A100", "A800", "MI355X", "MI350X", "MI325X",
    "MI300X",
)  # fmt: skip
"""Accelerators that a hardware cell may name; longer names stand before those that they contain."""

SAME_GPU = {"MI350X": "MI355X"}
"""Accelerators priced as another one of the same chip."""

GRANULARITY = (
    (r"nvfp4|\bfp4", "nvfp4", "block"),
    (r"mxfp8|fp8-mx|32x32|1x32", "mxfp8", "block"),
    (r"fp8-?block|128x128|1x128|rowwise|blockwise", "fp8", "block"),
    (r"fp8|float8", "fp8", "tensor"),
    (r"bf16|fp16|bfloat16", "bf16", ""),
    (r"fp32|tf32", "fp32", ""),
)

RECOMPUTE_WORDS = (
    ("core_attn", r"core[_-]attn|core[_-]attention"),
    ("moe_act", r"moe[_-]act"),
    ("layernorm", r"layernorm"),
    ("mla_up_proj", r"mla_up_proj"),
    ("shared_experts", r"shared_experts?"),
    ("mlp", r"\bmlp\b"),
    ("moe", r"\bmoe\b(?![_-]act)"),
    ("loss", r"\bloss\b"),
)


@dataclass(frozen=True)
class Software:
    """A stack as printed."""

    framework: str
    """`megatron`, `megascale`, `automodel`, `torchtitan`, `primus`, `deepspeed`, `fsdp`, `hai-llm` or `other`."""
    release: str
    """Version or container, empty if none is printed."""


def gpu_in(hardware: str) -> tuple[str | None, str]:
    """(the accelerator, what kind of network joins nodes: `efa` or empty) that a hardware cell names."""
    text = hardware.upper().replace(" ", "")
    network = "efa" if re.search(r"EFA|\bP[456]\w*[.-]", text) else ""
    if "H10096GB" in text:
        return "H100-96GB", network
    for name in GPUS:
        if name in text:
            return SAME_GPU.get(name, name), network
    return None, network


def precision_of(cell: str) -> tuple[Precision | None, str]:
    """(precision of matmuls, granularity of scales: `tensor`, `block` or empty); None for a word not known."""
    for pattern, name, granularity in GRANULARITY:
        if re.search(pattern, cell.lower()):
            return name, granularity  # type: ignore[return-value]
    return None, ""


def software_of(cell: str) -> Software:
    """The stack that a software cell names."""
    text = cell.lower()
    release = ""
    for pattern in (r"nemo (?:container )?(\d\d\.\d\d(?:\.\w+)*)", r"v?(\d+\.\d+(?:\.\d+)?)"):
        match = re.search(pattern, text)
        if match:
            release = match[1]
            break
    for pattern, framework in (
        (r"megascale", "megascale"),
        (r"automodel", "automodel"),
        (r"torchtitan", "torchtitan"),
        (r"primus", "primus"),
        (r"deepspeed", "deepspeed"),
        (r"hai-?llm", "hai-llm"),
        (r"moesaic", "moesaic"),
        (r"^t?p?\+?fsdp", "fsdp"),
        (r"megatron|mcore|nemo|swift|tp\+ep\+dp", "megatron"),
    ):
        if re.search(pattern, text):
            return Software(framework, release)
    return Software("other", release)


def graphs_of(notes: str) -> str:
    """`full`, `part` or `none`: how much of a step is launched as CUDA graphs."""
    text = notes.lower()
    if re.search(r"no graphs|graphs? off|eager|without (cuda )?graphs|graphs=none", text):
        return "none"
    if re.search(r"full[- _]iteration", text):
        return "full"
    said = re.search(r"graphs: (full|part|none)\b", text)
    if said:
        return said[1]
    if re.search(r"cuda[- ]graphs?|te graph|graph replay|with graphs", text):
        return "part"
    return "none"


def overlap_of(notes: str) -> tuple[str, ...]:
    """What of `cost.workload.OVERLAP` the notes turn on beside what every stack has."""
    text = notes.lower()
    found = []
    hides_dispatch = re.search(r"(ep|1f1b|a2a|1f1b a2a)[ -](a2a |ep )?overlap", text)
    if hides_dispatch and not re.search(r"no ep (a2a )?overlap|overlap[^;,.]{0,12}off|without ep", text):
        found.append("experts")
    if re.search(r"delayed wgrad|delay_wgrad", text):
        found.append("weight_gradients")
    if "async tp" in text:
        found.append("tensor")
    if "dualpipe" in text:
        found += ["experts", "weight_gradients"]
    return tuple(dict.fromkeys(found))


def recompute_of(cell: str) -> tuple[str, ...]:
    """Modules of `cost.workload.RECOMPUTE` that a recompute cell names. "selective" alone means Megatron-Core's
    default, the attention core; "selective per op" is torchtitan's, which keeps every second matmul."""
    text = re.sub(r"\(\+.*?\)", "", cell.lower())
    if not text or text.startswith("none") or text == "no":
        return ()
    if text.startswith("full"):
        return ("full",)
    if "per op" in text:
        return ("layernorm", "mlp")
    found = tuple(name for name, pattern in RECOMPUTE_WORDS if re.search(pattern, text))
    return found or ("core_attn",)


def dispatcher_of(cell: str) -> str | None:
    """The dispatcher of `cost.workload.DISPATCHERS` that a cell names, None if it is empty or not known."""
    text = cell.lower()
    for pattern, name in (
        (r"hybrid-?ep", "hybridep"),
        (r"deep-?ep|\bflex\b", "deepep"),
        (r"allgather|all-gather", "allgather"),
        (r"hierarchical", "hierarchical"),
        (r"alltoall|all-to-all|a2a", "alltoall"),
    ):
        if re.search(pattern, text):
            return name
    return None


def backend_of(cell: str) -> str:
    """The library under DeepEP where a cell names another than its own: `uccl`, `nvshmem`, or empty."""
    match = re.search(r"uccl|nvshmem", cell.lower())
    return match[0] if match else ""


def offload_of(notes: str) -> tuple[str, ...]:
    """What of `cost.workload.OFFLOAD` the notes name."""
    text = notes.lower()
    found = []
    if re.search(r"optimizer (cpu )?offload", text):
        found.append("optimizer")
    if re.search(r"(?<!without )(?<!without fine-grained )(cpu offload \d+ layers|activation offload)", text):
        found.append("activations")
    return tuple(found)


def routing_of(notes: str) -> str:
    """`forced`, `natural`, `dropped` (tokens beyond a capacity) or empty where the notes say nothing."""
    text = notes.lower()
    if "natural routing" in text:
        return "natural"
    if re.search(r"token ?drop|capacity factor", text):
        return "dropped"
    if re.search(r"force(d|-)|fake balanced|mock data", text):
        return "forced"
    return ""


def fused_of(notes: str) -> bool:
    """False where the notes say that permutation and router are not kernels of their own yet."""
    return not re.search(r"\b(router|permutation)\b[^;]*\bnot fused\b", notes.lower())


def tuned_of(notes: str) -> bool | None:
    """Whether the notes say that a run was set up for speed, or that it was not; None where they say neither.

    Notes may open with the kind of recipe that ran: `pretrain_performance` and `pretrain_weak_scaling` are for speed,
    `pretrain`, `sft` and their like, as recipes spell them, show that one works ("SFT" only says what is trained).
    """
    text = notes.lower().strip()
    if "not tuned for speed" in text:
        return False
    if "tuned for speed" in text or re.match(r"pretrain_(performance|weak)", text):
        return True
    return False if re.match(r"(pretrain|sft|peft)(_[a-z_]+)?;", notes.strip()) else None


def degrees_of(notes: str) -> dict[str, int]:
    """Degrees by column that the notes tell of a run's nodes, as in "tp 8 and etp 8 inside the node"."""
    found: dict[str, int] = {}
    for clause in notes.lower().split(";"):
        if "inside the node" in clause:
            found |= {name: int(size) for name, size in re.findall(r"\b(tp|cp|ep|etp) (\d{1,4})\b", clause)}
    return {name: size for name, size in found.items() if size > 0}


def peak_memory_gib(notes: str) -> float | None:
    """Peak allocated memory that the notes print, in GiB. "GB" is taken as 2^30 as PyTorch's reports print it, unless
    "(1e9)" follows."""
    if re.search(r"oom|out of memory", notes.lower()):
        return None
    match = re.search(r"(?:peak|max memory|rank-0 peak)[a-z -]*? ?(\d+(?:\.\d+)?) ?(GiB|GB)( \(1e9\))?", notes)
    if match is None or "reserved" in match[0]:
        return None
    value = float(match[1])
    return value * 1e9 / 2**30 if match[3] else value


def flops_convention(notes: str) -> float | None:
    """FLOPs per token by which the source counts, where the notes print them ("27.2 GFLOP/token")."""
    match = re.search(r"(\d+(?:\.\d+)?) ?GFLOP/token", notes)
    return float(match[1]) * 1e9 if match else None
