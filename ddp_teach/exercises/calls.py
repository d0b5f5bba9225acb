"""A module that keeps what it is called with, and what is wrong where that does not arrive."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_teach.exercises.probe import Finding, Learner, ranks_text

PASS_ON = "Define forward(self, *inputs, **kwargs) and pass all of it on to self.module."
CONSTRUCT = (
    "The class is built with the module and nothing else: def __init__(self, module). That begins "
    "with super().__init__(), then keeps the module: self.module = module."
)


class Spy(nn.Module):
    """Keeps what it was called with, and returns the answer it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls, self.answer = [], None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls.append((inputs, kwargs))
        return self.answer


@dataclass
class Calls:
    """What one rank saw: whether the wrapper's ``module`` is the module that was given, and of
    everything that went in and came out (call, expected, got)."""

    kept: bool
    seen: list[tuple[str, str, str]]


def call_in_many_ways(learner: Learner) -> Calls:
    """Call the wrapper with all kinds of arguments, then let it return all kinds of answers."""
    x, y = torch.ones(2), torch.zeros(2)
    names = {id(x): "x", id(y): "y"}
    spy = Spy()
    wrapper = learner.wrap(spy, advice=for_step_forward(learner, CONSTRUCT))
    seen = []
    calls = [
        ("wrapper(x)", (x,), {}),
        ("wrapper(x, y)", (x, y), {}),
        ("wrapper(x, scale=2.0)", (x,), {"scale": 2.0}),
        ("wrapper(x=x, y=y)", (), {"x": x, "y": y}),
        ("wrapper((x, y), None)", ((x, y), None), {}),
        ("wrapper()", (), {}),
    ]
    for text, inputs, kwargs in calls:
        spy.calls = []
        learner.doing(text, for_step_forward(learner, PASS_ON))
        wrapper(*inputs, **kwargs)
        got = " and ".join(arguments(*call, names) for call in spy.calls) or "no call at all"
        seen.append((f"what the module gets from {text}", arguments(inputs, kwargs, names), got))
    seen.append(("x and y, after these calls", "ones and zeros", contents(x, y)))
    for answer in (x, (x, y), [x], {"out": (x, [y])}, None, "text", 3):
        spy.answer = answer
        expected = describe(answer, names)
        learner.doing(f"wrapper(x), where the module returns {expected},")
        seen.append(("what wrapper(x) returns", expected, describe(wrapper(x), names)))
    return Calls(getattr(wrapper, "module", None) is spy, seen)


def for_step_forward(learner: Learner, advice: str) -> str:
    """The advice, if this is the step; in a later one it would miss the mistake."""
    return advice if learner.step == "forward" else ""


def arguments(inputs: tuple, kwargs: dict[str, Any], names: dict[int, str]) -> str:
    """ "module(x, scale=2.0)"."""
    given = [describe(value, names) for value in inputs]
    given += [f"{name}={describe(value, names)}" for name, value in kwargs.items()]
    return f"module({', '.join(given)})"


def describe(value: Any, names: dict[int, str]) -> str:
    """A value with its tensors by name; a tensor that is not one of them is told as such."""
    if isinstance(value, Tensor):
        return names.get(id(value), f"another tensor of shape {list(value.shape)}")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {describe(v, names)}' for k, v in value.items())}}}"
    if type(value) is tuple:
        inside = [describe(v, names) for v in value]
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(describe(v, names) for v in value)}]"
    return repr(value) if isinstance(value, str | float | int | None) else type(value).__name__


def contents(x: Tensor, y: Tensor) -> str:
    """Whether the inputs are still what they were."""
    unchanged = x.equal(torch.ones(2)) and y.equal(torch.zeros(2))
    return "ones and zeros" if unchanged else f"{x.tolist()} and {y.tolist()}"


def compare_calls(evidence: list[Calls]) -> Iterator[Finding]:
    """The first call that did not arrive, or answer that did not come back."""
    for entries in zip(*(calls.seen for calls in evidence), strict=True):
        whats, expected, got = zip(*entries, strict=True)
        if wrong := [rank for rank, text in enumerate(got) if text != expected[rank]]:
            hint = hint_for_call(whats[0], expected[0], got[wrong[0]], evidence[0].kept)
            on = "" if len(wrong) == len(got) else f"On {ranks_text(wrong, len(got))}: "
            yield Finding(on + hint, whats[0], expected, got)
            return


def hint_for_call(what: str, expected: str, got: str, kept: bool) -> str:
    """What is wrong with a call, or with an answer."""
    if what.startswith("what wrapper(x) returns"):
        if got == "None":
            return "forward returns nothing. Return what self.module returned."
        if got == f"({expected},)":
            return "forward wraps the output in a tuple. Return it just as the module did."
        return "forward changes what the module returned. Return it just as it is."
    if what.startswith("x and y"):
        return "forward changes its inputs in place. Pass them on as they are."
    if got == "no call at all":
        other = "" if kept else " Keep it just as it was given: self.module = module."
        return f"forward never calls the module that was given.{other or f' {PASS_ON}'}"
    if " and module(" in got:
        return "forward calls the module more than once. Call it once, and return what it returns."
    return hint_for_arguments(what, expected, got)


def hint_for_arguments(what: str, expected: str, got: str) -> str:
    """What is wrong with the arguments that the module got."""
    if "{" in got or "kwargs=" in got:
        return f"Keyword arguments arrive as a dict: two stars, **kwargs, take it apart. {PASS_ON}"
    if "scale" in expected and "scale" not in got or "x=" in expected and "x=" not in got:
        return f"Keyword arguments are lost on the way. {PASS_ON}"
    if "another tensor" in got:
        return (
            "The module gets another tensor, a copy or a part of it, not the one that was given. "
            f"{PASS_ON}"
        )
    if got == f"module(({expected.removeprefix('module(').removesuffix(')')},))":
        return f"Inputs arrive in a tuple: a star, *inputs, takes it apart. {PASS_ON}"
    return f"The arguments do not arrive as they were given. {PASS_ON}"
