"""Names that libraries and torch's own tests call on a wrapper beside its documented interface."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_teach.arguments import find_process_group
from ddp_teach.replicas import CHUNK_BYTES


class TorchNames:
    """Copies, and methods of torch's class that are private by name and public by use."""

    broadcast_buffers = property(lambda self: self.forward_sync_buffers, doc="The older name.")
    broadcast_bucket_size = CHUNK_BYTES

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Sequence[str]
    ) -> None:
        """Before wrapping: leave ``names`` (``"layer.weight"``) out of all synchronisation."""
        module._ddp_params_and_buffers_to_ignore = names

    def _set_static_graph(self) -> None:
        """What ``static_graph=True`` does in the constructor; before the first backward only."""
        if self.static_graph:
            warnings.warn("static_graph is set already; no need to set it again.", stacklevel=2)
            return
        if self.reducer is not None:
            if self.reducer.iterations > 0:
                late = "_set_static_graph() should be called before training loop starts."
                self.reducer.complaint.raise_now(late)
            self.reducer.remove_hooks()
        self.static_graph = True
        self._attach()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """The few entries of torch's log that say something here."""
        error = self.reducer.complaint.last_message or ""
        return {"iteration": self.reducer.iterations, "has_error": bool(error), "error": error}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: all but what belongs to this process, which is made anew."""
        if self.process_group not in (None, dist.group.WORLD):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. Copy `.module` instead, and wrap the copy."
            )
        ours = ("process_group", "device_mesh", "reducer", "buffer_sync", "_outputs", "_watch")
        return {k: v for k, v in self.__dict__.items() if k not in ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.device_mesh, self.process_group = None, find_process_group(None, None)
        self._attach()
