"""Join: ranks that have run out of inputs stay, and answer every collective of those that go on.

Stands on ``torch.distributed.algorithms.join``: a rank that leaves the ``with model.join():`` block
early calls ``main_hook`` once per iteration of the others, until all have left.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_teach.replicas import broadcast_states

if TYPE_CHECKING:
    from ddp_teach.ddp import DistributedDataParallel


class Shadow(JoinHook):
    """The collectives of one training step of ``wrapper``, with zeros for gradients."""

    def __init__(self, wrapper: "DistributedDataParallel", divide_by_initial_world_size: bool):
        self.wrapper = wrapper
        wrapper.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Answer one forward and backward pass of the ranks that still have inputs."""
        wrapper = self.wrapper
        if wrapper.will_sync_module_buffers():
            wrapper.sync_buffers(agree_on_rank(wrapper, False))
        synchronises = agree_to_synchronise(wrapper, False)
        wrapper.require_forward_param_sync = synchronises
        if synchronises:
            wrapper.reducer.complete(taking_part=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that trained to the end."""
        wrapper = self.wrapper
        broadcast_states(
            wrapper.module,
            wrapper.process_group,
            wrapper.parameters_to_ignore,
            src=agree_on_rank(wrapper, is_last_joiner),
            buffers=wrapper.forward_sync_buffers,
        )
        wrapper.reducer.divisor = dist.get_world_size(wrapper.process_group)


def announce(wrapper: "DistributedDataParallel") -> None:
    """Tell the ranks that have joined that this one runs another step, and set the divisor."""
    work = Join.notify_join_context(wrapper)
    if work is None:
        return
    active = work.get_future().wait()[0]
    if not wrapper.divide_by_initial_world_size:
        wrapper.reducer.divisor = int(active.item())


def agree_on_rank(wrapper: "DistributedDataParallel", candidate: bool) -> int:
    """The highest rank that is a candidate: the one whose buffers or model all others take."""
    rank = dist.get_rank(wrapper.process_group) if candidate else -1
    highest = torch.tensor([rank], device=wrapper.device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=wrapper.process_group)
    return int(highest.item())


def agree_to_synchronise(wrapper: "DistributedDataParallel", synchronises: bool) -> bool:
    """Whether any rank will average gradients in the backward pass of this step."""
    votes = torch.tensor([float(synchronises)], device=wrapper.device)
    dist.all_reduce(votes, group=wrapper.process_group)
    return votes.item() > 0
