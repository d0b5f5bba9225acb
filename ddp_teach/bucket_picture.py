"""The picture of buckets: for each, in launch order, a bar for its bytes and the names of what lies
in it. ``rows`` is what ``ddp_teach.draw.bucket_rows`` returns."""

from collections.abc import Sequence
from math import prod

from ddp_teach.canvas import (
    MARGIN,
    PALE,
    WIDTH,
    Canvas,
    bucket_color,
    characters_in_a_chip,
    count,
    elide,
    our_settings,
    readable_bytes,
    tint,
    wrap_chips,
)

MOST_BUCKETS = 10  # drawn; where there are more, those in the middle are left out
MOST_LINES = 20  # of parameter names in a whole bucket map


@our_settings()
def draw_buckets(rows: Sequence[dict]) -> Canvas:
    left, width, gap = MARGIN + 16, WIDTH - 2 * MARGIN - 16, 8
    shown = elide(list(enumerate(rows)), MOST_BUCKETS)
    lines_each = MOST_LINES // max(len(shown), 1)
    names = [flow(row[1]["params"], width - 16, lines_each) if row else [] for row in shown]
    heights = [38 + 18 * len(lines) if row else 16 for row, lines in zip(shown, names, strict=True)]
    bottom = 50 + sum(heights) + gap * (len(shown) - 1)
    canvas = Canvas(bottom + MARGIN)
    order = ", launched from top to bottom" if len(rows) > 1 else ""
    canvas.text(MARGIN, 19, count(len(rows), "bucket") + order, 11, weight="bold")
    legend = "Bars show bytes, to scale. Below, what lies in them from left to right."
    canvas.text(MARGIN, 35, legend if rows else "Nothing is sent.", 8.5, PALE)
    if len(rows) > 1:
        canvas.arrow(MARGIN + 4, 50, MARGIN + 4, bottom)
    y, largest = 50, max((row["nbytes"] for row in rows), default=0)
    for entry, lines, height in zip(shown, names, heights, strict=True):
        if entry is None:
            more = len(rows) - len(shown) + 1
            canvas.text(left + 8, y + height / 2, f"… {more} more …", 9, PALE)
        else:
            draw_bucket(canvas, *entry, lines, (left, y, width, height), largest)
        y += height + gap
    return canvas


def draw_bucket(canvas: Canvas, i: int, row: dict, lines: list, place: tuple, largest: int) -> None:
    color, (x, y, width, height) = bucket_color(i), place
    canvas.box(x, y, width, height, tint(color, 0.12), color)
    canvas.text(x + 8, y + 11, f"bucket {i}", 9.5, weight="bold")
    size = f"{readable_bytes(row['nbytes'])} of {row['dtype']}"
    about = f"{count(len(row['params']), 'parameter')}, {size}"
    canvas.text(x + width - 8, y + 11, about, 8.5, PALE, ha="right")
    numels = [prod(p["shape"]) for p in row["params"]]
    per_element = (width - 16) * row["nbytes"] / max(largest, 1) / max(sum(numels), 1)
    canvas.box(x + 8, y + 21, max(per_element * sum(numels), 0.5), 7, tint(color, 0.55))
    seen = [(p, n) for p, n in zip(row["params"], numels, strict=True) if per_element * n > 0.5]
    for param, numel in seen[::2]:
        canvas.box(x + 8 + per_element * param["offset"], y + 21, per_element * numel, 7, color)
    canvas.chips(x + 8, y + 34, lines, tint(color, 0.6))


def flow(params: Sequence[dict], width: float, most_lines: int) -> list[list[str]]:
    """Names and shapes of ``params`` on lines of ``width`` points; where ``most_lines`` are not
    enough, some before the last are left out, and their number is said."""
    longest = characters_in_a_chip(width)
    words = [f"{p['name']} {p['shape']}" for p in params]
    words = [w if len(w) <= longest else "…" + w[1 - longest :] for w in words]
    lines, kept = wrap_chips(words, width), len(words)
    while len(lines) > most_lines and kept > 0:
        kept = min(kept - 1, sum(map(len, lines[:most_lines])))
        lines = wrap_chips([*words[:kept], f"… {len(words) - kept - 1} more …", words[-1]], width)
    return lines
