"""Pictures of curves: what they say, what is drawn, and that no text in them overlaps."""

from itertools import combinations
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_teach.canvas import WIDTH
from ddp_teach.curves import curve_picture, curve_rows, legend_lines

TWO = {"one process": [1.0, 0.5, 0.25], "two ranks": [1.0, 0.5, 0.75]}


def test_rows_are_the_points_by_name():
    assert curve_rows(TWO) == [
        {"name": "one process", "points": [[0, 1.0], [1, 0.5], [2, 0.25]]},
        {"name": "two ranks", "points": [[0, 1.0], [1, 0.5], [2, 0.75]]},
    ]
    assert curve_rows({"a": [5, 6]}, x=[-1, 1])[0]["points"] == [[-1, 5], [1, 6]]


def test_a_difference_in_the_last_bits_changes_nothing():
    exact = {"a": [0.3, -1e-9, 1 / 3]}
    nearly = {"a": [0.1 + 0.2, 1e-9, 1 / 3 + 1e-12]}
    assert curve_rows(exact) == curve_rows(nearly)
    one, other = (curve_picture(curves, "Loss") for curves in (exact, nearly))
    assert one.svg == other.svg and repr(one) == repr(other)
    assert curve_rows({"a": [0.3]}) != curve_rows({"a": [0.3002]})


def test_the_text_says_where_every_curve_starts_and_ends():
    picture = curve_picture(TWO, "Two trainings", x=[0, 10, 20])
    assert repr(picture).splitlines() == [
        "Two trainings: loss by step",
        "one process: 1 at 0, 0.25 at 20",
        "two ranks: 1 at 0, 0.75 at 20",
    ]
    assert picture.alt == "Two trainings. 2 curves of loss by step: one process, two ranks."


def plotted(picture):
    """The lines in the plot itself, without those of the legend."""
    return picture.figure.axes[1].lines


def test_what_is_drawn_are_the_points_each_curve_narrower_than_the_one_below():
    picture = curve_picture(TWO, "Two trainings")
    lines = plotted(picture)
    assert [line.get_ydata().tolist() for line in lines] == list(TWO.values())
    assert [line.get_xdata().tolist() for line in lines] == [[0, 1, 2]] * 2
    assert lines[0].get_linewidth() > lines[1].get_linewidth() > 1
    samples = picture.figure.axes[0].lines
    for sample, line in zip(samples, lines, strict=True):
        assert sample.get_color() == line.get_color()
        assert sample.get_linewidth() == line.get_linewidth()
    assert lines[0].get_color() != lines[1].get_color()


def test_modelled_curves_are_dashed_and_measured_ones_have_dots():
    curves = {"measured": [1.0, None, 3.0], "model": [2.0, 2.0, 2.0]}
    picture = curve_picture(curves, "Two", x=[2, 4, 8], modelled=["model"])
    measured, model = plotted(picture)
    assert (measured.get_linestyle(), measured.get_marker()) == ("-", "o")
    assert (model.get_linestyle(), model.get_marker()) == ("--", "None")
    assert measured.get_xdata().tolist() == [2, 8]  # nothing where nothing was measured
    samples = picture.figure.axes[0].lines
    assert [line.get_linestyle() for line in samples] == ["-", "--"]
    assert [line.get_marker() for line in plotted(curve_picture(TWO, "Loss"))] == ["None"] * 2


def test_a_logarithmic_axis_has_a_number_at_every_x():
    picture = curve_picture({"a": [3, 1, 2]}, "Sizes", x=[0.01, 1, 25], log_x=True)
    axis = picture.figure.axes[1]
    assert axis.get_xscale() == "log"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0.01", "1", "25"]
    assert axis.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("curves", "x", "message"),
    [
        ({}, None, "need a point"),
        ({"a": []}, None, "need a point"),
        ({"a": [1.0], "b": [None]}, None, "need a point"),
        ({"a": [1.0], "b": [1.0, 2.0]}, None, "Every curve must have 1 points"),
        ({"a": [1.0, 2.0]}, [0], "Every curve must have 1 points"),
        ({"a": [1.0, float("nan")]}, None, "'a' has a value that is not finite"),
        ({str(i): [1.0] for i in range(7)}, None, "At most 6 curves"),
    ],
)
def test_what_cannot_be_drawn_is_refused(curves, x, message):
    with pytest.raises(ValueError, match=message):
        curve_picture(curves, "Loss", x=x)


PICTURES = {
    "two": lambda: curve_picture(TWO, "Two trainings"),
    "one point": lambda: curve_picture({"a": [1.0]}, "One step"),
    "six": lambda: curve_picture(
        {f"a training with the number {i}": [1e6 * i, -1e-3, 0] for i in range(6)}, "Six"
    ),
    "logarithmic": lambda: curve_picture(
        {"a": [3, 1, 2, 4, 5], "b": [1, None, None, 2, 3]},
        "Sizes",
        x=[8, 64, 128, 256, 1024],
        log_x=True,
        modelled=["b"],
    ),
    "odd names": lambda: curve_picture({"a <b> & 'c'": [1, 2], "$x_1$": [2, 1]}, "x < y & $z$"),
}


@pytest.fixture(params=PICTURES)
def picture(request):
    return PICTURES[request.param]()


def test_no_text_overlaps_another_or_leaves_the_card(picture):
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()
    renderer, card = canvas.get_renderer(), picture.figure.bbox
    plot = picture.figure.axes[1]
    ticks = [t for axis in (plot.xaxis, plot.yaxis) for t in axis.get_ticklabels()]
    low, high = plot.get_xlim(), plot.get_ylim()
    drawn = [
        t
        for t in ticks
        if low[0] <= t.get_position()[0] <= low[1] and high[0] <= t.get_position()[1] <= high[1]
    ]
    texts = [*picture.figure.axes[0].texts, plot.xaxis.label, plot.yaxis.label, *drawn]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
    assert len(boxes) > 6
    for words, box in boxes:
        assert card.x0 <= box.x0 and box.x1 <= card.x1, words
        assert card.y0 <= box.y0 and box.y1 <= card.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        assert not box.overlaps(other), f"{words!r} and {others!r}"


def test_svg_is_well_formed_says_what_is_to_be_seen_and_is_the_same_again(picture, request):
    root = ElementTree.fromstring(picture.svg)
    assert root.get("aria-label") == picture.alt
    assert PICTURES[request.node.callspec.params["picture"]]().svg == picture.svg


def test_the_legend_breaks_where_a_line_is_full():
    names = ["short", "a name that is rather long", "another name that is long", "last"]
    lines = legend_lines(names, 400)
    assert [[i for i, _ in line] for line in lines] == [[0, 1], [2, 3]]
    assert all(line[0][1] == 0 for line in lines)
    assert [[i for i, _ in line] for line in legend_lines(names, 10)] == [[0], [1], [2], [3]]
    assert len(legend_lines(["one", "two"], WIDTH)) == 1
