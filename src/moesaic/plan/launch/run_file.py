"""A plan as a run file of this project's own trainer."""

from __future__ import annotations

from typing import Any

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import Layout, resolve_layout
from moesaic.spec.options import FLEX_BACKENDS, FLEX_LIBRARIES, refuse_cut_experts_with_libraries
from moesaic.spec.presets import PRESETS
from moesaic.spec.run import parse_run
from moesaic.spec.stages import default_stages
from moesaic.spec.toml import write_toml

from .parts import Draft, comment, heading, short_stages
from .plan import Plan
from .wrappers import train_script, wrapped


def files(plan: Plan) -> dict[str, str]:
    """`run.toml`, the script that trains it, and its wrappers.

    Raises:
        SpecError: the trainer lacks an option of the plan, with the trainer's own sentence.
    """
    draft = Draft("moesaic")
    tables = run_tables(draft, plan)
    text = comment(heading(plan, draft.target, draft.notes)) + "\n" + write_toml(tables)
    script = train_script(
        plan, draft, ["-m moesaic train run.toml --resume"], ["The run is described in run.toml."], True
    )
    return wrapped(plan, draft, {"run.toml": text, "train.sh": script})


def run_tables(draft: Draft, plan: Plan) -> dict[str, dict[str, Any]]:
    """The tables of the run file; what they resolve to is the plan's layout.

    Raises:
        SpecError: the trainer has no such option, or takes it for another layout.
    """
    work, layout = plan.workload, plan.layout
    if work.precision not in ("fp32", "bf16"):
        raise draft.refuse(f"train.dtype {work.precision!r} does not exist yet: use bf16 or fp32")
    if layout.schedule == "dualpipe":
        raise draft.refuse("layout.schedule 'dualpipe' does not exist yet: use 1f1b, interleaved or zero_bubble")
    if work.gradient_bytes != 4:
        draft.lost(f"gradients of {work.gradient_bytes} bytes; the trainer sums them in fp32, 4 bytes")
    if work.model.mtp and not work.mtp:
        draft.lost("training without the prediction blocks; train.mtp_weight 0 only takes their loss away")
    tables: dict[str, dict[str, Any]] = {
        "model": _model(draft, plan),
        "layout": _layout(layout, len(work.model.layers), len(work.model.mtp)),
        "train": {
            "steps": 100,
            "seq_len": work.seq_len,
            "global_batch": work.global_batch,
            "dtype": work.precision,
        },
        "cluster": {"gpu": plan.cluster.gpu.name, "nodes": plan.nodes, "gpus_per_node": plan.gpus_per_node},
        "run": {"name": plan.name},
    }
    if work.moment_bytes == 2:
        tables["train"]["moment_dtype"] = "bf16"
    if work.master == "split":
        tables["train"]["master"] = "split"
    if work.model.mtp and not work.mtp:
        tables["train"]["mtp_weight"] = 0.0
    draft.remark("[data] path is missing: name your text or tokens")
    if layout.dispatcher in FLEX_LIBRARIES:
        draft.remark(f"dispatcher {layout.dispatcher} needs the package deep_ep on every node")
    _read_back(draft, plan, tables)
    return tables


def _layout(layout: Layout, layers: int, mtp: int) -> dict[str, Any]:
    table: dict[str, Any] = {
        name: getattr(layout, name)
        for name in ("tp", "cp", "cp_kind", "pp", "virtual_stages", "ep", "etp", "dp", "sharding", "replicas")
    }
    table |= {"micro_batch": layout.micro_batch, "schedule": layout.schedule, "order": layout.order}
    table["dispatcher"] = layout.dispatcher
    if layout.dispatcher in FLEX_BACKENDS:
        table |= {"dispatcher": "flex", "dispatcher_backend": layout.dispatcher}
    table |= {name: list(getattr(layout, name)) or "none" for name in ("overlap", "recompute")}
    table |= {name: list(getattr(layout, name)) for name in ("offload", "compression") if getattr(layout, name)}
    if "optimizer" in layout.offload:
        table["offload_fraction"] = layout.offload_fraction
    if "activations" in layout.offload:
        table["offload_modules"] = list(layout.offload_modules)
    if layout.stages != default_stages(len(layout.stages), layers, mtp):
        table["stages"] = short_stages(layout.stages, mtp)
    return table


def _model(draft: Draft, plan: Plan) -> dict[str, Any]:
    model = plan.workload.model
    if model.name in PRESETS:
        return {"preset": model.name}
    if not model.hf_config:
        raise draft.refuse(f"{model.name} is no preset and has no config to write into [model]")
    return dict(model.hf_config)


def _read_back(draft: Draft, plan: Plan, tables: dict[str, dict[str, Any]]) -> None:
    work, layout = plan.workload, plan.layout
    run = parse_run(tables)
    try:
        refuse_cut_experts_with_libraries(run.layout)
        resolved = resolve_layout(
            run.layout, run.model_spec(), layout.world, seq_len=work.seq_len, global_batch=work.global_batch
        )
    except SpecError as error:
        raise draft.refuse(str(error).rstrip(".")) from None
    if resolved != layout:
        raise draft.refuse(f"its run file would give {resolved} with other options than the plan's {layout}")
