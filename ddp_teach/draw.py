"""Pictures of what the ranks hold: which gradient travels in which bucket, what an all-reduce does.

What a picture says comes from a function of its own (``bucket_rows``, ``all_reduce_rows``) that
returns plain lists and dicts: a rank can hand these to the notebook, and a test can compare them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ddp_teach.bucket_picture import draw_buckets
from ddp_teach.canvas import (
    MARGIN,
    NEUTRAL,
    PALE,
    PAPER,
    Canvas,
    Picture,
    bucket_color,
    count,
    elide,
    our_settings,
    readable_bytes,
    text_width,
    tint,
)

# Which parameter lies where, in which bucket.


def bucket_map(buckets: Any) -> Picture:
    """A picture of ``buckets`` in launch order, and which parameter lies where in each.

    ``buckets`` is a list of ``Bucket``, a wrapper that has ``.buckets``, or what ``bucket_rows``
    made of either.
    """
    rows = bucket_rows(buckets)
    lines = [f"{count(len(rows), 'bucket')}, in launch order"]
    for i, row in enumerate(rows):
        names = ", ".join(f"{p['name']} {p['shape']}" for p in row["params"])
        lines.append(f"bucket {i}: {readable_bytes(row['nbytes'])} of {row['dtype']}: {names}")
    n_params = sum(len(row["params"]) for row in rows)
    alt = (
        f"{count(len(rows), 'bucket')} with {count(n_params, 'parameter')}, drawn in the order in "
        "which they are launched, with the names of the parameters in each."
    )
    return Picture(draw_buckets(rows), "\n".join(lines), alt)


def bucket_rows(buckets: Any) -> list[dict]:
    """What ``bucket_map`` draws: for every bucket, in launch order, its ``dtype``, its ``nbytes``,
    and its ``params``, each with its ``name``, its ``shape``, and the ``offset`` at which it lies
    in the bucket, in elements."""
    buckets = getattr(buckets, "buckets", buckets)
    return [bucket if isinstance(bucket, dict) else bucket_row(bucket) for bucket in buckets]


def bucket_row(bucket: Any) -> dict:
    members = zip(bucket.names, bucket.params, bucket.offsets, strict=True)
    return {
        "dtype": str(bucket.params[0].dtype).removeprefix("torch."),
        "nbytes": bucket.nbytes,
        "params": [{"name": n, "shape": list(p.shape), "offset": o} for n, p, o in members],
    }


# What an all-reduce does.

RESULTS = {
    "mean": "all ranks hold the mean",
    "sum": "all ranks hold the sum",
    "same": "all ranks hold the same numbers",
    "different": "the ranks hold different numbers",
}


def all_reduce_picture(before: Sequence, after: Sequence) -> Picture:
    """A picture of what every rank holds before and after an all-reduce.

    ``before[r]`` and ``after[r]`` are what rank r holds: a number, a list of numbers, or a small
    tensor, of one shape on all ranks. Raises ``ValueError`` where ranks or shapes don't match.
    """
    data = all_reduce_rows(before, after)
    n, result = len(data["before"]), RESULTS[data["result"]]
    lines = [f"all-reduce over {count(n, 'rank')}; afterwards {result}"]
    for rank, (old, new) in enumerate(zip(data["before"], data["after"], strict=True)):
        lines.append(f"rank {rank}: {plain(old)} -> {plain(new)}")
    alt = f"What each of {count(n, 'rank')} holds before and after an all-reduce: {result}."
    return Picture(draw_all_reduce(data), "\n".join(lines), alt)


def all_reduce_rows(before: Sequence, after: Sequence) -> dict:
    """What ``all_reduce_picture`` draws: ``before`` and ``after``, for every rank a matrix of
    numbers as text, and ``result``: whether all ranks then hold the "mean", the "sum", or something
    else that is the "same", or "different" numbers."""
    held = [torch.as_tensor(x).detach().cpu().to(torch.float64) for x in [*before, *after]]
    if len(before) != len(after) or not held:
        raise ValueError(
            "before and after need one entry for every rank, "
            f"but before has {len(before)} and after has {len(after)}."
        )
    if len({x.shape for x in held}) > 1 or not held[0].numel():
        shapes = ", ".join(str(list(x.shape)) for x in held)
        raise ValueError(
            f"All ranks must hold numbers of one shape, before and after; got {shapes}."
        )
    old, new = torch.stack(held[: len(before)]), torch.stack(held[len(before) :])
    result = "same" if torch.equal(new, new[:1].expand_as(new)) else "different"
    for name, value in (("sum", old.sum(0)), ("mean", old.mean(0))):
        if result != "different" and torch.allclose(new[0], value):
            result = name
    return {"before": [*map(matrix, old)], "after": [*map(matrix, new)], "result": result}


def matrix(values: torch.Tensor) -> list[list[str]]:
    values = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    return [[f"{number:.4g}" for number in row] for row in values.tolist()]


def plain(rows: list[list[str]]) -> str:
    return "; ".join(", ".join(row) for row in shorten(rows, 6))


@our_settings()
def draw_all_reduce(data: dict) -> Canvas:
    longest = max(len(n) for side in ("before", "after") for m in data[side] for r in m for n in r)
    cell, line, middle = max(28, text_width("0" * longest, 9) + 8), 20, 132
    before, after = ([shorten(m, int(190 // cell)) for m in data[s]] for s in ("before", "after"))
    width, height = cell * len(before[0][0]), line * len(before[0])
    left, top, step = MARGIN + 50, 54, height + 12
    right, bottom = left + width + middle, top + step * len(before) - 12
    canvas = Canvas(bottom + 34, max(right + width + MARGIN, 270))
    canvas.text(MARGIN, 19, f"All-reduce over {count(len(before), 'rank')}", 11, weight="bold")
    canvas.text(left + width / 2, 42, "before", 9, PALE, ha="center")
    canvas.text(right + width / 2, 42, "after", 9, PALE, ha="center")
    canvas.text(MARGIN, bottom + 18, f"Afterwards {RESULTS[data['result']]}.", 9)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        y, own = top + step * rank, tint(bucket_color(rank), 0.3)
        canvas.text(MARGIN, y + height / 2, f"rank {rank}", 9.5, weight="bold")
        canvas.table(left, y, cell, line, old, own)
        color = own if data["result"] == "different" else NEUTRAL
        canvas.table(right, y, cell, line, new, color)
        canvas.arrow(left + width + 4, y + height / 2, left + width + 24, y + height / 2)
        canvas.arrow(right - 24, y + height / 2, right - 4, y + height / 2)
    canvas.box(left + width + 26, top, middle - 52, bottom - top, PAPER, PALE)
    canvas.text(left + width + middle / 2, (top + bottom) / 2, "all-reduce", 9.5, ha="center")
    return canvas


def shorten(rows: list[list[str]], most_columns: int, most_lines: int = 5) -> list[list[str]]:
    """The outermost rows and columns, with "…" for what is left out."""
    rows = [["…" if n is None else n for n in elide(row, most_columns)] for row in rows]
    return [["…"] * len(rows[0]) if row is None else row for row in elide(rows, most_lines)]
