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
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

STILL_TO_DO = "Still to do: "  # how the hint for a skeleton that raises NotImplementedError begins
MOST_COLLECTIVES = 500  # in a probe; right wrappers need sixty
JOURNAL = "\x1eddp_teach "  # what a rank's lines for the journal begin with


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


@dataclass(frozen=True)
class Event:
    """``kind`` is what happened: a collective that starts ("all_reduce", "broadcast", "all_gather",
    ...), a "wait" for one (``name`` tells how), or what a probe notes itself."""

    kind: str
    name: str = ""
    collective: bool = False
    tensors: tuple[tuple[int, str], ...] = ()  # a collective's: number of elements, dtype
    nbytes: int = 0
    root: int = -1  # the rank that a broadcast or reduce names
    returns_work: bool = False  # a torch.distributed call, which hands out something to wait for

    def __str__(self) -> str:
        sizes = ", ".join(f"{numel} x {dtype}" for numel, dtype in self.tensors)
        root = (
            f" {'from' if self.kind == 'broadcast' else 'to'} {self.root}" if self.root >= 0 else ""
        )
        return f"{self.kind}({sizes}{root})"


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
        write_journal({"doing": what, "advice": advice})

    def note(self, kind: str, name: str = "") -> None:
        """Write down an event of the probe's own, in order with the collectives."""
        self.events.append(Event(kind, name))


class NeverEnds(RuntimeError):
    """A loop goes on starting collectives, so it will not come to an end by itself."""


class Collectives(TorchDispatchMode):
    """While entered, writes down every collective that starts, however it was called: through
    ``torch.distributed``, a functional collective, or torch's own C++ code; and every ``wait()``
    that Python calls."""

    KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
    ROOTS = {"broadcast": 2, "reduce": 3}  # where a collective has its root among its arguments

    # In each of these ways one may learn that a collective is done.
    WAITS = ("wait", "get_future", "is_completed", "synchronize")

    def __init__(self, learner: Learner):
        super().__init__()
        self.learner, self.count = learner, 0
        self.waits = {name: getattr(dist.Work, name) for name in self.WAITS}

    def __enter__(self) -> "Collectives":
        for name, method in self.waits.items():
            setattr(dist.Work, name, self.noting(name, method))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self.waits.items():
            setattr(dist.Work, name, method)

    def noting(self, name: str, method: Callable) -> Callable:
        """The method, which notes every call of it."""

        def wait(work: dist.Work, *args: Any) -> Any:
            if name != "is_completed":  # before: it may be the last thing that this rank does
                self.learner.note("wait", name)
            answer = method(work, *args)
            if name == "is_completed" and answer:  # asked in a loop, perhaps
                self.learner.note("wait", name)
            return answer

        return wait

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace == "c10d" or func.namespace == "_c10d_functional" and args[1:]:
            self.started(name, args)
        return func(*args, **(kwargs or {}))

    def started(self, name: str, args: tuple) -> None:
        for theirs, ours in self.KINDS.items():
            name = name.replace(theirs, ours)
        kind = name.removesuffix("_coalesced").removesuffix("_base").removesuffix("_")
        lists = [arg if isinstance(arg, list) else [arg] for arg in args]
        tensors = next((ts for ts in lists if ts and all(isinstance(t, Tensor) for t in ts)), [])
        root = args[self.ROOTS[kind]] if len(args) > self.ROOTS.get(kind, 99) else -1
        event = Event(
            kind,
            collective=True,
            tensors=tuple((t.numel(), str(t.dtype).removeprefix("torch.")) for t in tensors),
            nbytes=sum(t.numel() * t.element_size() for t in tensors),
            root=root if isinstance(root, int) else -1,
            returns_work=called_from(dist.distributed_c10d.__file__),
        )
        self.learner.events.append(event)
        write_journal({"started": str(event)})
        self.count += 1
        if self.count > MOST_COLLECTIVES:
            raise NeverEnds(f"{MOST_COLLECTIVES} collectives, far more than anything here needs")


def called_from(filename: str) -> bool:
    """Whether a function of this file is running, a few calls up."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != filename:
        frame = frame.f_back
    return frame is not None


def not_waited_for(events: Sequence[Event]) -> int:
    """How many works were handed out but never asked whether they are done."""
    works = sum(event.returns_work for event in events)
    return max(works - sum(event.kind == "wait" for event in events), 0)


class Said(io.TextIOBase):
    """Where the learner's own ``print`` writes, so that it can be told from what C++ prints."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                write_journal({"said": line})
        return len(text)


def write_journal(entry: dict[str, Any]) -> None:
    """Print a line that the engine reads, and that is there even if this process crashes."""
    os.write(1, f"{JOURNAL}{json.dumps(entry | {'time': time.time()})}\n".encode())


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
