"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesaic.cost.timeline import STREAMS, Timeline
from moesaic.report.read import ReportError

STREAM_TITLES = {
    "compute": "compute",
    "fast": "collectives in the domain",
    "network": "collectives over the network",
    "host": "host",
    "send": "sends to other stages",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """A process per pipeline rank, a thread per stream, a complete event per piece of work, in microseconds (the
    JSON object of the Trace Event Format). `otherData` has the figures of the whole."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        name = f"pipeline rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for rank, stream in timeline.streams:
        at = {"pid": rank, "tid": STREAMS.index(stream)}
        events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": STREAM_TITLES[stream]}})
        events.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": at["tid"]}})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": kind(event.name),
                "pid": event.rank,
                "tid": STREAMS.index(event.stream),
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "seconds": timeline.makespan,
            "hidden_share_of_communication": timeline.hidden(),
            "idle_seconds_by_rank": [timeline.idle(rank) for rank in range(timeline.ranks)],
        },
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace` as a file. Raises ReportError when that is impossible."""
    path = Path(path)
    try:
        path.write_text(json.dumps(chrome_trace(timeline), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} could not be written: {error.strerror}; name another file.") from None


def kind(name: str) -> str:
    """What sort of work an event is: the first word of its name, or `pair` for a forward and a backward together."""
    return "pair" if " | " in name else name.partition(" ")[0]
