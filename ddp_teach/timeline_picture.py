"""The picture of timelines: a column for every rank, with a lane for what it computes and a lane
for what it sends. It reads from top to bottom, by order of events or by time."""

from collections.abc import Sequence
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
    readable_bytes,
    text_width,
    tint,
)
from ddp_teach.timeline import LASTING, Collective, Timeline, side_by_side
from ddp_teach.timeline_scale import ROW, TIME_HEIGHT, TOP, ByOrder, ByTime, bounds
from ddp_teach.timeline_text import carrier_of, mismatch, notes, numbers_of, text_of

GAP = 14  # points
NARROWEST = 136  # of a rank
TIME_LEFT = 54
MOST_RANKS = 8
SMALL = 7.5  # font size
TITLES = {
    "order": "What happened, in order of events, from top to bottom",
    "time": "What happened, by time, from top to bottom",
}
ABOUT = {
    "order": "A bar goes from the launch to the end of the wait.",
    "time": "All ranks on one clock. A bar ends when the result is there, waited for or not.",
}
RANKS = " Equal heights on two ranks do not mean equal times."


def draw(timelines: Sequence[Timeline], by: str) -> Picture:
    """See ``ddp_teach.trace.plot``."""
    alt = (
        f"Timeline of {count(len(timelines), 'rank')}, by {by}. For each a lane for what it "
        "computes, with the gradients as they get ready, and a lane for its collectives."
    )
    return Picture(draw_ranks(timelines, by), text_of(timelines, by), alt)


@our_settings()
def draw_ranks(timelines: Sequence[Timeline], by: str) -> Canvas:
    shown = timelines[:MOST_RANKS]
    left = TIME_LEFT if by == "time" else MARGIN
    width = max(WIDTH, left + (NARROWEST + GAP) * len(shown))
    each = (width - left - MARGIN + GAP) / max(len(shown), 1)
    scales = [ByOrder(t) if by == "order" else ByTime(t, timelines) for t in shown]
    bottom = max((scale.bottom for scale in scales), default=TOP)
    below = notes(timelines, by)
    if len(timelines) > len(shown):
        below.insert(0, f"Ranks 0 to {len(shown) - 1} of {len(timelines)}.")
    canvas = Canvas(bottom + 10 + 14 * len(below) + MARGIN, width)
    canvas.text(MARGIN, 19, TITLES[by], 11, weight="bold")
    about = ABOUT[by] + (RANKS if by == "order" and len(shown) > 1 else "")
    canvas.text(MARGIN, 35, about, 8.5, PALE)
    if by == "time" and scales:
        draw_clock(canvas, timelines, width)
    for k, scale in enumerate(scales):
        draw_rank(canvas, scale, left + each * k, each - GAP)
    for k, line in enumerate(below):
        weight = "bold" if line in mismatch(timelines) else "normal"
        canvas.text(MARGIN, bottom + 17 + 14 * k, line, 8.5, weight=weight)
    return canvas


def draw_clock(canvas: Canvas, timelines: Sequence[Timeline], width: float) -> None:
    first, last = bounds(timelines)
    total = max(last - first, 1e-9) * 1e3  # milliseconds
    steps = (digit * 10.0**power for power in range(-7, 9) for digit in (1, 2, 5))
    step = next(step for step in steps if total / step <= 9)
    for k in range(int(total / step) + 1):
        y = TOP + TIME_HEIGHT * k * step / total
        canvas.text(TIME_LEFT - 8, y, f"{k * step:.6g} ms", 8, PALE, ha="right")
        canvas.box(TIME_LEFT - 5, y - 0.25, width - TIME_LEFT - MARGIN + 5, 0.5, NEUTRAL)


def draw_rank(canvas: Canvas, scale: ByOrder | ByTime, x: float, width: float) -> None:
    lane = (width - 6) / 2
    canvas.text(x, 52, f"rank {scale.timeline.rank}", 9.5, weight="bold")
    for at, name in ((x, "compute"), (x + lane + 6, "communication")):
        canvas.text(at + lane / 2, 65, name, 8.5, PALE, ha="center")
    Compute(canvas, scale, x, lane).draw()
    draw_collectives(canvas, scale, x + lane + 6, lane)


