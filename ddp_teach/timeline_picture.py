"""The picture of timelines: a column for every rank, with a lane for what it computes and a lane
for what it sends. It reads from top to bottom, by order of events or by time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_teach.canvas import (
    INK,
    MARGIN,
    NEUTRAL,
    PALE,
    PAPER,
    WIDTH,
    Canvas,
    Picture,
    bucket_color,
    count,
    our_settings,
    text_width,
    tint,
)
from ddp_teach.timeline import Timeline
from ddp_teach.timeline_text import (
    MOST_ROWS,
    carrier_of,
    mismatch,
    numbers_of,
    rows_of,
    text_of,
    unseen,
)

ROW, TOP = 15, 74  # points
TIME_HEIGHT = 420
LEFT = 52  # room for the scale of times
MOST_RANKS = 8

Heights = Callable[[int], tuple[float, float]]  # upper and lower end of an event, in points


@dataclass
class Column:
    """Where a rank is drawn."""

    timeline: Timeline
    heights: Heights
    x: float
    width: float
    by: str

    @property
    def lanes(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Left end and width of the lanes for compute and communication."""
        half = (self.width - 6) / 2
        return (self.x, half), (self.x + half + 6, half)


def draw(timelines: Sequence[Timeline], by: str) -> Picture:
    """See ``ddp_teach.trace.plot``."""
    ranks = timelines[:MOST_RANKS]
    text = text_of(timelines)
    if by == "time":
        text = f"by time: {duration(timelines) * 1e3:.1f} ms\n{text}"
    alt = (
        f"Timeline of {count(len(timelines), 'rank')}: for each a lane for what it computes, with "
        "the gradients as they get ready, beside a lane for its collectives, by "
        f"{'order of events' if by == 'order' else 'time'}. The text form says the same."
    )
    return Picture(draw_columns(ranks, by, mismatch(timelines)), text, alt)


def duration(timelines: Sequence[Timeline]) -> float:
    first, last = bounds(timelines)
    return last - first


