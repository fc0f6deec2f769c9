"""What a run leaves to look at: metrics.jsonl, TensorBoard, run.log, and lines or a bar on the terminal.

One line of metrics.jsonl describes one step:

    step                      1, 2, …
    loss                      mean cross-entropy per trained token, nats, before auxiliary terms
    total_loss                what backward ran on
    loss_parts                {name: value}: auxiliary terms without their coefficients; 1 is perfect balance
    grad_norm                 2-norm of all gradients, before clipping
    lr
    tokens                    trained tokens of this step
    total_tokens              trained tokens since the run began
    seconds                   wall time of training this step: all phases but checkpoint and eval
    elapsed                   wall time since the run began, everything counted, interruptions left out
    tokens_per_second         tokens / seconds
    seconds_by_phase          {data, forward, backward, optimizer, other; checkpoint: saving before this step; eval}
    model_flops_per_second    training FLOPs of the model for the step's tokens (filling left out) / seconds; attention
                              is counted over whole sequences, also where documents in them are masked
    matmul_share              that over the measured rate of a plain matmul on this machine
    load_max_over_mean        {layer: tokens of the busiest expert / mean}
    dead_experts              {layer: experts without a token in this step}
    dropped_tokens            always 0: no expert has a capacity
    expert_load               {layer: [share of the routed tokens per expert]}
    peak_memory_bytes
    benchmark_only            [what was forced on the routers], where something was
    moment_dtype              "bf16", where AdamW's moments are kept in it, which changes results a little
    compression               [what travelled with fewer bits, which changes results a little], where something did
    validation_loss           nats per token, in steps with an evaluation
    validation_bits_per_byte

`layer` is a decimal string. A resumed run removes the lines after the step that it goes on from, so that each step
stands once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moesaic.mesh.lanes import own_seconds

Row = dict[str, Any]


class Stopwatch:
    """Wall time of one step by phase."""

    def __init__(self, synchronize: Any = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self.also: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
        """Told of every phase: a meter of something else than time."""
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._begin = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to phase `name`: with work queued on the device, without what another lane did."""
        begin = own_seconds()
        try:
            with contextlib.nullcontext() if self.also is None else self.also(name):
                yield
            self._synchronize()
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + own_seconds() - begin

    def total(self) -> float:
        """Seconds since `restart`."""
        return time.perf_counter() - self._begin


class MetricsFile:
    """metrics.jsonl, and the same numbers for TensorBoard where it is installed.

    `last_step` is the step the run goes on from: later lines of an interrupted run are removed, and a line that a
    crash cut off.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        _keep_lines_until(self.path, last_step)
        self._file = open(self.path, "a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", last_step)
        self.has_tensorboard = self._board is not None

    def write(self, row: Row) -> None:
        """Append one line; it is in the hands of the operating system on return."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(row):
                self._board.add_scalar(name, value, row["step"])
            self._board.flush()

    def sync(self) -> None:
        """Force all lines to the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class NoMetrics:
    """In the place of `MetricsFile` on ranks that write nothing."""

    has_tensorboard = True

    def write(self, row: Row) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _keep_lines_until(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = []
    for line in text.splitlines():
        try:
            if int(json.loads(line)["step"]) <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    if "".join(kept) != text:
        temporary = path.with_name(".tmp-" + path.name)
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)


def _tensorboard(folder: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=last_step + 1 if last_step else None)  # type: ignore[no-untyped-call]


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name in ("step", "expert_load", "benchmark_only", "compression", "moment_dtype"):
            continue
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", number) for key, number in value.items())
        elif value is not None:
            yield name, value


class Display:
    """The terminal: a bar with the remaining time on a terminal, plain lines elsewhere; everything said is also
    appended to the run's run.log."""

    def __init__(self, console: Console, folder: Path, steps: int, last_step: int) -> None:
        self._console = console
        self._log = open(folder / "run.log", "a", encoding="utf-8")
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = steps
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
                transient=False,
            )
            self._task = self._bar.add_task("train", total=steps, completed=last_step, numbers="")
        self._first = last_step
        self._begin = time.perf_counter()

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is not None:
            self._record(f"Ended by {type(error).__name__}: {error}")
        self._log.close()

    def say(self, text: str) -> None:
        """One sentence for the user and for the record."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._record(text)

    def _record(self, text: str) -> None:
        self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")
        self._log.flush()

    def step(self, row: Row) -> None:
        """Show a step's numbers."""
        numbers = (
            f"loss {row['loss']:.4f}  grad {row['grad_norm']:.2f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second']:,.0f} tok/s  {row['model_flops_per_second'] / 1e9:.1f} GFLOP/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], numbers=numbers)
        else:
            done = row["step"] - self._first
            left = (time.perf_counter() - self._begin) / max(1, done) * (self._steps - row["step"])
            line = f"step {row['step']}/{self._steps}  {numbers}  left {_duration(left)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if "validation_loss" in row:
            bits = row.get("validation_bits_per_byte")
            per_byte = "" if bits is None else f", {bits:.3f} bits per byte"
            self.say(f"step {row['step']}: held-out loss {row['validation_loss']:.4f} nats{per_byte}")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class NoDisplay:
    """In the place of `Display` on ranks that say nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, row: Row) -> None:
        """Nothing."""

    def __enter__(self) -> NoDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass
