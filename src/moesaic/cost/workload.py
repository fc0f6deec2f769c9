"""What is trained (a workload), and layouts as columns of numbers, so that one formula prices many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.options import OFFLOAD as OFFLOAD
from moesaic.spec.options import OFFLOAD_BLOCKS as OFFLOAD_BLOCKS
from moesaic.spec.options import OVERLAP as OVERLAP
from moesaic.spec.options import RECOMPUTE as RECOMPUTE
from moesaic.spec.stages import Stage

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
"""Of the matmuls. fp8 stands for per-tensor and block scaling, whose differences are rates."""
SHARDING = ("none", "optimizer", "gradients", "parameters")
DISPATCHERS = ("local", "allgather", "alltoall", "hierarchical", "deepep", "hybridep")
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "dualpipe")


@dataclass(frozen=True)
class Workload:
    """What is trained, whatever the layout."""

    model: ModelSpec
    seq_len: int
    """Tokens of one sequence."""
    global_batch: int
    """Sequences of one optimizer step."""
    precision: Precision = "bf16"
    mtp: bool = True
    """Whether multi-token prediction blocks, if the model has any, are trained."""
    imbalance: float = 1.0
    """Rows that the most loaded expert rank receives over the mean; 1 is perfect balance."""
    moment_bytes: int = 4
    """Bytes of one optimizer moment (there are two): 4 for fp32, 2 for bf16."""
    master: Literal["fp32", "split"] = "fp32"
    """How weights that compute in fewer bytes are kept in fp32: whole, or as the 2 bytes that the bf16 weight lacks."""
    gradient_bytes: int = 4
    """Bytes of one accumulated gradient."""

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


@dataclass(frozen=True)
class Columns:
    """N layouts as arrays [N]. Names are those of `Layout`; words are numbers, by their place in the tuples above."""

    pp: Ints
    dp: Ints
    cp: Ints
    tp: Ints
    edp: Ints
    ep: Ints
    etp: Ints
    virtual_stages: Ints
    micro_batch: Ints
    replicas: Ints
    sharding: Ints
    dispatcher: Ints
    schedule: Ints
    ring: Bools
    """Context parallelism by a ring instead of ulysses."""
    dp_outer: Bools
    recompute: Ints
    """Bit i: module i of RECOMPUTE."""
    overlap: Ints
    """Bit i: entry i of OVERLAP."""
    offload: Ints
    """Bit i: entry i of OFFLOAD."""
    offload_fraction: Floats
    """Share of the optimizer's state that is offloaded with `optimizer`."""
    offload_modules: Ints
    """Bit i: entry i of OFFLOAD_BLOCKS, whose activations are offloaded with `activations`."""
    stages: Ints
    """Which of `stage_lists`."""
    stage_lists: tuple[tuple[Stage, ...], ...]
    """Stage lists that layouts share; each is pp·virtual_stages long, stage i on pipeline rank i % pp."""

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Columns:
        """The columns of `layouts`, in their order."""
        lists = dict.fromkeys(layout.stages for layout in layouts)
        index = {stages: number for number, stages in enumerate(lists)}
        numbers = ("pp", "dp", "cp", "tp", "edp", "ep", "etp", "virtual_stages", "micro_batch", "replicas")
        columns: dict[str, Any] = {
            name: np.array([getattr(layout, name) for layout in layouts], np.int64) for name in numbers
        }
        one: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("sharding", SHARDING),
            ("dispatcher", DISPATCHERS),
            ("schedule", SCHEDULES),
        )
        some: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("recompute", RECOMPUTE),
            ("overlap", OVERLAP),
            ("offload", OFFLOAD),
            ("offload_modules", OFFLOAD_BLOCKS),
        )
        for name, words in one:
            columns[name] = np.array([words.index(getattr(layout, name)) for layout in layouts], np.int64)
        for name, words in some:
            columns[name] = np.array([bits(words, getattr(layout, name)) for layout in layouts], np.int64)
        return cls(
            **columns,
            offload_fraction=np.array([layout.offload_fraction for layout in layouts], np.float64),
            ring=np.array([layout.cp_kind == "ring" for layout in layouts], bool),
            dp_outer=np.array([layout.order == "dp-outer" for layout in layouts], bool),
            stages=np.array([index[layout.stages] for layout in layouts], np.int64),
            stage_lists=tuple(lists),
        )

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def world(self) -> Ints:
        """Ranks of each layout."""
        return self.pp * self.dp * self.cp * self.tp

    def take(self, rows: Any) -> Columns:
        """Some of the layouts, by index or by mask."""
        arrays = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "stage_lists"}
        return replace(self, **arrays)

    def recomputes(self, module: str) -> Bools:
        """Which layouts compute `module` again; `full` and, for the parts of an expert layer, `moe` include it."""
        wanted = bits(RECOMPUTE, ("full", module))
        if module in ("moe_act", "shared_experts"):
            wanted |= bits(RECOMPUTE, ("moe",))
        return (self.recompute & wanted) != 0

    def recomputing(self, words: Sequence[str] | None) -> Columns:
        """The same layouts with `words` computed again; None: with their own."""
        if words is None:
            return self
        return replace(self, recompute=np.full(len(self), bits(RECOMPUTE, words), np.int64))

    def of_the_last(self) -> Columns:
        """The same layouts with what they compute again of prediction blocks, head and loss."""
        last = [
            next((s.recompute for s in stages if s.recompute is not None and (s.mtp or s.head)), None)
            for stages in self.stage_lists
        ]
        if not any(last):
            return self
        said = np.array([-1 if each is None else bits(RECOMPUTE, each.others) for each in last], np.int64)[self.stages]
        return replace(self, recompute=np.where(said < 0, self.recompute, said))

    def overlaps(self, what: str) -> Bools:
        """Which layouts run `what` of OVERLAP at the same time as something else."""
        return (self.overlap & bits(OVERLAP, (what,))) != 0

    def offloads(self, what: str) -> Bools:
        """Which layouts keep `what` of OFFLOAD in host memory."""
        return (self.offload & bits(OFFLOAD, (what,))) != 0

    def dispatches(self, *names: str) -> Bools:
        """Which layouts use one of the dispatchers `names`."""
        return np.isin(self.dispatcher, [DISPATCHERS.index(name) for name in names])

    def micro_batches(self, global_batch: int) -> Ints:
        """Micro-batches that one rank works through in a step of `global_batch` sequences."""
        return global_batch // (self.micro_batch * self.dp)


def bits(words: Sequence[str], chosen: Sequence[str]) -> int:
    """A number whose bit i says whether word i is chosen.

    Raises:
        ValueError: a chosen word that is not one of `words`.
    """
    return sum(1 << words.index(word) for word in set(chosen))


def chosen(words: Sequence[str], number: int) -> tuple[str, ...]:
    """The words whose bits are set in `number`: the inverse of `bits`."""
    return tuple(word for place, word in enumerate(words) if number >> place & 1)
