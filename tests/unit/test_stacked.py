"""Stacked bars: the data they are drawn from, where the boxes lie, and what is refused."""

from math import inf
from unittest.mock import patch

import pytest

from ddp_teach.canvas import Canvas
from ddp_teach.stacked import stacked_picture, stacked_rows

BARS = {"bare": [0.001, 0.002], "ours": [0.001, 0.003]}
PARTS = ("forward", "backward")


def test_rows_are_milliseconds_with_their_total():
    assert stacked_rows(BARS, PARTS) == [
        {"name": "bare", "parts": [1.0, 2.0], "total": 3.0},
        {"name": "ours", "parts": [1.0, 3.0], "total": 4.0},
    ]


def test_text_says_what_the_picture_shows():
    assert repr(stacked_picture(BARS, PARTS, "A step")).splitlines() == [
        "A step, milliseconds",
        "bare: 3 (forward 1, backward 2)",
        "ours: 4 (forward 1, backward 3)",
    ]


def test_parts_lie_end_to_end_and_to_scale():
    box, boxes = Canvas.box, []

    def noted(self, x, y, width, height, *colors):
        if height == 18:
            boxes.append((x, y, width))
        box(self, x, y, width, height, *colors)

    with patch.object(Canvas, "box", noted):
        stacked_picture(BARS, PARTS, "A step")
    (x1, y1, w1), (x2, y2, w2), (x3, y3, w3), (x4, _, w4) = boxes
    assert x1 == x3 and x2 == pytest.approx(x1 + w1) and x4 == pytest.approx(x3 + w3)
    assert y1 == y2 < y3
    assert (w2, w3, w4) == pytest.approx((2 * w1, w1, 3 * w1))


def test_picture_is_the_same_every_time_and_names_all():
    first, second = (stacked_picture(BARS, PARTS, "A step").svg for _ in range(2))
    assert first == second
    for words in ("bare", "ours", "forward", "backward", "3.00 ms", "4.00 ms"):
        assert words in first


@pytest.mark.parametrize("seconds", [[1.0], [1.0, -1.0], [1.0, inf]])
def test_bars_that_do_not_fit_are_refused(seconds):
    with pytest.raises(ValueError, match="'odd' must have 2 numbers"):
        stacked_picture({"odd": seconds}, PARTS, "A step")


@pytest.mark.parametrize(
    ("bars", "parts"), [({}, PARTS), ({"a": []}, ()), ({"a": [1] * 9}, "abcdefghi")]
)
def test_nothing_to_draw_is_refused(bars, parts):
    with pytest.raises(ValueError, match="at least one bar"):
        stacked_picture(bars, parts, "A step")
