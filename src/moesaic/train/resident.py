"""What a training process has resident on a processor, above the same process without a model.

On a processor one memory holds what a device and its host share out between them: the tensors of a step (`predict`),
what the experts work in, and the copy of the state that a checkpoint is written from while training goes on. Freed
memory that the C library keeps is not here: see `process.tune_malloc`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.activations import value_bytes
from moesaic.mesh.device import bf16_is_native
from moesaic.model.expert_blocks import BYTES_PER_ELEMENTWISE_BLOCK, ROWS_PER_PRODUCT, bundle_rows
from moesaic.model.expert_memory import ELEMENTS_BETWEEN_ROWS
from moesaic.spec.layout import Layout
from moesaic.spec.model import ModelSpec, MoeSpec
from moesaic.spec.run import RunSpec
from moesaic.train.predicted import predict, workload

_STATE_BYTES = 12
"""Of a weight in a checkpoint, however it is stored: the fp32 master and AdamW's two moments."""


@dataclass(frozen=True)
class Resident:
    """Bytes of one process at its fullest moment."""

    step: float
    """Tensors of a training step, as the planner counts them."""
    scratch: float
    """What experts work in, at most: of every thread, with the most rows that are computed together."""
    copy: float
    """What a checkpoint is written from."""
    state: float
    """Weights and the optimizer's state: all that is there beside the copy when the last step's checkpoint is made."""
    writes_beside: bool
    """Whether steps follow a checkpoint, so that one may still be on its way to the disk at the peak of a step."""

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment."""
        beside = self.copy if self.writes_beside else 0.0
        return max(self.step + beside, self.state + self.copy) + self.scratch


def resident(run: RunSpec, spec: ModelSpec, layout: Layout, threads: int) -> list[Resident]:
    """Of the process of each pipeline rank, with `threads` threads within one operation. Weights are not sharded."""
    keys = run.train
    size = value_bytes(workload(run, spec).precision)
    rows = keys.seq_len * layout.micro_batch // layout.cp * layout.ep
    again = bool({"moe", "full"} & set(layout.recompute))
    per_thread = max(
        scratch_bytes(each.moe, spec.hidden, rows, keys.dtype, etp=layout.etp, again=again) for each in spec.layers
    )
    beside = bool(keys.checkpoint_every) and keys.checkpoint_every < keys.steps
    return [
        Resident(
            step=stage.total,
            scratch=float(threads * per_thread),
            copy=stage.weights / size * _STATE_BYTES,
            state=stage.weights + stage.optimizer,
            writes_beside=beside,
        )
        for stage in predict(run, spec, layout)
    ]


def scratch_bytes(
    moe: MoeSpec | None, hidden: int, rows: int, dtype: str = "fp32", *, etp: int = 1, again: bool = False
) -> int:
    """What one thread works in for the experts of a block, if one of them gets up to `rows` rows, and `top_k` of a
    block as many times that; 0 without experts.

    Rows of inputs and of output gradients [D], of activations [F], of gradients of pre-activations [G], and of one
    result of the wider of D and F; pre-activations that a forward pass does not keep (`again`: backward runs it again).
    bf16 that is computed in fp32 has the rows in both types, and one expert's weights and a gradient in fp32.
    """
    if moe is None:
        return 0
    width = moe.expert.width // etp
    up = width * (2 if moe.expert.gated else 1)
    wide = dtype == "bf16" and not bf16_is_native()
    size = 2 if dtype == "bf16" and not wide else 4
    # Of one expert, or of several that are computed together.
    rows = max(min(rows, ROWS_PER_PRODUCT), min(rows * moe.router.top_k, bundle_rows(width, hidden, size)))
    apart = ELEMENTS_BETWEEN_ROWS if up > width else 0
    numbers = rows * (2 * hidden + width + up + apart + max(hidden, width) + (up if again or wide else 0)) + width
    if wide:
        numbers += rows * hidden + hidden * (up + width + max(up, width))  # rows of inputs twice, in half the bytes
    return numbers * size + BYTES_PER_ELEMENTWISE_BLOCK
