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
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ddp_teach.call import short
from ddp_teach.chrome_trace import to_chrome_trace
from ddp_teach.collectives import NAMES
from ddp_teach.timeline import Collective, Timeline, plot

__all__ = ["Timeline", "plot", "to_chrome_trace", "trace"]

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    "scatter",
)
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
    torch's dispatcher, which makes every operation a little slower; the waits are not seen. Nor are
    they with a communication hook, whose futures can't be watched. On a GPU the times are the
    host's: when work was handed over.

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
    """Fills ``timeline`` with what the hooks and the replaced functions see."""

    def __init__(self, model: nn.Module):
        self.model, inner = model, getattr(model, "module", None)
        self.inner = inner if isinstance(inner, nn.Module) else model
        self.params = {n: p for n, p in self.inner.named_parameters() if p.requires_grad}
        self.waiting: list[str] = []  # gradients that are ready and in no collective yet
        self.depth = 0  # of backward() calls, one inside another
        self.lock, self.is_on = threading.Lock(), True  # hooks may launch from another thread
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.in_python = False  # whether a replaced function is calling its collective
        self.timeline = Timeline(rank, type(model).__name__, time.time())
        self.zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero

    def note(self, kind: str, name: str = "", collective: int | None = None) -> None:
        if self.is_on:
            self.timeline.add(kind, self.now(), name, collective)

    def stop(self) -> None:
        """What is waited for later is noted no more."""
        self.is_on = False

    def attach(self, stack: ExitStack) -> None:
        """Put everything in place; ``stack`` puts it back."""

        def noting(kind: str) -> Callable:
            return lambda *_: self.note(kind)

        def until_closed(handle: RemovableHandle) -> None:
            stack.callback(handle.remove)

        stack.callback(self.stop)
        # of the wrapped module, so that forward() called by name is seen as well
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
        for name in COLLECTIVES:
            replace(stack, dist, name, self._recorded_collective)
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            stack.enter_context(InDispatcher(self))

    def _gradient_ready(self, name: str, _grads: tuple) -> None:
        self.waiting.append(name)
        self.note("gradient", name)

    def _recorded_backward(self, backward: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> None:
            outermost, self.depth = self.depth == 0, self.depth + 1
            if outermost:
                self.waiting = []
                self.note("backward")
            try:
                backward(*args, **kwargs)
            finally:
                self.depth -= 1
                if outermost:
                    self.note("backward end")

        return recorded

    def _recorded_collective(self, collective: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            number = self.launched(collective.__name__, given[0] if given else None)
            self.in_python = True
            try:
                work = collective(*args, **kwargs)
            finally:
                self.in_python = False
            if work is not None:
                return self._watched(work, number, given)
            about = self.timeline.collectives[number]
            about.is_async, about.done = False, self.now()
            self.timeline.add("wait", about.launched, collective=number)
            self.timeline.add("done", about.done, collective=number)
            return None

        return recorded

    def launched(self, kind: str, tensor: Tensor | None) -> int:
        bucket, names = (None, ()) if tensor is None else self._contents(tensor)
        self.waiting = [name for name in self.waiting if name not in names]
        nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        with self.lock:
            number = len(self.timeline.collectives)
            about = Collective(kind, nbytes, dtype, bucket, names, self.now())
            self.timeline.collectives.append(about)
            self.timeline.add("launch", about.launched, collective=number)
        return number

    def _contents(self, tensor: Tensor) -> tuple[int | None, tuple[str, ...]]:
        """The place of the bucket that ``tensor`` is, if it is one, and the parameters in it."""
        buckets = [b for b in getattr(self.model, "buckets", ()) if hasattr(b, "flat")]
        for place, bucket in enumerate(buckets):
            if same_memory(tensor, bucket.flat):
                return place, tuple(bucket.names)
        for name, param in self.params.items():
            if same_memory(tensor, param.grad):
                return None, (name,)
        if sum(self.params[name].numel() for name in self.waiting) != tensor.numel():
            return None, ()
        for place, bucket in enumerate(buckets):  # a copy of a bucket, made by a hook
            if set(bucket.names) == set(self.waiting):
                return place, tuple(bucket.names)
        return None, tuple(self.waiting)

    def _watched(self, work: dist.Work, number: int, given: list[Tensor]) -> "RecordedWork":
        about = self.timeline.collectives[number]

        def completed(_future: torch.futures.Future) -> None:
            about.done = self.now()

        if all(tensor.device.type == "cpu" for tensor in given):  # a GPU's futures end at once
            work.get_future().add_done_callback(completed)
        return RecordedWork(work, self, number)


class InDispatcher(TorchDispatchMode):
    """Sees collectives that C++ code starts, on their way to the process group."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d" and not self.recorder.in_python:
            name = func._schema.name.removeprefix("c10d::")
            given = [x for x in (args[0] if args else ()) if isinstance(x, Tensor)]
            self.recorder.launched(NAMES.get(name, name), given[0] if given else None)
        return func(*args, **(kwargs or {}))


class RecordedWork:
    """Stands for a ``dist.Work`` and notes its first ``wait()``."""

    def __init__(self, work: dist.Work, recorder: Recorder, number: int):
        self._work, self._recorder, self._number = work, recorder, number

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return self._work.wait(*args, **kwargs)
        recorder.note("wait", collective=self._number)
        result = self._work.wait(*args, **kwargs)
        recorder.note("done", collective=self._number)
        return result

    @property
    def __class__(self) -> type:
        return type(self._work)  # for those who ask with isinstance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def replace(stack: ExitStack, owner: Any, name: str, recorded: Callable) -> None:
    """Put ``recorded(original)`` in the place of ``owner.name`` until ``stack`` closes."""
    original = getattr(owner, name)
    stack.callback(setattr, owner, name, original)
    setattr(owner, name, wraps(original)(recorded(original)))


def same_memory(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether both are the same numbers at the same place."""
    if tensor is other or other is None:
        return tensor is other
    if any(t.layout is not torch.strided for t in (tensor, other)) or not tensor.numel():
        return False
    place, others = ((t.data_ptr(), t.numel(), t.dtype) for t in (tensor, other))
    return place == others
