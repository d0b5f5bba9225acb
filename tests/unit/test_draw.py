"""Pictures: what they say, that they are the same every time, and that nothing in them overlaps."""

import subprocess
import sys
import textwrap
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

from ddp_teach.bucket_picture import flow
from ddp_teach.buckets import Bucket, assign_buckets, bucket_caps
from ddp_teach.canvas import COLORS, INK, NEUTRAL, PALE, bucket_color, readable_bytes, tint
from ddp_teach.draw import all_reduce_picture, all_reduce_rows, bucket_map, bucket_rows


def buckets_of(model, cap_mb=None):
    named = list(model.named_parameters())[::-1]
    params = [p for _, p in named]
    return [
        Bucket(bucket, [params[i] for i in bucket], [named[i][0] for i in bucket])
        for bucket in assign_buckets(params, bucket_caps(cap_mb))
    ]


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def deep(layers):
    return nn.ModuleDict({f"layer{i}": nn.Linear(32, 32) for i in range(layers)})


def transformer_block():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


TWO = 200 / 2**20  # MiB: two buckets for the mlp
ONE_LAYER = 32 * 33 * 4 / 2**20  # MiB: a bucket for each layer of the deep model


# What a bucket map says.


def test_bucket_rows_are_the_buckets_in_launch_order():
    assert bucket_rows(buckets_of(mlp(), TWO)) == [
        {
            "dtype": "float32",
            "nbytes": 4 * (4 + 64),
            "params": [
                {"name": "2.bias", "shape": [4], "offset": 0},
                {"name": "2.weight", "shape": [4, 16], "offset": 4},
            ],
        },
        {
            "dtype": "float32",
            "nbytes": 4 * (16 + 128),
            "params": [
                {"name": "0.bias", "shape": [16], "offset": 0},
                {"name": "0.weight", "shape": [16, 8], "offset": 16},
            ],
        },
    ]


def test_a_wrapper_and_rows_that_came_from_a_rank_are_drawn_as_buckets_are():
    buckets = buckets_of(mlp(), TWO)
    wrapper = nn.Module()
    wrapper.buckets = buckets
    rows = bucket_rows(buckets)
    assert bucket_rows(wrapper) == bucket_rows(rows) == rows
    assert bucket_map(wrapper).svg == bucket_map(rows).svg == bucket_map(buckets).svg


def test_the_text_of_a_bucket_map_says_the_same_as_the_picture():
    picture = bucket_map(buckets_of(mlp(), TWO))
    assert repr(picture) == textwrap.dedent("""\
        2 buckets, in launch order
        bucket 0: 272 bytes of float32: 2.bias [4], 2.weight [4, 16]
        bucket 1: 576 bytes of float32: 0.bias [16], 0.weight [16, 8]""")
    assert picture.alt.startswith("2 buckets with 4 parameters")
    drawn = words_in(picture)
    for words in [
        "bucket 0",
        "2.bias [4]",
        "0.weight [16, 8]",
        "2 parameters, 272 bytes of float32",
    ]:
        assert words in drawn


def words_in(picture):
    """The texts in the SVG, which is well-formed."""
    return [text.text for text in elements(picture, "text")]


def elements(picture, kind):
    return list(ElementTree.fromstring(picture.svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}"))


def test_bars_are_to_scale_and_parameters_lie_where_they_lie():
    """The first bar is as much shorter as its bucket; in the dark parts lie every second one."""
    figure = bucket_map(buckets_of(mlp(), TWO)).figure
    bars = [p for p in figure.axes[0].patches if isinstance(p, matplotlib.patches.Rectangle)]
    first, first_bias, second, second_bias = bars
    assert first.get_width() / second.get_width() == pytest.approx(272 / 576)
    assert first_bias.get_width() / first.get_width() == pytest.approx(4 / 68)
    assert second_bias.get_width() / second.get_width() == pytest.approx(16 / 144)
    assert first_bias.get_x() == first.get_x() == second.get_x()


def test_of_many_buckets_and_parameters_the_picture_says_how_many_it_leaves_out():
    words = words_in(bucket_map(buckets_of(deep(100), ONE_LAYER)))
    assert "100 buckets, launched from top to bottom" in words and "… 91 more …" in words
    assert [w for w in words if w.startswith("bucket ")] == [
        *(f"bucket {i}" for i in range(8)),
        "bucket 99",
    ]
    words = words_in(bucket_map(buckets_of(deep(100))))
    (left_out,) = [int(w.split()[1]) for w in words if w.startswith("… ")]
    assert left_out + sum(w.startswith("layer") for w in words) == 200
    assert "layer0.weight [32, 32]" in words, "the last one is always there"


def test_no_buckets_are_a_picture_too():
    picture = bucket_map([])
    assert repr(picture) == "0 buckets, in launch order" and "Nothing is sent." in words_in(picture)


NAMES = st.lists(st.text("abc._1", min_size=1, max_size=200), min_size=1, max_size=60)


@given(NAMES, st.integers(2, 6))
def test_names_that_do_not_fit_are_counted(names, most_lines):
    params = [{"name": name, "shape": [3]} for name in names]
    lines = flow(params, 500, most_lines)
    words = [word for line in lines for word in line]
    assert len(lines) <= most_lines
    left_out = sum(int(word.split()[1]) for word in words if " more …" in word)
    assert len([word for word in words if " more …" not in word]) + left_out == len(names)
    for word in words[:1]:
        assert f"{names[0]} [3]".endswith(word.lstrip("…"))


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (25 << 20, "25.0 MiB"),
    ],
)
def test_bytes_are_readable(nbytes, expected):
    assert readable_bytes(nbytes) == expected


