"""What must hold of an exercise notebook and of its solution, beside the rules for all notebooks.

A rule takes the two and returns its complaints, one line each. What a check says is read in the
stored outputs, which nbval compares with those of a new run.
"""

import re
from collections.abc import Iterator

import nbformat
from notebook_rules import code_cells, tags, texts

ANSWER = "answer"  # the tag of the cell that the learner writes in
CARD = re.compile(r"^# Exercise \d\d.*\| difficulty \| minutes \|.*\| [●○]{5} \| \d+ \|", re.DOTALL)
# Lines of a solution that give nothing away: no class, no method and no training is without them.
TELLS_NOTHING = re.compile(
    r"(class|def|import|from|@|#|super\(\)|self\.module = module$)"
    r"|(loss\.backward|optimizer\.step|optimizer\.zero_grad)\(\)$"
    r"|[^=(]*$"
)


def exercise_complaints(
    exercise: nbformat.NotebookNode, solution: nbformat.NotebookNode
) -> list[str]:
    """All complaints about one exercise and its solution."""
    rules = (card_rule, answer_rule, same_rule, untouched_rule, solved_rule, secret_rule)
    return [complaint for rule in rules for complaint in rule(exercise, solution)]


def answers(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for _, cell in code_cells(notebook) if ANSWER in tags(cell)]


def output_of(notebook: nbformat.NotebookNode) -> str:
    """Every text that a notebook's cells have put out."""
    return "\n".join(text for _, cell in code_cells(notebook) for text in texts(cell))


def telling_lines(solution: nbformat.NotebookNode) -> list[str]:
    """The lines of a solution that nobody should read before trying, each without its indent."""
    lines = [line.strip() for cell in answers(solution) for line in cell.source.splitlines()]
    return [line for line in lines if not TELLS_NOTHING.match(line)]


def card_rule(exercise, solution) -> Iterator[str]:
    if not CARD.match(exercise.cells[0].source):
        yield "the exercise does not begin with a card that tells difficulty and minutes"


def answer_rule(exercise, solution) -> Iterator[str]:
    for name, notebook in (("exercise", exercise), ("solution", solution)):
        if len(answers(notebook)) != 1:
            yield f"the {name} has {len(answers(notebook))} cells tagged {ANSWER!r}, not one"


def same_rule(exercise, solution) -> Iterator[str]:
    """The solution is the exercise with another answer: so the exercise passes with it."""
    given, solved = (
        [cell.source for _, cell in code_cells(notebook) if ANSWER not in tags(cell)]
        for notebook in (exercise, solution)
    )
    if given != solved:
        yield "code that is not the answer differs between exercise and solution"


def untouched_rule(exercise, solution) -> Iterator[str]:
    if "Still to do" not in output_of(exercise):
        yield "the untouched exercise does not say what is still to do"
    if "Traceback" in output_of(exercise):
        yield "the untouched exercise shows a traceback"


def solved_rule(exercise, solution) -> Iterator[str]:
    output = output_of(solution)
    if not re.search(r"\bpassed$|^Right", output, re.MULTILINE):
        yield "the solution does not pass its check"
    if re.search(r"not yet|still to do", output, re.IGNORECASE):
        yield "the solution does not pass all of its check"


def secret_rule(exercise, solution) -> Iterator[str]:
    text = "\n".join(cell.source for cell in exercise.cells) + output_of(exercise)
    for line in telling_lines(solution):
        if line in text:
            yield f"the exercise gives away a line of a solution: {line}"
