"""A run file (TOML) and what it means: one object that planner, trainer and report read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from .errors import SpecError
from .keys import describe, explain, takes_only_text, unknown_table
from .layout import resolve_layout
from .legal import batch_rule, expert_mesh_sentence, micro_batch_rule, sequence_rule, virtual_stage_rule
from .model import ModelSpec
from .stages import expand
from .tables import (
    TABLES,
    BalanceTable,
    ClusterTable,
    DataTable,
    LayoutTable,
    ModelTable,
    RunTable,
    Table,
    TrainTable,
)
from .toml import parse_override, read_toml, set_in, write_toml

__all__ = ["RunSpec", "check_forced", "explain", "load_run", "parse_run", "resolve_balance"]


class RunSpec(Table):
    """A run: seven tables, each with every key filled in."""

    model: ModelTable = Field(default_factory=ModelTable)
    data: DataTable = Field(default_factory=DataTable)
    layout: LayoutTable = Field(default_factory=LayoutTable)
    train: TrainTable = Field(default_factory=TrainTable)
    balance: BalanceTable = Field(default_factory=BalanceTable)
    cluster: ClusterTable = Field(default_factory=ClusterTable)
    run: RunTable = Field(default_factory=RunTable)

    def to_toml(self) -> str:
        """The resolved run file: every key with its value. `parse_run` of it gives this object back."""
        return write_toml({name: getattr(self, name).model_dump() for name in TABLES})

    def model_source(self) -> str | dict[str, Any]:
        """What `load_model_spec` reads: a preset's name, a path, or the keys of a Hugging Face config.

        Raises:
            SpecError: the table names no model, or more than one, or the config that it overrides cannot be read.
        """
        table, inline = self.model, self.model.inline
        if table.preset is not None and table.hf is not None:
            raise SpecError(f"[model] names preset {table.preset!r} and hf {table.hf!r}; keep one of the two.")
        if table.preset is None and table.hf is None:
            if not inline:
                raise SpecError("[model] names no model: give preset, hf, or the keys of a Hugging Face config.")
            if "model_type" not in inline:
                raise SpecError(
                    f"[model] has {', '.join(map(repr, inline))}, but neither preset nor hf nor a model_type: "
                    f"name the model by one of them."
                )
            return inline
        if not inline:
            return table.preset if table.preset is not None else str(table.hf)
        return _merged(_preset_config(table.preset) if table.preset is not None else _hf_config(str(table.hf)), inline)

    def model_spec(self) -> ModelSpec:
        """The model that `[model]` describes.

        Raises:
            SpecError: the model is unknown, its keys do not make a model, or it is too short for `train.seq_len`.
        """
        from .families import load_model_spec

        source = self.model_source()
        if isinstance(source, str):
            spec = load_model_spec(source)
        else:
            # Keys written by hand are checked, while a published config may carry any number of others. Such a model
            # is no longer the one whose config it starts from, so it takes the run's name.
            inline = self.model.inline
            spec = load_model_spec(source, strict=list(inline), name=str(inline.get("name") or self.run.name))
        if spec.learned_positions and self.train.seq_len > spec.max_positions:
            raise SpecError(
                f"train.seq_len is {self.train.seq_len} tokens, but {spec.name} has learned only "
                f"{spec.max_positions} positions: use at most that."
            )
        return spec

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, before any are masked."""
        return self.train.global_batch * self.train.seq_len

    @property
    def world(self) -> int | None:
        """Processes, where the run says how many: by its degrees, or else by its cluster."""
        layout, cluster = self.layout, self.cluster
        if layout.dp != "auto":
            return layout.pp * layout.dp * layout.cp * layout.tp
        if cluster.nodes is not None and cluster.gpus_per_node is not None:
            return cluster.nodes * cluster.gpus_per_node
        return None


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that a TOML file describes, with `table.key=value` overrides applied to it.

    Raises:
        SpecError: the file, a key, a value, or their combination is wrong.
    """
    path = Path(path)
    return parse_run(read_toml(path), overrides, name=path.stem, source=str(path))


def parse_run(
    tables: dict[str, Any],
    overrides: Sequence[str] = (),
    name: str | None = None,
    source: str = "run file",
    check: bool = True,
) -> RunSpec:
    """As `load_run`, from tables that were already read; `name` is the run's name when the file gives none. Without
    `check` each value is right, but what does not fit together is not refused."""
    tables = _merged({}, tables)
    for text in overrides:
        key_path, value, raw = parse_override(text)
        if key_path[0] not in TABLES:
            raise SpecError(f"--set {text}: {unknown_table(key_path[0])}")
        set_in(tables, key_path, raw if takes_only_text(key_path) and not isinstance(value, str) else value)
    if name:
        run = tables.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", name)
    for key, value in tables.items():
        _refuse_unusable(value, key, source)
    for table, key in _PATHS:
        inner = tables.get(table)
        if isinstance(inner, dict) and isinstance(inner.get(key), str):
            inner[key] = os.path.expanduser(inner[key])
    try:
        spec = RunSpec.model_validate(tables)
    except ValidationError as error:
        raise SpecError(f"{source}: {describe(error)}") from None
    if check:
        _check(spec)
    return spec


def check_forced(balance: BalanceTable) -> None:
    """Raises SpecError for keys of [balance] about forced and recorded routing that do not fit together."""
    if balance.force != "none" and balance.replay is not None:
        raise SpecError(f'balance.force is "{balance.force}", but balance.replay also names choices: keep one of them.')
    if balance.force == "skew" and balance.force_std == 0:
        raise SpecError('balance.force is "skew", but balance.force_std is 0: give the standard deviation in logits.')
    if balance.force != "skew" and balance.force_std:
        raise SpecError(
            f'balance.force_std is {balance.force_std:g}, but balance.force is "{balance.force}": set it to "skew".'
        )
    if balance.record is not None and balance.record == balance.replay:
        raise SpecError(f"balance.record and balance.replay both name {balance.record}: record to another folder.")


def resolve_balance(run: RunSpec, spec: ModelSpec) -> tuple[RunSpec, list[str]]:
    """The run with the model's own auxiliary coefficient where the run file gives none, and sentences that say so, or
    that nothing balances the experts.

    Hugging Face's loss is E·Σ f·P with f counted per token over its K experts, so that perfect balance gives K;
    here perfect balance gives 1, so its coefficient c becomes c·K.
    """
    given = run.balance.model_fields_set & {"batch_aux", "sequence_aux", "global_aux", "bias_update"}
    coefficient = spec.hf_config.get("router_aux_loss_coef")
    if given or not spec.moe_layers:
        return run, []
    if not coefficient:
        note = "Nothing balances the experts: set balance.bias_update (1e-3 is usual) or balance.sequence_aux."
        return run, [note]
    moe = spec.layers[spec.moe_layers[0]].moe
    assert moe is not None
    value = float(coefficient) * moe.router.top_k
    balance = run.balance.model_copy(update={"batch_aux": value})
    note = (
        f"balance.batch_aux is {value:g}: the model's router_aux_loss_coef {coefficient:g} "
        f"times top-k {moe.router.top_k}"
    )
    return run.model_copy(update={"balance": balance}), [note]


_PATHS = (("run", "dir"), ("model", "hf"), ("model", "upcycle_from"))
"""Keys in which `~` becomes the home folder at once. Those of [data] may be patterns, and their readers see to it."""
_LARGEST_NUMBER = 3.4e38
"""What an fp32 tensor holds."""


def _refuse_unusable(value: Any, where: str, source: str) -> None:
    """Refuses, whatever the key, values that no file name, no TOML file, or no fp32 tensor can hold."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_unusable(key, where, source)
            _refuse_unusable(inner, f"{where}.{key}" if isinstance(value, dict) else where, source)
    elif isinstance(value, str):
        if "\0" in value:
            raise SpecError(f"{source}: {where} is {value!r}, which holds a NUL character: remove it.")
        if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
            raise SpecError(f"{source}: {where} is {value!r}, which is not UTF-8 text: use other letters.")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(f"{source}: {where} is {value:.3e}, but integers of TOML go up to 2^63 - 1.")
    elif isinstance(value, float) and _LARGEST_NUMBER < abs(value) < math.inf:
        raise SpecError(f"{source}: {where} is {value:g}, but numbers go up to {_LARGEST_NUMBER:g}, as fp32 does.")


