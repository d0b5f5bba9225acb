"""A method of the wrapper that must return a context manager: ``no_sync()``, ``join()``."""

from collections.abc import Iterator
from functools import partial

from ddp_teach.exercises.probe import Finding, Learner, Probe
from ddp_teach.exercises.shares import Branches


class Interruption(Exception):
    """Raised inside a context, on purpose."""


def context_probe(method: str, recipe: str) -> Probe:
    """Looks at what the method returns; ``recipe`` says how to write it."""
    judge = partial(not_a_context_manager, method=method, recipe=recipe)
    look = partial(what_it_returns, method=method, recipe=recipe)
    return Probe(f"what {method}() returns", look, judge, (3,))


def what_it_returns(learner: Learner, method: str, recipe: str) -> str:
    """Empty if it is a context manager, else what it is."""
    wrapper = learner.wrap(Branches())
    if not hasattr(wrapper, method):
        return "missing"
    learner.doing(f"wrapper.{method}()", recipe)
    kind = type(getattr(wrapper, method)())
    return "" if hasattr(kind, "__enter__") and hasattr(kind, "__exit__") else kind.__name__


def not_a_context_manager(evidence: list[str], method: str, recipe: str) -> Iterator[Finding]:
    """The finding if it is none."""
    kind = evidence[0]
    if kind == "missing":
        yield Finding(f"The class has no method {method}. {recipe}")
    elif kind == "generator":
        cure = "put @contextlib.contextmanager above the method"
        yield Finding(f"{method}() returns a bare generator: {cure}. {recipe}")
    elif kind:
        what = "None" if kind == "NoneType" else f"something of type {kind}"
        yield Finding(f"{method}() returns {what}, which can't stand in a with statement. {recipe}")
