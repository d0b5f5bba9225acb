"""Record what happens when in a training step, on this rank.

def one_step():
    model = DDP(nn.Linear(4, 2))
    with trace(model) as timeline:
        model(torch.ones(1, 4)).sum().backward()
    return timeline

plot(launch(one_step))

A trace sits on top of everything: it puts hooks on the model, and in place of torch's collectives
functions that note the call and pass it on. When the ``with`` block is left, all of that is gone;
code that is not traced pays nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ddp_teach.call import short
from ddp_teach.chrome_trace import to_chrome_trace
from ddp_teach.timeline import Timeline, plot
from ddp_teach.watched_collectives import CollectiveWatch, replace

__all__ = ["Timeline", "plot", "to_chrome_trace", "trace"]

only_one = threading.Lock()  # what a trace replaces belongs to the whole process


@contextmanager
def trace(model: nn.Module) -> Iterator[Timeline]:
    """A timeline that fills while the ``with`` block runs: one step of ``model``, or several.

    It sees forward and backward, every gradient as it gets ready, every collective that is called
    as ``torch.distributed.all_reduce`` or the like, the waits for it, and the optimizer's step.
    ``model`` is any wrapper, or a bare module. What a collective carries is told by its tensor: a
    bucket in ``model.buckets``, a parameter's ``grad``, or else a tensor of as many elements as the
    gradients that got ready since the last collective.

    Torch's own class starts its all-reduces in C++ and waits for them there. The starts are seen in
    torch's dispatcher, which slows every operation down, so take its order and not its times; the
    waits are not seen, nor when a collective is done. With a communication hook waits are not seen
    either: its futures can't be watched. On a GPU the times are the host's: when work was handed
    over.

    Raises ``TypeError`` if ``model`` is no module, ``RuntimeError`` if another trace is running in
    this process.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: model must be a torch.nn.Module, got {short(model)}.")
    if not only_one.acquire(blocking=False):
        raise RuntimeError("trace: another trace is running in this process; let it end first.")
    with ExitStack() as stack:
        stack.callback(only_one.release)
        recorder = Recorder(model)
        recorder.attach(stack)
        yield recorder.timeline


class Recorder:
    """Fills ``timeline`` with what hooks on ``model`` and the replaced functions see."""

    def __init__(self, model: nn.Module):
        inner = getattr(model, "module", None)
        # of the wrapped module, so that a forward() called by name is seen as well
        self.inner = inner if isinstance(inner, nn.Module) else model
        self.params = {n: p for n, p in self.inner.named_parameters() if p.requires_grad}
        self.collectives = CollectiveWatch(self, model, self.params)
        self.depth = 0  # of backward() calls, one inside another
        self.is_on = True
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.timeline = Timeline(rank, type(model).__name__, time.time())
        self.zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self.zero

    def note(self, kind: str, name: str = "", collective: int | None = None) -> None:
        """Something happens now."""
        if self.is_on:
            self.timeline.add(kind, self.now(), name, collective)

    def attach(self, stack: ExitStack) -> None:
        """Put everything in place; ``stack`` puts it back."""

        def noting(kind: str) -> Callable:
            return lambda *_: self.note(kind)

        def until_closed(handle: RemovableHandle) -> None:
            stack.callback(handle.remove)

        stack.callback(self._stop)
        until_closed(self.inner.register_forward_pre_hook(noting("forward")))
        until_closed(self.inner.register_forward_hook(noting("forward end"), always_call=True))
        until_closed(register_optimizer_step_pre_hook(noting("step")))
        until_closed(register_optimizer_step_post_hook(noting("step end")))
        # Before the gradient is stored, because the wrapper's own hooks run right after that and
        # may already send it. A node lives only as long as somebody holds it.
        self.nodes = {name: get_gradient_edge(p).node for name, p in self.params.items()}
        for name, node in self.nodes.items():
            until_closed(node.register_prehook(partial(self._gradient_ready, name)))
        replace(stack, torch.autograd, "backward", self._recorded_backward)
        self.collectives.attach(stack)

    def _stop(self) -> None:
        self.is_on = False  # what is waited for later is noted no more

    def _gradient_ready(self, name: str, _grads: tuple) -> None:
        self.collectives.waiting.append(name)
        self.note("gradient", name)

    def _recorded_backward(self, backward: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> None:
            outermost, self.depth = self.depth == 0, self.depth + 1
            if outermost:
                self.collectives.waiting = []
                self.note("backward")
            try:
                backward(*args, **kwargs)
            finally:
                self.depth -= 1
                if outermost:
                    self.note("backward end")

        return recorded
