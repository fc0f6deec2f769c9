"""A timeline as a Chrome trace and as a chart."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from moesaic.cost.layer_timeline import simulate_layers
from moesaic.cost.pipeline_timeline import simulate_step
from moesaic.cost.timeline import STREAMS, Event, Piece, Timeline
from moesaic.report.read import ReportError
from moesaic.report.timeline_chart import LEFT, MOST_HINTS, RIGHT, seconds_text, timeline_svg
from moesaic.report.trace import chrome_trace, kind, write_trace


def step(pp: int = 4, micros: int = 8, **more: Any) -> Timeline:
    return simulate_step([1e-3] * pp, [1e-3] * pp, [1e-3] * pp, 1e-4, "zero_bubble", micros, **more)


def test_trace_holds_every_event_in_microseconds() -> None:
    timeline = step(gradient_seconds=[2e-3] * 4, optimizer_seconds=1e-3)
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(boxes) == len(timeline.events)
    for box, event in zip(boxes, timeline.events, strict=True):
        assert (box["pid"], STREAMS[box["tid"]], box["name"]) == event[:3]
        assert box["ts"] == pytest.approx(event.start * 1e6)
        assert box["dur"] == pytest.approx(event.seconds * 1e6)
    assert max(box["ts"] + box["dur"] for box in boxes) == pytest.approx(timeline.makespan * 1e6)
    assert trace["otherData"]["seconds"] == timeline.makespan


def test_trace_names_every_rank_and_stream() -> None:
    timeline = step()
    named = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "M"]
    ranks = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert ranks == {rank: f"pipeline rank {rank}" for rank in range(4)}
    threads = {(event["pid"], STREAMS[event["tid"]]) for event in named if event["name"] == "thread_name"}
    assert threads == set(timeline.streams)


def test_kinds_of_events() -> None:
    assert kind("forward 3 · stage 1") == "forward"
    assert kind("forward 3 · stage 1 | backward 2 · stage 1") == "pair"
    assert kind("optimizer") == "optimizer"


def test_trace_goes_to_a_file(tmp_path: Path) -> None:
    write_trace(step(), tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    with pytest.raises(ReportError, match="could not be written"):
        write_trace(step(), tmp_path / "no folder" / "step.json")


def svg(timeline: Timeline, **more: Any) -> ET.Element:
    found = re.search(r"<svg.*</svg>", timeline_svg(timeline, **more), re.DOTALL)
    assert found
    return ET.fromstring(found[0])


def test_chart_draws_every_event_to_scale() -> None:
    timeline = step()
    groups = svg(timeline, width=1000).findall("g")
    assert len(groups) == len(timeline.events)
    scale = (1000 - LEFT - RIGHT) / timeline.makespan
    for event in timeline.events:
        hint = f"{event.name}\n"
        boxes = [g.find("rect") for g in groups if (g.findtext("title") or "").startswith(hint)]
        assert any(box is not None and abs(float(box.get("x", 0)) - LEFT - event.start * scale) < 0.01 for box in boxes)


def test_chart_of_many_events_has_a_row_each_and_stays_small() -> None:
    timeline = simulate_step([1.0] * 64, [1.0] * 64, [1.0] * 64, 0.1, "interleaved", 64, virtual_stages=4)
    assert len(timeline.events) > MOST_HINTS
    text = timeline_svg(timeline)
    groups = svg(timeline).findall("g")
    assert len(groups) == len(timeline.streams)
    assert "busy for" in (groups[0].findtext("title") or "")
    assert len(text) < 600_000


def test_chart_knows_its_kinds_and_escapes_the_others() -> None:
    layer = [Piece("attention", "compute", 1.0, 1.0, 1.0), Piece("dispatch<&>", "network", 1.0, 1.0)]
    text = timeline_svg(simulate_layers([layer], ()))
    assert "gradients of weights" in text and "sending" not in text
    assert "dispatch&lt;&amp;&gt;" in text and "dispatch<&>" not in text
    assert "other" in timeline_svg(Timeline((Event(0, "compute", "strange", 0.0, 1.0),), 1))
    assert "nothing happens" in timeline_svg(Timeline((), 0))


@pytest.mark.parametrize(
    "seconds,text", [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (45e-6, "45 µs"), (0.0, "0 µs"), (120.0, "120 s")]
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
