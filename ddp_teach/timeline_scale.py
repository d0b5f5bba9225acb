"""How far below the top of a picture each event of a timeline is drawn: by order, or by time."""

from collections.abc import Sequence

from ddp_teach.timeline import Timeline
from ddp_teach.timeline_text import MOST_ROWS, rows_of

TOP, ROW, TIME_HEIGHT = 74, 15, 420  # points: of the head, of a row, of all times together


class ByOrder:
    """Heights by order of events: a row for what happens at once."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.rows = timeline, rows_of(timeline)
        self.hidden = max((self.rows[-1] + 1 if self.rows else 0) - MOST_ROWS, -1) + 1
        self.gap = MOST_ROWS - 2 if self.hidden else len(self.rows)  # row that stands for others
        self.bottom = TOP + ROW * (self.row(len(self.rows) - 1) + 1 if self.rows else 0)

    def row(self, i: int) -> int:
        row = self.rows[i]
        return row if row < self.gap else max(row - self.hidden + 1, self.gap)

    def top(self, i: int) -> float:
        return TOP + ROW * self.row(i)

    def low(self, i: int) -> float:
        return self.top(i) + ROW

    def shows(self, i: int) -> bool:
        return not self.hidden or self.row(i) != self.gap

    def end_of(self, number: int) -> float:
        """Where a collective is done."""
        events = enumerate(self.timeline.events)
        return self.low(max(i for i, event in events if event.collective == number))


class ByTime:
    """Heights by time, on a clock that all ``timelines`` share."""

    hidden, bottom = 0, TOP + TIME_HEIGHT

    def __init__(self, timeline: Timeline, timelines: Sequence[Timeline]):
        first, last = bounds(timelines)
        self.timeline, self.first = timeline, first
        self.per_second = TIME_HEIGHT / max(last - first, 1e-9)

    def at(self, seconds: float) -> float:
        return TOP + (self.timeline.start + seconds - self.first) * self.per_second

    def top(self, i: int) -> float:
        return self.at(self.timeline.events[i].time)

    low = top

    def shows(self, i: int) -> bool:
        return True

    def end_of(self, number: int) -> float:
        collective = self.timeline.collectives[number]
        return self.at(collective.launched if collective.done is None else collective.done)


def bounds(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """Begin and end, in seconds since 1970, of all that happened on any rank."""
    times = [t.start + event.time for t in timelines for event in t.events]
    times += [t.start + c.done for t in timelines for c in t.collectives if c.done is not None]
    return min(times, default=0.0), max(times, default=0.0)
