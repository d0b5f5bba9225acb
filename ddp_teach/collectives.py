"""Counts the collectives that a piece of code starts, whoever starts them: torch's class or ours.

    with count_collectives() as collectives:
        model(x).sum().backward()
    collectives.count("all_reduce"), collectives.nbytes("all_reduce")

Torch's reducer is C++ and calls no Python function that could be watched. But every collective on
its way to a process group goes through torch's dispatcher, and there they can be counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {"allreduce_": "all_reduce", "broadcast_": "broadcast", "allgather_": "all_gather"}


class Collectives(TorchDispatchMode):
    """What was started, in order: ``started`` holds pairs of a name, as in ``torch.distributed``,
    and the bytes that this rank gave or got (of a gathering, those it got)."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.started.append((NAMES.get(name, name), bytes_of(args[0]) if args else 0))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """How often the collective of this name was started."""
        return sum(kind == name for kind, _ in self.started)

    def nbytes(self, name: str) -> int:
        """The bytes of all collectives of this name together."""
        return sum(nbytes for kind, nbytes in self.started if kind == name)


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives that this rank starts in the ``with`` block, backward passes included.

    Nothing else changes, but everything takes longer: not for measuring time."""
    with Collectives() as collectives:
        yield collectives


def bytes_of(tensors: Any) -> int:
    """The bytes of a tensor, or of all tensors in a list, or in a list of lists."""
    if isinstance(tensors, list | tuple):
        return sum(map(bytes_of, tensors))
    return getattr(tensors, "nbytes", 0)