def bounds(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """Begin and end, in seconds since 1970, of all that happened on any rank."""
    times = [t.start + e.time for t in timelines for e in t.events] or [0.0]
    return min(times), max(times)


@our_settings()
def draw_columns(timelines: Sequence[Timeline], by: str, warnings: Sequence[str]) -> Canvas:
    left = MARGIN if by == "order" else LEFT
    width = max(WIDTH, left + 150 * len(timelines) + MARGIN)
    each = (width - left - MARGIN + 14) / max(len(timelines), 1)
    columns, bottom = [], TOP
    for k, timeline in enumerate(timelines):
        heights, end = by_order(timeline) if by == "order" else by_time(timeline, timelines)
        columns.append(Column(timeline, heights, left + each * k, each - 14, by))
        bottom = max(bottom, end)
    canvas = Canvas(bottom + 12 + 16 * len(warnings) + MARGIN, width)
    canvas.text(MARGIN, 19, f"What happened when, by {by}, from top to bottom", 11, weight="bold")
    about = "Each rank by itself: equal heights on two ranks do not mean equal times."
    if by == "time":
        about = "All ranks on one clock. A collective ends when its result was there."
        draw_scale(canvas, timelines, width)
    canvas.text(MARGIN, 35, about, 8.5, PALE)
    for column in columns:
        draw_column(canvas, column, bottom)
    for k, line in enumerate(warnings):
        canvas.text(MARGIN, bottom + 18 + 16 * k, line, 8.5, weight="bold")
    return canvas


def by_order(timeline: Timeline) -> tuple[Heights, float]:
    rows = rows_of(timeline)
    n = rows[-1] + 1 if rows else 0
    hidden = max(n - MOST_ROWS, 0)
    head = MOST_ROWS - 2

    def heights(i: int) -> tuple[float, float]:
        row = rows[i]
        if hidden and row >= head:
            row = max(row - hidden, head)
        return TOP + ROW * row, TOP + ROW * (row + 1)

    return heights, TOP + ROW * (n - hidden)


def by_time(timeline: Timeline, timelines: Sequence[Timeline]) -> tuple[Heights, float]:
    first, last = bounds(timelines)
    per_second = TIME_HEIGHT / max(last - first, 1e-9)

    def heights(i: int) -> tuple[float, float]:
        y = TOP + (timeline.start + timeline.events[i].time - first) * per_second
        return y, y

    return heights, TOP + TIME_HEIGHT


def draw_scale(canvas: Canvas, timelines: Sequence[Timeline], width: float) -> None:
    milliseconds = duration(timelines) * 1e3
    step = next(
        s * 10**p for p in range(-4, 6) for s in (1, 2, 5) if milliseconds / (s * 10**p) <= 9
    )
    for k in range(int(milliseconds / step) + 1):
        y = TOP + TIME_HEIGHT * k * step / max(milliseconds, 1e-9)
        canvas.text(LEFT - 8, y, f"{k * step:g} ms", 8, PALE, ha="right")
        canvas.box(LEFT - 5, y - 0.25, width - LEFT - MARGIN + 5, 0.5, NEUTRAL)


def draw_column(canvas: Canvas, column: Column, bottom: float) -> None:
    timeline, (compute, communication) = column.timeline, column.lanes
    canvas.text(column.x, 52, f"rank {timeline.rank}", 9.5, weight="bold")
    for (x, width), name in zip(column.lanes, ("compute", "communication"), strict=True):
        canvas.text(x + width / 2, 65, name, 8.5, PALE, ha="center")
    draw_spans(canvas, column, compute)
    draw_marks(canvas, column, compute)
    draw_collectives(canvas, column, communication)
    if timeline.hidden:
        words = unseen(timeline).split(": ")
        x, width = communication
        for k, line in enumerate(words):
            canvas.text(x + 4, bottom - 24 + 12 * k, line, 7, PALE)


def draw_spans(canvas: Canvas, column: Column, lane: tuple[float, float]) -> None:
    """Forward, backward, and the optimizer's step."""
    (x, width), events = lane, column.timeline.events
    for i, event in enumerate(events):
        if event.kind not in ("forward", "backward", "step"):
            continue
        rest = range(i + 1, len(events))
        last = next((j for j in rest if events[j].kind == f"{event.kind} end"), len(events) - 1)
        top, low = column.heights(i)[0], column.heights(last)[1]
        canvas.box(x, top + 0.5, width, max(low - top - 1, 1), tint("#000000", 0.06), PALE)
        if low - top >= 9 or column.by == "order":
            name = "optimizer step" if event.kind == "step" else event.kind
            canvas.text(x + 5, top + ROW / 2, name, 8)


def draw_marks(canvas: Canvas, column: Column, lane: tuple[float, float]) -> None:
    """Gradients that get ready, and waits."""
    (x, width), timeline = lane, column.timeline
    numbers, free = numbers_of(timeline), 0.0
    for i, event in enumerate(timeline.events):
        top, low = column.heights(i)
        if event.kind == "gradient":
            carrier = carrier_of(timeline, i)
            number = None if carrier is None else numbers[carrier]
            color = NEUTRAL if number is None else tint(bucket_color(number), 0.5)
            words = fitting([event.name], width - 20, 7.5)
            if column.by == "order":
                canvas.box(x + 8, top + 1.5, width - 12, low - top - 3, color)
            else:
                canvas.box(x + 8, top - 0.75, width - 12, 1.5, color)
            if column.by == "order" or top >= free:
                middle = (top + low) / 2 if column.by == "order" else top + 5.5
                canvas.text(x + 12, middle, words, 7.5, family="monospace")
                free = top + 10
        elif event.kind == "wait":
            done = i + 1 if timeline.events[i + 1 : i + 2] else i
            end = column.heights(done)[1]
            about = timeline.collectives[event.collective].label
            canvas.box(x + 3, top + 1, width - 6, max(end - top - 2, 0.8), PAPER, INK)
            if end - top >= 9 and top >= free:
                words = fitting([f"waits for {about}", "waits"], width - 16, 7.5)
                canvas.text(x + 8, top + 7, words, 7.5)


def draw_collectives(canvas: Canvas, column: Column, lane: tuple[float, float]) -> None:
    timeline = column.timeline
    spans = [extent(column, number) for number in range(len(timeline.collectives))]
    slots: list[float] = []  # for bars side by side: until where each is taken
    places = []
    for top, low in spans:
        slot = next((s for s, until in enumerate(slots) if until <= top), len(slots))
        slots[slot : slot + 1] = [low]
        places.append(slot)
    (x, width), numbers = lane, numbers_of(timeline)
    each = width / max(len(slots), 1)
    for collective, number, (top, low), slot in zip(
        timeline.collectives, numbers, spans, places, strict=True
    ):
        color = "#595959" if number is None else bucket_color(number)
        at = x + each * slot
        canvas.box(at + 1, top + 0.5, each - 2, max(low - top - 1, 1), tint(color, 0.5), color)
        if low - top >= 9:
            short = "" if collective.bucket is None else str(collective.bucket)
            words = fitting([collective.label, short], each - 6, 7.5)
            canvas.text(at + 4, top + ROW / 2, words, 7.5)


def extent(column: Column, number: int) -> tuple[float, float]:
    """Where the bar of a collective begins and ends."""
    events = column.timeline.events
    mine = [i for i, event in enumerate(events) if event.collective == number]
    top, low = column.heights(mine[0])[0], column.heights(mine[-1])[1]
    return top, low


def fitting(choices: Sequence[str], width: float, size: float) -> str:
    """The first of ``choices`` that fits; else the last one, cut at its left."""
    for words in choices:
        if text_width(words, size) <= width:
            return words
    most = int(width / text_width("x", size))
    return "…" + words[len(words) - most + 1 :] if most > 2 else ""
