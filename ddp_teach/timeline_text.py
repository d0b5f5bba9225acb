"""A timeline in words: one line for what happens at once, in the order of events.

The picture (``timeline_picture``) has the same rows and the same words.
"""

from collections import Counter
from collections.abc import Sequence

from ddp_teach.canvas import count, elide
from ddp_teach.timeline import Collective, Timeline

MOST_ROWS = 60  # of one rank; where there are more, those in the middle are left out
BEGINS = {"forward": "forward begins", "backward": "backward begins", "step": "optimizer steps"}
ENDS = {"forward end": "forward ends", "backward end": "backward ends", "step end": ""}


def rows_of(timeline: Timeline) -> list[int]:
    """The row of every event, from 0. What ends shares a row with what came last before it, and a
    collective that is waited for at once has one row."""
    rows: list[int] = []
    for i, event in enumerate(timeline.events):
        before = timeline.events[i - 1] if i else None
        joins = event.kind.endswith(" end") or (
            before is not None
            and event.collective is not None
            and event.collective == before.collective
            and (event.kind == "done" or not timeline.collectives[event.collective].is_async)
        )
        rows.append(rows[-1] + (not joins) if rows else 0)
    return rows


def numbers_of(timeline: Timeline) -> list[int | None]:
    """For every collective the number that gives it its colour: the bucket's place, or the how
    manyeth it is in its pass to carry gradients; ``None`` where it carries none."""
    numbers, carried = [], 0
    for event in timeline.events:
        if event.kind in ("forward", "backward"):
            carried = 0
        elif event.kind == "launch":
            collective = timeline.collectives[event.collective]
            number = carried if collective.bucket is None else collective.bucket
            numbers.append(number if collective.names else None)
            carried += bool(collective.names)
    return numbers


def carrier_of(timeline: Timeline, i: int) -> int | None:
    """Which collective of the same pass carries the gradient that got ready in event ``i``."""
    for event in timeline.events[i + 1 :]:
        if event.kind in ("forward", "backward"):
            return None
        names = timeline.collectives[event.collective].names if event.kind == "launch" else ()
        if timeline.events[i].name in names:
            return event.collective
    return None


def lines_of(timeline: Timeline, with_times: bool = False) -> list[tuple[int, str]]:
    """What happened: a line for each row, and for each end of something that others are inside;
    before it the place of the event."""
    lines, inside = [], 0
    for i, event in enumerate(timeline.events):
        before = timeline.events[i - 1].kind if i else ""
        if event.kind in ENDS:
            inside = max(inside - 1, 0)
            words = "" if f"{before} end" == event.kind else ENDS[event.kind]
        else:
            words = wording(timeline, i)
        if words:
            time = f"{event.time * 1e3:8.3f} ms  " if with_times else ""
            lines.append((i, f"{time}{'  ' * inside}{words}"))
        inside += event.kind in BEGINS
    return lines


def wording(timeline: Timeline, i: int) -> str:
    event, after = timeline.events[i], [e.kind for e in timeline.events[i + 1 : i + 2]]
    if event.kind in BEGINS:
        return event.kind if after == ["forward end"] else BEGINS[event.kind]
    if event.kind == "gradient":
        return f"gradient of {event.name} is ready"
    if event.kind == "done":
        return ""  # said with the wait
    collective = timeline.collectives[event.collective]
    if event.kind == "wait":
        ending = ", done" if after == ["done"] else ""
        return f"waits for {collective.label}{ending}" if collective.is_async else ""
    size = f" ({count(collective.nbytes, 'byte')})" if collective.nbytes else ""
    ending = "" if collective.is_async else ", waits until it is done"
    return f"{collective.label} is launched{size}{ending}"


def text_of(timelines: Sequence[Timeline], by: str) -> str:
    """The lines of every rank; ranks that did the same share them."""
    stories: dict[tuple, list[Timeline]] = {}
    for timeline in timelines:
        lines = (line for _, line in lines_of(timeline, with_times=by == "time"))
        story = timeline.model, *lines
        stories.setdefault(story, []).append(timeline)
    parts = []
    for (model, *lines), alike in stories.items():
        ranks = ", ".join(str(timeline.rank) for timeline in alike)
        head = f"{model} on {'rank' if len(alike) == 1 else 'ranks'} {ranks}, by {by}:"
        more = f"… {len(lines) - MOST_ROWS + 1} more …"
        shown = (more if line is None else line for line in elide(lines, MOST_ROWS))
        parts.append("\n  ".join([head, *shown]))
    return "\n".join([*parts, *notes(timelines, by)])


def notes(timelines: Sequence[Timeline], by: str) -> list[str]:
    """What is to be said below: what isn't seen, and where the ranks send different things."""
    lines = []
    waited = [{e.collective for e in t.events if e.kind == "done"} for t in timelines]
    pairs = zip(timelines, waited, strict=True)
    if by == "order" and any(len(t.collectives) > len(done) for t, done in pairs):
        lines.append("Where no wait is seen, a bar shows the launch alone.")
    return [*lines, *mismatch(timelines)]


def mismatch(timelines: Sequence[Timeline]) -> list[str]:
    """A line about the first collective that does not carry the same gradients on all ranks.

    The n-th collective of a rank meets the n-th of the others in its process group. Where it isn't
    known what one of them carries (the zeros of a rank that has joined), nothing is said.
    """
    met: dict[tuple, list[tuple[Timeline, Collective]]] = {}
    for timeline in timelines:
        nth: Counter = Counter()
        for collective in timeline.collectives:
            place = collective.ranks, nth[collective.ranks]
            nth[collective.ranks] += 1
            if collective.names:
                met.setdefault(place, []).append((timeline, collective))
    for (_, n), each in sorted(met.items(), key=lambda item: item[0][1]):
        if len({c.names for _, c in each}) > 1:
            said = ", ".join(f"{c.label} on rank {t.rank}" for t, c in each)
            return [f"The ranks send different things: collective {n + 1} is {said}."]
    return []
