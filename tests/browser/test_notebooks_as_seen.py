"""The course as a learner sees it: notebooks opened and run in JupyterLab, in a real browser."""

import json
import re
from io import BytesIO
from xml.etree import ElementTree

import nbformat
import pytest
from jupyterlab import ROOT
from PIL import Image, ImageChops
from playwright.sync_api import expect
from run_notebooks import IGNORED, find_notebooks

NOTEBOOKS = ROOT / "notebooks"
# Run from top to bottom; of the others, those with pictures are opened and looked at.
RUN = [
    NOTEBOOKS / "04_backward_with_gradient_sync.ipynb",
    NOTEBOOKS / "06_overlap_and_buckets.ipynb",
]
WITH_SLIDER = NOTEBOOKS / "06_overlap_and_buckets.ipynb"
EXERCISE = NOTEBOOKS / "exercises" / "04_backward_with_gradient_sync.ipynb"
SVG, HTML = "image/svg+xml", "text/html"
A_LITTLE_PALER = 64  # of 255; from a light page to a dark one it is more than 200


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def stored_pictures(path):
    """The SVG of every picture stored in a notebook."""
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    kept = [output.data for output in outputs if "data" in output]
    texts = [data.get(SVG, data.get(HTML, "")) for data in kept]
    return [svg for text in texts for svg in re.findall(r"<svg role=.*?</svg>", text, re.DOTALL)]


def stored_text(cell, notebook):
    """What is to be read below a code cell; a picture is read by nobody."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        if HTML in data:
            texts.append(notebook.text_of_html(data[HTML]))
        else:
            texts.append("" if SVG in data else data.get("text/plain", output.get("text")))
    return "\n".join(texts).rstrip()


def alt(svg):
    return ElementTree.fromstring(svg).get("aria-label")


def without_edge(png):
    """The inside of a picture: at its edge a pixel may be half picture and half page."""
    image = Image.open(BytesIO(png)).convert("RGB")
    return image.crop((2, 2, image.width - 2, image.height - 2))


def looks_the_same(png, other):
    """No pixel turns from dark to light. A line may be a little paler: how its edges are smoothed
    depends on the part of a pixel at which the page has put the picture."""
    a, b = without_edge(png), without_edge(other)
    if a.size != b.size:
        return False
    return max(high for _, high in ImageChops.difference(a, b).getextrema()) < A_LITTLE_PALER


def is_blank(png):
    return all(low == high for low, high in without_edge(png).getextrema())


def check_pictures(notebook, stored):
    """Every picture is there, has its alt text, and looks the same in both themes."""
    shown = notebook.pictures()
    assert [picture["alt"] for picture in shown] == [alt(svg) for svg in stored]
    assert all(picture["alt"] and picture["width"] for picture in shown), shown
    light, dark = notebook.look_at_pictures("Light"), notebook.look_at_pictures("Dark")
    assert not any(is_blank(png) for png in [*light, *dark])
    assert [looks_the_same(a, b) for a, b in zip(light, dark, strict=True)] == [True] * len(stored)


def each(paths):
    return pytest.mark.parametrize(
        "path", paths, ids=[path.relative_to(NOTEBOOKS).as_posix() for path in paths]
    )


def check_outputs(notebook, path):
    """All cells have run, and below each is to be read what is stored."""
    for stored, shown in zip(code_cells(path), notebook.code_cells(), strict=True):
        assert shown["prompt"] == f"[{stored.execution_count}]:"
        if IGNORED not in stored.metadata.get("tags", ()):
            assert shown["text"].rstrip() == stored_text(stored, notebook)


@each(RUN)
def test_run_all_cells_shows_the_stored_outputs(open_notebook, path):
    before = path.read_bytes()
    notebook = open_notebook(path)
    notebook.run_all()
    check_outputs(notebook, path)
    check_pictures(notebook, stored_pictures(path))
    assert notebook.complaints == []
    assert path.read_bytes() == before


@each([path for path in find_notebooks() if path not in RUN and stored_pictures(path)])
def test_stored_pictures_show_as_soon_as_a_notebook_is_open(open_notebook, path):
    notebook = open_notebook(path)
    check_pictures(notebook, stored_pictures(path))
    assert notebook.complaints == []


def test_an_exercise_answers_the_learner(open_notebook):
    """First it is run untouched; then a learner, here the solution, writes an answer."""
    before = EXERCISE.read_bytes()
    notebook = open_notebook(EXERCISE)
    notebook.run_all()
    check_outputs(notebook, EXERCISE)
    assert "Still to do" in notebook.code_cells()[-1]["text"]

    solution = EXERCISE.parent / "solutions" / EXERCISE.name
    sources = [cell.source for cell in code_cells(solution)]
    (place,) = [i for i, cell in enumerate(code_cells(EXERCISE)) if cell.source != sources[i]]
    notebook.write(place, sources[place])
    notebook.run_all()
    expected = stored_text(code_cells(solution)[-1], notebook)
    assert notebook.code_cells()[-1]["text"].rstrip() == expected
    assert "average     passed" in expected
    assert notebook.complaints == []
    assert EXERCISE.read_bytes() == before


def test_a_slider_goes_through_the_events_one_by_one(open_notebook):
    page = open_notebook(WITH_SLIDER).page
    slider = page.locator(".jp-OutputArea-output input[type=range]").first
    words = slider.locator("xpath=..").locator("output")
    curtain = slider.locator("xpath=..").locator("[data-curtain]")
    steps = [event for _, event in json.loads(slider.get_attribute("data-steps"))]
    heights = []
    for step in (0, 1, len(steps) - 1):
        slider.fill(str(step))
        expect(words).to_have_text(steps[step])
        heights.append(curtain.bounding_box()["height"])
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[1] > heights[2] == 0
