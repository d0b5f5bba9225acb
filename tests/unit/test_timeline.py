"""Timelines: what they say in words, that pictures are the same every time, the Chrome trace."""

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_teach.canvas import bucket_color, tint
from ddp_teach.timeline import Collective, Timeline, plot, side_by_side
from ddp_teach.timeline_text import lines_of, text_of
from ddp_teach.trace import to_chrome_trace


class Script:
    """Writes a timeline, in which every event comes a millisecond after the one before."""

    def __init__(self, rank=0, model="Buckets"):
        self.timeline = Timeline(rank, model, start=1e9)

    def add(self, *kinds, name="", collective=None):
        for kind in kinds:
            self.timeline.add(kind, 0.001 * len(self.timeline.events), name, collective)
        return self

    def gradient(self, name):
        return self.add("gradient", name=name)

    def launch(self, *names, bucket=None, kind="all_reduce", is_async=True):
        launched, number = 0.001 * len(self.timeline.events), len(self.timeline.collectives)
        about = Collective(kind, (0, 1), 4 * len(names), "float32", bucket, names, launched)
        about.is_async = is_async
        self.timeline.collectives.append(about)
        return self.add("launch", collective=number)

    def wait(self, number):
        self.add("wait", "done", collective=number)
        # done in the background, half a millisecond after the launch
        about = self.timeline.collectives[number]
        about.done = about.launched + 0.0005 if about.is_async else self.timeline.events[-1].time
        return self


def two_buckets(rank=0):
    script = Script(rank).add("forward", "forward end", "backward")
    script.gradient("2.bias").gradient("2.weight").launch("2.bias", "2.weight", bucket=0)
    script.gradient("0.weight").launch("0.weight", bucket=1)
    return script.wait(0).wait(1).add("backward end", "step", "step end").timeline


def other_order():
    """What a rank sends that launches buckets as they fill, another order than in two_buckets."""
    script = Script(1).add("forward", "forward end", "backward")
    script.gradient("0.weight").launch("0.weight", bucket=1)
    script.gradient("2.bias").gradient("2.weight").launch("2.bias", "2.weight", bucket=0)
    return script.wait(0).wait(1).add("backward end").timeline


def after_backward():
    script = Script(model="AverageAfterBackward").add("forward", "forward end", "backward")
    script.gradient("b").gradient("a").add("backward end")
    for k, name in enumerate("ab"):
        script.launch(name, is_async=False).wait(k)
    return script.timeline


def torchs_class():
    """A launch, and no wait that is seen."""
    script = Script(model="DistributedDataParallel").add("forward", "forward end", "backward")
    return script.gradient("a").launch("a").add("backward end").timeline


def long():
    script = Script()
    for step in range(30):
        script.add("forward", "forward end", "backward").gradient("layer.weight" * 5)
        script.launch("layer.weight" * 5, bucket=0).wait(step).add("backward end")
    return script.timeline


def crowded():
    """As many collectives at once as a model of 150 parameters has with a hook for each."""
    script = Script(model="OverlappedHooks").add("forward", "forward end", "backward")
    for i in range(150):
        script.gradient(f"{i}.weight").launch(f"{i}.weight")
    for i in range(150):
        script.wait(i)
    return script.add("backward end").timeline


def broken():
    """A backward that an exception broke off, with a collective under way and one in a forward."""
    script = Script().add("forward").launch(kind="broadcast").add("forward end", "backward")
    script.gradient("b").launch("b", bucket=0).add("backward end", "forward", "forward end")
    return script.wait(1).timeline


# In words.


def test_the_text_says_what_happened_in_order():
    assert repr(two_buckets().plot()) == textwrap.dedent("""\
        Buckets on rank 0, by order:
          forward
          backward begins
            gradient of 2.bias is ready
            gradient of 2.weight is ready
            bucket 0 is launched (8 bytes)
            gradient of 0.weight is ready
            bucket 1 is launched (4 bytes)
            waits for bucket 0, done
            waits for bucket 1, done
          backward ends
          optimizer steps""")


