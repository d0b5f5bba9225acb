"""The picture of uneven inputs: what it says, that it is the same every time, and is refused."""

from itertools import combinations

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_teach.canvas import NEUTRAL, PAPER, bucket_color, tint
from ddp_teach.join_picture import join_picture, join_rows

THREE = ([[3, 0, 0], [6, 6, 0], [9, 9, 9]], [1, 2, 3], [6, 5, 3], [-6, -11, -14], [-14, -14, -14])
TWO = ([[1 / 3, 1e-7 / 3], [0.5, 2.25]], [1, 2], [1 / 6, 5], [-1 / 6, -31 / 6], [-31 / 6] * 2)
EIGHT = ([[1] * 5] * 8, [5] * 8, [1] * 5, list(range(8)), list(range(8)))
PICTURES = [THREE, TWO, EIGHT]


def test_rows_tell_steps_of_ones_own_from_shadows():
    rows = join_rows(*THREE)
    assert [row["sent"] for row in rows] == [
        [("3", True), ("0", False), ("0", False)],
        [("6", True), ("6", True), ("0", False)],
        [("9", True), ("9", True), ("9", True)],
    ]
    assert [(row["left_with"], row["ended_with"]) for row in rows] == [
        ("-6", "-14"),
        ("-11", "-14"),
        ("-14", "-14"),
    ]


def test_the_text_says_the_same():
    picture = join_picture(*THREE)
    assert repr(picture).splitlines() == [
        "3 ranks, 3 steps; in brackets what shadows send",
        "rank 0: 3 [0] [0]; leaves with -6, ends with -14",
        "rank 1: 6 6 [0]; leaves with -11, ends with -14",
        "rank 2: 9 9 9; leaves with -14, ends with -14",
        "gradient: 6 5 3",
    ]
    assert "inputs for 1, 2, 3 of 3 steps" in picture.alt and "the same weight" in picture.alt
    assert "other weights" in join_picture(*EIGHT).alt


def test_colours_tell_who_trains():
    patches = join_picture(*THREE).figure.axes[0].patches
    boxes = [p for p in patches if isinstance(p, matplotlib.patches.FancyBboxPatch)]
    colors = [matplotlib.colors.to_hex(p.get_facecolor()).upper() for p in boxes]
    own = [tint(bucket_color(rank), 0.3) for rank in range(3)]
    assert colors[:15] == [
        *(own[0], PAPER, PAPER, own[0], NEUTRAL),
        *(own[1], own[1], PAPER, own[1], NEUTRAL),
        *(own[2], own[2], own[2], NEUTRAL, NEUTRAL),
    ]
    assert colors[15:] == [NEUTRAL] * 3, "the gradients"


@pytest.mark.parametrize("data", PICTURES)
def test_no_text_overlaps_another_or_leaves_the_card(data):
    figure = join_picture(*data).figure
    renderer, card = FigureCanvasAgg(figure).get_renderer(), figure.bbox
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in figure.axes[0].texts]
    boxes = [(words, box) for words, box in boxes if words]
    assert len(boxes) > 10
    for words, box in boxes:
        assert card.x0 <= box.x0 and box.x1 <= card.x1, words
        assert card.y0 <= box.y0 and box.y1 <= card.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        assert not box.overlaps(other), f"{words!r} and {others!r}"


def test_svg_is_the_same_the_second_time():
    first, second = join_picture(*THREE), join_picture(*THREE)
    assert first.svg == second.svg and first.alt in first.svg and "rank 2" in first.svg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: [1, 2]}, "have 3, 2, 3 and 3"),
        ({4: [-14]}, "have 3, 3, 3 and 1"),
        ({0: [], 1: [], 3: [], 4: []}, "have 0, 0, 0 and 0"),
        ({2: [6, 5]}, "There are 2 steps, but rank 0 has sent in 3"),
        ({1: [1, 2, 4]}, "rank 2 has sent in 3, 4 of them its own"),
    ],
)
def test_numbers_that_do_not_match_are_refused(change, message):
    data = [change.get(i, part) for i, part in enumerate(THREE)]
    with pytest.raises(ValueError, match=message):
        join_picture(*data)
