"""A timeline in words: one line for what happens at once, in the order of events.

The picture (``timeline_picture``) has the same rows and the same words.
"""

from collections.abc import Sequence

from ddp_teach.canvas import count, elide
from ddp_teach.timeline import Timeline

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


def lines_of(timeline: Timeline) -> list[str]:
    """What happened, a line for each row and for each end."""
    lines, inside = [], 0
    for i, event in enumerate(timeline.events):
        before = timeline.events[i - 1].kind if i else ""
        if event.kind in ENDS:
            inside = max(inside - 1, 0)
            if ENDS[event.kind] and f"{before} end" != event.kind:
                lines.append("  " * inside + ENDS[event.kind])
            continue
        words = wording(timeline, i)
        if words:
            lines.append("  " * inside + words)
        inside += event.kind in BEGINS
    return lines


def wording(timeline: Timeline, i: int) -> str:
    event, after = timeline.events[i], [e.kind for e in timeline.events[i + 1 : i + 2]]
    if event.kind in BEGINS:
        return event.kind if after == ["forward end"] else BEGINS[event.kind]
    if event.kind == "gradient":
        return f"gradient of {event.name} is ready"
    collective = timeline.collectives[event.collective]
    size = f" ({count(collective.nbytes, 'byte')})" if collective.nbytes else ""
    if event.kind == "launch":
        ending = "" if collective.is_async else " and waited for"
        return f"{collective.label} is launched{size}{ending}"
    if event.kind == "wait" and collective.is_async:
        return f"waits for {collective.label}" + (", done" if after == ["done"] else "")
    return ""


def text_of(timelines: Sequence[Timeline]) -> str:
    """The lines of every rank; ranks that did the same share them."""
    stories: dict[tuple, list[Timeline]] = {}
    for timeline in timelines:
        stories.setdefault(tuple(lines_of(timeline)), []).append(timeline)
    parts = []
    for lines, ranks in stories.items():
        who = " and ".join(f"rank {timeline.rank}" for timeline in ranks)
        shown = elide(lines, MOST_ROWS)
        more = f"… {len(lines) - MOST_ROWS + 1} more …"
        head = f"{who}, {ranks[0].model}, in order of events:"
        parts.append("\n  ".join([head, *(more if line is None else line for line in shown)]))
        if ranks[0].hidden:
            parts[-1] += f"\n  {unseen(ranks[0])}"
    return "\n".join([*parts, *mismatch(timelines)])


def unseen(timeline: Timeline) -> str:
    """What to say of torch's class."""
    if any(c.names for c in timeline.collectives):
        return "its waits are not visible: torch's class waits in C++"
    return "its all-reduces are not visible: torch's class launches them in C++"


def mismatch(timelines: Sequence[Timeline]) -> list[str]:
    """A line that says which collective of gradients is the first not to carry the same on all
    ranks; empty where all do."""
    carried = [[c for c in timeline.collectives if c.names] for timeline in timelines]
    for i in range(max(map(len, carried), default=0)):
        each = [c[i] if i < len(c) else None for c in carried]
        if len({c and (c.kind, c.bucket, c.names) for c in each}) > 1:
            said = ", ".join(
                f"rank {t.rank}: {c.label if c else 'nothing'}"
                for t, c in zip(timelines, each, strict=True)
            )
            return [f"The ranks do not send the same. Collective {i + 1} of gradients is {said}."]
    return []
