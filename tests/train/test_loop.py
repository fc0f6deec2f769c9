"""Whole tiny runs: what they leave, interruption and resumption, refusals."""

from __future__ import annotations

import errno
import math
import os
import signal
import tomllib

import pytest
import torch

from moesaic.mesh.device import Device
from moesaic.spec.errors import MoesaicError
from moesaic.train import loop
from moesaic.train.checkpoint import Checkpoints, load_model_checkpoint

PHI = {
    "model_type": "phimoe",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.1,
    "max_position_embeddings": 64,
}


class Crash(BaseException):
    """Stands for a process that dies: nothing in the product catches it."""


def crash_in_step(monkeypatch, at):
    """The process dies in step `at`, after backward, before the update."""
    real = loop.train_step

    def dying(*args, **kwargs):
        if kwargs["step"] == at:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", dying)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_leaves_what_the_design_promises(make_run, console, tmp_path, metrics):
    run = make_run("whole", "balance.batch_aux=0.01", "balance.z_loss=0.001", "balance.sequence_aux=0.01")
    assert loop.train(run, console=console) == 0
    folder = tmp_path / "whole"
    assert names(folder) == ["step-4", "step-6"]
    assert any((folder / "tensorboard").iterdir())
    saved = tomllib.loads((folder / "run.toml").read_text())
    assert saved["train"]["lr"] == 1e-2 and saved["layout"]["ep"] == 1
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["loss"] == pytest.approx(math.log(257), rel=0.02), "small random logits give the uniform loss"
    assert rows[-1]["loss"] < rows[0]["loss"]
    coefficients = {"batch_aux": 0.01, "z": 0.001, "sequence_aux": 0.01}
    for row in rows:
        expected = row["loss"] + sum(coefficients[name] * value for name, value in row["loss_parts"].items())
        assert row["total_loss"] == pytest.approx(expected, rel=1e-5)
        assert row["loss_parts"].keys() == coefficients.keys()
        assert set(row["expert_load"]) == {"0", "1"} and row["dropped_tokens"] == 0
        for layer, shares in row["expert_load"].items():
            assert sum(shares) == pytest.approx(1, abs=1e-5)
            assert row["load_max_over_mean"][layer] == pytest.approx(max(shares) * 4, abs=1e-4)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        phases = row["seconds_by_phase"]
        assert row["seconds"] == pytest.approx(
            sum(phases.values()) - phases.get("eval", 0) - phases.get("checkpoint", 0), rel=1e-3
        )
        assert row["matmul_share"] > 0 and row["peak_memory_bytes"] > 0
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert rows[5]["validation_bits_per_byte"] > 0
    assert sum(row["tokens"] for row in rows) == rows[-1]["total_tokens"]
    out = console.file.getvalue()
    assert "step 6/6" in out and "held-out loss" in out and out.count("Done") == 1


@pytest.mark.parametrize(
    ("name", "sets", "model", "deaths"),
    [
        ("fp32", ["balance.global_aux=0.01"], None, (1, 3, 4, 6)),
        ("bf16", ["train.dtype='bf16'", "balance.bias_update=0.01", "layout.micro_batch=1"], None, (3, 4)),
        ("sampling_router", ["data.document_mask=false", "train.schedule='wsd'"], PHI, (3, 6)),
    ],
)
def test_resume_is_bit_exact_wherever_the_process_dies(
    name, sets, model, deaths, make_run, console, tmp_path, monkeypatch, assert_same_run
):
    assert loop.train(make_run("straight", *sets, model=model), console=console) == 0
    for at in deaths:
        run = make_run(f"died_in_{at}", *sets, model=model)
        with monkeypatch.context() as patch:
            crash_in_step(patch, at)
            with pytest.raises(Crash):
                loop.train(run, console=console)
        torch.manual_seed(at)
        assert loop.train(run, resume=True, console=console) == 0
        assert_same_run(tmp_path / f"died_in_{at}", tmp_path / "straight")


OFFLOAD = "layout.offload=['activations','optimizer']"


