"""What batch-level overlap of expert communication gains, beside published A/B measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moesaic.cost.layer_timeline import simulate_layers, stage_seconds
from moesaic.cost.rates import Stack, rates_for
from moesaic.cost.step import layer_pieces
from moesaic.cost.timeline import NCCL, Contention, Piece
from moesaic.cost.workload import Workload
from moesaic.spec.cluster import load_cluster
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import parse_layout, resolve_layout

# Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap: Qwen3-30B-A3B on 16 H100, EP16, 1024 sequences of 4096
# tokens, micro-batch 1; seconds per step without and with --overlap-moe-expert-parallel-comm.
HYBRIDEP, ALLTOALL = (24.7138, 20.992), (41.25, 31.31)


@pytest.mark.parametrize(
    "dispatcher,measured,contention",
    [
        # HybridEP's kernels hold 16 of 132 multiprocessors (Megatron-Core's --moe-hybridep-num-sms).
        ("hybridep", HYBRIDEP, Contention.of_processors(16, 132)),
        ("alltoall", ALLTOALL, NCCL),
    ],
)
def test_gain_of_two_micro_batches_at_once(
    dispatcher: str, measured: tuple[float, float], contention: Contention
) -> None:
    model, cluster = load_model_spec("qwen3-30b-a3b"), load_cluster("h100", 16)
    work = Workload(model, 4096, 1024)
    table = parse_layout("pp1 dp16 / edp1 ep16").model_copy(update={"dispatcher": dispatcher, "micro_batch": 1})
    layout = replace(resolve_layout(table, model, 16, seq_len=4096, global_batch=1024), overlap=("experts",))
    pieces = layer_pieces(work, layout, cluster, rates_for(cluster, Stack()))
    layers = [pieces["embedding"], *[pieces["moe"]] * len(model.layers), pieces["head"]]
    count = layout.micro_batches(1024)
    # Overlap alone is in question here: compute is scaled so that the step without it takes as long as published.
    apart = measured[0] / count
    layers = [[scaled(piece, factor_of(layers, apart)) for piece in layer] for layer in layers]
    stage = stage_seconds(layers, layout.overlap, contention=contention)
    assert stage.forward + stage.backward == pytest.approx(apart)
    hidden = simulate_layers(layers, layout.overlap, contention=contention).hidden()
    print(f"\nQwen3-30B-A3B on 16 H100, {dispatcher}: {measured[0]:.2f} s in turn; at once, predicted and (published)")
    print(f"{count * stage.pair:.2f} s ({measured[1]:.2f}), gain {apart / stage.pair:.3f} "
          f"({measured[0] / measured[1]:.3f}), {hidden:.0%} of communication hidden")  # fmt: skip
    assert apart / stage.pair == pytest.approx(measured[0] / measured[1], rel=0.08)


def factor_of(layers: Sequence[Sequence[Piece]], seconds: float) -> float:
    """By how much compute must be longer for all pieces in turn to take `seconds`."""
    parts = {True: 0.0, False: 0.0}
    for piece in itertools.chain(*layers):
        parts[piece.stream == "compute"] += piece.forward + piece.backward_input + piece.backward_weight
    return (seconds - parts[False]) / parts[True]


def scaled(piece: Piece, factor: float) -> Piece:
    if piece.stream != "compute":
        return piece
    times = (piece.forward, piece.backward_input, piece.backward_weight)
    return Piece(piece.name, piece.stream, *(factor * seconds for seconds in times))
