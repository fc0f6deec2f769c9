"""The training loop, in one process or as one rank of several.

Reads top to bottom: make the data, the model and the optimizer; go back to the last checkpoint if asked; then step,
measure, evaluate, save, until the steps are done or somebody asks to stop. Everything a step depends on is either in
the checkpoint or a function of the run file and the step's number, so an interrupted run continues bit for bit.

All ranks go through the same steps and agree on when to stop, save and evaluate; rank 0 alone prints and writes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moesaic.cost.counts import flops_per_token, parameters
from moesaic.mesh.collectives import gather_counts, gather_objects
from moesaic.mesh.device import bf16_is_native, device
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import Mesh
from moesaic.model.losses import LossWeights
from moesaic.spec.model import ModelSpec
from moesaic.spec.run import RunSpec, resolve_balance
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
from moesaic.train.launch import Launch, join
from moesaic.train.metered import Metered
from moesaic.train.metrics import Display, MetricsFile, NoDisplay, NoMetrics, Row, Stopwatch
from moesaic.train.nonfinite import NonFiniteError, not_finite
from moesaic.train.routing_files import benchmark_only, forced_routing
from moesaic.train.schedule import learning_rate
from moesaic.train.sharded_state import rng_to_read
from moesaic.train.signals import StopRequest
from moesaic.train.start import initial_decoder
from moesaic.train.state import Host, TrainState
from moesaic.train.step import StepResult, evaluate, train_step

DONE, STOPPED = 0, 3


def train(run: RunSpec, *, resume: bool = False, console: Console | None = None) -> int:
    """Train as `run` says, into the folder `run.run.dir`. Returns 0 when all steps are done, 3 when a signal stopped
    it after saving.

    `resume` goes on from the newest valid checkpoint of that folder, or from the start if it has none. Raises
    MoesaicError for bad input (exit code 2), among them a folder that already holds a run; NonFiniteError (4);
    CheckpointError when a checkpoint cannot be written.
    """
    folder = Path(run.run.dir)
    spec = run.model_spec()
    launch = join(run, spec)
    resume = resume or launch.restarts > 0
    try:
        with contextlib.ExitStack() as held:

            def take() -> None:
                refuse_to_overwrite(folder, resume)
                held.enter_context(lock(folder))

            launch.first("the folder of the run", take)
            return _train(run, spec, launch, resume, console or Console())
    except (OSError, RuntimeError, MemoryError) as error:
        sentence = out_of_room(error, run)
        if sentence is None:
            raise
        raise RunError(sentence) from error


def _train(run: RunSpec, spec: ModelSpec, launch: Launch, resume: bool, console: Console) -> int:
    folder = Path(run.run.dir)
    keys, mesh, layout = run.train, launch.mesh, launch.layout

    # What is asked for, checked before anything is made.
    run, notes = resolve_balance(run, spec)
    notes += [*launch.notes, *spec.notes]
    if keys.tune_malloc and not process.tune_malloc():
        notes.append("train.tune_malloc has no effect: this C library has no mallopt.")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[keys.dtype]
    if dtype == torch.bfloat16 and device().kind == "cpu" and not bf16_is_native():
        notes.append("This processor has no bf16 products: they are computed in fp32 and rounded, no faster than fp32.")
    # Measured before anything is seeded, because the measurement draws random numbers.
    matmul_flops = device().matmul_flops(dtype)

    data = launch.leaders_first("the data", lambda: build_data(run, spec.vocab, cache_folder(), console))
    launch.agree({"the tokens of data.path (a hash)": data.content})
    notes += data.notices
    device().manual_seed(keys.seed)
    decoder = launch.settle("the model", lambda: initial_decoder(run, spec, dtype, notes, mesh))
    if run.balance.bias_update:
        decoder.enable_select_bias()
    state = TrainState.of(
        decoder,
        dtype,
        sharding=layout.sharding,
        replicas=layout.replicas,
        host=Host.of(layout, folder),
        moments={"fp32": torch.float32, "bf16": torch.bfloat16}[keys.moment_dtype],
        split_masters=keys.master == "split",
        beta1=keys.beta1,
        beta2=keys.beta2,
        eps=keys.eps,
        weight_decay=keys.weight_decay,
    )
    if layout.sharding != "none" and not state.sharding.is_on:
        notes.append(f'layout.sharding = "{layout.sharding}" has no effect: no two ranks hold the same parameters.')
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
    group = checkpoint_group(mesh, run.run.timeout_seconds)
    checkpoints = Checkpoints(folder / "checkpoints", keys.keep_checkpoints, group)
    launch.first("the folder of checkpoints", lambda: checkpoints.folder.mkdir(parents=True, exist_ok=True))
    checkpoints.remove_leftovers()
    step, total_tokens, elapsed = 0, 0, 0.0
    saved_step: int | None = None
    if resume:
        newest, passed_over = checkpoints.agreed_newest()
        notes += passed_over
        if newest is None:
            notes.append(f"There is no checkpoint in {checkpoints.folder} yet: starting from step 0.")
        else:
            notes += changes(newest, run)
            progress = _restore(newest, spec, state, group, notes)
            step, total_tokens, elapsed = progress["step"], progress["tokens"], progress["seconds"]
            saved_step = step
            if step > keys.steps:
                raise RunError(
                    f"{newest} was written after step {step}, beyond train.steps = {keys.steps}: raise train.steps to "
                    f"{step} or more, or choose another folder with --set run.dir=…."
                )
            notes += _other_conditions(newest, progress, data.content, launch.threads)
            notes.append(f"Going on after step {step} from {newest}.")
    forced = forced_routing(
        run, spec, decoder.routers(), first=launch.first, is_first=launch.is_first, resume=resume, notes=notes
    )
    labels = benchmark_only(run.balance)
    if keys.moment_dtype != "fp32":
        notes.append("AdamW's moments are kept in bf16, which changes results a little (train.moment_dtype).")
    compression = layout.compressed
    if compression:
        notes.append(f"Compressed, which changes results a little: {', '.join(compression)} (layout.compression).")
    if "dispatch" in set(layout.compression) - set(compression):
        notes.append("layout.compression 'dispatch' has no effect: with ep·etp = 1 no rows travel to experts.")
    if "gradients" in set(layout.compression) - set(compression):
        notes.append(
            "layout.compression 'gradients' has no effect: with dp·cp = 1 and edp = 1 no gradients are summed."
        )
    if "tensor" in layout.overlap and layout.tp == 1:
        notes.append("layout.overlap 'tensor' has no effect: with tp = 1 nothing travels between parts of a layer.")
    if "parameters" in layout.overlap and not state.sharding.is_on:
        notes.append("layout.overlap 'parameters' has no effect: no weights are sharded (layout.sharding, dp·cp, edp).")

    def begin_folder() -> None:
        write_resolved(folder, run)
        if data.tokenizer is not None:
            data.tokenizer.save(folder / "tokenizer")

    launch.first("the folder of the run", begin_folder)
    metrics = MetricsFile(folder, step) if launch.is_first else NoMetrics()
    if not metrics.has_tensorboard:
        notes.append("tensorboard is not installed, so there are no TensorBoard files.")

    def require_finite_weights() -> None:
        found = gather_objects(not_finite(state.tensors()), mesh.world)
        culprit = next((f"{each}{_on(rank, mesh)}" for rank, each in enumerate(found) if each), None)
        if culprit:
            checkpoints.wait()
            raise NonFiniteError(f"Step {step}: after its update {culprit}. {last_checkpoint(checkpoints)}")

    def save() -> None:
        # An update can overflow though loss and gradients were finite; such weights must not push out good ones.
        require_finite_weights()
        # The line of a saved step must be on the disk first: a resumed run does not write it again.
        metrics.sync()
        texts = checkpoint.describe(
            spec, dtype, step=step, tokens=total_tokens, seconds=elapsed, data=data.content, threads=launch.threads
        )
        checkpoints.save(step, state.saved(group), texts | {"run.toml": run.to_toml()})

    display_of = Display(console, folder, keys.steps, step) if launch.is_first else NoDisplay()
    # The clock restarts when a step's line is written, so a checkpoint's time stands in the line of the next step.
    clock = Stopwatch(device().synchronize)
    metered = Metered(run, spec, layout, mesh, state, clock)
    with metrics, display_of as display, StopRequest(display.say) as stop, metered:
        display.say(_headline(run, spec, launch, matmul_flops))
        for note in notes:
            display.say(note)
        clock.restart()
        while step < keys.steps and not launch.anyone(bool(stop.requested) or checkpoints.failed):
            step += 1
            metered.begin(step)
            with clock.phase("data"):
                batches = data.train.batches(step - 1, mesh.dp.rank, mesh.dp.size)
            lr = learning_rate(step, keys)
            try:
                result = train_step(
                    decoder,
                    state.optimizer,
                    batches,
                    step=step,
                    lr=lr,
                    weights=weights,
                    clip=keys.clip,
                    bias_update=run.balance.bias_update,
                    clock=clock,
                    sharding=state.sharding,
                    forced=forced,
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
                row = _row(step, lr, result, clock, elapsed, total_tokens, flops, matmul_flops * mesh.world.size, mesh)
                row.update(held_out)
                if labels:
                    row["benchmark_only"] = labels
                if keys.moment_dtype != "fp32":
                    row["moment_dtype"] = keys.moment_dtype
                if compression:
                    row["compression"] = list(compression)
                metrics.write(row)
                display.step(row)
            clock.restart()

            checkpoints.check()
            if last or (keys.checkpoint_every and step % keys.checkpoint_every == 0):
                with clock.phase("checkpoint"):
                    save()
                saved_step = step
            for line in metered.end():
                display.say(line)

        if step < keys.steps:
            # A failed write raises here, on all ranks.
            checkpoints.wait()
            if saved_step != step:
                save()
            checkpoints.wait()
            signal = stop.requested or "a signal to another rank"
            display.say(f"Stopped by {signal} after step {step}; saved. Go on with --resume.")
            return STOPPED
        checkpoints.wait()
        display.say(f"Done: {keys.steps} steps, {total_tokens:,} tokens. {last_checkpoint(checkpoints)}")
    return DONE


# ---------------------------------------------------------------- parts of the above


def checkpoint_group(mesh: Mesh, timeout_seconds: float) -> Group:
    """All ranks, over the CPU, for the threads that write checkpoints beside training."""
    if mesh.world.size == 1:
        return Group.single("checkpoint")
    limit = max(timeout_seconds, _SLOWEST_DISK_SECONDS)
    return Group.create("checkpoint", [mesh.world.ranks], limit, channel="checkpoint", backend="gloo")


_SLOWEST_DISK_SECONDS = 3600.0
"""How long ranks wait for the slowest of them to write its part of a checkpoint. A dead rank is noticed at once."""


def _restore(path: Path, spec: ModelSpec, state: TrainState, group: Group, notes: list[str]) -> dict[str, Any]:
    """Put the checkpoint at `path` into the model, the optimizer and the generators; returns trainer.json."""
    difference = checkpoint.first_difference(checkpoint.read_spec(path), spec)
    if difference is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {difference}. Change [model] back, or choose another run.dir."
        )
    progress = checkpoint.read_progress(path)
    saved = checkpoint.saved_names(path)
    if any(name.endswith(".select_bias") for name in saved):
        state.decoder.enable_select_bias()
    wanted = state.saved(group)
    unsaved = [name for name in wanted["model"] if name.endswith(".select_bias") and f"model.{name}" not in saved]
    if unsaved:
        notes.append(f"{path} has no selection biases: they start from zero.")
    for name in unsaved:
        del wanted["model"][name]
    generators = device().rng_state()
    wanted["rng"], more = rng_to_read(path, saved, generators, group)
    notes += more
    checkpoint.read(path, wanted, group)
    state.take(wanted)
    device().set_rng_state(generators)
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


def _on(rank: int, mesh: Mesh) -> str:
    return f" on rank {rank}" if mesh.world.size > 1 else ""


def _headline(run: RunSpec, spec: ModelSpec, launch: Launch, matmul_flops: float) -> str:
    keys, world = run.train, launch.mesh.world.size
    where = f"{device().name} with {launch.threads} thread{'s' if launch.threads > 1 else ''}"
    counts = parameters(spec)
    return (
        f"{run.run.name}: {spec.name}, {(counts.total + counts.mtp) / 1e6:.1f} M parameters, {keys.steps} steps of "
        f"{keys.global_batch} × {keys.seq_len} tokens, {keys.dtype}, layout {launch.layout}, on "
        f"{where if world == 1 else f'{world} ranks, each on {where}'} "
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
    mesh: Mesh,
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
        "peak_memory_bytes": max(gather_counts(device().peak_memory_bytes(), mesh.world)),
    }
