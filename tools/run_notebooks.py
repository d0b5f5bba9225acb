"""Run notebooks from top to bottom and store their outputs so that a diff shows real changes only.

run_notebooks.py [NOTEBOOK ...]      all of them by default

Metadata that differs from one editor or run to the next is dropped. The output of a cell that
nbval is told to ignore is replaced only if it differs in more than its numbers: two runs of the
same cell give other times, and that is no change.
"""

import json
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 120  # seconds, as in `make test`
IGNORED = "nbval-ignore-output"

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
KEPT_CELL_METADATA = {"ddp_teach", "deletable", "editable", "jupyter", "nbgrader", "tags"}


def find_notebooks() -> list[Path]:
    """Every notebook of the course, in the order of the chapters."""
    found = (ROOT / "notebooks").rglob("*.ipynb")
    return sorted(path for path in found if ".ipynb_checkpoints" not in path.parts)


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop, in place, what differs between editors and runs; a second call changes nothing."""
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    for cell in notebook.cells:
        for key in set(cell.metadata) - KEPT_CELL_METADATA:
            del cell.metadata[key]
    return notebook


def run(path: Path) -> nbformat.NotebookNode:
    """A copy of the notebook as it is after running it in its own folder, as Jupyter does."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
        # Without it ipykernel warns, for every notebook, that others on the machine might listen.
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
    )
    client.execute()
    return tidy(notebook)


def keep_ignored_outputs(old: nbformat.NotebookNode, new: nbformat.NotebookNode) -> None:
    """Put back the old outputs of ignored cells where only numbers changed, in place."""
    before = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    for cell in new.cells:
        if IGNORED not in cell.metadata.get("tags", ()) or cell.id not in before:
            continue
        outputs = before[cell.id].outputs
        if without_numbers(outputs) == without_numbers(cell.outputs):
            cell.outputs = outputs


def without_numbers(outputs: list[nbformat.NotebookNode]) -> str:
    """The outputs with every number replaced; a picture counts by the text that stands for it."""
    outputs = nbformat.from_dict(outputs)
    for output in outputs:
        if "text/plain" in output.get("data", {}):
            output.data.pop("image/svg+xml", None)
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", json.dumps(outputs, sort_keys=True))
    return re.sub(r"\s+", " ", text)


def update(path: Path) -> bool:
    """Run one notebook and store it; True if the file changed."""
    before = path.read_text(encoding="utf-8")
    new = run(path)
    keep_ignored_outputs(nbformat.reads(before, as_version=4), new)
    after = nbformat.writes(new) + "\n"
    if after == before:
        return False
    path.write_text(after, encoding="utf-8")
    return True


def main(names: list[str]) -> int:
    """Update the notebooks named, all of them by default; 0 if every one ran to its end."""
    failed = 0
    for path in [Path(name) for name in names] or find_notebooks():
        try:
            print(f"{path}: {'changed' if update(path) else 'unchanged'}", flush=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path}: left as it was, since it did not run to its end\n{error}", flush=True)
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
