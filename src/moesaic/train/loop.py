"""The training loop, in one process.

Reads top to bottom: make the data, the model and the optimizer; go back to the last checkpoint if asked; then step,
measure, evaluate, save, until the steps are done or somebody asks to stop. Everything a step depends on is either in
the checkpoint or a function of the run file and the step's number, so an interrupted run continues bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moesaic.cost.counts import flops_per_token
from moesaic.mesh.device import bf16_is_native, device
from moesaic.model.decoder import Decoder
from moesaic.model.losses import LossWeights
from moesaic.spec.layout import written
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec, require_single_process, resolve_balance
from moesaic.train import checkpoint, process
from moesaic.train.balancing import Load
from moesaic.train.checkpoint import CheckpointError, Checkpoints
from moesaic.train.data import build_data
from moesaic.train.folder import (
    RunError,
    cache_folder,
    changes,
    last_checkpoint,
    lock,
    out_of_room,
    refuse_to_overwrite,
    write_resolved,
)
from moesaic.train.metrics import Display, MetricsFile, Row, Stopwatch
from moesaic.train.nonfinite import NonFiniteError, not_finite
from moesaic.train.optimizer import Optimizer
from moesaic.train.schedule import learning_rate
from moesaic.train.signals import StopRequest
from moesaic.train.start import initial_decoder
from moesaic.train.step import StepResult, evaluate, train_step

DONE, STOPPED = 0, 3


def train(run: RunSpec, *, resume: bool = False, console: Console | None = None) -> int:
    """Train as `run` says, into the folder `run.run.dir`. Returns 0 when all steps are done, 3 when a signal stopped
    it after saving.

    `resume` goes on from the newest valid checkpoint of that folder, or from the start if it has none. Raises
    MoesaicError for bad input (exit code 2), among them a folder that already holds a run; NonFiniteError (4);
    CheckpointError when a checkpoint cannot be written.
    """
    refuse_to_overwrite(Path(run.run.dir), resume)
    try:
        with lock(Path(run.run.dir)):
            return _train(run, resume, console or Console())
    except (OSError, RuntimeError, MemoryError) as error:
        sentence = out_of_room(error, run)
        if sentence is None:
            raise
        raise RunError(sentence) from error


def _train(run: RunSpec, resume: bool, console: Console) -> int:
    folder = Path(run.run.dir)
    keys = run.train

    # What is asked for, checked before anything is made.
    require_single_process(run)
    spec = run.model_spec()
    run, notes = resolve_balance(run, spec)
    notes += spec.notes
    threads = process.set_threads(keys.threads)
    if keys.tune_malloc and not process.tune_malloc():
        notes.append("train.tune_malloc has no effect: this C library has no mallopt.")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[keys.dtype]
    if dtype == torch.bfloat16 and device().kind == "cpu" and not bf16_is_native():
        notes.append("This processor has no bf16 products: they are computed in fp32 and rounded, no faster than fp32.")
    # Measured before anything is seeded, because the measurement draws random numbers.
    matmul_flops = device().matmul_flops(dtype)

    data = build_data(run, spec.vocab, cache_folder(), console)
    notes += data.notices
    device().manual_seed(keys.seed)
    decoder = initial_decoder(run, spec, dtype, notes)
    if run.balance.bias_update:
        decoder.enable_select_bias()
    optimizer = Optimizer(
        decoder, dtype=dtype, beta1=keys.beta1, beta2=keys.beta2, eps=keys.eps, weight_decay=keys.weight_decay
    )
    weights = LossWeights(
        z=run.balance.z_loss,
        batch_aux=run.balance.batch_aux,
        sequence_aux=run.balance.sequence_aux,
        global_aux=run.balance.global_aux,
        mtp=keys.mtp_weight,
    )
    flops = flops_per_token(spec, keys.seq_len, mtp=keys.mtp_weight > 0).total
    held_out_sequences = keys.eval_batches * run.layout.micro_batch or None

    # Where it goes on from.
    checkpoints = Checkpoints(folder / "checkpoints", keys.keep_checkpoints)
    checkpoints.folder.mkdir(parents=True, exist_ok=True)
    checkpoints.remove_leftovers()
    step, total_tokens, elapsed = 0, 0, 0.0
    saved_step: int | None = None
    if resume:
        newest, passed_over = checkpoints.newest()
        notes += passed_over
        if newest is None:
            notes.append(f"There is no checkpoint in {checkpoints.folder} yet: starting from step 0.")
        else:
            notes += changes(newest, run)
            progress = _restore(newest, spec, decoder, optimizer, notes)
            step, total_tokens, elapsed = progress["step"], progress["tokens"], progress["seconds"]
            saved_step = step
            if step > keys.steps:
                raise RunError(
                    f"{newest} was written after step {step}, beyond train.steps = {keys.steps}: raise train.steps to "
                    f"{step} or more, or choose another folder with --set run.dir=…."
                )
            notes += _other_conditions(newest, progress, data.content, threads)
            notes.append(f"Going on after step {step} from {newest}.")
    write_resolved(folder, run)
    if data.tokenizer is not None:
        data.tokenizer.save(folder / "tokenizer")

    metrics = MetricsFile(folder, step)
    if not metrics.has_tensorboard:
        notes.append("tensorboard is not installed, so there are no TensorBoard files.")

    def require_finite_weights() -> None:
        culprit = not_finite({**decoder.state_dict(), **optimizer.masters})
        if culprit:
            checkpoints.wait()
            raise NonFiniteError(f"Step {step}: after its update {culprit}. {last_checkpoint(checkpoints)}")

    def save() -> None:
        # An update can overflow though loss and gradients were finite; such weights must not push out good ones.
        require_finite_weights()
        # The line of a saved step must be on the disk first: a resumed run does not write it again.
        metrics.sync()
        texts = checkpoint.describe(
            spec, dtype, step=step, tokens=total_tokens, seconds=elapsed, data=data.content, threads=threads
        )
        checkpoints.save(step, _state(decoder, optimizer), texts | {"run.toml": run.to_toml()})

    with metrics, Display(console, folder, keys.steps, step) as display, StopRequest(display.say) as stop:
        display.say(_headline(run, spec, decoder, threads, matmul_flops))
        for note in notes:
            display.say(note)
        # The clock restarts when a step's line is written, so a checkpoint's time stands in the line of the next step.
        clock = Stopwatch(device().synchronize)

        while step < keys.steps and not stop.requested:
            step += 1
            with clock.phase("data"):
                batches = data.train.batches(step - 1)
            lr = learning_rate(step, keys)
            try:
                result = train_step(
                    decoder,
                    optimizer,
                    batches,
                    step=step,
                    lr=lr,
                    weights=weights,
                    clip=keys.clip,
                    bias_update=run.balance.bias_update,
                    clock=clock,
                )
            except NonFiniteError as error:
                checkpoints.wait()
                raise NonFiniteError(f"{error} {last_checkpoint(checkpoints)}") from None
            total_tokens += result.tokens

            held_out: dict[str, float] = {}
            last = step == keys.steps
            if data.validation is not None and (last or (keys.eval_every and step % keys.eval_every == 0)):
                with clock.phase("eval"):
                    require_finite_weights()
                    held_out = evaluate(decoder, data.validation.once(held_out_sequences))

            elapsed += clock.total()
            if step % keys.log_every == 0 or last or held_out:
                row = _row(step, lr, result, clock, elapsed, total_tokens, flops, matmul_flops)
                row.update(held_out)
                metrics.write(row)
                display.step(row)
            clock.restart()

            checkpoints.check()
            if last or (keys.checkpoint_every and step % keys.checkpoint_every == 0):
                with clock.phase("checkpoint"):
                    save()
                saved_step = step

        if stop.requested and step < keys.steps:
            if saved_step != step:
                save()
            checkpoints.wait()
            display.say(f"Stopped by {stop.requested} after step {step}; saved. Go on with --resume.")
            return STOPPED
        checkpoints.wait()
        display.say(f"Done: {keys.steps} steps, {total_tokens:,} tokens. {last_checkpoint(checkpoints)}")
    return DONE


# ---------------------------------------------------------------- parts of the above


def _state(decoder: Decoder, optimizer: Optimizer) -> checkpoint.State:
    """Everything a step depends on, apart from the run file and the step's number: live tensors."""
    return {
        "model": checkpoint.model_state(decoder, dict(optimizer.masters)),
        "optimizer": optimizer.state(),
        "rng": device().rng_state(),
    }


