"""What all pictures are made with: a white card, boxes and text on it, and colours.

A picture shows in Jupyter as an SVG that is the same every time and on every machine, prints as
text, and can be saved. Needs matplotlib, which is imported when the first picture is drawn.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from xml.sax.saxutils import quoteattr

# Okabe and Ito's colours, which colour-blind readers tell apart
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
INK, PALE, PAPER, NEUTRAL = "#1A1A1A", "#595959", "#FFFFFF", "#E4E4E4"
WIDTH, MARGIN = 600, 14  # points; 600 points are 800 pixels on a page
CHIP = 7.5  # font size in a chip
FONTS = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "Consolas", "monospace"],
    "text.hinting": "none",
}
SVG = {
    "svg.fonttype": "none",  # text stays text, which can be searched and read aloud
    "svg.hashsalt": "ddp_teach",  # ids are the same every time
}


def bucket_color(i: int) -> str:
    """The colour of bucket ``i`` in all pictures, as ``"#RRGGBB"``; also that of rank ``i``."""
    return COLORS[i % len(COLORS)]


def tint(color: str, strength: float = 0.2) -> str:
    """``color`` mixed with white, light enough to be written on."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - strength * (255 - c)):02X}" for c in channels)


def text_width(words: str, size: float) -> float:
    """Points that monospaced ``words`` take, in the widest of the fonts a reader may have."""
    return 0.61 * size * len(words)


def chip_width(words: str) -> float:
    return text_width(words, CHIP) + 8


def characters_in_a_chip(width: float) -> int:
    """How many fit into a chip of ``width`` points."""
    return int((width - 8) / text_width("x", CHIP))


def wrap_chips(words: Sequence[str], width: float) -> list[list[str]]:
    """The lines of ``width`` points in which ``Canvas.chips`` can put ``words``."""
    lines, free = [], -1.0
    for word in words:
        if chip_width(word) > free:
            lines.append([])
            free = width
        lines[-1].append(word)
        free -= chip_width(word) + 4
    return lines


class Canvas:
    """A card to draw on, ``width`` x ``height`` points, measured from its upper left corner.

    It is white on every page, so that it reads the same in a light and in a dark theme. Make it and
    draw on it within ``our_settings``.
    """

    def __init__(self, height: float, width: float = WIDTH):
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width / 72, height / 72), facecolor=PAPER)
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()

    def box(
        self, x: float, y: float, width: float, height: float, color: str, edge: str | None = None
    ) -> None:
        """A rectangle; one with an edge has round corners."""
        from matplotlib.patches import FancyBboxPatch, Rectangle

        if edge is None:
            patch = Rectangle((x, y), width, height, facecolor=color, edgecolor="none")
        else:
            style = "round,pad=0,rounding_size=3"
            patch = FancyBboxPatch((x, y), width, height, style, facecolor=color, edgecolor=edge)
        self.axes.add_patch(patch).set_clip_on(False)

    def text(
        self, x: float, y: float, words: str, size: float = 9, color: str = INK, **how
    ) -> None:
        """A line of text around the height ``y``. ``how`` is passed on to matplotlib:
        ``ha="right"``, ``weight="bold"``, ``family="monospace"``."""
        y += 0.36 * size  # half of a capital letter; centred by matplotlib, descenders would count
        self.axes.text(x, y, words, fontsize=size, color=color, parse_math=False, **how)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight arrow."""
        style = {"arrowstyle": "-|>,head_length=0.5,head_width=0.25", "shrinkA": 0, "shrinkB": 0}
        style |= {"color": PALE, "linewidth": 1.4}
        self.axes.annotate("", (to_x, to_y), (x, y), arrowprops=style, annotation_clip=False)

    def table(
        self,
        x: float,
        y: float,
        cell: float,
        line: float,
        rows: Sequence[Sequence[str]],
        color: str,
    ) -> None:
        """Numbers in cells of ``cell`` x ``line`` points."""
        for k, row in enumerate(rows):
            for j, number in enumerate(row):
                self.box(x + cell * j + 1, y + line * k + 1, cell - 2, line - 2, color)
                middle = x + cell * (j + 0.5), y + line * (k + 0.5)
                self.text(*middle, number, 9, ha="center", family="monospace")

    def chips(self, x: float, y: float, lines: Sequence[Sequence[str]], edge: str) -> None:
        """Words in boxes of their own, on lines that are 18 points apart."""
        for k, line in enumerate(lines):
            at = x
            for words in line:
                self.box(at, y + 18 * k, chip_width(words), 14, PAPER, edge)
                self.text(at + 4, y + 18 * k + 7, words, CHIP, family="monospace")
                at += chip_width(words) + 4

    def to_svg(self, alt: str) -> str:
        """The drawing as an SVG element."""
        file = StringIO()
        with our_settings():
            metadata = {"Title": alt, "Date": None, "Creator": None}
            self.figure.savefig(file, format="svg", metadata=metadata)
        _, svg = file.getvalue().split("<svg ", 1)  # without XML's preamble, as a page wants it
        return f'<svg role="img" aria-label={quoteattr(alt)} {svg}'


class Picture:
    """A drawing that shows as SVG in a notebook and as ``text`` elsewhere.

    ``svg`` is the drawing, ``figure`` the matplotlib figure behind it, and ``alt`` says in a
    sentence what is to be seen, for those who don't see it.
    """

    def __init__(self, canvas: Canvas, text: str, alt: str):
        self.figure, self.text, self.alt, self.svg = canvas.figure, text, alt, canvas.to_svg(alt)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> None:
        """Write the picture to ``path``; the ending says how: ``.svg``, ``.png``, ``.pdf``."""
        if Path(path).suffix == ".svg":
            Path(path).write_text(self.svg, encoding="utf-8")
        else:
            with our_settings():
                self.figure.savefig(path, dpi=200)


@contextmanager
def our_settings() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the reader has set; theirs are back afterwards."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Pictures need matplotlib: pip install matplotlib.") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(FONTS | SVG)
        yield


# Words and numbers.


def count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def readable_bytes(n: int) -> str:
    """``n`` bytes in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return count(n, "byte")


def elide(items: Sequence, most: int) -> list:
    """``items``; where there are more than ``most``, those before the last make way for a
    ``None``."""
    return [*items] if len(items) <= most else [*items[: most - 2], None, items[-1]]