# What a picture of an all-reduce says.


@pytest.mark.parametrize(
    ("after", "result"),
    [([1.5, 1.5], "mean"), ([3.0, 3.0], "sum"), ([2.0, 2.0], "same"), ([1.0, 2.0], "different")],
)
def test_what_the_ranks_hold_afterwards_is_recognised(after, result):
    assert all_reduce_rows([1.0, 2.0], after) == {
        "before": [[["1"]], [["2"]]],
        "after": [[[f"{x:g}"]] for x in after],
        "result": result,
    }


def test_ranks_that_hold_nearly_the_same_do_not_hold_the_same():
    assert all_reduce_rows([1.0, 2.0], [1.5, 1.5 + 1e-6])["result"] == "different"


def test_numbers_lists_and_tensors_of_any_kind_are_taken():
    assert all_reduce_rows([[1, 2], [3, 4]], [[2, 3], [2, 3]])["result"] == "mean"
    before = [
        torch.full((2, 3), float(r), dtype=torch.bfloat16, requires_grad=True) for r in (0, 1)
    ]
    data = all_reduce_rows(before, [torch.ones(2, 3)] * 2)
    assert data["result"] == "sum" and data["before"][1] == [["1"] * 3] * 2
    assert all_reduce_rows([torch.ones(2, 2, 2)], [torch.ones(2, 2, 2)])["before"] == [
        [["1"] * 2] * 4
    ]


def test_the_text_says_who_holds_what():
    picture = all_reduce_picture([[1.0, 20.0], [2.0, 1 / 3]], [[1.5, 61 / 6]] * 2)
    assert repr(picture) == textwrap.dedent("""\
        all-reduce over 2 ranks; afterwards all ranks hold the mean
        rank 0: 1, 20 -> 1.5, 10.17
        rank 1: 2, 0.3333 -> 1.5, 10.17""")
    drawn = words_in(picture)
    assert [w for w in drawn if w in ("1.5", "0.3333", "20")] == ["20", "1.5", "0.3333", "1.5"]
    assert "Afterwards all ranks hold the mean." in drawn


