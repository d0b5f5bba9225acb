"""Writes down what a wrapper does: gradients getting ready, collectives starting, waits.

    with record(model) as events:
        wrapper(x).sum().backward()
    assert kinds(events, "all_reduce", "wait") == ["all_reduce", "wait"]

Sees collectives that are called as ``dist.all_reduce`` and ``dist.broadcast``, so not those inside
torch's own reducer. To be used inside a rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Event:
    """``kind`` is "gradient", "all_reduce", "broadcast" or "wait"; ``name`` the parameter of a
    gradient; ``nbytes`` and ``dtype`` belong to a collective's tensor."""

    kind: str
    name: str = ""
    nbytes: int = 0
    dtype: str = ""
    async_op: bool = False


class RecordedWork:
    """A ``dist.Work`` that writes down its first ``wait()``."""

    def __init__(self, work: dist.Work, events: list[Event], event: Event):
        self._work, self._events, self._event, self._waited = work, events, event, False

    def wait(self, *args: Any) -> Any:
        if not self._waited:
            self._events.append(Event("wait", nbytes=self._event.nbytes, dtype=self._event.dtype))
        self._waited = True
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def record(model: nn.Module | None = None) -> Iterator[list[Event]]:
    """A list that fills with events. For gradients, record before the model is wrapped: hooks run
    in the order in which they were registered."""
    events: list[Event] = []
    handles = []
    for name, param in model.named_parameters() if model is not None else ():
        if param.requires_grad:
            ready = Event("gradient", name)
            handles.append(
                param.register_post_accumulate_grad_hook(lambda _, e=ready: events.append(e))
            )
    try:
        with (
            patch.object(dist, "all_reduce", _recorded("all_reduce", events)),
            patch.object(dist, "broadcast", _recorded("broadcast", events)),
        ):
            yield events
    finally:
        for handle in handles:
            handle.remove()


def _recorded(kind: str, events: list[Event]) -> Any:
    collective = getattr(dist, kind)

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        async_op = bool(kwargs.get("async_op", False))
        nbytes, dtype = tensor.numel() * tensor.element_size(), str(tensor.dtype)
        event = Event(kind, nbytes=nbytes, dtype=dtype.removeprefix("torch."), async_op=async_op)
        events.append(event)
        work = collective(tensor, *args, **kwargs)
        return RecordedWork(work, events, event) if work is not None else None

    return call


def kinds(events: list[Event], *wanted: str) -> list[str]:
    """The kinds of the events in their order; only those ``wanted``, if any are named."""
    return [e.kind for e in events if not wanted or e.kind in wanted]