def test_ranks_that_did_the_same_share_their_lines():
    assert repr(plot([two_buckets(0), two_buckets(1)])).startswith("Buckets on ranks 0, 1, by")
    assert repr(plot([two_buckets(0), other_order()])).count("Buckets on rank") == 2


def test_a_collective_that_is_waited_for_at_once_is_one_line():
    lines = text_of([after_backward()], "order").splitlines()
    assert lines[-2:] == [
        "  all-reduce of a is launched (4 bytes), waits until it is done",
        "  all-reduce of b is launched (4 bytes), waits until it is done",
    ]


def test_ranks_that_send_different_things_are_told_apart():
    ending = "The ranks send different things: collective 1 is bucket 0 on rank 0, bucket 1 on "
    assert text_of([two_buckets(0), other_order()], "order").splitlines()[-1] == f"{ending}rank 1."
    assert "different" not in text_of([two_buckets(0), two_buckets(1)], "order")


def test_ranks_are_not_said_to_send_different_things_where_that_is_not_known():
    joined = two_buckets(0)
    joined.collectives = [replace(c, names=(), bucket=None) for c in joined.collectives]
    assert "different" not in text_of([joined, two_buckets(1)], "order"), "zeros, for example"
    apart = other_order()
    apart.collectives = [replace(c, ranks=(1, 2)) for c in apart.collectives]
    assert "different" not in text_of([two_buckets(0), apart], "order"), "two process groups"


def test_where_no_wait_is_seen_the_bar_is_said_to_show_the_launch_alone():
    note = "Where no wait is seen, a bar shows the launch alone."
    assert repr(plot([torchs_class()])).splitlines()[-1] == note
    assert note in words_in(plot([torchs_class()]))
    assert note not in repr(plot([two_buckets()])) and note not in repr(plot([after_backward()]))


def test_what_an_exception_broke_off_is_told_as_far_as_it_went():
    assert text_of([broken()], "order").splitlines() == [
        "Buckets on rank 0, by order:",
        "  forward begins",
        "    broadcast is launched",
        "  forward ends",
        "  backward begins",
        "    gradient of b is ready",
        "    bucket 0 is launched (4 bytes)",
        "  backward ends",
        "  forward",
        "  waits for bucket 0, done",
        "Where no wait is seen, a bar shows the launch alone.",
    ]


def test_a_long_story_says_how_much_it_leaves_out():
    lines = text_of([long()], "order").splitlines()
    assert len(lines) == 1 + 60
    (left_out,) = [int(line.split()[1]) for line in lines if line.startswith("  … ")]
    assert left_out + 59 == 30 * 6


def test_repr_counts():
    text = "Timeline of Buckets on rank 0: 3 gradients, 2 x all_reduce (12 bytes)"
    assert repr(two_buckets()) == text


def test_by_time_every_line_has_its_time():
    lines = repr(two_buckets().plot(by="time")).splitlines()
    assert lines[1] == "     0.000 ms  forward"
    assert lines[-1] == "    13.000 ms  optimizer steps"


# Pictures.

RANKS = {
    "two ranks": lambda: [two_buckets(0), two_buckets(1)],
    "one rank": lambda: [two_buckets()],
    "different": lambda: [two_buckets(0), other_order()],
    "after backward": lambda: [after_backward()] * 3,
    "torch": lambda: [torchs_class()] * 2,
    "long": lambda: [long()],
    "crowded": lambda: [crowded()] * 2,
    "nine ranks": lambda: [two_buckets(rank) for rank in range(9)],
    "broken off": lambda: [broken()],
    "nothing happened": lambda: [Script().timeline],
    "no ranks": lambda: [],
}


@pytest.fixture(params=RANKS)
def timelines(request):
    return RANKS[request.param]()


@pytest.fixture(params=["order", "time"])
def picture(request, timelines):
    return plot(timelines, request.param)


