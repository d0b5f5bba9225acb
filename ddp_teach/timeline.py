"""What a trace has recorded: a list of events, a list of collectives, and ways to show them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_teach.call import short
from ddp_teach.canvas import Picture, count

LASTING = {"forward": "forward end", "backward": "backward end", "step": "step end", "wait": "done"}


@dataclass(frozen=True)
class Event:
    """Something that happened on a rank, ``time`` seconds after its trace began.

    ``kind`` is "forward", "forward end", "backward", "backward end", "step" or "step end" (of the
    optimizer); "gradient" (the gradient of the parameter ``name`` is ready); "launch" (a collective
    is started), "wait" (this rank waits for it) or "done" (it need not wait any more).
    ``collective`` is then a place in ``timeline.collectives``.
    """

    kind: str
    time: float
    name: str = ""
    collective: int | None = None


@dataclass
class Collective:
    """A collective that a rank has started: ``kind`` is torch's name for it, such as "all_reduce".

    ``nbytes`` and ``dtype`` belong to the tensor that was given. ``bucket`` is the bucket's place
    in launch order where it carries a bucket, ``names`` the parameters whose gradients it carries.
    ``launched`` and ``done`` are in seconds; ``done`` is ``None`` if its end was not seen, and may
    lie before the rank began to wait.
    """

    kind: str
    nbytes: int
    dtype: str
    bucket: int | None
    names: tuple[str, ...]
    launched: float
    done: float | None = None
    is_async: bool = True

    @property
    def label(self) -> str:
        """What it is called in pictures: its bucket, or what it carries."""
        kind = self.kind.replace("_", "-")
        if self.bucket is not None:
            return f"bucket {self.bucket}"
        if len(self.names) > 1:
            return f"{kind} of {len(self.names)} gradients"
        return f"{kind} of {self.names[0]}" if self.names else kind


@dataclass(repr=False)
class Timeline:
    """What happened on ``rank``, in the order in which it happened: ``events``, ``collectives``.

    ``model`` is the name of the traced class; ``hidden`` says that it starts its all-reduces where
    Python can't see them; ``start`` is when the trace began, in seconds since 1970.
    """

    rank: int
    model: str
    hidden: bool
    start: float
    events: list[Event] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    def add(self, kind: str, time: float, name: str = "", collective: int | None = None) -> None:
        """Append an event."""
        self.events.append(Event(kind, time, name, collective))

    def kinds(self, *wanted: str) -> list[str]:
        """The kinds of the events in their order; only those ``wanted``, if any are named."""
        return [event.kind for event in self.events if not wanted or event.kind in wanted]

    def spans(self) -> Iterator[tuple[int, int]]:
        """The places of every event that lasts and of its end; one that never ended, because of an
        exception, lasts until the last event."""
        for i, event in enumerate(self.events):
            if event.kind in LASTING:
                rest = range(i + 1, len(self.events))
                ends = (j for j in rest if is_end(self.events[j], event))
                yield i, next(ends, len(self.events) - 1)

    def lanes(self) -> list[int]:
        """For every collective the lane, from 0, in which it can be drawn without overlapping."""
        lanes: list[int] = []
        taken: list[float] = []  # for every lane, until when
        for collective in self.collectives:
            free = (i for i, until in enumerate(taken) if until <= collective.launched)
            lane = next(free, len(taken))
            taken[lane : lane + 1] = [collective.done or collective.launched]
            lanes.append(lane)
        return lanes

    def plot(self, by: str = "order") -> Picture:
        """A picture of this rank alone; see ``plot``."""
        return plot([self], by)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write this rank's timeline to ``path``; see ``to_chrome_trace``."""
        to_chrome_trace([self], path)

    def __repr__(self) -> str:
        gradients = count(self.kinds().count("gradient"), "gradient")
        by_kind: dict[str, list[int]] = {}
        for collective in self.collectives:
            by_kind.setdefault(collective.kind, []).append(collective.nbytes)
        sent = [f", {len(s)} x {kind} ({count(sum(s), 'byte')})" for kind, s in by_kind.items()]
        return f"Timeline of {self.model} on rank {self.rank}: {gradients}{''.join(sent)}"


def is_end(event: Event, of: Event) -> bool:
    return event.kind == LASTING[of.kind] and event.collective == of.collective


def plot(timelines: Sequence[Timeline], by: str = "order") -> Picture:
    """A picture of the timelines of several ranks: what each computed, and beside it what it sent.

    ``by="order"`` shows the order of events on each rank, which is the same in every run;
    ``by="time"`` the same events on one clock, to scale.
    """
    from ddp_teach.timeline_picture import draw

    timelines = check_timelines("plot", timelines)
    if by not in ("order", "time"):
        raise ValueError(f'plot: by must be "order" or "time", got {short(by)}.')
    return draw(timelines, by)


def to_chrome_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write ``timelines`` to ``path`` as JSON that Perfetto (ui.perfetto.dev) and Chrome open: a
    process for each rank, in it a thread for what it computes and others for its collectives."""
    timelines = check_timelines("to_chrome_trace", timelines)
    zero = min((t.start for t in timelines), default=0.0)
    entries = [entry for timeline in timelines for entry in chrome_entries(timeline, zero)]
    Path(path).write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")


def check_timelines(caller: str, timelines: Any) -> list[Timeline]:
    """``timelines`` as a list; raises ``TypeError`` if it is anything else."""
    found = [timelines] if isinstance(timelines, Timeline) else timelines
    if not isinstance(found, Sequence) or not all(isinstance(t, Timeline) for t in found):
        accepted = "a Timeline or a list of them, one for each rank"
        raise TypeError(f"{caller}: timelines must be {accepted}, got {short(timelines)}.")
    return list(found)


def chrome_entries(timeline: Timeline, zero: float) -> Iterator[dict[str, Any]]:
    """The entries of one rank; times count from ``zero``, in seconds since 1970."""

    def entry(phase: str, name: str, start: float, thread: int, **more: Any) -> dict[str, Any]:
        at = round((timeline.start - zero + start) * 1e6, 3)  # microseconds
        return {"ph": phase, "name": name, "ts": at, "pid": timeline.rank, "tid": thread, **more}

    def lasting(name: str, start: float, end: float, thread: int, **args: Any) -> dict[str, Any]:
        return entry("X", name, start, thread, dur=round((end - start) * 1e6, 3), args=args)

    yield entry("M", "process_name", 0, 0, args={"name": f"rank {timeline.rank}"})
    yield entry("M", "thread_name", 0, 0, args={"name": "compute"})
    for i, j in timeline.spans():
        event, end = timeline.events[i], timeline.events[j].time
        about = {} if event.collective is None else timeline.collectives[event.collective]
        name = f"wait for {about.label}" if about else event.kind
        yield lasting(name, event.time, end, 0)
    for event in timeline.events:
        if event.kind == "gradient":
            yield entry("i", f"{event.name} is ready", event.time, 0, s="t")
    for collective, lane in zip(timeline.collectives, timeline.lanes(), strict=True):
        about = {"names": collective.names, "nbytes": collective.nbytes, "dtype": collective.dtype}
        yield entry("M", "thread_name", 0, 1 + lane, args={"name": f"communication {1 + lane}"})
        end = collective.launched if collective.done is None else collective.done
        yield lasting(collective.label, collective.launched, end, 1 + lane, **about)
