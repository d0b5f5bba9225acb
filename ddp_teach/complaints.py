"""What the reducer says when a backward pass went wrong, and when.

Torch's class finds an unused parameter at the *next* forward pass; until then an optimizer may have
stepped. Here the complaint is known when backward ends, and is raised by whatever comes first: the
next forward pass of the wrapper, or the step of an optimizer that holds one of its parameters.
"""

from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)


class Complaint:
    """An error message that waits for the next forward pass or optimizer step over ``params``."""

    def __init__(self, params: Sequence[torch.Tensor]):
        self.ids = {id(p) for p in params}
        self.message = self.last_message = None
        self.step_hook = None

    def file(self, message: str) -> None:
        """Keep ``message`` for later; it replaces one that still waits."""
        self.withdraw()
        self.message = self.last_message = message
        self.step_hook = register_optimizer_step_pre_hook(self._before_step)

    def withdraw(self) -> None:
        """Forget the message, and leave no hook behind in torch's optimizers."""
        if self.step_hook is not None:
            self.step_hook.remove()
        self.message = self.step_hook = None

    def raise_if_any(self) -> None:
        """Raise the waiting message as ``RuntimeError``, once."""
        message = self.message
        if message is not None:
            self.withdraw()
            self.raise_now(message)

    def raise_now(self, message: str) -> None:
        """Raise ``message`` as ``RuntimeError`` and remember it as the last one."""
        self.last_message = message
        raise RuntimeError(message)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if any(id(p) in self.ids for group in optimizer.param_groups for p in group["params"]):
            self.raise_if_any()


def no_gradient_for(rank: int, indices: Sequence[int], names: Sequence[str]) -> str:
    """The line with places and names of parameters; its start is torch's."""
    places = " ".join(str(i) for i in indices)
    return (
        f"\nParameter indices which did not receive grad for rank {rank}: {places}"
        f"\nParameters which did not receive grad for rank {rank}: "
        + ", ".join(names[i] for i in indices)
    )


def unused_parameters(rank: int, indices: Sequence[int], names: Sequence[str]) -> str:
    """Backward ended without a gradient for some parameters, and nobody said that this may
    happen."""
    return (
        UNFINISHED + "This error indicates that your module has parameters that were not used in "
        "producing loss: their gradients were averaged as if this rank's were zero. You can allow "
        "that by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel; otherwise make sure that all `forward` function outputs "
        "participate in calculating loss, and that no parameter was frozen or replaced after "
        "wrapping. (For torch's own log of collectives set the environment variable "
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.)" + no_gradient_for(rank, indices, names)
    )


def graph_changed(rank: int, indices: Sequence[int], names: Sequence[str]) -> str:
    """With ``static_graph=True`` a parameter got its gradient more often than in the first
    backward."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with "
        f"static_graph set to True. On rank {rank}: {', '.join(names[i] for i in indices)}"
    )


def graph_shrank(rank: int, indices: Sequence[int], names: Sequence[str]) -> str:
    """With ``static_graph=True`` a parameter got its gradient less often than at first."""
    return (
        UNFINISHED + "This error indicates that your training graph has changed in this iteration, "
        "e.g., one parameter is used in first iteration, but then got unused in the second "
        "iteration. this is not compatible with static_graph set to True."
        + no_gradient_for(rank, indices, names)
    )


def late_gradient(rank: int, indices: Sequence[int], names: Sequence[str]) -> str:
    """A gradient arrived after its bucket had been sent."""
    return (
        f"Rank {rank} got a gradient for {', '.join(names[i] for i in indices)} after its bucket "
        "had been sent, so it was not averaged. This happens when a parameter is used in several "
        "reentrant checkpoints or backward passes at once: pass `use_reentrant=False` to "
        "torch.utils.checkpoint, or static_graph=True to DistributedDataParallel."
    )