def _check(run: RunSpec) -> None:
    """What no single key can tell: the sentences about keys that do not fit together."""
    _check_model(run.model)
    _check_layout(run)
    check_forced(run.balance)
    train, data = run.train, run.data
    if train.warmup_steps >= train.steps:
        raise SpecError(
            f"train.warmup_steps is {train.warmup_steps}, but there are only {train.steps} steps: "
            f"make it less than train.steps."
        )
    if train.schedule == "wsd" and train.warmup_steps + train.decay_fraction * train.steps > train.steps:
        raise SpecError(
            f"warm-up ({train.warmup_steps} steps) and decay ({train.decay_fraction:g} of {train.steps} steps) "
            f"overlap: lower train.warmup_steps or train.decay_fraction."
        )
    if train.master == "split":
        if train.dtype == "fp32":
            raise SpecError(
                'train.master is "split", but train.dtype is "fp32", whose weights are their own masters: there is '
                'nothing to split, so use master "fp32" or dtype "bf16".'
            )
        if run.layout.sharding != "none":
            raise SpecError(
                f'train.master is "split" and layout.sharding is "{run.layout.sharding}", but sharded weights are '
                'stored in fp32 and gathered from there: use master "fp32" or sharding "none".'
            )
    if data.validation_path is not None and data.validation_fraction > 0:
        raise SpecError(
            f"data.validation_path is {data.validation_path!r} and data.validation_fraction is "
            f"{data.validation_fraction:g}; held-out data comes from one of them, so remove the other."
        )


