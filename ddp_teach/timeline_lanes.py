"""The two lanes of a rank in the picture of timelines: what it computes, and what it sends."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_teach.canvas import (
    INK,
    NEUTRAL,
    PALE,
    PAPER,
    Canvas,
    bucket_color,
    readable_bytes,
    text_width,
    tint,
)
from ddp_teach.timeline import LASTING, Collective, side_by_side
from ddp_teach.timeline_scale import ROW, TOP, ByOrder, ByTime
from ddp_teach.timeline_text import carrier_of, numbers_of

SMALL = 7.5  # font size


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
