"""Tells apart the backward passes that come by: one to synchronise, one to keep local, or neither.

The forward pass decides. A hook on what it returned runs first when backward goes through it, and
says which kind has begun. (Torch's class looks only at the *last* forward pass, so a backward of an
earlier one is treated as if it belonged to the last.)
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType

import torch
from torch import Tensor, nn
from torch.autograd import Variable

BACKWARD, GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


class BackwardPasses:
    """Base of the reducer, which defines ``params``, ``expect``, ``begin`` and ``complete``."""

    def __init__(self) -> None:
        self.expecting = False  # a synchronising forward has run, its backward has not ended
        self.entered: int | None = None  # autograd's id of the synchronising backward now running
        self.task: int | None = None  # the same, once the first gradient is there
        self.recognised = False  # whether that backward came through a hook
        self.served = False  # whether one has run since the last forward that did not
        # What autograd is to call when a backward ends; gone as soon as that has ended in any way.
        self.at_end: Callable = lambda: None  # of the synchronising backward
        self.at_local_end: Callable = lambda: None  # of one that belongs to a forward in no_sync
        self.synchronising_hook = carrier_of(self._enter_synchronising)
        self.local_hook = carrier_of(self._enter_local)

    def is_running(self) -> bool:
        """Whether a synchronising backward has begun and not ended, or was broken off."""
        expected = self.expecting and not self.at_local_end()
        return (expected and torch._C._current_graph_task_id() != -1) or self.entered is not None

    def before_forward(self) -> None:
        """End, for the other ranks' sake, a synchronising backward that an exception broke off."""
        if self.entered is not None and not self.at_end():  # else it runs in another thread
            self._end_broken_off()

    def after_forward(self, outputs: Iterable[Tensor], synchronise: bool) -> None:
        """Put a hook on ``outputs``, all tensors that the forward pass returned."""
        if not (self.params[0].requires_grad or any(p.requires_grad for p in self.params)):
            return  # frozen for this pass, like one of two adversaries while the other is trained
        # a backward pass may come through a tensor that is not among the outputs
        self.expecting = synchronise or (self.expecting and not self.served)
        self.served = False
        carrier = self.synchronising_hook if synchronise else self.local_hook
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn._register_hook_dict(carrier)
            elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                hook_once(tensor, self._enter_synchronising if synchronise else self._enter_local)

    def _enter_synchronising(self, _grad: object) -> None:
        if self.entered == torch._C._current_graph_task_id():
            return
        call = called_from()
        if call is None or call.f_code is not GRAD:  # grad() leaves the parameters' .grad alone
            self._enter(recognised=True)

    def _enter_local(self, _grad: object) -> None:
        if not self.at_local_end() and self.entered is None:
            self.at_local_end = call_at_end(lambda: None)

    def _enter(self, recognised: bool) -> None:
        self._end_broken_off()
        self.expect()
        self.entered, self.recognised = torch._C._current_graph_task_id(), recognised
        self.at_end = call_at_end(partial(self._leave, self.entered))

    def first_gradient(self) -> bool:
        """Whether the backward pass that brings this gradient synchronises; if so, it begins."""
        if self.entered is None:
            if self.at_local_end() or not self.expecting:
                return False
            # It comes through a tensor which no hook could be put on. There may be more of these,
            # so after this pass another may be meant for the same forward pass.
            self._enter(recognised=False)
        self.task = self.entered
        self.begin()
        return True

    def _leave(self, task: int) -> None:
        if task != self.entered:
            return
        if self.task is None:  # no parameter took part on this rank
            call = called_from()
            if call is not None and call.f_locals["inputs"]:
                self.entered = None  # nor was any asked for
                return
            self.task = task
            self.begin()
        self.complete()

    def _end_broken_off(self) -> None:
        if self.entered is not None:
            self.complete(taking_part=False)


def call_at_end(callback: Callable[[], None]) -> weakref.ref:
    """Have autograd call ``callback`` when the backward pass now running has reached its end.
    Autograd alone holds it, so the reference is dead once that pass has ended or was broken off."""
    Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def carrier_of(enter: Callable[[Tensor], None]) -> Tensor:
    """A tensor whose hook can be put on any node of autograd. The public ways to put one there
    make new objects each time, at more cost than all the rest of a forward pass of the wrapper."""
    carrier = torch.zeros((), requires_grad=True)
    carrier.register_hook(enter)
    return carrier


def hook_once(leaf: Tensor, enter: Callable[[Tensor], None]) -> None:
    """For an input that the module returned as it came: it may be used again, elsewhere."""

    def hook(grad: Tensor) -> None:
        handle.remove()
        enter(grad)

    handle = leaf.register_hook(hook)


def called_from() -> FrameType | None:
    """The call of ``torch.autograd.backward`` or ``grad`` that runs the current backward pass."""
    found = innermost_call(sys._getframe())
    if found is None:  # the backward pass of a GPU has a thread of its own
        found = next(filter(None, map(innermost_call, sys._current_frames().values())), None)
    return found


def innermost_call(frame: FrameType | None) -> FrameType | None:
    """The first call of one of the two, going outwards from ``frame``."""
    while frame is not None and frame.f_code is not BACKWARD and frame.f_code is not GRAD:
        frame = frame.f_back
    return frame