def _restore(path: Path, spec: ModelSpec, decoder: Decoder, optimizer: Optimizer, notes: list[str]) -> dict[str, Any]:
    """Put the checkpoint at `path` into the model, the optimizer and the generators; returns trainer.json."""
    difference = checkpoint.first_difference(checkpoint.read_spec(path), spec)
    if difference is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {difference}. Change [model] back, or choose another run.dir."
        )
    progress = checkpoint.read_progress(path)
    saved = checkpoint.saved_names(path)
    if any(name.endswith(".select_bias") for name in saved):
        decoder.enable_select_bias()
    state = _state(decoder, optimizer)
    unsaved = [name for name in state["model"] if name.endswith(".select_bias") and f"model.{name}" not in saved]
    if unsaved:
        notes.append(f"{path} has no selection biases: they start from zero.")
    for name in unsaved:
        del state["model"][name]
    elsewhere = [name for name in state["rng"] if f"rng.{name}" not in saved]
    if elsewhere:
        notes.append(f"{path} was written on another kind of device: {', '.join(elsewhere)} draws anew from the seed.")
    for name in elsewhere:
        del state["rng"][name]
    checkpoint.read(path, state)
    optimizer.round_masters()
    device().set_rng_state(state["rng"])
    return progress


def _other_conditions(path: Path, progress: dict[str, Any], content: str, threads: int) -> list[str]:
    """A sentence for what keeps the run from going on bit for bit, though the run file is the same."""
    found = []
    if progress.get("data", content) != content:
        found.append(f"The tokens are not those that {path.name} was trained on: what data.path names has changed.")
    if progress.get("threads", threads) != threads:
        found.append(
            f"{path.name} was computed with {progress['threads']} threads and the run goes on with {threads}: sums in "
            "another order differ in their last bits."
        )
    return found


