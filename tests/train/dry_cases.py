"""Random small models and layouts for dry runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from moesaic.cost.habits import MOESAIC
from moesaic.cost.memory import StageMemory, stage_memory
from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec
from moesaic.train.dry_run import DryRun, dry_run, enough_micro_batches
from moesaic.train.predicted import workload
from tests.cost.kinds import KINDS

SEQ_LEN = 112
"""Of 8 experts two are chosen, 28 pairs: with a multiple of 28 tokens on each rank expected counts are whole."""
HABITS = replace(MOESAIC, workspace=0, context=0, reserved_share=0.0)


def run_of(keys: dict[str, Any], dtype: str, mtp: bool = False) -> RunSpec:
    """A run file of such a layout; its model is not looked at."""
    return RunSpec.model_validate(
        {
            "model": {"preset": "Mixtral-8x7B"},
            "train": {
                "seq_len": SEQ_LEN, "global_batch": 64, "dtype": dtype, "mtp_weight": 0.3 if mtp else 0.0,
            },
            "layout": keys,
            "run": {"dir": "unused", "name": "unused"},
        }
    )  # fmt: skip


def drawn(seed: int) -> tuple[ModelSpec, RunSpec, Layout]:
    """A model and a layout that is legal for it."""
    draw = random.Random(seed)
    kinds = [name for name in KINDS if "two gates" not in name]
    while True:
        attention = draw.choice(["grouped", "latent"])
        names = [draw.choice([kind for kind in kinds if kind.startswith(attention)]) for _ in range(draw.randint(2, 4))]
        mtp = draw.random() < 0.25
        last = tuple([KINDS[names[-1]]] if mtp else [])
        layers = tuple(KINDS[name] for name in names)
        model = ModelSpec(name="t", family="moesaic", vocab=64, hidden=64, layers=layers, mtp=last)
        keys = {
            "pp": draw.choice([1, 1, 2]),
            "tp": draw.choice([1, 1, 2]),
            "cp": draw.choice([1, 1, 2]),
            "cp_kind": draw.choice(["ulysses", "ring"]),
            "ep": draw.choice([1, 2, 4]),
            "etp": draw.choice([1, 1, 2]),
            "sharding": draw.choice(["none", "none", "optimizer", "gradients", "parameters"]),
            "micro_batch": draw.choice([1, 2]),
            "dispatcher": draw.choice(["auto", "alltoall", "allgather"]),
        }
        run = run_of(keys, draw.choice(["fp32", "bf16"]), mtp)
        try:
            found = resolve_layout(run.layout, model, draw.choice([1, 2, 4, 8, 16]), seq_len=SEQ_LEN, global_batch=64)
        except SpecError:
            continue
        if found.sharding != "none" and not _shards_evenly(found, names):
            continue
        return model, run, found


def _shards_evenly(layout: Layout, names: list[str]) -> bool:
    """Whether the rows of all parameters divide by the ranks that share them; otherwise some ranks have more."""
    here = 8 // layout.ep
    return 8 % (layout.dp * layout.cp) == here % layout.edp == 0 and not any("gated" in name for name in names)


def both(model: ModelSpec, run: RunSpec, layout: Layout, rank: int) -> tuple[DryRun, StageMemory]:
    """A rank's dry run, and the planner's figures for its stage."""
    found = dry_run(run, model, layout, rank)
    # Ids of the micro-batches that a dry run leaves out are not there.
    micro_batches = enough_micro_batches(layout, run.train.global_batch)
    work = replace(workload(run, model), global_batch=micro_batches * layout.micro_batch * layout.dp)
    return found, stage_memory(work, layout, HABITS)[found.stage]
