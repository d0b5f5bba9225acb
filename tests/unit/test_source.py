"""Source shown in notebooks is the package's own, in both of its forms."""

import contextlib
from pathlib import Path

import pytest

import ddp_teach.steps
from ddp_teach.source import show_source
from ddp_teach.steps import ForwardOnly, SameStart

STEPS = Path(ddp_teach.steps.__file__).read_text(encoding="utf-8")


def test_a_class_is_shown_as_it_stands_in_its_file():
    name, source = repr(show_source(SameStart)).split("\n", 1)
    assert name == "# ddp_teach/steps.py"
    assert source.startswith("class SameStart(ForwardOnly):")
    assert source in STEPS


def test_a_method_is_shown_without_its_indentation():
    lines = repr(show_source(ForwardOnly.forward)).split("\n")
    assert lines[1].startswith("def forward(self, *inputs")
    assert f"    {lines[1]}\n    {lines[2]}\n" in STEPS


def test_a_decorated_function_shows_its_own_body():
    @contextlib.contextmanager
    def own_words():
        yield "own words"

    assert 'yield "own words"' in repr(show_source(own_words))


def test_several_pieces_are_separated_and_markdown_is_a_code_block():
    shown = show_source(ForwardOnly, SameStart)
    assert repr(shown) == f"{show_source(ForwardOnly)!r}\n\n{show_source(SameStart)!r}"
    assert shown._repr_markdown_() == f"```python\n{shown!r}\n```"


@pytest.mark.parametrize("thing", [len, 3])
def test_what_has_no_python_source_is_refused(thing):
    with pytest.raises(TypeError):
        show_source(thing)
