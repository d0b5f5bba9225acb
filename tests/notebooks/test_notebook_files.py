"""The stored notebooks keep the rules of notebook_rules, and the rules catch planted faults."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_rules import complaints, ignored_cells
from run_notebooks import IGNORED, ROOT, find_notebooks, keep_ignored_outputs, tidy

NOTEBOOKS = find_notebooks()
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def chapter_number(path):
    found = re.match(r"(\d\d)_\w+\.ipynb$", path.name)
    assert found, f"{path.name} is not named like 01_linear_layer.ipynb"
    return int(found[1])


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[str(p.relative_to(ROOT)) for p in NOTEBOOKS])
def test_stored_notebook_keeps_the_rules(path):
    assert complaints(read(path)) == []


def test_chapters_are_numbered_without_gaps():
    assert CHAPTERS[0].name == "00_start_here.ipynb"
    assert [chapter_number(path) for path in CHAPTERS] == list(range(len(CHAPTERS)))


def test_few_outputs_of_the_first_chapters_are_ignored():
    first = [read(path) for path in CHAPTERS if chapter_number(path) <= 4]
    assert sum(len(ignored_cells(notebook)) for notebook in first) <= 3


# The rules themselves, each on a notebook with one planted fault.


def stdout(text):
    return new_output("stream", name="stdout", text=text)


def good_notebook():
    ignored = new_code_cell("clock()", execution_count=2, outputs=[stdout("/tmp/a/b 0.3 s\n")])
    ignored.metadata = {"tags": [IGNORED], "ddp_teach": {"reason": "a time"}}
    first = new_code_cell("print(1.5)", execution_count=1, outputs=[stdout("1.5 a/b </tag>\n")])
    return tidy(new_notebook(cells=[new_markdown_cell("# Title"), first, ignored]))


def good_output(notebook):
    return notebook.cells[1].outputs[0]


def plant(change):
    notebook = good_notebook()
    change(notebook)
    return notebook


def test_rules_accept_a_good_notebook():
    assert complaints(good_notebook()) == []


def raised(*_):
    return new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])


FAULTS = {
    "not a valid notebook": lambda n: n.cells[1].update(outputs=[{"output_type": "music"}]),
    "kernelspec is 'mine'": lambda n: n.metadata.kernelspec.update(name="mine"),
    "as `make notebooks` stores it": lambda n: n.cells[1].metadata.update(collapsed=True),
    "code cell 1 has execution count None": lambda n: n.cells[1].update(execution_count=None),
    "code cell 2 has execution count 3, not 2": lambda n: n.cells[2].update(execution_count=3),
    "stores stderr": lambda n: good_output(n).update(name="stderr"),
    "not tagged raises-exception": lambda n: n.cells[1].update(outputs=[raised()]),
    "raised nothing": lambda n: n.cells[1].metadata.update(tags=["raises-exception"]),
    "an absolute path: /home/me": lambda n: good_output(n).update(text="in '/home/me/x.py'"),
    "an absolute path: C:\\U": lambda n: good_output(n).update(text="in C:\\Users\\me"),
    "a memory address": lambda n: good_output(n).update(text="<object at 0x7f1c9a5d3e50>"),
    "a warning: UserWarning": lambda n: good_output(n).update(text="x.py:3: UserWarning: old"),
    "something other than the tag": lambda n: n.cells[1].update(source="# NBVAL_IGNORE_OUTPUT"),
    "hidden from nbval": lambda n: n.cells[1].metadata.update(tags=["nbval-skip"]),
    "no ddp_teach.reason": lambda n: n.cells[2].metadata.pop("ddp_teach"),
}


@pytest.mark.parametrize("complaint", FAULTS)
def test_rules_see_a_planted_fault(complaint):
    found = complaints(plant(FAULTS[complaint]))
    assert any(complaint in line for line in found), found


def test_rules_read_every_text_form_of_an_output():
    html = new_output("display_data", data={"text/html": "<p>/home/me/x.py</p>"})
    found = complaints(plant(lambda n: n.cells[1].update(outputs=[html])))
    assert found == ["code cell 1 prints an absolute path: /home/me"]


# What `make notebooks` stores.


@pytest.mark.parametrize(
    ("cell", "text", "stored"),
    [
        (2, "/tmp/a/b 12.25 s\n", "/tmp/a/b 0.3 s\n"),  # ignored, other numbers: no change
        (2, "another text 0.3\n", "another text 0.3\n"),  # ignored, another text
        (1, "2.5 a/b </tag>\n", "2.5 a/b </tag>\n"),  # not ignored: numbers count
    ],
)
def test_ignored_output_that_differs_in_numbers_only_is_kept(cell, text, stored):
    old = good_notebook()
    new = nbformat.from_dict(old)
    new.cells[cell].outputs = [stdout(text)]
    keep_ignored_outputs(old, new)
    assert new.cells[cell].outputs == [stdout(stored)]


def test_tidy_drops_what_editors_add_and_keeps_what_the_course_uses():
    notebook = good_notebook()
    notebook.metadata.language_info.version = "3.11.7"
    notebook.cells[1].metadata.execution = {"shell.execute_reply": "2026-01-01T00:00:00Z"}
    notebook.cells[1].metadata.tags = ["raises-exception"]
    tidied = tidy(notebook)
    assert "version" not in tidied.metadata.language_info
    assert tidied.cells[1].metadata == {"tags": ["raises-exception"]}
    assert tidied.cells[2].metadata.ddp_teach.reason == "a time"
