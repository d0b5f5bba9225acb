"""Timelines as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and Chrome show and measure."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_teach.timeline import Timeline, check_timelines, side_by_side


def to_chrome_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write ``timelines`` to ``path`` as JSON that Perfetto (ui.perfetto.dev) and Chrome open: a
    process for each rank, in it a thread for what it computes and others for its collectives."""
    timelines = check_timelines("to_chrome_trace", timelines)
    zero = min((t.start for t in timelines), default=0.0)
    entries = [entry for timeline in timelines for entry in chrome_entries(timeline, zero)]
    Path(path).write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")


def chrome_entries(timeline: Timeline, zero: float) -> Iterator[dict[str, Any]]:
    """The entries of one rank; times count from ``zero``, in seconds since 1970."""

    def entry(phase: str, name: str, start: float, thread: int, **more: Any) -> dict[str, Any]:
        at = round((timeline.start - zero + start) * 1e6, 3)  # microseconds
        return {"ph": phase, "name": name, "ts": at, "pid": timeline.rank, "tid": thread, **more}

    def lasting(name: str, start: float, end: float, thread: int, **args: Any) -> dict[str, Any]:
        return entry("X", name, start, thread, dur=round((end - start) * 1e6, 3), args=args)

    collectives = timeline.collectives
    extents = [(c.launched, c.launched if c.done is None else c.done) for c in collectives]
    places = side_by_side(extents)
    yield entry("M", "process_name", 0, 0, args={"name": f"rank {timeline.rank}"})
    yield entry("M", "thread_name", 0, 0, args={"name": "compute"})
    for place in sorted(set(places)):
        name = f"communication {place + 1}"
        yield entry("M", "thread_name", 0, place + 1, args={"name": name})
    for i, j in timeline.spans():
        event, end = timeline.events[i], timeline.events[j].time
        waits = event.kind == "wait"
        name = f"wait for {collectives[event.collective].label}" if waits else event.kind
        yield lasting(name, event.time, end, 0)
    for event in timeline.events:
        if event.kind == "gradient":
            yield entry("i", f"{event.name} is ready", event.time, 0, s="t")
    for collective, extent, place in zip(collectives, extents, places, strict=True):
        about = {"names": collective.names, "nbytes": collective.nbytes, "dtype": collective.dtype}
        yield lasting(collective.label, *extent, place + 1, **about)