def _check_model(table: ModelTable) -> None:
    if table.preset is not None and table.hf is not None:
        raise SpecError(f"[model] names preset {table.preset!r} and hf {table.hf!r}; keep one of the two.")
    if table.init == "hf" and table.hf is None:
        raise SpecError('model.init is "hf", but model.hf names no folder to take the weights from.')
    if table.init == "upcycle" and table.upcycle_from is None:
        raise SpecError('model.init is "upcycle", but model.upcycle_from names no dense model.')
    if table.init != "upcycle" and table.upcycle_from is not None:
        raise SpecError(f'model.upcycle_from is set, but model.init is "{table.init}": set it to "upcycle".')
    if table.init != "upcycle" and table.upcycle_noise:
        raise SpecError(f'model.upcycle_noise is set, but model.init is "{table.init}": set it to "upcycle".')


def _check_layout(run: RunSpec) -> None:
    layout, train = run.layout, run.train
    if layout.dp != "auto" and layout.dp < 1:
        raise SpecError(f'layout.dp is {layout.dp}, but it takes a degree of at least 1, or "auto".')
    sentence = next(_layout_rules(layout, train), None)
    if sentence is None:
        return
    if layout.dp != "auto":
        try:
            model = run.model_spec()
        except SpecError:
            model = None
        if model is not None:
            # With the model and the number of processes known, the refusal also names the nearest legal layouts.
            world = layout.pp * layout.dp * layout.cp * layout.tp
            resolve_layout(layout, model, world, seq_len=train.seq_len, global_batch=train.global_batch)
    raise SpecError(f"{sentence}.")


def _layout_rules(layout: LayoutTable, train: TrainTable) -> Iterator[str]:
    """What is wrong with a layout whatever the model. Where dp follows from the processes, what no dp can mend."""
    dp = 1 if layout.dp == "auto" else layout.dp
    if layout.dp != "auto" and layout.tp * layout.cp * dp % (layout.etp * layout.ep):
        yield expert_mesh_sentence(layout.tp, layout.cp, dp, layout.ep, layout.etp)
    if layout.stages is not None:
        expand(layout.stages)
    yield from virtual_stage_rule(layout.pp, layout)
    yield from sequence_rule(layout.cp, layout.tp, layout.cp_kind, train.seq_len)
    yield from batch_rule(dp, layout, train.global_batch)
    yield from micro_batch_rule(layout.pp, dp, layout, train.global_batch)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`; tables in both are merged key by key."""
    out = dict(base)
    for key, value in over.items():
        mine = out.get(key)
        out[key] = _merged(mine if isinstance(mine, dict) else {}, value) if isinstance(value, dict) else value
    return out


def _preset_config(name: str) -> dict[str, Any]:
    from .presets import preset_config

    return preset_config(name)


def _hf_config(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"model.hf: {str(file)!r} cannot be read as a config.json: {error}.") from None
    if not isinstance(config, dict):
        raise SpecError(f"model.hf: {str(file)!r} holds a {type(config).__name__}, not the keys of a config.")
    return config
