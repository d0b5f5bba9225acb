"""Pictures of curves: the loss over the steps of several trainings, or what a model has learned.

Curves that coincide stay visible: each is drawn narrower than the one before, on top of it. What is
drawn are the numbers of ``curve_rows``, rounded, so that a difference in the last bits, as between
two processors, does not change the picture.
"""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite

from matplotlib.axes import Axes

from ddp_teach.canvas import (
    COLORS,
    MARGIN,
    NEUTRAL,
    PALE,
    WIDTH,
    Canvas,
    Picture,
    bucket_color,
    count,
    our_settings,
    text_width,
)

LEGEND, SAMPLE = 9, 22  # font size, and length of a line beside a name, in points
HEIGHT = 190  # of the part with the curves, in points
MOST = len(COLORS) - 1  # curves; the last colour, yellow, is hard to see as a thin line


def curve_picture(
    curves: Mapping[str, Sequence[float | None]],
    title: str,
    x: Sequence[float] | None = None,
    x_label: str = "step",
    y_label: str = "loss",
    *,
    log_x: bool = False,
    modelled: Collection[str] = (),
) -> Picture:
    """A picture of named ``curves`` of equal length, over ``x`` (by default 0, 1, 2, ...).

    A ``None`` in a curve is a point left out. With ``log_x`` equal factors of x are equally far
    apart, and each x has its number. The curves named in ``modelled`` are dashed; the others, which
    were measured, then have a dot at every point.

    Raises ``ValueError`` where there is nothing to draw, for more than 6 curves, where lengths
    differ, and for numbers that are not finite.
    """
    rows = curve_rows(curves, x)
    lines = [f"{title}: {y_label} by {x_label}"]
    for row in rows:
        (first_x, first), (last_x, last) = row["points"][0], row["points"][-1]
        lines.append(f"{row['name']}: {first:g} at {first_x:g}, {last:g} at {last_x:g}")
    names = ", ".join(row["name"] for row in rows)
    alt = f"{title}. {count(len(rows), 'curve')} of {y_label} by {x_label}: {names}."
    for row in rows:
        row["line"] = "--" if row["name"] in modelled else "o-" if modelled or log_x else "-"
    ticks = list(x) if x is not None and log_x else None
    return Picture(draw_curves(rows, title, x_label, y_label, ticks), "\n".join(lines), alt)


def curve_rows(
    curves: Mapping[str, Sequence[float | None]], x: Sequence[float] | None = None
) -> list[dict]:
    """What ``curve_picture`` draws: for every curve its ``name`` and its ``points``, pairs of x and
    y rounded to 4 decimals."""
    lengths = {name: len(ys) for name, ys in curves.items()}
    if not curves or any(all(y is None for y in ys) for ys in curves.values()):
        raise ValueError(f"curves need a point each to be drawn, but got {dict(curves)}.")
    if len(curves) > MOST:
        raise ValueError(f"At most {MOST} curves fit into a picture, but got {len(curves)}.")
    if x is None:
        x = range(next(iter(lengths.values())))
    if set(lengths.values()) != {len(x)}:
        raise ValueError(f"Every curve must have {len(x)} points, one for each x; got {lengths}.")
    for name, ys in curves.items():
        if not all(y is None or isfinite(y) for y in ys):
            raise ValueError(f"Curve {name!r} has a value that is not finite.")
    rows = []
    for name, ys in curves.items():
        pairs = zip(x, ys, strict=True)
        points = [[rounded(a), rounded(b)] for a, b in pairs if b is not None]
        rows.append({"name": name, "points": points})
    return rows


def rounded(number: float) -> float:
    return round(float(number), 4) + 0.0  # -0.0 becomes 0.0


@our_settings()
def draw_curves(
    rows: Sequence[dict],
    title: str,
    x_label: str,
    y_label: str,
    log_ticks: Sequence[float] | None = None,
) -> Canvas:
    names, styles = [row["name"] for row in rows], line_styles(rows)
    legend = legend_lines(names, WIDTH - 2 * MARGIN)
    height, left = 38 + 16 * len(legend) + HEIGHT + 40, 52
    canvas = Canvas(height)
    canvas.text(MARGIN, 19, title, 11, weight="bold")
    draw_legend(canvas, legend, names, styles)
    place = (left / WIDTH, 40 / height, (WIDTH - left - MARGIN) / WIDTH, HEIGHT / height)
    plot = canvas.figure.add_axes(place)
    for row, style in zip(rows, styles, strict=True):
        xs, ys = zip(*row["points"], strict=True)
        plot.plot(xs, ys, **style)
    if log_ticks is not None:
        plot.set_xscale("log")
        plot.set_xticks(log_ticks, [f"{tick:g}" for tick in log_ticks])
        plot.set_xticks([], minor=True)
        plot.set_ylim(bottom=0)
    elif all(x == int(x) for row in rows for x, _ in row["points"]):
        plot.xaxis.get_major_locator().set_params(integer=True)  # there is no half step
    dress_axes(plot, x_label, y_label)
    return canvas


def dress_axes(plot: Axes, x_label: str, y_label: str) -> None:
    """Pale axes and a grid, behind the curves."""
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(PALE)
    plot.grid(color=NEUTRAL, linewidth=0.7)
    plot.set_axisbelow(True)
    plot.tick_params(labelsize=8.5, color=PALE, labelcolor=PALE)
    plot.set_xlabel(x_label, fontsize=9, color=PALE)
    plot.set_ylabel(y_label, fontsize=9, color=PALE)


def line_styles(rows: Sequence[dict]) -> list[dict]:
    """How matplotlib draws each curve, whose ``line`` is ``"-"``, ``"--"`` or, with dots, ``"o-"``.
    The later a curve comes, the narrower it is."""
    widths = [1.4 + 1.8 * (len(rows) - 1 - i) for i in range(len(rows))]  # the last on top
    if any(row["line"] == "--" for row in rows):  # wide dashes are ugly, and these don't coincide
        widths = [2.0] * len(rows)
    styles = []
    for i, (row, width) in enumerate(zip(rows, widths, strict=True)):
        style = {"color": bucket_color(i), "linewidth": width, "solid_capstyle": "butt"}
        dots = {"marker": "o", "markersize": width + 4}
        styles.append(style | (dots if row["line"] == "o-" else {"linestyle": row["line"]}))
    return styles


def draw_legend(
    canvas: Canvas,
    legend: Sequence[Sequence[tuple[int, float]]],
    names: Sequence[str],
    styles: Sequence[dict],
) -> None:
    """A piece of every curve, with its name; ``legend`` is what ``legend_lines`` returned."""
    for k, line in enumerate(legend):
        for i, place in line:
            at, y = MARGIN + place, 40 + 16 * k
            xs = [at, at + SAMPLE / 2, at + SAMPLE] if "marker" in styles[i] else [at, at + SAMPLE]
            canvas.axes.plot(xs, [y] * len(xs), markevery=[1], **styles[i])
            canvas.text(at + SAMPLE + 5, y, names[i], LEGEND)


def legend_lines(names: Sequence[str], width: float) -> list[list[tuple[int, float]]]:
    """On which line of ``width`` points every name of the legend stands, and how far from its left:
    a list of (number of the curve, points) for every line."""
    lines: list[list[tuple[int, float]]] = []
    at = width
    for i, name in enumerate(names):
        needed = SAMPLE + 5 + text_width(name, LEGEND)
        if at + needed > width or not lines:
            lines.append([])
            at = 0.0
        lines[-1].append((i, at))
        at += needed + 14
    return lines