def _headline(run: RunSpec, spec: ModelSpec, decoder: Decoder, threads: int, matmul_flops: float) -> str:
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    keys = run.train
    return (
        f"{run.run.name}: {spec.name}, {parameters / 1e6:.1f} M parameters, {keys.steps} steps of "
        f"{keys.global_batch} × {keys.seq_len} tokens, {keys.dtype}, layout {written(run.layout, 1)}, on "
        f"{device().name} with {threads} thread{'s' if threads > 1 else ''} "
        f"({matmul_flops / 1e9:.0f} GFLOP/s in a plain matmul); results in {run.run.dir}"
    )


def _row(
    step: int,
    lr: float,
    result: StepResult,
    clock: Stopwatch,
    elapsed: float,
    total_tokens: int,
    flops_per_token: float,
    matmul_flops: float,
) -> Row:
    phases = dict(clock.phases)
    total = clock.total()
    seconds = total - phases.get("eval", 0.0) - phases.get("checkpoint", 0.0)
    phases["other"] = max(0.0, total - sum(phases.values()))
    rate = result.positions * flops_per_token / seconds
    load = Load.of(result.counts)
    return {
        "step": step,
        "loss": result.loss,
        "total_loss": result.total_loss,
        "loss_parts": result.parts,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens": result.tokens,
        "total_tokens": total_tokens,
        "seconds": seconds,
        "elapsed": elapsed,
        "tokens_per_second": result.tokens / seconds,
        "seconds_by_phase": phases,
        "model_flops_per_second": rate,
        "matmul_share": rate / matmul_flops,
        "load_max_over_mean": load.max_over_mean,
        "dead_experts": load.dead,
        "dropped_tokens": 0,
        "expert_load": load.shares,
        "peak_memory_bytes": device().peak_memory_bytes(),
    }