def words_in(picture):
    root = ElementTree.fromstring(picture.svg)
    return [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_no_text_overlaps_another_or_leaves_the_card(picture):
    renderer = FigureCanvasAgg(picture.figure).get_renderer()
    card = picture.figure.bbox
    texts = [t for t in picture.figure.axes[0].texts if t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    assert len(boxes) >= 2
    for words, box in boxes:
        assert card.x0 <= box.x0 and box.x1 <= card.x1, words
        assert card.y0 <= box.y0 and box.y1 <= card.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        assert not box.overlaps(other), f"{words!r} and {others!r}"


def test_no_box_is_without_size_or_leaves_the_card(picture):
    width, height = (72 * inches for inches in picture.figure.get_size_inches())
    for patch in picture.figure.axes[0].patches:
        extent = patch.get_path().get_extents(patch.get_patch_transform())
        assert extent.width > 0 and extent.height > 0
        assert extent.x0 >= 0 and extent.x1 <= width and extent.y0 >= 0 and extent.y1 <= height


def test_the_svg_has_an_alternative_text(picture, timelines):
    root = ElementTree.fromstring(picture.svg)
    assert root.get("role") == "img" and root.get("aria-label") == picture.alt
    assert f"Timeline of {len(timelines)} rank" in picture.alt


def rectangles(timeline, by="order"):
    """(colour, top, bottom) of every box in points, from left to right."""
    picture = timeline.plot(by)
    boxes = []
    for patch in picture.figure.axes[0].patches:
        extent = patch.get_path().get_extents(patch.get_patch_transform())
        color = matplotlib.colors.to_hex(patch.get_facecolor()).upper()
        boxes.append((color, extent.y0, extent.y1))
    return boxes


def test_gradients_and_their_bucket_have_one_colour_and_bars_span_launch_to_done():
    for bucket, n_gradients, rows in ((0, 2, (4, 7)), (1, 1, (6, 8))):
        mine = [
            box for box in rectangles(two_buckets()) if box[0] == tint(bucket_color(bucket), 0.5)
        ]
        *gradients, (_, top, low) = mine
        assert len(gradients) == n_gradients
        # rows of 15 points below a head of 74: forward, backward, two gradients, the launch, ...
        assert [round((y - 74) / 15) for y in (top, low - 1)] == [rows[0], rows[1] + 1]


def test_by_time_a_bar_ends_when_the_result_is_there_though_nobody_waits_yet():
    timeline = two_buckets()
    boxes = rectangles(timeline, "time")
    bars = [box for box in boxes if box[0] == tint(bucket_color(0), 0.5)]
    _, top, low = bars[-1]
    assert low - top + 1 == pytest.approx(420 * 0.0005 / timeline.events[-1].time, abs=0.01)


def test_a_gradient_that_travels_in_no_collective_of_its_pass_has_no_colour():
    colors = {bucket_color(i) for i in range(7)}
    local = Script().add("forward", "forward end", "backward").gradient("a").add("backward end")
    local.add("forward", "forward end", "backward").gradient("a").launch("a", bucket=0).wait(0)
    drawn = [c for c, *_ in rectangles(local.timeline) if c in {tint(c, 0.5) for c in colors}]
    assert len(drawn) == 2, "the second gradient and the bar of its bucket"


EXTENTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


@given(EXTENTS)
def test_what_overlaps_lies_side_by_side(pairs):
    extents = sorted((begin, begin + length) for begin, length in pairs)
    places = side_by_side(extents)
    for (a, (begin, end)), (b, (other, _)) in combinations(zip(places, extents, strict=True), 2):
        assert a != b or other >= end, "the same place, and it begins before the other ends"
        assert begin <= other
    most = max((sum(b <= t < e for b, e in extents) for t in range(71)), default=0)
    assert len(set(places)) <= most + sum(b == e for b, e in extents), "no more than are needed"


ANOTHER_PROCESS = """
    import sys
    from test_timeline import RANKS, plot
    for make in RANKS.values():
        sys.stdout.write(plot(make()).svg + repr(plot(make())))
"""


def test_the_picture_is_the_same_in_another_process():
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ANOTHER_PROCESS)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "".join(plot(f()).svg + repr(plot(f())) for f in RANKS.values())


# Step by step.


class Slider(HTMLParser):
    """Reads the attributes of the slider."""

    def handle_starttag(self, tag, attributes):
        if tag == "input":
            self.attributes = dict(attributes)


def slider_of(timeline):
    parser = Slider()
    parser.feed(timeline.steps()._repr_html_())
    return parser.attributes


def test_the_slider_has_a_step_for_every_line_of_the_text_and_one_before_all():
    for make in (two_buckets, other_order, after_backward, broken, long):
        slider = slider_of(make())
        tops, words = zip(*json.loads(slider["data-steps"]), strict=True)
        assert slider["max"] == slider["value"] == str(len(words) - 1), "at first all is seen"
        lines = [line.strip() for _, line in lines_of(make())]
        assert list(words) == ["nothing has happened yet", *lines]
        assert list(tops) == sorted(tops) and tops[-1] == 100


def test_the_curtain_uncovers_what_has_happened():
    timeline = two_buckets()
    height = timeline.plot().figure.get_figheight() * 72
    top, words = json.loads(slider_of(timeline)["data-steps"])[3]
    assert words == "gradient of 2.bias is ready"
    assert top == pytest.approx(100 * (74 + 3 * 15) / height, abs=0.5), "the third row's end"


def test_a_stepper_holds_the_picture_and_prints_as_its_text():
    stepper, picture = two_buckets().steps(), two_buckets().plot()
    assert picture.svg in stepper._repr_html_() and repr(stepper) == repr(picture)
    assert two_buckets().steps()._repr_html_() == stepper._repr_html_()


# Data.


def test_a_timeline_travels_and_stays_small():
    timeline = two_buckets()
    data = pickle.dumps(timeline)
    assert pickle.loads(data) == timeline == copy.deepcopy(timeline)
    assert len(data) < 2000


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1],), TypeError, "plot: timelines must be a Timeline or a list of them.*got .1."),
        ((None,), TypeError, "got None"),
        (([], "size"), ValueError, 'plot: by must be "order" or "time", got \'size\''),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        plot(*arguments)


