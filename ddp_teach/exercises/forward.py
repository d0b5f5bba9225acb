"""Step forward: the wrapper passes every call on to ``module``, and back what that returns."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_teach.exercises.calls import (
    CONSTRUCT,
    PASS_ON,
    call_in_many_ways,
    compare_calls,
    for_step_forward,
)
from ddp_teach.exercises.probe import Finding, Learner, Probe


class Noticing(nn.Linear):
    """A linear layer that notices how it is called. A part of it notices the mode, too."""

    def __init__(self):
        super().__init__(2, 2)
        self.part = nn.Identity()
        self.modes, self.hook_calls = [], 0
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hook_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training if self.part.training == self.training else None)
        return super().forward(x)


def look_at_wrapper(learner: Learner) -> list[str]:
    """The mistakes seen on one rank, as hints. They need no numbers."""
    module = Noticing()
    before = list(module.parameters())
    wrapper = learner.wrap(module, advice=for_step_forward(learner, CONSTRUCT))
    learner.doing("reading wrapper.module", for_step_forward(learner, CONSTRUCT))
    if hint := kept_wrongly(wrapper, module, before):
        return [hint]
    x = torch.ones(1, 2, requires_grad=True)
    outputs = []
    for training in (True, False, True):
        wrapper.train(training)
        learner.doing("wrapper(x)", for_step_forward(learner, PASS_ON))
        outputs.append(wrapper(x))
    hints = [hint for wrong, hint in USED_WRONGLY.items() if wrong(module, outputs)]
    if not hints:
        learner.doing("backward")
        outputs[-1].sum().backward()
        if x.grad is None or any(p.grad is None for p in before):
            hints.append(
                "backward through the output does not reach the input or the parameters: "
                "pass on the tensors themselves, not copies of their values."
            )
    return hints[:1]


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
    if not any(child is module for child in wrapper.children()):
        return (
            "The module is not registered, so wrapper.parameters() does not list its "
            f"parameters and an optimizer can't find them. {CONSTRUCT}"
        )
    if list(map(id, wrapper.parameters())) != list(map(id, params)):
        return (
            "wrapper.parameters() are not the module's own parameters and no others. Leave these "
            "where they are: an optimizer trains what stands there."
        )
    if not all(param.requires_grad for param in params):
        return (
            "Wrapping has frozen parameters of the module. Leave requires_grad as it is: whoever "
            "wraps the module decides what learns."
        )
    return ""


USED_WRONGLY: dict[Callable[[Noticing, list[Any]], bool], str] = {
    lambda module, _: module.modes != [True, False, True]: (
        "The module, or a part of it, does not run in the mode that wrapper.train() or "
        "wrapper.eval() has set. They do not reach the module, or forward sets another mode: leave "
        "both methods to nn.Module, and the mode alone."
    ),
    lambda module, _: module.hook_calls == 0: (
        "The module's own forward hooks do not run: call self.module(...), not "
        "self.module.forward(...)."
    ),
    lambda _, outputs: not all(isinstance(out, Tensor) for out in outputs): (
        "forward does not return the output in every mode: after train() and after eval() it must "
        "return what self.module returned."
    ),
    lambda _, outputs: not all(getattr(out, "requires_grad", False) for out in outputs): (
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
