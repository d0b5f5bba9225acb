"""Which parameters a backward pass will not reach, and which ones no rank used.

Torch's class walks the autograd graph from the outputs of ``forward`` to find unused parameters.
Here the question is asked later and of someone who knows: inside the backward pass the autograd
engine has already worked out which nodes it is going to run, starting from the loss itself.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def accumulation_nodes(params: Iterable[Tensor]) -> list[Node | None]:
    """The autograd node that adds to ``.grad``, one per parameter; frozen ones have none."""
    return [get_gradient_edge(p).node if p.requires_grad else None for p in params]


def not_reached(nodes: Sequence[Node | None]) -> list[int]:
    """Positions of the nodes that the backward pass now running will not execute.

    May be called only from a hook or callback of a running backward pass.
    """
    # register_multi_grad_hook of torch.autograd.graph asks the engine in the same way
    will_run = torch._C._will_engine_execute_node
    return [i for i, node in enumerate(nodes) if node is None or not will_run(node)]


class UsageCount:
    """On how many ranks each parameter was used since its gradient was last averaged.

    A gradient that nobody used must stay as it is (often ``None``): an optimizer with momentum or
    weight decay moves a parameter whose gradient is zero, but not one whose gradient is ``None``.
    """

    def __init__(self, n: int, device: torch.device, group: dist.ProcessGroup):
        self.group = group
        self.counts = torch.zeros(n, dtype=torch.int32, device=device)

    def share(self, idle: Sequence[int]) -> None:
        """Count over all ranks; this one used all parameters but those at ``idle``."""
        used = torch.ones(len(self.counts), dtype=torch.int32)
        used[list(idle)] = 0
        self.counts.copy_(used)
        dist.all_reduce(self.counts, group=self.group)

    def used_nowhere(self) -> set[int]:
        """Positions of the parameters that no rank used."""
        return {i for i, count in enumerate(self.counts.tolist()) if count == 0}
