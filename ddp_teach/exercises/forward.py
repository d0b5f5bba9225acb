"""Step forward: the wrapper passes every call on to ``module``, and back what that returns."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_teach.exercises.probe import Finding, Learner, Probe

PASS_ON = "Define forward(self, *inputs, **kwargs) and pass all of it on to self.module."
CONSTRUCT = "Start __init__ with super().__init__(), then keep the module: self.module = module."


class Spy(nn.Module):
    """Keeps what it was called with, and returns the answer it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls, self.answer = [], None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls.append((inputs, kwargs))
        return self.answer


def call_in_many_ways(learner: Learner) -> list[tuple[str, str, str]]:
    """(call, expected, got) of everything that went in and came out."""
    x, y = torch.ones(2), torch.zeros(2)
    names = {id(x): "x", id(y): "y"}
    spy = Spy()
    wrapper = learner.wrap(spy, advice=CONSTRUCT)
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
        learner.doing(text, PASS_ON)
        wrapper(*inputs, **kwargs)
        got = " and ".join(arguments(*call, names) for call in spy.calls) or "no call at all"
        seen.append((f"what the module gets from {text}", arguments(inputs, kwargs, names), got))
    for answer in (x, (x, y), [x], {"out": (x, [y])}, None, "text", 3):
        spy.answer = answer
        expected = describe(answer, names)
        learner.doing(f"wrapper(x), where the module returns {expected},")
        seen.append(("what wrapper(x) returns", expected, describe(wrapper(x), names)))
    return seen


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


def compare_calls(evidence: list[list[tuple[str, str, str]]]) -> Iterator[Finding]:
    for entries in zip(*evidence, strict=True):
        whats, expected, got = zip(*entries, strict=True)
        if expected != got:
            yield Finding(hint_for_call(whats[0], expected[0], got), whats[0], expected, got)
            return


def hint_for_call(what: str, expected: str, got: tuple[str, ...]) -> str:
    wrong = next(text for text in got if text != expected)
    if what.startswith("what wrapper(x) returns"):
        if wrong == "None":
            return "forward returns nothing. Return what self.module returned."
        if wrong == f"({expected},)":
            return "forward wraps the output in a tuple. Return it just as the module did."
        return "forward changes what the module returned. Return it just as it is."
    if wrong == "no call at all":
        return f"forward never calls the module. {PASS_ON}"
    if " and module(" in wrong:
        return "forward calls the module more than once. Call it once, and return what it returns."
    if (
        "scale" in expected + what
        and "scale" not in wrong
        or "x=" in expected
        and "x=" not in wrong
    ):
        return f"Keyword arguments are lost on the way. {PASS_ON}"
    if "another tensor" in wrong:
        return f"The module gets a copy of the tensor, not the tensor itself. {PASS_ON}"
    return f"The arguments do not arrive as they were given. {PASS_ON}"


class Noticing(nn.Linear):
    """A linear layer that notices how it is called."""

    def __init__(self):
        super().__init__(2, 2)
        self.modes, self.hook_calls = [], 0
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hook_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(x)


def look_at_wrapper(learner: Learner) -> list[str]:
    """The mistakes seen on one rank, as hints. They need no numbers."""
    module = Noticing()
    before = list(module.parameters())
    wrapper = learner.wrap(module, advice=CONSTRUCT)
    learner.doing("reading wrapper.module", CONSTRUCT)
    if hint := kept_wrongly(wrapper, module, before):
        return [hint]
    x = torch.ones(1, 2, requires_grad=True)
    for training in (True, False, True):
        wrapper.train(training)
        learner.doing("wrapper(x)", PASS_ON)
        out = wrapper(x)
    hints = [hint for said, hint in USED_WRONGLY.items() if said(module, out)]
    if not hints:
        learner.doing("backward")
        out.sum().backward()
        if x.grad is None or any(p.grad is None for p in before):
            hints.append(
                "backward through the output does not reach the input or the parameters: "
                "pass on the tensors themselves, not copies of their values."
            )
    return hints


def kept_wrongly(wrapper: nn.Module, module: nn.Module, params: list[nn.Parameter]) -> str:
    """What is wrong with the attribute ``module``; empty if nothing is."""
    kept = getattr(wrapper, "module", None)
    if kept is None:
        return f"The wrapper has no attribute module. {CONSTRUCT}"
    if kept is not module:
        other = "a copy of it" if isinstance(kept, nn.Module) else f"a {type(kept).__name__}"
        return (
            f"wrapper.module is not the module that was given, but {other}. An optimizer made "
            "before would train the other one: self.module = module."
        )
    if "module" not in dict(wrapper.named_children()):
        return (
            "The module is not registered, so wrapper.parameters() does not list its "
            f"parameters and an optimizer can't find them. {CONSTRUCT}"
        )
    if list(map(id, wrapper.parameters())) != list(map(id, params)):
        return (
            "wrapper.parameters() are not the module's own parameters and no others. Leave these "
            "where they are: an optimizer trains what stands there."
        )
    return ""


USED_WRONGLY: dict[Callable[[Noticing, Tensor], bool], str] = {
    lambda module, _: module.modes != [True, False, True]: (
        "wrapper.eval() and wrapper.train() do not reach the module: leave both to nn.Module."
    ),
    lambda module, _: module.hook_calls == 0: (
        "The module's own forward hooks do not run: call self.module(...), not "
        "self.module.forward(...)."
    ),
    lambda _, out: not out.requires_grad: (
        "The output is cut off from the computation that made it (detach(), .data or "
        "no_grad()), so backward can't reach the module."
    ),
}


def first_hints(evidence: list[list[str]]) -> Iterator[Finding]:
    hints = dict.fromkeys(hint for hints in evidence for hint in hints)
    yield from (Finding(hint) for hint in hints)


PROBES = [
    Probe("calls with all kinds of arguments and outputs", call_in_many_ways, compare_calls),
    Probe("a module that looks at how it is kept and called", look_at_wrapper, first_hints, (2,)),
]
