"""What one rank measures: products, memory, and collectives with the others. All ranks do the same at the same time,
so that they share cores, memory and links as ranks of a training run do."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.mesh import collectives
from moesaic.mesh.device import bf16_is_native, device, free_host_memory_bytes
from moesaic.mesh.group import Group
from moesaic.model.kernels import compute_dtype
from moesaic.spec.cluster import members_in_domain
from moesaic.tune.modules import Calls, attention, experts, norm

Say = Callable[[str], None]

_TORCH = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
_TIMEOUT_SECONDS = 120.0
_SAMPLES = (3, 9)
"""Fewest and most repetitions of which the median is taken, after one that warms up."""
_LONG_SECONDS = 0.25
"""From here on one repetition is enough."""
_LEAST_SECONDS = 0.001
"""Shorter calls are timed several at once, since the clock and a wait for the device take their time too."""

MODULES: dict[str, Callable[..., Calls]] = {"attention": attention, "experts": experts, "norm": norm}

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@dataclass
class Measurements:
    """Seconds as they were measured; medians over ranks of the medians over repetitions."""

    facts: dict[str, Any]
    products: list[tuple[str, str, tuple[int, ...], str, float]] = field(default_factory=list)
    """(precision, kind, shape, product, seconds); kind `matmul` with (m, n, k) or `grouped` with (groups, m, n, k)."""
    modules: list[tuple[str, str, tuple[int, ...], str, float]] = field(default_factory=list)
    """The same of `experts` with (experts, rows, width, hidden), `attention` with (positions, heads, width) and `norm`
    with (tokens, hidden), by pass."""
    copies: list[tuple[str, int, float]] = field(default_factory=list)
    """(`memory` or `host`, bytes, seconds)."""
    launch_seconds: float = 0.0
    messages: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    """(collective, ranks, members in a domain, bytes that one rank sends, seconds)."""
    overlaps: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    """(ranks, members in a domain, seconds of an all-to-all, of products, of both at the same time)."""
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    precisions: tuple[str, ...]
    quick: bool
    seconds: float
    """Time for all of it; what is left when its share is over is skipped, and said so."""
    domain: int
    """Consecutive ranks that share the fast link."""

    def linear_shapes(self, kind: str) -> list[tuple[int, int, int]]:
        """(m, n, k), small ones first."""
        if kind == "cpu":
            sizes = [(256, 256), (1024, 512)] + ([] if self.quick else [(512, 1024), (1024, 1024)])
            rows = [32, 256, 1024] if self.quick else [16, 64, 256, 1024, 4096]
        else:
            sizes = [(512, 7168), (1536, 7168), (7168, 2048), (4096, 7168), (8192, 8192)]
            rows = [128, 1024, 8192] if self.quick else [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
        return sorted(((m, n, k) for n, k in sizes for m in rows), key=math.prod)

    def grouped_shapes(self, kind: str) -> list[tuple[int, int, int, int]]:
        """(groups, m, n, k), small ones first."""
        if kind == "cpu":
            shapes = [(g, m, 512, 256) for g in (4, 16) for m in ((16, 128) if self.quick else (4, 16, 64, 256))]
        else:
            sizes = [(4096, 7168), (7168, 2048)] if self.quick else [(4096, 7168), (7168, 2048), (1536, 2048)]
            shapes = [(g, m, n, k) for n, k in sizes for g in (4, 32) for m in (128, 512, 2048)]
        return sorted(shapes, key=math.prod)

    def module_shapes(self, kind: str) -> list[tuple[str, tuple[int, ...]]]:
        """Shapes of norms, attention cores and experts, few rows and many; none on an accelerator, whose kernels'
        figures are published. Weights of the experts are larger than a cache."""
        if kind != "cpu":
            return []
        cores = [(256, 8, 64), (1024, 8, 64)] + ([] if self.quick else [(512, 4, 128), (2048, 4, 128)])
        rows = [16, 128] if self.quick else [4, 16, 64, 128, 256]
        experts = [(16, each, 512, 512) for each in rows]
        experts += [] if self.quick else [(32, each, 256, 512) for each in (16, 64, 256)]
        norms = [(256, 512)] if self.quick else [(256, 512), (1024, 512), (1024, 1024)]
        shapes: dict[str, Sequence[tuple[int, ...]]] = {"norm": norms, "experts": experts, "attention": cores}
        return [(kind, shape) for kind, several in shapes.items() for shape in several]

    def copy_bytes(self, kind: str) -> list[int]:
        """Bytes of the tensor that is copied."""
        if kind == "cpu":
            return [2**p for p in ((20, 24, 26) if self.quick else (16, 20, 22, 24, 26, 28))]
        return [2**p for p in ((24, 28) if self.quick else (20, 24, 26, 28, 30))]

    def hidden_bytes(self, kind: str) -> list[int]:
        """Bytes of a rank's tensor in an all-to-all that runs under products: as large as those of a training step."""
        large = [2**20, 2**22] if kind == "cpu" else [2**25, 2**27]
        return large[:1] if self.quick else large

    def message_bytes(self, kind: str) -> list[int]:
        """Bytes of a rank's tensor before a collective; small and large ones first, which a line needs most."""
        if kind == "cpu":
            powers = [12, 15, 18, 21, 23] if self.quick else list(range(12, 26, 2))
        else:
            powers = [14, 18, 22, 26] if self.quick else list(range(12, 30, 2))
        ends = [powers[0], powers[-2], powers[1], powers[-1]]
        return [2**power for power in [*ends, *(power for power in powers if power not in ends)]]


