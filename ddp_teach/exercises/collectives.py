"""Every collective that a learner's code starts, and every wait for one, written down as events."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_teach.exercises import journal

MOST_COLLECTIVES = 500  # in a probe; right wrappers need sixty


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


class NeverEnds(RuntimeError):
    """A loop goes on starting collectives, so it will not come to an end by itself."""


class Collectives(TorchDispatchMode):
    """While entered, adds an event for every collective that starts, however it was called: through
    ``torch.distributed``, a functional collective, or torch's own C++ code; and for every
    ``wait()`` that Python calls. What a thread of the learner's own starts is not seen."""

    KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
    ROOTS = {"broadcast": 2, "reduce": 3}  # where a collective has its root among its arguments

    # In each of these ways one may learn that a collective is done.
    WAITS = ("wait", "get_future", "is_completed", "synchronize")

    def __init__(self, events: list[Event]):
        super().__init__()
        self.events, self.count = events, 0
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
                self.events.append(Event("wait", name))
            answer = method(work, *args)
            if name == "is_completed" and answer:  # asked in a loop, perhaps
                self.events.append(Event("wait", name))
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
        self.events.append(event)
        journal.write({"started": str(event)})
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
