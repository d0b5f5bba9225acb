"""What must hold of a stored notebook beyond its outputs, which nbval compares.

A rule takes a notebook and returns its complaints, one line each; none where all is well.
"""

import re
from collections.abc import Iterator

import nbformat
from run_notebooks import IGNORED, NOTEBOOK_METADATA, tidy

# Marks that make nbval skip or half-check a cell. Only the tag IGNORED and `raises-exception` are
# used here: tags are seen in Jupyter and in a diff, a comment is easily copied along.
OTHER_MARKS = re.compile(r"nbval[-_](ignore|skip|raises|check)|pytest[-_]validate", re.IGNORECASE)

# Text that is never the same on another machine or in another run.
UNSTABLE = {
    "an absolute path": re.compile(r"(?<![^\s'\"`(\[=:,>])/[\w.-]+/[\w.-]+|\b[A-Z]:\\\w"),
    "a memory address": re.compile(r"\bat 0x[0-9a-fA-F]{6,}"),
    "a warning": re.compile(r"\b[A-Z]\w*Warning\b"),
}


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """All complaints about one notebook."""
    if invalid := list(format_rule(notebook)):
        return invalid
    rules = (metadata_rule, count_rule, output_rule, unstable_rule, ignored_rule)
    return [complaint for rule in rules for complaint in rule(notebook)]


def code_cells(notebook: nbformat.NotebookNode) -> list[tuple[str, nbformat.NotebookNode]]:
    """(name for a complaint, cell) for every code cell; names count as Jupyter's panel does."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(f"code cell {number}", cell) for number, cell in enumerate(cells, start=1)]


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def ignored_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells whose stored output nbval does not compare."""
    return [cell for _, cell in code_cells(notebook) if IGNORED in tags(cell)]


def format_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error.message}"


def metadata_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    name = notebook.metadata.get("kernelspec", {}).get("name")
    wanted = NOTEBOOK_METADATA["kernelspec"]["name"]
    if name != wanted:
        yield f"kernelspec is {name!r}, not {wanted!r}"
    if tidy(nbformat.from_dict(notebook)) != notebook:
        yield "metadata is not as `make notebooks` stores it"


def count_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    for number, (name, cell) in enumerate(code_cells(notebook), start=1):
        if cell.get("execution_count") != number:
            yield f"{name} has execution count {cell.get('execution_count')}, not {number}"


def output_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    for name, cell in code_cells(notebook):
        types = [output.output_type for output in cell.outputs]
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"{name} stores stderr"
        if "error" in types and "raises-exception" not in tags(cell):
            yield f"{name} stores an error and is not tagged raises-exception"
        if "raises-exception" in tags(cell) and "error" not in types:
            yield f"{name} is tagged raises-exception and raised nothing"


def unstable_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    for name, cell in code_cells(notebook):
        if IGNORED in tags(cell):
            continue
        for text in texts(cell):
            for what, pattern in UNSTABLE.items():
                if found := pattern.search(text):
                    yield f"{name} prints {what}: {found.group()}"


def texts(cell: nbformat.NotebookNode) -> Iterator[str]:
    """Every text that a cell's outputs hold, in every form that is text."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        for mime, content in output.get("data", {}).items():
            if mime.startswith("text/") or mime.endswith(("xml", "json")):
                yield str(content)


def ignored_rule(notebook: nbformat.NotebookNode) -> Iterator[str]:
    for name, cell in code_cells(notebook):
        marks = [*(tag for tag in tags(cell) if tag != IGNORED), cell.source]
        if any(OTHER_MARKS.search(mark) for mark in marks):
            yield f"{name} is hidden from nbval by something other than the tag {IGNORED}"
        if IGNORED in tags(cell) and not cell.metadata.get("ddp_teach", {}).get("reason"):
            yield f"{name} is ignored and its metadata hold no ddp_teach.reason"
