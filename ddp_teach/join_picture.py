"""The picture of uneven inputs: who trains in which step, who only answers, and how all end equal.

``join_rows`` returns what the picture says as plain lists, which a test can compare.
"""

from collections.abc import Sequence

from ddp_teach.canvas import (
    MARGIN,
    NEUTRAL,
    PALE,
    PAPER,
    Canvas,
    Picture,
    bucket_color,
    count,
    our_settings,
    text_width,
    tint,
)

TOP, LINE, STEP = 76, 26, 32  # points: where the first rank begins, its height, to the next one


def join_picture(
    sent: Sequence[Sequence[float]],
    own_steps: Sequence[int],
    gradients: Sequence[float],
    left_with: Sequence[float],
    ended_with: Sequence[float],
) -> Picture:
    """A picture of training with ``join``: a row for every rank, a column for every step.

    ``sent[r][s]`` is what rank r gave to the all-reduce of step s, ``own_steps[r]`` how many steps
    it had inputs for: in the others it is a shadow. ``gradients[s]`` came out of step s.
    ``left_with[r]`` is a weight of rank r when its inputs were used up, ``ended_with[r]`` the same
    weight after ``join``. Raises ``ValueError`` where the numbers of ranks or steps don't match.
    """
    rows = join_rows(sent, own_steps, gradients, left_with, ended_with)
    n, steps = len(rows), len(gradients)
    lines = [f"{count(n, 'rank')}, {count(steps, 'step')}; in brackets what shadows send"]
    for rank, row in enumerate(rows):
        told = [x if own else f"[{x}]" for x, own in row["sent"]]
        weights = f"leaves with {row['left_with']}, ends with {row['ended_with']}"
        lines.append(f"rank {rank}: {' '.join(told)}; {weights}")
    lines.append("gradient: " + " ".join(map(number, gradients)))
    own = ", ".join(map(str, own_steps))
    equal = len({row["ended_with"] for row in rows}) == 1
    alt = (
        f"{count(n, 'rank')} with inputs for {own} of {count(steps, 'step')}; in the others a rank "
        f"sends zeros as a shadow. They end with {'the same weight' if equal else 'other weights'}."
    )
    return Picture(draw_join(rows, [number(g) for g in gradients]), "\n".join(lines), alt)


def join_rows(
    sent: Sequence[Sequence[float]],
    own_steps: Sequence[int],
    gradients: Sequence[float],
    left_with: Sequence[float],
    ended_with: Sequence[float],
) -> list[dict]:
    """What ``join_picture`` draws: for every rank ``sent``, pairs of a number as text and whether
    the rank trained in that step, and ``left_with`` and ``ended_with`` as text."""
    ranks = {len(x) for x in (sent, own_steps, left_with, ended_with)}
    if ranks != {len(sent)} or not sent:
        raise ValueError(
            "sent, own_steps, left_with and ended_with need one entry for every rank, but have "
            f"{len(sent)}, {len(own_steps)}, {len(left_with)} and {len(ended_with)}."
        )
    for rank, numbers in enumerate(sent):
        if len(numbers) != len(gradients) or not 0 <= own_steps[rank] <= len(gradients):
            raise ValueError(
                f"There are {len(gradients)} steps, but rank {rank} has sent in {len(numbers)}, "
                f"{own_steps[rank]} of them its own."
            )
    return [
        {
            "sent": [(number(x), s < own_steps[rank]) for s, x in enumerate(numbers)],
            "left_with": number(left_with[rank]),
            "ended_with": number(ended_with[rank]),
        }
        for rank, numbers in enumerate(sent)
    ]


def number(x: float) -> str:
    return f"{x:.4g}"


@our_settings()
def draw_join(rows: Sequence[dict], gradients: Sequence[str]) -> Canvas:
    numbers = [*gradients, *(x for row in rows for x, _ in row["sent"])]
    numbers += [row[key] for row in rows for key in ("left_with", "ended_with")]
    cell = max(60, text_width("0" * max(map(len, numbers)), 9) + 12)
    left, right = MARGIN + 58, MARGIN + 82 + cell * len(gradients)
    bottom = TOP + STEP * len(rows)
    canvas = Canvas(bottom + LINE + 46, max(right + 2 * cell + 30 + MARGIN, 470))
    title = f"{count(len(rows), 'rank')} with different numbers of inputs"
    canvas.text(MARGIN, 19, title, 11, weight="bold")
    about = "What each gives to the all-reduce of every step, and one of its weights."
    canvas.text(MARGIN, 36, about, 8.5, PALE)
    heads = [(left + cell * s, f"step {s}") for s in range(len(gradients))]
    for x, words in [*heads, (right, "leaves with"), (right + cell + 30, "ends with")]:
        canvas.text(x + cell / 2, 62, words, 9, PALE, ha="center")
    for rank, row in enumerate(rows):
        draw_rank(canvas, rank, row, (left, right, cell))
    canvas.text(MARGIN, bottom + LINE / 2, "gradient", 9.5, weight="bold")
    for s, words in enumerate(gradients):
        draw_cell(canvas, left + cell * s, bottom, cell, words, NEUTRAL)
    legend = "Coloured: the rank trains. White: it is a shadow and sends zeros."
    canvas.text(MARGIN, bottom + LINE + 24, legend, 9)
    return canvas


def draw_rank(canvas: Canvas, rank: int, row: dict, columns: tuple) -> None:
    left, right, cell = columns
    y, own = TOP + STEP * rank, tint(bucket_color(rank), 0.3)
    canvas.text(MARGIN, y + LINE / 2, f"rank {rank}", 9.5, weight="bold")
    for s, (words, trains) in enumerate(row["sent"]):
        draw_cell(canvas, left + cell * s, y, cell, words, own if trains else PAPER)
    stays = row["left_with"] == row["ended_with"]
    draw_cell(canvas, right, y, cell, row["left_with"], NEUTRAL if stays else own)
    canvas.arrow(right + cell + 4, y + LINE / 2, right + cell + 26, y + LINE / 2)
    draw_cell(canvas, right + cell + 30, y, cell, row["ended_with"], NEUTRAL)


def draw_cell(canvas: Canvas, x: float, y: float, width: float, words: str, color: str) -> None:
    canvas.box(x + 2, y, width - 4, LINE, color, PALE)
    canvas.text(x + width / 2, y + LINE / 2, words, 9, ha="center", family="monospace")
