"""Show a piece of source in a notebook, from where it runs: text and code can't drift apart."""

import inspect
from textwrap import dedent
from typing import Any


class Source:
    """The source of functions, methods or classes: highlighted in Jupyter, plain text elsewhere."""

    def __init__(self, *objects: Any):
        self.text = "\n\n".join(source_of(thing) for thing in objects)

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def source_of(thing: Any) -> str:
    """The source of a function, method or class, and above it the file that it comes from.

    Raises ``TypeError`` for what has no Python source, such as a number or a built-in function.
    """
    thing = inspect.unwrap(thing)
    source = dedent(inspect.getsource(thing)).rstrip()
    return f"# {thing.__module__.replace('.', '/')}.py\n{source}"


def show_source(*objects: Any) -> Source:
    """What a notebook cell shows if this is its last line: the source of ``objects``."""
    return Source(*objects)
