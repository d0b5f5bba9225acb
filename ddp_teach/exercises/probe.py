"""What a step's file is written with: probes, findings, and the learner's class under test.

A step's file (``average.py``, say) lists ``PROBES``. A probe has two halves:

- ``run(learner)`` runs on every rank. It wraps a small model with ``learner.wrap(module)``, uses
  the wrapper, and returns what it saw as plain, picklable *evidence*: values before and after,
  ``learner.events``. It judges nothing and calls no collective of its own, but may let the ranks
  ``learner.meet()``, so that a step that hangs is not taken for a later one. What it is about to do
  it says with ``learner.doing("calling wrapper(x)", advice="...")``; if that raises or hangs, the
  report says so, with the advice.
- ``diagnose(evidence)`` runs afterwards in the launching process. It gets the evidence of all
  ranks, in rank order, and yields a ``Finding`` for every mistake: its hint is concluded from the
  numbers (``explain.py`` does that for gradients), never from how the class is written.

The engine runs all probes of a step and of those before it on 2 and on 3 ranks, in one launch each,
and reports the first step that has findings. A probe that raises or hangs ends its launch.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp_teach.exercises import journal
from ddp_teach.exercises.collectives import Event

STILL_TO_DO = "Still to do: "  # how the hint for a skeleton that raises NotImplementedError begins


@dataclass(frozen=True)
class Finding:
    """One mistake: the ``hint`` names it, and ``expected`` and ``got``, one text for every rank,
    show it. ``where`` says of what: 'gradient of "weight" in iteration 1'. ``lines`` come as they
    are, the learner's own line of code for instance."""

    hint: str
    where: str = ""
    expected: tuple[str, ...] = ()
    got: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One use of the learner's wrapper; see above. ``world_sizes``: on how many ranks. ``advise``
    concludes the advice for a probe that raised or hung from the journals of all ranks, where that
    tells more than what ``learner.doing`` was given."""

    name: str  # what the wrapper is tried on: "a model with tied weights"
    run: Callable[["Learner"], Any]
    diagnose: Callable[[list[Any]], Iterable[Finding]]
    world_sizes: tuple[int, ...] = (2, 3)
    advise: Callable[[list[Any]], str] | None = None


@dataclass
class Learner:
    """The class under test, in a rank. ``step`` is the one that ``check`` was called with;
    ``meet()`` returns when all ranks have come to it."""

    cls: type[nn.Module]
    step: str
    meet: Callable[[], None]
    events: list[Event] = field(default_factory=list)

    def wrap(self, module: nn.Module, advice: str = "", **options: Any) -> nn.Module:
        """A wrapper around ``module``; of the options those that the constructor has names for."""
        options = {name: value for name, value in options.items() if self.accepts(name)}
        texts = {k: v if isinstance(v, bool) else f"{v:g}" for k, v in options.items()}
        given = ", ".join(["module", *(f"{name}={text}" for name, text in texts.items())])
        self.doing(f"{self.cls.__name__}({given})", advice)
        return self.cls(module, **options)

    def accepts(self, option: str) -> bool:
        """Whether the constructor takes this keyword argument."""
        parameters = inspect.signature(self.cls).parameters.values()
        return any(p.name == option or p.kind is p.VAR_KEYWORD for p in parameters)

    def after_backward(self, wrapper: nn.Module, advice: str = "") -> None:
        """What a training loop calls after backward: ``sync_gradients()`` in step average, nothing
        from then on."""
        if self.step == "average" and hasattr(wrapper, "sync_gradients"):
            self.doing("sync_gradients()", advice)
            wrapper.sync_gradients()

    def doing(self, what: str, advice: str = "") -> None:
        """Say what happens next, for the case that it raises or never ends."""
        journal.write({"doing": what, "advice": advice})

    def note(self, kind: str, name: str = "") -> None:
        """Write down an event of the probe's own, in order with the collectives."""
        self.events.append(Event(kind, name))


def values_of(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor's values, to be sent back as evidence."""
    return None if tensor is None else tensor.detach().clone()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every value."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def ranks_text(ranks: Iterable[int], world_size: int) -> str:
    """ "rank 1", "both ranks", "all 3 ranks", "ranks 1 and 2"."""
    ranks = list(ranks)
    if len(ranks) == world_size:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
