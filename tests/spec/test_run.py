"""Run files: what goes in comes out, and what is wrong is said in one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.spec.errors import SpecError
from moesaic.spec.keys import all_keys
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec, explain, load_run, parse_run, resolve_balance
from moesaic.spec.tables import TABLES
from moesaic.spec.toml import parse_override, write_toml

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
NAME = TEXT.filter(bool)
SHARE = st.floats(0, 1, exclude_max=True)
POSITIVE = st.floats(1e-12, 1e6)
SCALAR = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(-3.4e38, 3.4e38), TEXT)
INLINE = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3))
MODEL_KEYS = set(TABLES["model"].model_fields)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Tables of run files that are right."""
    steps, micro = draw(st.integers(2, 10**6)), draw(st.integers(1, 64))
    inline = draw(st.dictionaries(NAME.filter(lambda name: name not in MODEL_KEYS), INLINE, max_size=3))
    optional: dict[str, dict[Any, Any]] = {
        "model": {"preset": NAME, "upcycle_from": st.none()},
        "data": {
            "path": NAME,
            "format": st.sampled_from(["auto", "text", "jsonl", "parquet", "arrow", "megatron"]),
            "validation_path": NAME,
            "pack": st.booleans(),
        },
        "layout": {"recompute": st.lists(NAME, max_size=3), "dp": st.sampled_from(["auto", 1]), "tp": st.just(1)},
        "train": {
            "lr": POSITIVE,
            "min_lr_ratio": SHARE,
            "beta1": SHARE,
            "seed": st.integers(0, 2**63 - 1),
            "dtype": st.sampled_from(["fp32", "bf16"]),
            "warmup_steps": st.integers(0, steps - 1),
            "tune_malloc": st.booleans(),
        },
        "balance": {"batch_aux": POSITIVE, "bias_update": SHARE},
        "cluster": {"gpu": NAME, "nodes": st.integers(1, 10**4)},
        "run": {"name": NAME, "dir": NAME.filter(lambda name: name[0] != "~")},
    }
    tables = {name: draw(st.fixed_dictionaries({}, optional=keys)) for name, keys in optional.items()}
    tables["model"] |= inline
    tables["layout"]["micro_batch"] = micro
    tables["train"] |= {"steps": steps, "global_batch": micro * draw(st.integers(1, 100))}
    return tables


@given(runs())
def test_resolved_run_file_reads_back_equal(tables: dict[str, Any]) -> None:
    run = parse_run(tables)
    again = parse_run(tomllib.loads(run.to_toml()))
    assert again == run
    assert again.to_toml() == run.to_toml()
    for table, keys in tables.items():
        for key, value in keys.items():
            assert (getattr(run, table).model_dump())[key] == value


@given(st.dictionaries(NAME, st.dictionaries(NAME, INLINE, max_size=4), max_size=3))
def test_toml_writer_agrees_with_the_standard_library(tables: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(tables)) == tables


def test_every_key_is_resolved_and_explained() -> None:
    values = tomllib.loads(RunSpec().to_toml())
    for key in all_keys():
        (entry,) = explain(key)
        assert entry.key == key and entry.help.endswith(".") and entry.type
        table, name = key.split(".")
        assert name in values[table] or entry.default == "not set"
    assert [entry.key for entry in explain()] == all_keys()
    assert {entry.key.split(".")[0] for entry in explain("train")} == {"train"}
    assert [entry.key for entry in explain("micro_batch")] == ["layout.micro_batch"]


def test_file_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text('[model]\npreset = "a"\n[train]\nsteps = 10\n')
    run = load_run(file, ["train.steps=5000", "train.dtype=bf16", "run.dir=7", "model.rope_scaling.factor=2.5"])
    assert (run.train.steps, run.train.dtype, run.run.dir, run.run.name) == (5000, "bf16", "7", "tiny")
    assert run.model.inline == {"rope_scaling": {"factor": 2.5}}
    assert load_run(file).run.dir == "runs/tiny"


