"""What a trace has recorded: a list of events, a list of collectives, and ways to show them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_teach.call import short
from ddp_teach.canvas import Picture, count

if TYPE_CHECKING:
    from ddp_teach.stepper import Stepper

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

    ``ranks`` are those of its process group. ``nbytes`` and ``dtype`` belong to the tensor that was
    given. ``bucket`` is the bucket's place
    in launch order where it carries a bucket, ``names`` the parameters whose gradients it carries.
    ``launched`` and ``done`` are in seconds; ``done`` is ``None`` if its end was not seen, and may
    lie before the rank began to wait.
    """

    kind: str
    ranks: tuple[int, ...]
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

    ``model`` is the name of the traced class, ``start`` when its trace began, in
    seconds since 1970.
    """

    rank: int
    model: str
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

    def plot(self, by: str = "order") -> Picture:
        """A picture of this rank alone; see ``plot``."""
        return plot([self], by)

    def steps(self) -> "Stepper":
        """The picture by order of events, with a slider that goes through it event by event."""
        from ddp_teach.stepper import Stepper

        return Stepper(self)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write this rank's timeline to ``path``; see ``to_chrome_trace``."""
        from ddp_teach.chrome_trace import to_chrome_trace

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


def side_by_side(extents: Sequence[tuple[float, float]]) -> list[int]:
    """For every (begin, end), in the order in which they begin, the lowest place, from 0, that is
    free: what overlaps lies side by side."""
    places: list[int] = []
    taken: list[float] = []  # for every place, until when
    for begin, end in extents:
        place = next((p for p, until in enumerate(taken) if until <= begin), len(taken))
        taken[place : place + 1] = [end]
        places.append(place)
    return places


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


def check_timelines(caller: str, timelines: Any) -> list[Timeline]:
    """``timelines`` as a list; raises ``TypeError`` if it is anything else."""
    found = [timelines] if isinstance(timelines, Timeline) else timelines
    if not isinstance(found, Sequence) or not all(isinstance(t, Timeline) for t in found):
        accepted = "a Timeline or a list of them, one for each rank"
        raise TypeError(f"{caller}: timelines must be {accepted}, got {short(timelines)}.")
    return list(found)
