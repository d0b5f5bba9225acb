"""Chapters 01 to 10 have an exercise with a solution each, and the rules catch planted faults."""

import nbformat
import pytest
from exercise_rules import ANSWER, answers, exercise_complaints, secret_rule, telling_lines
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from run_notebooks import ROOT

CHAPTERS = ROOT / "notebooks"
EXERCISES = CHAPTERS / "exercises"
SOLUTIONS = EXERCISES / "solutions"
NAMES = sorted(path.name for path in EXERCISES.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def names(folder):
    return {path.name for path in folder.glob("*.ipynb")}


def test_chapters_01_to_10_have_an_exercise_and_a_solution():
    assert names(EXERCISES) == {name for name in names(CHAPTERS) if "01" <= name[:2] <= "10"}
    assert len(names(EXERCISES)) == 10
    assert names(SOLUTIONS) == names(EXERCISES)


@pytest.mark.parametrize("name", NAMES)
def test_exercise_keeps_the_rules(name):
    assert exercise_complaints(read(EXERCISES / name), read(SOLUTIONS / name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_exercise_gives_this_solution_away(name):
    solution = read(SOLUTIONS / name)
    assert telling_lines(solution)
    found = [list(secret_rule(read(EXERCISES / other), solution)) for other in NAMES]
    assert not any(found), found


# The rules themselves, each on an exercise and a solution with one planted fault.


def stdout(text):
    return new_output("stream", name="stdout", text=text)


def good_pair():
    card = "# Exercise 01: add\n\n| difficulty | minutes |\n|---|---|\n| ●●○○○ | 5 |"
    pair = []
    for body, said in (("raise NotImplementedError", "Still to do: add"), ("y = x + 1", "passed")):
        answer = new_code_cell(f"def add(x):\n    {body}", metadata={"tags": [ANSWER]})
        check = new_code_cell("check(add)", outputs=[stdout(f"  add  {said}\n")])
        pair.append(new_notebook(cells=[new_markdown_cell(card), answer, check]))
    return pair


def test_rules_accept_a_good_pair():
    assert exercise_complaints(*good_pair()) == []
    assert telling_lines(good_pair()[1]) == ["y = x + 1"]


def say(notebook, text):
    notebook.cells[2].outputs = [stdout(text)]


FAULTS = {
    "does not begin with a card": lambda e, s: e.cells[0].update(source="# Exercise 01: add"),
    "the exercise has 0 cells tagged": lambda e, s: answers(e)[0].metadata.clear(),
    "the solution has 0 cells tagged": lambda e, s: answers(s)[0].metadata.clear(),
    "code that is not the answer differs": lambda e, s: s.cells[2].update(source="check(sum)"),
    "does not say what is still to do": lambda e, s: say(e, "nothing"),
    "shows a traceback": lambda e, s: say(e, "Still to do\nTraceback (most recent call last)"),
    "the solution does not pass its check": lambda e, s: say(s, "passed?"),
    "does not pass all of its check": lambda e, s: say(s, "forward passed\naverage not yet"),
    "gives away a line of a solution: y": lambda e, s: e.cells[0].update(
        source=e.cells[0].source + "\n\nTry `y = x + 1`."
    ),
}


@pytest.mark.parametrize("complaint", FAULTS)
def test_rules_see_a_planted_fault(complaint):
    pair = good_pair()
    FAULTS[complaint](*pair)
    found = exercise_complaints(*pair)
    assert any(complaint in line for line in found), found