def test_only_equal_numbers_lose_the_colours_of_their_ranks():
    def colors(after):
        patches = all_reduce_picture([1.0, 2.0], after).figure.axes[0].patches
        cells = [p for p in patches if isinstance(p, matplotlib.patches.Rectangle)]
        return [matplotlib.colors.to_hex(p.get_facecolor()).upper() for p in cells]

    own = [tint(bucket_color(rank), 0.3) for rank in (0, 1)]
    assert colors([1.5, 1.5]) == [own[0], NEUTRAL, own[1], NEUTRAL]
    assert colors([1.0, 2.0]) == [own[0], own[0], own[1], own[1]]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1.0, 2.0], [1.5], "before has 2 and after has 1"),
        ([], [], "before has 0 and after has 0"),
        ([[1.0], [1.0, 2.0]], [1.0, 1.0], "one shape"),
        ([[]], [[]], "one shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        all_reduce_picture(before, after)


# Every picture.

PICTURES = {
    "mlp": lambda: bucket_map(buckets_of(mlp(), TWO)),
    "transformer": lambda: bucket_map(buckets_of(transformer_block(), 0.03)),
    "200 parameters": lambda: bucket_map(buckets_of(deep(100))),
    **{
        f"{n} buckets": lambda n=n: bucket_map(buckets_of(deep(n), ONE_LAYER)) for n in range(1, 11)
    },
    "100 buckets": lambda: bucket_map(buckets_of(deep(100), ONE_LAYER)),
    "odd names": lambda: bucket_map(odd_names()),
    "two numbers": lambda: all_reduce_picture([1.0, 2.0], [1.5, 1.5]),
    "8 ranks": lambda: all_reduce_picture(range(8), [3.5] * 8),
    "large": lambda: all_reduce_picture(
        [torch.full((20, 30), -1e-7 / 3)] * 2, torch.ones(2, 20, 30)
    ),
}


def odd_names():
    names = ["a <b> & 'c' \"d\"", "$x_1$ é", "long." * 60 + "weight"]
    return [Bucket([0, 1, 2], [torch.zeros(2)] * 3, names)]


@pytest.fixture(params=PICTURES)
def picture(request):
    return PICTURES[request.param]()


def test_no_text_overlaps_another_or_leaves_the_card(picture):
    renderer = FigureCanvasAgg(picture.figure).get_renderer()
    card = picture.figure.bbox
    boxes = [(t, t.get_window_extent(renderer)) for t in picture.figure.axes[0].texts]
    boxes = [(t.get_text(), box) for t, box in boxes if t.get_text()]
    assert len(boxes) > 2
    for words, box in boxes:
        assert card.x0 <= box.x0 and box.x1 <= card.x1, words
        assert card.y0 <= box.y0 and box.y1 <= card.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        assert not box.overlaps(other), f"{words!r} and {others!r}"


def test_text_keeps_inside_its_chip(picture):
    renderer = FigureCanvasAgg(picture.figure).get_renderer()
    axes = picture.figure.axes[0]
    boxes = [p.get_window_extent(renderer) for p in axes.patches]
    names = [t for t in axes.texts if t.get_family() == ["monospace"]]
    assert names
    for name in names:
        extent = name.get_window_extent(renderer)
        assert any(b.x0 <= extent.x0 and extent.x1 <= b.x1 and b.y0 <= extent.y0 for b in boxes), (
            name
        )


def test_svg_says_what_is_to_be_seen(picture):
    root = ElementTree.fromstring(picture.svg)
    assert picture._repr_svg_() == picture.svg and picture.svg.startswith("<svg ")
    assert root.get("role") == "img" and root.get("aria-label") == picture.alt
    assert elements(picture, "title")[0].text == picture.alt
    assert not [e for e in root.iter() if e.tag.endswith("date")]


def test_names_with_special_characters_are_drawn_as_they_are():
    words = words_in(bucket_map(odd_names()))
    assert "a <b> & 'c' \"d\" [2]" in words and "$x_1$ é [2]" in words


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_save_writes_what_the_ending_says(tmp_path, ending):
    picture = all_reduce_picture([1.0, 2.0], [1.5, 1.5])
    path = tmp_path / f"picture.{ending}"
    picture.save(path)
    start = {"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)
    if ending == "svg":
        assert path.read_text(encoding="utf-8") == picture.svg


# The same every time, and nothing changed for others.

ANOTHER_PROCESS = """
    import io, sys
    import ddp_teach.draw
    assert "matplotlib" not in sys.modules, "imported before the first picture"
    import matplotlib.style
    from matplotlib.figure import Figure
    if sys.argv[1] == "changed":
        matplotlib.style.use("dark_background")
        matplotlib.rcParams.update({
            "svg.hashsalt": "other", "svg.fonttype": "path", "font.size": 20, "patch.linewidth": 5,
            "font.family": "serif", "savefig.dpi": 300, "figure.dpi": 50, "axes.linewidth": 3,
        })
        figure = Figure()
        figure.add_subplot().plot([1, 2], label="x")
        figure.savefig(io.StringIO(), format="svg")
    before = matplotlib.rcParams.copy()
    from test_draw import PICTURES
    for make in PICTURES.values():
        sys.stdout.write(make().svg)
    assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.fixture(scope="module")
def here():
    return "".join(make().svg for make in PICTURES.values())


@pytest.mark.parametrize("settings", ["untouched", "changed"])
def test_svg_is_the_same_in_another_process(here, settings):
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ANOTHER_PROCESS), settings],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == here


def test_svg_is_the_same_the_second_time(here):
    assert "".join(make().svg for make in PICTURES.values()) == here


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        bucket_map([])
    assert bucket_rows(buckets_of(mlp()))[0]["dtype"] == "float32"


# Colours.


def luminance(color):
    """As WCAG defines it: 0 for black, 1 for white."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", COLORS)
def test_text_can_be_read_on_every_colour_it_stands_on(color):
    for paper, ink in [
        (tint(color, 0.12), INK),
        (tint(color, 0.3), INK),
        (tint(color, 0.12), PALE),
    ]:
        contrast = (luminance(paper) + 0.05) / (luminance(ink) + 0.05)
        assert contrast >= 4.5, "less than WCAG asks of normal text"


def test_neighbouring_buckets_differ_and_colours_come_round_again():
    assert len({bucket_color(i) for i in range(7)}) == 7
    assert all(bucket_color(i) == bucket_color(i + 7) != bucket_color(i + 1) for i in range(20))
    assert tint("#000000", 0.5) == "#808080" and tint("#0072B2", 0) == "#FFFFFF"