class Bench:
    """The measurements of one rank of `world`."""

    def __init__(self, world: Group, plan: Plan, say: Say) -> None:
        self.world, self.plan, self.say = world, plan, say
        self.here = device()
        self._share_end = 0.0
        self._cpu_seconds = self._wall_seconds = 0.0
        self.result = Measurements(self._facts())

    def run(self) -> Measurements:
        """All of it."""
        alone = self.world.size == 1
        self._section(0.4 if alone else 0.2)
        self.say("products of matrices")
        self._products()
        self._section(0.25)
        self._modules()
        self.result.facts["core_share"] = self._core_share()
        self._section(0.35 if alone else 0.1)
        self.say("memory")
        self._copies()
        if not alone:
            groups = self.groups()
            self._section(0.35)
            self._messages(groups)
            self._section(0.1)
            self.say("messages under products")
            self._overlaps(groups)
        return self.result

    def _facts(self) -> dict[str, Any]:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.here.kind == "cpu":
            memory = min(total, free_host_memory_bytes() or total)
        else:
            memory = self.here.free_memory_bytes() or 0
        return {
            "kind": self.here.kind,
            "name": self.here.name,
            "threads": torch.get_num_threads(),
            "native_bf16": self.here.kind != "cpu" or bf16_is_native(),
            "torch": torch.__version__.partition("+")[0],
            "memory_bytes": memory,
            "world": self.world.size,
            "domain": self.plan.domain,
        }

    # ------------------------------------------------------------ timing

    def _section(self, share: float) -> None:
        self._share_end = time.perf_counter() + share * self.plan.seconds

    def _late(self) -> bool:
        """Whether the section's time is over on any rank; the same answer on all."""
        return any(collectives.gather_counts(int(time.perf_counter() > self._share_end), self.world))

    def _median_of_ranks(self, seconds: float) -> float:
        return statistics.median(collectives.gather_counts(round(seconds * 1e12), self.world)) / 1e12

    def seconds(self, call: Callable[[], Any], budget: float = 0.2) -> float:
        """Seconds of one call. All ranks begin together and make equally many, so a call may be a collective."""
        call()
        once = self._timed(call, 1)
        inner = max(1, min(1000, math.ceil(_LEAST_SECONDS / max(once, 1e-7))))
        # A long call varies little, and few of them fit into the time.
        least = _SAMPLES[0] if once < _LONG_SECONDS else 1
        repeat = min(_SAMPLES[1], max(least, round(budget / max(once * inner, 1e-6))))
        counts = collectives.gather_counts(inner * 100 + repeat, self.world)
        inner, repeat = divmod(max(counts), 100)
        samples = []
        for _ in range(repeat):
            collectives.barrier(self.world)
            samples.append(self._timed(call, inner))
        return self._median_of_ranks(statistics.median(samples))

    def _timed(self, call: Callable[[], Any], inner: int) -> float:
        self.here.synchronize()
        start, worked = time.perf_counter(), time.process_time()
        for _ in range(inner):
            call()
        self.here.synchronize()
        seconds = time.perf_counter() - start
        self._cpu_seconds += time.process_time() - worked
        self._wall_seconds += seconds
        return seconds / inner

    def _core_share(self) -> float:
        """How much of its cores this process had while it computed: less than 1 where others wanted them too. On an
        accelerator always 1."""
        if self.here.kind != "cpu" or self._wall_seconds == 0:
            return 1.0
        share = self._cpu_seconds / (self._wall_seconds * torch.get_num_threads())
        return min(1.0, self._median_of_ranks(share))

    def _tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.here.torch_device).to(dtype)

    def _each(self, what: str, cases: list[Any]) -> Iterator[Any]:
        """The cases until the section's time is over, but one at least; what is left is noted."""
        for place, case in enumerate(cases):
            if place > 0 and self._late():
                self.result.skipped.append(f"{len(cases) - place} of {len(cases)} {what}")
                return
            yield case

    # ------------------------------------------------------------ products

    def _products(self) -> None:
        kind, plan = self.here.kind, self.plan
        one = self._tensor(1, dtype=torch.float32)
        self.result.launch_seconds = self.seconds(lambda: one.add_(0.0))
        cases: list[tuple[str, tuple[int, ...]]] = []
        for shape in plan.linear_shapes(kind):
            cases += [(precision, shape) for precision in plan.precisions]
        grouped = [(precision, shape) for shape in plan.grouped_shapes(kind) for precision in plan.precisions]
        # Both kinds by size, so that a budget that is too short costs each its large shapes.
        cases = sorted([*cases, *grouped], key=lambda case: math.prod(case[1]))
        for precision, shape in self._each("products", cases):
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            calls = self._matmul(precision, *shape) if len(shape) == 3 else self._grouped(precision, *shape)
            for product, call in calls.items():
                kinds = "matmul" if len(shape) == 3 else "grouped"
                self.result.products.append((precision, kinds, shape, product, self.seconds(call, 0.06)))
        torch.set_float32_matmul_precision("highest")

    def _matmul(self, precision: str, m: int, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
        dtype = _TORCH[precision]
        x, w, dy = (self._tensor(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
        wide = compute_dtype(x)

        def product(a: Tensor, b: Tensor) -> Tensor:
            return (a.to(wide) @ b.to(wide)).to(dtype)

        return {
            "forward": lambda: product(x, w.t()),
            "input": lambda: product(dy, w),
            "weight": lambda: product(dy.t(), x),
        }

    def _grouped(self, precision: str, groups: int, m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
        """One kernel for all groups where there is one (bf16 on a GPU), else one product after another."""
        dtype = _TORCH[precision]
        rows = groups * m
        x, w, dy = (self._tensor(*shape, dtype=dtype) for shape in ((rows, k), (groups, n, k), (rows, n)))
        if self.here.kind == "cuda" and dtype == torch.bfloat16:
            ends = torch.arange(m, rows + 1, m, dtype=torch.int32, device=x.device)
            return {
                "forward": lambda: _grouped_mm(x, w.transpose(1, 2), offs=ends),
                "input": lambda: _grouped_mm(dy, w, offs=ends),
                "weight": lambda: _grouped_mm(dy.t(), x, offs=ends),
            }
        wide = compute_dtype(x)
        xs, ys = x.split(m), dy.split(m)

        def each(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], Any]:
            return lambda: [(a.to(wide) @ b.to(wide)).to(dtype) for a, b in pairs]

        return {
            "forward": each([(a, b.t()) for a, b in zip(xs, w, strict=True)]),
            "input": each(list(zip(ys, w, strict=True))),
            "weight": each([(a.t(), b) for a, b in zip(ys, xs, strict=True)]),
        }

    # ------------------------------------------------------------ modules of the trainer

    def _modules(self) -> None:
        shapes = self.plan.module_shapes(self.here.kind)
        if shapes:
            self.say("norms, experts and attention")
        cases = [(precision, kind, shape) for kind, shape in shapes for precision in self.plan.precisions]
        for precision, kind, shape in self._each("modules", cases):
            calls = MODULES[kind](*shape, _TORCH[precision], self.here.torch_device)
            forward = self.seconds(calls.forward, 0.1)
            both = self.seconds(partial(_pass, calls), 0.2)
            self.result.modules.append((precision, kind, shape, "forward", forward))
            # Backward alone cannot be repeated; noise must not make it shorter than any backward is.
            self.result.modules.append((precision, kind, shape, "backward", max(both - forward, forward)))

    # ------------------------------------------------------------ memory

    def _copies(self) -> None:
        for size in self._each("copies", self.plan.copy_bytes(self.here.kind)):
            source = torch.empty(size, dtype=torch.uint8, device=self.here.torch_device).fill_(1)
            target = torch.empty_like(source)
            # The source is read and the target written.
            self.result.copies.append(("memory", 2 * size, self.seconds(partial(target.copy_, source))))
            if self.here.kind == "cuda" and size <= 2**28:
                pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                self.result.copies.append(
                    ("host", size, self.seconds(partial(target.copy_, pinned, non_blocking=True)))
                )

    # ------------------------------------------------------------ messages

    def groups(self) -> list[tuple[Group, int]]:
        """Groups to measure, with their members in a fast domain: neighbours, and, where there are several domains,
        one rank of each."""
        world, domain = self.world.size, self.plan.domain
        found = []
        strides = [1, domain] if domain < world and world % domain == 0 else [1]
        for stride in strides:
            most = world // stride
            sizes = [size for size in (2**p for p in range(1, 11)) if size < most and most % size == 0] + [most]
            for size in sizes:
                span = stride * size
                partition = [
                    tuple(range(start + block, start + block + span, stride))
                    for block in range(0, world, span)
                    for start in range(stride)
                ]
                group = Group.create(f"{size} ranks {stride} apart", partition, _TIMEOUT_SECONDS)
                found.append((group, int(members_in_domain(stride, size, domain, world))))
        return found

    def _messages(self, groups: list[tuple[Group, int]]) -> None:
        dtype = _TORCH[self.plan.precisions[0]]
        sizes = self.plan.message_bytes(self.here.kind)
        # Sizes go round all groups, so that a budget that is too short costs all of them the same.
        cases = [(size, group, members) for size in sizes for group, members in groups]
        said = None
        for size, group, members in self._each("messages", cases):
            if size != said:
                self.say(f"collectives of {size / 1024:g} KiB over {', '.join(str(g.size) for g, _ in groups)} ranks")
                said = size
            for name, sent, call in self.collective_calls(group, max(group.size, size // dtype.itemsize), dtype):
                self.result.messages.append((name, group.size, members, sent, self.seconds(call, 0.1)))

    def collective_calls(
        self, group: Group, elements: int, dtype: torch.dtype
    ) -> Iterator[tuple[str, int, Callable[[], Any]]]:
        """(name, bytes that one rank sends, call) with `elements` numbers per rank."""
        n = group.size
        share = elements // n
        x = self._tensor(n, share, dtype=dtype)
        size = x.numel() * x.element_size()
        counts, zeros, flat = [1] * n, torch.zeros_like(x), x.reshape(-1)
        yield "all_gather", size * (n - 1), lambda: collectives.all_gather(flat, group)
        yield "reduce_scatter", size * (n - 1) // n, lambda: collectives.reduce_scatter(x, group)
        yield "all_reduce", 2 * size * (n - 1) // n, lambda: collectives.all_reduce(zeros, group)
        yield "all_to_all", size * (n - 1) // n, lambda: collectives.all_to_all(x, group, counts, counts)
        if n == 2:
            yield "send", size, lambda: self._shift(flat, group)

    def _overlaps(self, groups: list[tuple[Group, int]]) -> None:
        """An all-to-all of each group under as many products as take about as long: their copies, and what drives them,
        want the same cores (on a GPU streaming multiprocessors and memory) as the products."""
        precision = self.plan.precisions[0]
        dtype, (rows, width) = _TORCH[precision], (256, 512) if self.here.kind == "cpu" else (2048, 4096)
        product = self._matmul(precision, rows, width, width)["forward"]
        one = self.seconds(product, 0.05)
        cases = [(size, group, members) for size in self.plan.hidden_bytes(self.here.kind) for group, members in groups]
        for size, group, members in self._each("messages under products", cases):
            sent = self._tensor(group.size, size // dtype.itemsize // group.size, dtype=dtype)
            counts = [1] * group.size
            message = self.seconds(partial(collectives.all_to_all, sent, group, counts, counts), 0.1)
            count = max(1, round(message / one))

            def products(count: int = count) -> None:
                for _ in range(count):
                    product()

            def both(
                sent: Tensor = sent, group: Group = group, counts: list[int] = counts, run: Any = products
            ) -> None:
                pending = collectives.start_all_to_all(sent, group, counts, counts)
                run()
                pending.wait()

            found = (message, self.seconds(products, 0.1), self.seconds(both, 0.1))
            self.result.overlaps.append((group.size, members, *found))

    def _shift(self, x: Tensor, group: Group) -> None:
        """One message to the next rank and one from it, at the same time, as between pipeline stages."""
        collectives.start_shift(x, group).wait()


def _pass(calls: Calls) -> None:
    calls.backward(calls.forward())
