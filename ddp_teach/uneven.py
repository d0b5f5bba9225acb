"""Join: ranks that have run out of inputs stay, and answer every collective of those that go on.

Stands on ``torch.distributed.algorithms.join``: a rank that leaves the ``with model.join():`` block
early calls ``main_hook`` once per step of the others, until all have left.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_teach.replicas import broadcast_states


class Shadow(JoinHook):
    """The collectives of one training step of ``wrapper``, a ``DistributedDataParallel``, with
    zeros for gradients. ``by_world_size`` divides by all ranks, not by those with inputs left."""

    def __init__(self, wrapper: nn.Module, by_world_size: bool):
        self.wrapper = wrapper
        wrapper.divide_by_initial_world_size = by_world_size

    def main_hook(self) -> None:
        """Answer one forward and backward pass of the ranks that still have inputs."""
        self.wrapper.reducer.complaint.raise_if_filed()
        if self.wrapper.will_sync_module_buffers():
            self.wrapper.buffer_sync(highest(self.wrapper, -1))
        synchronises = highest(self.wrapper, 0) == 1
        self.wrapper.require_forward_param_sync = synchronises
        if synchronises:
            self.wrapper.reducer.complete(taking_part=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that trained to the end."""
        wrapper, group = self.wrapper, self.wrapper.process_group
        src = highest(wrapper, dist.get_rank(group) if is_last_joiner else -1)
        ignored, buffers = wrapper.parameters_to_ignore, wrapper.forward_sync_buffers
        broadcast_states(wrapper.module, group, ignored, src=src, buffers=buffers)


def announce(wrapper: nn.Module) -> None:
    """Tell the ranks that have joined that this one runs another step, and set the divisor."""
    work = Join.notify_join_context(wrapper)
    if work is not None:
        active = work.get_future().wait()[0]
        if not wrapper.divide_by_initial_world_size:
            wrapper.reducer.queue.divisor = int(active.item())


def highest(wrapper: nn.Module, number: int) -> int:
    """The highest ``number`` on any rank: how ranks agree whose buffers or model to take (-1: not
    this rank's), and whether this step synchronises (1 or 0)."""
    tensor = torch.tensor([number], device=wrapper.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=wrapper.process_group)
    return int(tensor.item())
