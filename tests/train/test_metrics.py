"""The files and lines that a run leaves to look at."""

from __future__ import annotations

import io
import json

from rich.console import Console

from moesaic.train.metrics import Display, MetricsFile, Stopwatch


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_after_the_resumed_step_go_and_each_step_stands_once(tmp_path):
    with MetricsFile(tmp_path, 0) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step, "loss": 1.0 / step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss"')
    with MetricsFile(tmp_path, 3) as metrics:
        assert steps_in(tmp_path) == [1, 2, 3]
        metrics.write({"step": 4, "loss": 0.0})
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_tensorboard_has_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsFile(tmp_path, 0) as metrics:
        for step in (1, 2):
            metrics.write({"step": step, "loss": 2.0 / step, "dead_experts": {"3": step}, "expert_load": {"3": [0.5]}})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "dead_experts/3"}
    assert [event.value for event in events.Scalars("loss")] == [2.0, 1.0]


def test_phases_add_up_and_never_exceed_the_step():
    clock = Stopwatch()
    for _ in range(3):
        with clock.phase("forward"):
            sum(range(1000))
    with clock.phase("backward"):
        pass
    assert set(clock.phases) == {"forward", "backward"}
    assert 0 < sum(clock.phases.values()) <= clock.total()
    clock.restart()
    assert clock.phases == {}


def test_plain_lines_without_a_terminal_and_a_log(tmp_path):
    console = Console(file=io.StringIO(), width=60)
    row = {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 1234.0,
        "model_flops_per_second": 5e9,
        "validation_loss": 2.25,
    }
    with Display(console, tmp_path, 10, 0) as display:
        display.say("[bold] is not markup here")
        display.step(row)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "[bold] is not markup here"
    assert lines[1].startswith("step 3/10  loss 2.5000") and "1,234 tok/s" in lines[1] and "left 0:" in lines[1]
    assert lines[2] == "step 3: held-out loss 2.2500 nats"
    assert "[bold] is not markup here" in (tmp_path / "run.log").read_text()