def test_defaults_that_follow_from_other_keys() -> None:
    assert parse_run({"train": {"steps": 50}}).train.warmup_steps == 5
    assert parse_run({"train": {"steps": 10**6}}).train.warmup_steps == 100
    assert parse_run({"data": {"validation_path": "x"}}).data.validation_fraction == 0.0
    assert parse_run({}, name="tiny").run.dir == "runs/tiny"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.lr=1e-3", ["train", "lr"], 1e-3),
        ("train.tune_malloc=false", ["train", "tune_malloc"], False),
        ("layout.recompute=['moe']", ["layout", "recompute"], ["moe"]),
        ("data.path=a=b.txt", ["data", "path"], "a=b.txt"),
        ("run.name=2026-01-01", ["run", "name"], "2026-01-01"),
        ("run.name=1\nx=2", ["run", "name"], "1\nx=2"),
        ('run.name="quoted"', ["run", "name"], "quoted"),
    ],
)
def test_override_values_are_toml_or_bare_text(text: str, path: list[str], value: Any) -> None:
    assert parse_override(text)[:2] == (path, value)


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"trian": {}}, ["[trian]", "'train'"]),
        ({"train": {"seqlen": 3}}, ["'train.seqlen'", "'seq_len'"]),
        ({"train": {"micro_batch": 2}}, ["'layout.micro_batch'"]),
        ({"steps": 3}, ["'train.steps'", "[train]"]),
        ({"train": 3}, ["'train' is 3", "[train]"]),
        ({"train": {"seq_len": 0}}, ["train.seq_len is 0", "≥ 1", "tokens"]),
        ({"train": {"steps": True}}, ["train.steps is true", "integer"]),
        ({"train": {"steps": "many"}}, ["train.steps is 'many'", "integer"]),
        ({"train": {"lr": float("nan")}}, ["train.lr is nan", "> 0"]),
        ({"train": {"dtype": "bf61"}}, ["'bf61'", '"fp32" or "bf16"', "did you mean 'bf16'?"]),
        ({"train": {"seq_len": 0, "steps": -1}}, ["train.seq_len is 0", "train.steps is -1"]),
        ({"train": {"steps": 10, "warmup_steps": 10}}, ["warmup_steps is 10", "10 steps"]),
        ({"train": {"master": "split"}}, ['master is "split"', 'dtype is "fp32"']),
        (
            {"train": {"master": "split", "dtype": "bf16"}, "layout": {"sharding": "optimizer"}},
            ['sharding is "optimizer"', "gathered"],
        ),
        ({"train": {"schedule": "wsd", "steps": 10, "warmup_steps": 9}}, ["9 steps", "0.2 of 10"]),
        ({"train": {"global_batch": 7}, "layout": {"micro_batch": 3}}, ["is 7", "micro_batch 3", "6 or 9"]),
        ({"layout": {"dp": 4, "ep": 3}}, ["1·1·4 = 4", "1·3 = 3"]),
        ({"layout": {"dp": 0}}, ["layout.dp is 0", "at least 1"]),
        ({"layout": {"virtual_stages": 2}}, ["virtual_stages is 2", "pp is 1"]),
        ({"layout": {"cp": 4, "cp_kind": "ring"}, "train": {"seq_len": 12}}, ["12 tokens", "multiple of 8"]),
        ({"data": {"validation_path": "v", "validation_fraction": 0.1}}, ["'v'", "0.1"]),
        ({"model": {"preset": "a", "hf": "b"}}, ["'a'", "'b'", "one of the two"]),
        ({"model": {"preset": "a", "init": "hf"}}, ["model.hf"]),
        ({"model": {"preset": "a", "init": "upcycle"}}, ["model.upcycle_from"]),
        ({"model": {"preset": "a", "upcycle_from": "b"}}, ["model.upcycle_from", '"random"']),
    ],
)
def test_what_is_wrong_is_said(tables: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_run(tables)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps=9223372036854775808", "train.steps is 9.223e+18, but integers of TOML go up to 2^63 - 1"),
        ("model.vocab_size=-99999999999999999999", "model.vocab_size is -1.000e+20"),
        ("train.weight_decay=1e39", "train.weight_decay is 1e+39, but numbers go up to 3.4e+38"),
        ("balance.bias_update=1e300", "balance.bias_update is 1e+300"),
        ("model.rope_scaling.factor=1e39", "model.rope_scaling.factor is 1e+39"),
        (r'run.dir="a\u0000b"', "run.dir is 'a\\x00b', which holds a NUL character"),
        (r'data.path="\u0000"', "data.path is"),
        ("run.name=\udcff", "run.name is '\\udcff', which is not UTF-8 text"),
        ("layout.recompute=['\udcff']", "layout.recompute is"),
        ("train.threads=1025", "train.threads is 1025, but must be integer ≥ 0, ≤ 1024"),
    ],
)
def test_values_that_nothing_can_hold_are_refused_whatever_the_key(override: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_run({"model": {"preset": "Mixtral-8x7B"}}, [override])
    assert part in str(caught.value)


def test_the_home_folder_has_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    run = parse_run({"run": {"dir": "~/runs/x"}, "model": {"hf": "~/models/y"}})
    assert (run.run.dir, run.model.hf) == ("/home/me/runs/x", "/home/me/models/y")


@pytest.mark.parametrize(
    ("model", "part"),
    [({}, "names no model"), ({"presets": "x"}, "'presets'"), ({"hf": "no/such/folder", "a": 1}, "no/such/folder")],
)
def test_a_model_table_that_names_no_model(model: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        parse_run({"model": model}).model_source()


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("x = ?\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, part in [
        ("none.toml", "other.toml"),
        ("other.toml", "line 1"),
        ("binary.toml", "UTF-8"),
        (".", "folder"),
    ]:
        with pytest.raises(SpecError, match=part):
            load_run(tmp_path / name)


@pytest.mark.parametrize("text", ["train.steps", "steps=3", "=3", "train.=3"])
def test_overrides_of_another_form(text: str) -> None:
    with pytest.raises(SpecError, match=r"table\.key=value"):
        parse_run({}, [text])


def test_override_of_an_unknown_table() -> None:
    with pytest.raises(SpecError, match=r"--set trian.steps=3.*'train'"):
        parse_run({}, ["trian.steps=3"])


def test_the_models_own_auxiliary_coefficient() -> None:
    from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, RouterSpec

    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=8, v_head_dim=8, scale=1.0)
    moe = MoeSpec(router=RouterSpec(experts=8, top_k=2), expert=MlpSpec(width=16))
    layers = (LayerSpec(attention=attention, moe=moe),)
    spec = ModelSpec(
        name="m", family="mixtral", vocab=8, hidden=8, layers=layers, hf_config={"router_aux_loss_coef": 0.02}
    )
    run, notes = resolve_balance(parse_run({}), spec)
    assert run.balance.batch_aux == pytest.approx(0.04) and "0.02" in notes[0]
    given_run = parse_run({"balance": {"sequence_aux": 0.0}})
    assert resolve_balance(given_run, spec) == (given_run, [])
    # A resolved file gives every key, so that reading it back changes nothing.
    resolved = parse_run(tomllib.loads(run.to_toml()))
    assert resolve_balance(resolved, spec) == (resolved, [])
    # Without a coefficient to take over, the user must know that experts are left to themselves.
    silent = spec.model_copy(update={"hf_config": {}})
    same, (note,) = resolve_balance(parse_run({}), silent)
    assert same == parse_run({}) and "Nothing balances the experts" in note
    biased = parse_run({"balance": {"bias_update": 1e-3}})
    assert resolve_balance(biased, silent) == (biased, [])