@dataclass
class Compute:
    """The lane for forward, backward with its gradients, waits, and the optimizer's step."""

    canvas: Canvas
    scale: ByOrder | ByTime
    x: float
    width: float

    def draw(self) -> None:
        timeline = self.scale.timeline
        numbers, ends = numbers_of(timeline), dict(timeline.spans())
        for i, event in enumerate(timeline.events):
            if not self.scale.shows(i) and not self.scale.shows(ends.get(i, i)):
                continue
            if event.kind == "gradient":
                carrier = carrier_of(timeline, i)
                number = None if carrier is None else numbers[carrier]
                color = NEUTRAL if number is None else tint(bucket_color(number), 0.5)
                self._bar(i, i, 8, event.name, color, color, family="monospace")
            elif event.kind == "wait":
                about = f"waits for {timeline.collectives[event.collective].label}"
                self._bar(i, ends[i], 3, about, PAPER, INK)
            elif i in ends:
                words = "optimizer step" if event.kind == "step" else event.kind
                self._bar(i, ends[i], 0, words, tint("#000000", 0.06), PALE)
        if self.scale.hidden:
            y = TOP + ROW * (self.scale.gap + 0.5)
            self.canvas.text(self.x + 8, y, f"… {self.scale.hidden} more …", SMALL, PALE)

    def _bar(
        self, i: int, end: int, inset: float, words: str, color: str, edge: str, **how: str
    ) -> None:
        top, height = self.scale.top(i), self.scale.low(end) - self.scale.top(i)
        x, width = self.x + inset, self.width - 1.5 * inset
        if height < 5:
            self.canvas.box(x, top - 0.75, width, max(height, 1.5), PALE if edge == INK else edge)
        else:
            self.canvas.box(x, top + 0.5, width, height - 1, color, None if color == edge else edge)
        fits = self._room_below(i) >= 11 and (height < 5 or height >= 13)
        if fits and self.scale.shows(i):
            shorter = words.replace("all-reduce of ", ""), words.split(" for ")[0]
            words = fitting([words, *shorter], width - 8)
            self.canvas.text(x + 5, top + 7.5, words, SMALL, **how)

    def _room_below(self, i: int) -> float:
        """Points until the next thing in this lane."""
        ends = {"launch", *LASTING.values()}
        later = enumerate(self.scale.timeline.events[i + 1 :], start=i + 1)
        following = next((j for j, event in later if event.kind not in ends), None)
        return ROW if following is None else self.scale.top(following) - self.scale.top(i)


def draw_collectives(canvas: Canvas, scale: ByOrder | ByTime, x: float, width: float) -> None:
    timeline, numbers = scale.timeline, numbers_of(scale.timeline)
    launches = [i for i, event in enumerate(timeline.events) if event.kind == "launch"]
    bars = [(k, scale.top(i), scale.end_of(k)) for k, i in enumerate(launches)]
    bars = [(k, *ends) for k, *ends in bars if ends[1] - ends[0] > ROW or scale.shows(launches[k])]
    slots = side_by_side([(top, low) for _, top, low in bars])
    each = width / (max(slots, default=0) + 1)
    for (k, top, low), slot in zip(bars, slots, strict=True):
        color = PALE if numbers[k] is None else bucket_color(numbers[k])
        place = x + each * slot + 1, top, max(each - 2, 0.6), low - top
        draw_collective(canvas, timeline.collectives[k], place, color)


def draw_collective(canvas: Canvas, collective: Collective, place: tuple, color: str) -> None:
    x, top, width, height = place
    if height < 5:
        canvas.box(x, top - 0.75, width, max(height, 1.5), color)
    else:
        edge = color if width > 8 else None
        canvas.box(x, top + 0.5, width, height - 1, tint(color, 0.5), edge)
    number = "" if collective.bucket is None else str(collective.bucket)
    lines = [fitting([collective.label, number], width - 6)]
    lines += fitting([readable_bytes(collective.nbytes), ""], width - 6).splitlines()
    for j, words in enumerate(lines):
        if height >= ROW * (j + 1) - 3:
            canvas.text(x + 3, top + ROW / 2 + 11 * j, words, SMALL)


def fitting(choices: Sequence[str], width: float) -> str:
    """The first of ``choices`` that fits into ``width`` points; else the last, cut at its left."""
    for words in choices:
        if text_width(words, SMALL) <= width:
            return words
    most = int(width / text_width("x", SMALL))
    return "…" + words[len(words) - most + 1 :] if most > 2 else ""
