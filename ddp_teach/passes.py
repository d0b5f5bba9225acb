"""Tells apart the backward passes that come by: one to synchronise, one to keep local, or neither.

The forward pass decides. A hook on what it returned runs first when backward goes through it, and
says which kind has begun. (Torch's class looks only at the *last* forward pass, so a backward of an
earlier one is treated as if it belonged to the last.)
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable


class BackwardPasses:
    """Base of the reducer, which defines ``begin`` and ``complete``."""

    def __init__(self) -> None:
        self.expecting = False  # a synchronising forward has run, its backward has not ended
        self.recognised = False  # the last backward to synchronise came through such a hook
        self.task: int | None = None  # autograd's id of the synchronising backward now running
        self.local = False  # the backward now running belongs to a forward in no_sync

    def before_forward(self) -> None:
        """End, for the other ranks' sake, a synchronising backward that an exception broke off."""
        if (self.task is not None or self.local) and torch._C._current_graph_task_id() == -1:
            self.local = False
            self.complete(taking_part=False)

    def after_forward(self, outputs: Iterable[Tensor], synchronise: bool) -> None:
        """Put a hook on ``outputs``, all tensors that the forward pass returned."""
        self.expecting = self.expecting or synchronise
        enter = self._enter_synchronising if synchronise else self._enter_local
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(enter)
            elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(enter)  # an input, returned as it came

    def _enter_synchronising(self, _grad: object) -> None:
        if self.task is None or self.task != torch._C._current_graph_task_id():
            self.enter(recognised=True)

    def _enter_local(self, _grad: object) -> None:
        if not self.local and self.task is None:
            self.local = True
            Variable._execution_engine.queue_callback(partial(setattr, self, "local", False))

    def enter(self, recognised: bool) -> None:
        """A synchronising backward begins; when it ends, ``complete`` is called.

        Not recognised is one that comes through a tensor which no hook could be put on: after such
        a one, another may be meant for the same forward pass.
        """
        if self.task is not None:
            self.complete(taking_part=False)  # an earlier one was broken off
        self.task, self.recognised = torch._C._current_graph_task_id(), recognised
        Variable._execution_engine.queue_callback(partial(self._leave, self.task))
        self.begin()

    def _leave(self, task: int) -> None:
        if task == self.task:
            self.complete()
