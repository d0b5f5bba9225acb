"""Names with an underscore that libraries and torch's own tests nevertheless call on a wrapper."""

import warnings
from collections.abc import Sequence

from torch import nn


class TorchNames:
    """Methods of torch's class that are private by name and public by use."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Before wrapping: leave these names (``"layer.weight"``) out of all synchronisation."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, state in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                state._ddp_ignored = True

    def _set_static_graph(self) -> None:
        """What ``static_graph=True`` does in the constructor; before the first backward pass
        only."""
        if self.static_graph:
            warnings.warn("static_graph is set already; no need to set it again.", stacklevel=2)
            return
        if self.reducer is not None:
            if self.reducer.iterations > 0:
                self.reducer.complaint.raise_now(
                    "_set_static_graph() should be called before training loop starts; pass "
                    "static_graph=True to the constructor."
                )
            self.reducer.remove_hooks()
        self.static_graph = True
        self._attach()

    def _get_ddp_logging_data(self) -> dict[str, object]:
        """The few entries of torch's log that say something here."""
        error = self.reducer.complaint.last_message if self.reducer is not None else None
        return {
            "iteration": self.reducer.iterations if self.reducer is not None else 0,
            "has_error": error is not None,
            "error": error or "",
        }