@pytest.mark.long
@pytest.mark.parametrize("sets", [["train.dtype='bf16'"], []])
def test_a_run_goes_on_bit_for_bit_with_and_without_host_memory(
    sets, make_run, console, tmp_path, monkeypatch, assert_same_run
):
    assert loop.train(make_run("straight", *sets), console=console) == 0
    with_it = [OFFLOAD, *(["train.master='split'"] if sets else [])]
    for name, before, after in (("there", with_it, with_it), ("back", with_it, []), ("away", [], with_it)):
        with monkeypatch.context() as patch:
            crash_in_step(patch, 4)
            with pytest.raises(Crash):
                loop.train(make_run(name, *sets, *before), console=console)
        assert loop.train(make_run(name, *sets, *after), resume=True, console=console) == 0
        assert_same_run(tmp_path / name, tmp_path / "straight")


def test_a_run_with_bf16_moments_says_so(make_run, console, tmp_path, metrics):
    assert loop.train(make_run("rough", "train.moment_dtype='bf16'", "train.steps=3"), console=console) == 0
    assert "moments are kept in bf16" in console.file.getvalue()
    assert [row["moment_dtype"] for row in metrics(tmp_path / "rough")] == ["bf16"] * 3


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_saves_and_exits_with_3(
    name, make_run, console, tmp_path, monkeypatch, metrics, assert_same_run
):
    assert loop.train(make_run("straight"), console=console) == 0
    run = make_run("stopped")
    real = loop.train_step

    def interrupted(*args, **kwargs):
        if kwargs["step"] == 3:
            os.kill(os.getpid(), getattr(signal, name))
        return real(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        assert loop.train(run, console=console) == 3
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert [row["step"] for row in metrics(tmp_path / "stopped")] == [1, 2, 3]
    assert names(tmp_path / "stopped") == ["step-2", "step-3"]
    assert name in console.file.getvalue()
    assert loop.train(run, resume=True, console=console) == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"The disk is full: .*step-2.*--resume", 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), r"Memory ran out .*most went to .*predicted", 1),
    ],
)
def test_running_out_of_room_is_a_sentence_and_loses_nothing(
    error, expected, code, make_run, console, tmp_path, monkeypatch, assert_same_run
):
    assert loop.train(make_run("straight"), console=console) == 0
    run = make_run("narrow")
    real = loop.MetricsFile.write

    def write(self, row):
        if row["step"] == 4:
            raise error
        real(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(loop.MetricsFile, "write", write)
        with pytest.raises(MoesaicError, match=expected) as caught:
            loop.train(run, console=console)
    assert caught.value.exit_code == code
    assert loop.train(run, resume=True, console=console) == 0
    assert_same_run(tmp_path / "narrow", tmp_path / "straight")


def test_a_run_can_be_lengthened_and_what_changed_is_said(make_run, console, tmp_path, metrics):
    constant = "train.schedule='constant'"
    assert loop.train(make_run("long", constant), console=console) == 0
    assert loop.train(make_run("long", constant, "train.steps=8"), resume=True, console=console) == 0
    assert [row["step"] for row in metrics(tmp_path / "long")] == list(range(1, 9))
    assert "train.steps was 6 when step-6 was written and is 8 now" in console.file.getvalue()


def test_a_run_cannot_be_shortened_below_what_it_has_done(make_run, console, tmp_path):
    loop.train(make_run("shortened", "train.steps=4"), console=console)
    before = (tmp_path / "shortened" / "run.toml").read_text()
    with pytest.raises(MoesaicError, match=r"step-4 was written after step 4, beyond train\.steps = 3"):
        loop.train(make_run("shortened", "train.steps=3"), resume=True, console=console)
    assert (tmp_path / "shortened" / "run.toml").read_text() == before


def test_other_tokens_and_another_number_of_threads_are_said(make_run, console, tmp_path, text_file):
    text = tmp_path / "text.jsonl"
    text.write_text(text_file.read_text())
    sets = (f"data.path='{text}'", "train.steps=2", "train.warmup_steps=1")
    assert loop.train(make_run("run", *sets), console=console) == 0
    assert loop.train(make_run("run", *sets), resume=True, console=console) == 0
    assert "has changed" not in console.file.getvalue() and "last bits" not in console.file.getvalue()
    text.write_text(text.read_text() + '\n{"text": "one more"}\n')
    assert loop.train(make_run("run", *sets, "train.threads=2"), resume=True, console=console) == 0
    said = console.file.getvalue()
    assert "what data.path names has changed" in said
    assert "step-2 was computed with 1 threads and the run goes on with 2" in said


def test_a_run_goes_on_on_another_kind_of_device(make_run, console, monkeypatch):
    sets = ("train.steps=2", "train.warmup_steps=1")
    assert loop.train(make_run("run", *sets), console=console) == 0
    real = Device.rng_state
    with monkeypatch.context() as patch:
        patch.setattr(Device, "rng_state", lambda self: real(self) | {"cuda": torch.zeros(16, dtype=torch.uint8)})
        assert loop.train(make_run("run", *sets), resume=True, console=console) == 0
    assert "another kind of device: cuda draws anew" in console.file.getvalue()


def test_resuming_a_finished_run_changes_nothing(make_run, console, tmp_path, metrics):
    run = make_run("finished")
    assert loop.train(run, console=console) == 0
    before = (tmp_path / "finished" / "metrics.jsonl").read_text()
    assert loop.train(run, resume=True, console=console) == 0
    assert (tmp_path / "finished" / "metrics.jsonl").read_text() == before


def test_a_second_run_does_not_overwrite_the_first(make_run, console):
    run = make_run("once", "train.steps=1", "train.warmup_steps=0")
    assert loop.train(run, console=console) == 0
    with pytest.raises(MoesaicError, match=r"already holds a run .*--resume") as caught:
        loop.train(run, console=console)
    assert caught.value.exit_code == 2


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(make_run, console):
    assert loop.train(make_run("other", "train.steps=1", "train.warmup_steps=0"), console=console) == 0
    with pytest.raises(MoesaicError, match=r"another model: layers\.0\.moe\.router\.experts is 4 .* and 8 here"):
        loop.train(make_run("other", "model.num_local_experts=8"), resume=True, console=console)


def test_a_damaged_checkpoint_is_passed_over_and_said(make_run, console, tmp_path, assert_same_run):
    assert loop.train(make_run("straight"), console=console) == 0
    run = make_run("damaged")
    assert loop.train(run, console=console) == 0
    data = next((tmp_path / "damaged" / "checkpoints" / "step-6").glob("*.distcp"))
    with open(data, "r+b") as file:
        file.truncate(data.stat().st_size // 2)
    assert loop.train(run, resume=True, console=console) == 0
    out = console.file.getvalue()
    assert "step-6 is not a whole checkpoint" in out and "Going on after step 4" in out
    assert_same_run(tmp_path / "damaged", tmp_path / "straight")


def test_a_torn_last_line_of_the_metrics_is_dropped_on_resume(make_run, console, tmp_path, metrics):
    assert loop.train(make_run("torn"), console=console) == 0
    with open(tmp_path / "torn" / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert loop.train(make_run("torn", "train.steps=7"), resume=True, console=console) == 0
    assert [row["step"] for row in metrics(tmp_path / "torn")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_non_finite_loss_stops_with_4_names_the_module_and_keeps_the_checkpoint(
    make_run, console, tmp_path, monkeypatch, metrics
):
    run = make_run("nan")
    real = loop.train_step

    def poisoned(decoder, *args, **kwargs):
        if kwargs["step"] == 4:
            with torch.no_grad():
                decoder.layers[1].moe.experts.down.fill_(float("nan"))
        return real(decoder, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(MoesaicError, match=r"Step 4: the loss is nan.*`layers\.1\.moe\.experts`") as caught:
        loop.train(run, console=console)
    assert caught.value.exit_code == 4
    assert "step-2" in str(caught.value)
    assert [row["step"] for row in metrics(tmp_path / "nan")] == [1, 2, 3]
    assert Checkpoints(tmp_path / "nan" / "checkpoints", 0).newest()[0].name == "step-2"
    monkeypatch.setattr(loop, "train_step", real)
    assert loop.train(run, resume=True, console=console) == 0


@pytest.mark.parametrize("steps", ["1", "4"])
def test_weights_that_an_update_broke_are_not_saved(make_run, console, tmp_path, steps):
    run = make_run("broken", "train.lr=1e38", "train.weight_decay=1e38", "train.warmup_steps=0", f"train.steps={steps}",
                   "train.checkpoint_every=1", "train.keep_checkpoints=1")  # fmt: skip
    with pytest.raises(
        MoesaicError, match=r"Step 1: after its update the weights `\S+` hold \w+\. No checkpoint"
    ) as caught:
        loop.train(run, console=console)
    assert caught.value.exit_code == 4
    assert Checkpoints(tmp_path / "broken" / "checkpoints", 0).all() == []


def test_a_model_beyond_the_memory_is_refused_before_it_is_made(make_run, console):
    run = make_run("huge", "model.num_local_experts=1000000000")
    with pytest.raises(MoesaicError, match=r"parameters, which with gradients .* take [\d,.]+ GiB, and .* are free"):
        loop.train(run, console=console)


def test_a_diverging_run_stops_with_4(make_run, console):
    run = make_run("diverging", "train.lr=1e38", "train.clip=0", "train.warmup_steps=0")
    with pytest.raises(MoesaicError, match="Step 2") as caught:
        loop.train(run, console=console)
    assert caught.value.exit_code == 4


def test_aux_loss_free_bias_moves_and_is_saved(make_run, console, tmp_path, tensors):
    assert loop.train(make_run("bias", "balance.bias_update=0.5", "train.steps=5"), console=console) == 0
    bias_E = tensors(tmp_path / "bias" / "checkpoints" / "step-5")["model.layers.1.moe.router.select_bias"]
    assert bias_E.dtype == torch.float32 and bias_E.abs().max() > 0
    steps_E = bias_E / 0.5
    assert torch.equal(steps_E, steps_E.round()), "every step moves a bias by the rate or not at all"
    decoder = load_model_checkpoint(tmp_path / "bias")
    assert torch.equal(decoder.layers[1].moe.router.select_bias, bias_E)


def test_balancing_by_bias_can_be_turned_on_and_off_between_resumptions(make_run, console, tmp_path, tensors):
    def go(steps, rate):
        sets = (f"train.steps={steps}", f"balance.bias_update={rate}", "train.schedule='constant'")
        assert loop.train(make_run("switched", *sets), resume=True, console=console) == 0
        return tensors(tmp_path / "switched" / "checkpoints" / f"step-{steps}")

    name = "model.layers.0.moe.router.select_bias"
    assert name not in go(3, 0.0)
    biased = go(4, 0.25)[name]
    assert sorted(set(biased.abs().tolist())) in ([0.25], [0.0, 0.25])
    assert torch.equal(go(5, 0.0)[name], biased), "learned biases stay in force"
    assert "no selection biases: they start from zero" in console.file.getvalue()


def test_a_run_starts_from_hugging_face_weights(make_run, console, tmp_path, metrics):
    from moesaic.train.exchange import export_checkpoint

    assert loop.train(make_run("first"), console=console) == 0
    export_checkpoint(tmp_path / "first", tmp_path / "hf")
    started = {"hf": str(tmp_path / "hf"), "init": "hf"}
    assert loop.train(make_run("second", "train.warmup_steps=0", model=started), console=console) == 0
    assert metrics(tmp_path / "second")[0]["loss"] < metrics(tmp_path / "first")[2]["loss"]


def test_more_than_one_process_is_refused(make_run, console):
    with pytest.raises(MoesaicError, match="processes"):
        loop.train(make_run("many", "layout.ep=2"), console=console)
