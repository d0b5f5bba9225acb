"""What the reducer says when a backward pass went wrong, and when it says it.

Torch's class reports an unused parameter at the *next* forward pass; until then an optimizer may
have stepped. Here the complaint is known when backward ends, and is raised by whatever comes first:
the next forward pass, or the step of an optimizer that holds one of the parameters.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_teach.unused import accumulation_nodes, not_reached

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "This error indicates that "
)
UNUSED = UNFINISHED + (
    "your module has parameters that were not used in producing loss; they were averaged as if "
    "this rank's gradients were zero. You can allow that by passing the keyword argument "
    "`find_unused_parameters=True` to DistributedDataParallel; otherwise make sure that all "
    "`forward` function outputs participate in calculating loss, and that no parameter was frozen "
    "or replaced after wrapping. (For torch's log of collectives set the environment variable "
    "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.)"
)
GRAPH_SHRANK = UNFINISHED + (
    "your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. "
    "this is not compatible with static_graph set to True."
)
GRAPH_GREW = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
    "iteration, but then got used in the second iteration. "
    "this is not compatible with static_graph set to True."
)
LATE = (
    "A gradient came after its bucket had been sent, so it was not averaged. That happens when a "
    "parameter is used in several reentrant checkpoints: pass `use_reentrant=False` to "
    "torch.utils.checkpoint, or static_graph=True to DistributedDataParallel."
)
BROKEN_OFF = (
    "A backward pass was broken off while gradients that lie in their buckets were being averaged "
    "(gradient_as_bucket_view=True); they are undefined. Call zero_grad(set_to_none=True) after it."
)
INCOMPLETE = (
    "an exception broke the backward pass off, so the gradients of this one are not averages over "
    "all ranks. Call zero_grad() and leave this batch out on every rank."
)
TOO_EARLY = (
    "an optimizer steps in the middle of backward, or after one that was broken off: gradients are "
    "not averaged. Call its step() only after backward() has returned."
)


class Complaint:
    """An error about some of ``params`` (``names`` belong to them) that waits for the next forward
    pass, or for the step of an optimizer, which must not come while ``busy()``."""

    def __init__(
        self, rank: int, names: Sequence[str], params: Sequence[Tensor], busy: Callable[[], bool]
    ):
        self.rank, self.names, self.params, self.busy = rank, names, params, busy
        self.message = self.last_message = None
        self.silent: set[int] | None = None  # without a gradient in every pass since last asked
        living.add(self)

    def speak(
        self, problem: str | None, late: Sequence[int], missing: Sequence[int], static: bool
    ) -> None:
        """At the end of a backward pass: raise ``RuntimeError`` for ``problem``, or for ``late``
        gradients; file a complaint about ``missing`` ones, unless another pass brings theirs."""
        nodes = accumulation_nodes(self.params[i] for i in missing)
        silent = {missing[k] for k in not_reached(nodes)}
        self.silent = silent if self.silent is None else silent & self.silent
        self.message = None
        if late and static:
            self._file(GRAPH_SHRANK, late)
        elif self.silent:
            self._file(GRAPH_SHRANK if static else UNUSED, sorted(self.silent))
        if problem is None and late:
            names = ", ".join(self.names[i] for i in late)
            problem = f"{GRAPH_GREW if static else LATE} On rank {self.rank}: {names}"
        if problem is not None:
            self.raise_now(problem)

    def raise_now(self, message: str) -> None:
        """Raise ``RuntimeError``, and remember the message."""
        self.last_message = message
        raise RuntimeError(message)

    def raise_if_filed(self) -> None:
        """Raise the waiting complaint as ``RuntimeError``, once."""
        message, self.message, self.silent = self.message, None, None
        if message is not None:
            self.raise_now(message)

    def close(self) -> None:
        """Say nothing any more."""
        living.discard(self)

    def _file(self, what: str, indices: Sequence[int]) -> None:
        who = f"did not receive grad for rank {self.rank}:"
        places, names = " ".join(map(str, indices)), ", ".join(self.names[i] for i in indices)
        self.message = (
            f"{what}\nParameter indices which {who} {places}\nParameters which {who} {names}"
        )

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise the waiting complaint, or one about a step that comes too early."""
        if self.message is None and not self.busy():
            return
        ours = set(self.params)
        if any(p in ours for group in optimizer.param_groups for p in group["params"]):
            self.raise_if_filed()
            self.raise_now(f"On rank {self.rank} {TOO_EARLY}")


living: weakref.WeakSet[Complaint] = weakref.WeakSet()


def before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
    """Called by torch before the step of any optimizer. A closure runs forward and backward: what
    goes wrong there is told before the step is made."""
    refuse(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def checked() -> Any:
        loss = closure()
        refuse(optimizer)
        return loss

    if len(args) > 1:
        return (optimizer, checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def refuse(optimizer: Optimizer) -> None:
    """Raise ``RuntimeError`` if there is a complaint about one of its parameters."""
    for complaint in [*living]:
        complaint.before_step(optimizer)


register_optimizer_step_pre_hook(before_step)
