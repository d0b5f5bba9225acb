"""Collectives that are noted on their way: which tensor is sent, what is in it, who waits for it.

For as long as a trace runs, the functions of ``torch.distributed`` are replaced by ones that note
the call, pass it on, and return what notes its ``wait()``; for torch's class, which does not call
them, torch's dispatcher is watched instead.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_teach.collectives import NAMES
from ddp_teach.timeline import Collective

if TYPE_CHECKING:
    from ddp_teach.trace import Recorder

REPLACED = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    "scatter",
)


class CollectiveWatch:
    """Tells ``recorder`` of every collective; ``model`` may have buckets, ``params`` are its
    parameters by name."""

    def __init__(self, recorder: "Recorder", model: nn.Module, params: Mapping[str, nn.Parameter]):
        self.recorder, self.model, self.params = recorder, model, params
        self.waiting: list[str] = []  # gradients that are ready and in no collective yet
        self.lock = threading.Lock()  # hooks may launch from another thread

    def attach(self, stack: ExitStack) -> None:
        """Watch until ``stack`` closes."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            # It starts its all-reduces in C++. Nothing is replaced: in join it hands what
            # dist.all_reduce returns to C++ code, which can't take a WatchedWork.
            stack.enter_context(InDispatcher(self))
            return
        for name in REPLACED:
            replace(stack, dist, name, self._watched)

    def _watched(self, collective: Callable) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            groups = (x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup))
            number = self.launched(collective.__name__, given[:1], next(groups, None))
            work = collective(*args, **kwargs)
            if work is None:
                self._waited_at_once(number)
                return None
            if all(tensor.device.type == "cpu" for tensor in given):  # a GPU's futures end at once
                work.get_future().add_done_callback(lambda _: self._done(number))
            return WatchedWork(work, self.recorder, number)

        return watched

    def launched(self, kind: str, given: list[Tensor], group: dist.ProcessGroup | None) -> int:
        """Note a launch; returns its place in ``timeline.collectives``. ``given`` is one tensor, or
        none (a barrier)."""
        bucket, names = self._contents(given[0]) if given else (None, ())
        self.waiting = [name for name in self.waiting if name not in names]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in given)
        dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
        ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else ()
        timeline = self.recorder.timeline
        with self.lock:
            number = len(timeline.collectives)
            about = Collective(kind, ranks, nbytes, dtype, bucket, names, self.recorder.now())
            timeline.collectives.append(about)
            timeline.add("launch", about.launched, collective=number)
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

    def _done(self, number: int) -> None:
        self.recorder.timeline.collectives[number].done = self.recorder.now()

    def _waited_at_once(self, number: int) -> None:
        self._done(number)
        about = self.recorder.timeline.collectives[number]
        about.is_async = False
        self.recorder.timeline.add("wait", about.launched, collective=number)
        self.recorder.timeline.add("done", about.done, collective=number)


class WatchedWork:
    """Stands for a ``dist.Work`` and notes its first ``wait()``."""

    def __init__(self, work: dist.Work, recorder: "Recorder", number: int):
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


class InDispatcher(TorchDispatchMode):
    """Sees collectives on their way to the process group, wherever they come from."""

    def __init__(self, watch: CollectiveWatch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            given = [x for x in (args[0] if args else ()) if isinstance(x, Tensor)]
            group = self.watch.model.process_group
            self.watch.launched(NAMES.get(name, name), given[:1], group)
        return func(*args, **(kwargs or {}))


def replace(stack: ExitStack, owner: Any, name: str, watched: Callable) -> None:
    """Put ``watched(original)`` in the place of ``owner.name`` until ``stack`` closes."""
    original = getattr(owner, name)
    stack.callback(setattr, owner, name, original)
    setattr(owner, name, wraps(original)(watched(original)))


def same_memory(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether both are the same numbers at the same place."""
    if tensor is other or other is None:
        return tensor is other
    if any(t.layout is not torch.strided for t in (tensor, other)) or not tensor.numel():
        return False
    place, others = ((t.data_ptr(), t.numel(), t.dtype) for t in (tensor, other))
    return place == others
