"""A picture of bars cut into parts: where the time of a step goes, for several wrappers."""

from collections.abc import Mapping, Sequence
from math import isfinite

from ddp_teach.canvas import (
    COLORS,
    MARGIN,
    PALE,
    WIDTH,
    Canvas,
    Picture,
    bucket_color,
    count,
    our_settings,
    text_width,
)

LINE, LABEL = 26, 112  # of a bar: height with the gap below, and space for its name; in points
VALUE = 66  # space for the total at the end of a bar


def stacked_picture(
    bars: Mapping[str, Sequence[float]], parts: Sequence[str], title: str
) -> Picture:
    """A picture of named ``bars``; each is a list of seconds, one for each of ``parts``.

    Raises ``ValueError`` for no bars or parts, too many parts, lists of another length, and seconds
    that are not finite or below zero.
    """
    rows = stacked_rows(bars, parts)
    lines = [f"{title}, milliseconds"]
    for row in rows:
        shares = ", ".join(f"{p} {ms:g}" for p, ms in zip(parts, row["parts"], strict=True))
        lines.append(f"{row['name']}: {row['total']:g} ({shares})")
    names = ", ".join(bars)
    alt = f"{title}: {count(len(rows), 'bar')} ({names}), each cut into {', '.join(parts)}."
    return Picture(draw_bars(rows, parts, title), "\n".join(lines), alt)


def stacked_rows(bars: Mapping[str, Sequence[float]], parts: Sequence[str]) -> list[dict]:
    """What ``stacked_picture`` draws: of every bar its ``name``, its ``parts`` and their ``total``,
    in milliseconds, rounded to microseconds."""
    if not bars or not parts or len(parts) > len(COLORS):
        raise ValueError(
            f"A picture needs at least one bar, and 1 to {len(COLORS)} parts, but got "
            f"{count(len(bars), 'bar')} and {count(len(parts), 'part')}."
        )
    for name, seconds in bars.items():
        if len(seconds) != len(parts) or not all(isfinite(s) and s >= 0 for s in seconds):
            raise ValueError(
                f"Bar {name!r} must have {count(len(parts), 'number')}, none below zero, "
                f"but has {list(seconds)}."
            )
    return [
        {
            "name": name,
            "parts": [round(1e3 * s, 3) for s in seconds],
            "total": round(1e3 * sum(seconds), 3),
        }
        for name, seconds in bars.items()
    ]


@our_settings()
def draw_bars(rows: Sequence[dict], parts: Sequence[str], title: str) -> Canvas:
    top = 58
    canvas = Canvas(top + LINE * len(rows) + 8)
    canvas.text(MARGIN, 19, title, 11, weight="bold")
    at = MARGIN
    for i, part in enumerate(parts):
        canvas.box(at, 35, 9, 9, bucket_color(i))
        canvas.text(at + 13, 39.5, part, 8)
        at += 25 + 0.87 * text_width(part, 8)
    longest = max(row["total"] for row in rows) or 1.0
    scale = (WIDTH - 2 * MARGIN - LABEL - VALUE) / longest
    for k, row in enumerate(rows):
        y, at = top + LINE * k, MARGIN + LABEL
        canvas.text(MARGIN, y + 9, row["name"], 9)
        for i, milliseconds in enumerate(row["parts"]):
            canvas.box(at, y, scale * milliseconds, 18, bucket_color(i))
            at += scale * milliseconds
        canvas.text(at + 6, y + 9, f"{row['total']:.2f} ms", 8.5, PALE)
    return canvas