def test_bad_timelines_are_named_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="to_chrome_trace: timelines must be"):
        to_chrome_trace([None], tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


# The Chrome trace.


@pytest.fixture
def entries(tmp_path, timelines):
    to_chrome_trace(timelines, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_a_chrome_trace_holds_what_the_format_asks_for(entries, timelines):
    assert {e["pid"] for e in entries} == {t.rank for t in timelines}
    for entry in entries:
        assert set(entry) >= {"ph", "name", "ts", "pid", "tid"} and entry["ph"] in "XiM"
        assert entry["ts"] >= 0 and (entry["ph"] != "X" or entry["dur"] >= 0)
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in entries} <= named
    assert sum(e["ph"] == "i" for e in entries) == sum(
        t.kinds().count("gradient") for t in timelines
    )


def test_on_a_thread_of_a_chrome_trace_what_overlaps_is_nested(entries):
    lasting = [e for e in entries if e["ph"] == "X"]
    for first, second in combinations(lasting, 2):
        if (first["pid"], first["tid"]) != (second["pid"], second["tid"]):
            continue
        (a, b), (c, d) = ((e["ts"], e["ts"] + e["dur"]) for e in (first, second))
        slack = 0.01  # microseconds, of rounding
        apart, inside = b <= c + slack or d <= a + slack, (a <= c and d <= b) or (c <= a and b <= d)
        assert apart or inside, (first, second)


def test_a_chrome_trace_tells_times_in_microseconds_and_what_a_bucket_carries(tmp_path):
    two_buckets().to_chrome_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (bucket,) = [e for e in entries if e["name"] == "bucket 0"]
    assert (bucket["ts"], bucket["dur"]) == (5000, 500)
    assert bucket["args"] == {"names": ["2.bias", "2.weight"], "nbytes": 8, "dtype": "float32"}
    assert [e["name"] for e in entries if e["ph"] == "X" and e["tid"] == 0] == [
        "forward", "backward", "wait for bucket 0", "wait for bucket 1", "step"
    ]  # fmt: skip
