"""Stacks at the reader's level: the lines that a reader wrote, without paths of this machine."""

import linecache
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

Frame = tuple[str, int, str]  # file name, line number, function name

# Whose lines a reader did not write: torch, this package, Python and what is installed in it.
LIBRARIES = (
    *(f"{Path(module).parent}{os.sep}" for module in (torch.__file__, __file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)
CELL = re.compile(
    r"[/\\]ipykernel_\d+[/\\]|^<ipython-input-"
)  # the names that Jupyter gives to cells


def readers(frames: list[Frame]) -> list[Frame]:
    """The part of a stack that a reader wrote."""
    return [frame for frame in frames if not frame[0].startswith(LIBRARIES)]


def stack(frames: list[Frame], name: Callable[[str], str]) -> str:
    """A stack as in a traceback, outermost call first, with ``name`` of every file."""
    text = ""
    for filename, line, function in frames:
        source = linecache.getline(filename, line).strip()
        text += f"\n  {name(filename)}, line {line}, in {function}"
        text += f"\n    {source}" if source else ""
    return text


def short_name(filename: str) -> str:
    """A file by its name alone, and a notebook cell as just that: no path of this machine.

    A cell's number is not told: it changes whenever the cell runs again.
    """
    return "notebook cell" if CELL.search(filename) else Path(filename).name
