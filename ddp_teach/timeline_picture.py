"""The picture of timelines: a column for every rank, with a lane for what it computes and a lane
for what it sends. It reads from top to bottom, by order of events or by time."""

from collections.abc import Sequence

from ddp_teach.canvas import (
    MARGIN,
    NEUTRAL,
    PALE,
    WIDTH,
    Canvas,
    Picture,
    count,
    our_settings,
)
from ddp_teach.timeline import Timeline
from ddp_teach.timeline_lanes import Compute, draw_collectives
from ddp_teach.timeline_scale import TIME_HEIGHT, TOP, ByOrder, ByTime, bounds
from ddp_teach.timeline_text import mismatch, notes, text_of

GAP = 14  # points
NARROWEST = 136  # of a rank
TIME_LEFT = 54
MOST_RANKS = 8
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
