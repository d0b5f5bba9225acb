"""Wrappers for step same_start: see ``planted``."""

import torch
import torch.distributed as dist
from planted import Planted, fault, right
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddp_teach.steps import ForwardOnly, SameStart

SAME_START = Planted("same_start")


def all_tensors(module):
    return [*module.parameters(), *module.buffers()]


class Wrapper(ForwardOnly):
    """Calls ``start()`` at construction."""

    def __init__(self, module):
        super().__init__(module)
        with torch.no_grad():
            self.start()


@right(SAME_START)
class Broadcasts(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            dist.broadcast(tensor, src=0)


@right(SAME_START)
class StateDict(Wrapper):
    def start(self):
        state = [self.module.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(state, src=0)
        self.module.load_state_dict(state[0])


@right(SAME_START)
class AllGather(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, tensor)
            tensor.copy_(everyones[0])


@right(SAME_START)
class ZerosElsewhere(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            numbers = tensor.double() if dist.get_rank() == 0 else torch.zeros_like(tensor).double()
            dist.all_reduce(numbers)
            tensor.copy_(numbers)


@right(SAME_START)
class Asynchronous(Wrapper):
    def start(self):
        works = [dist.broadcast(t.data, 0, async_op=True) for t in all_tensors(self.module)]
        for work in works:
            work.wait()


@right(SAME_START)
class FlatPerDtype(Wrapper):
    def start(self):
        tensors = all_tensors(self.module)
        for dtype in {tensor.dtype: None for tensor in tensors}:
            group = [tensor.data for tensor in tensors if tensor.dtype is dtype]
            flat = _flatten_dense_tensors(group)
            dist.broadcast(flat, 0)
            for tensor, values in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
                tensor.copy_(values)


@right(SAME_START)
class SendAndReceive(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            if dist.get_rank() == 0:
                for other in range(1, dist.get_world_size()):
                    dist.send(tensor, other)
            else:
                dist.recv(tensor, 0)


RIGHT_ELSEWHERE = [SameStart, nn.parallel.DistributedDataParallel]


@fault(SAME_START, "parameters and buffers are still rank 1's own", "nothing was sent")
class Nothing(Wrapper):
    def start(self):
        pass


@fault(SAME_START, "buffers are still rank 1's own")
class NoBuffers(Wrapper):
    def start(self):
        for param in self.module.parameters():
            dist.broadcast(param, 0)


@fault(SAME_START, "parameters are still rank 1's own", rare=True)
class NoParameters(Wrapper):
    def start(self):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


@fault(SAME_START, "frozen parameters and buffers are still rank 1's own")
class OnlyWhatLearns(Wrapper):
    def start(self):
        for param in self.module.parameters():
            if param.requires_grad:
                dist.broadcast(param, 0)


@fault(SAME_START, "still rank 1's own", "layers.1.bias", rare=True)
class FirstDtypeOnly(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            if tensor.dtype is not torch.float64:
                dist.broadcast(tensor, 0)


@fault(SAME_START, "from 0) on rank 0", "from 1) on rank 1", "Every rank must name the same one")
class FromItself(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            dist.broadcast(tensor, src=dist.get_rank())


@fault(SAME_START, "are those of rank 1 on both ranks, not those of rank 0", rare=True)
class FromRank1(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            dist.broadcast(tensor, src=1)


@fault(SAME_START, "parameters are the mean of all ranks'")
class Mean(Wrapper):
    def start(self):
        for param in self.module.parameters():
            dist.all_reduce(param)
            param /= dist.get_world_size()
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


@fault(SAME_START, "parameters are the sum of all ranks'", rare=True)
class Sum(Wrapper):
    def start(self):
        for param in self.module.parameters():
            dist.all_reduce(param)
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


@fault(SAME_START, "still rank 1's own", "not copied into them")
class CopyNotWrittenBack(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            dist.broadcast(tensor.clone(), 0)


@fault(SAME_START, "not waited for")
class NoWait(Wrapper):
    def start(self):
        self.works = [dist.broadcast(t, 0, async_op=True) for t in all_tensors(self.module)]


@fault(SAME_START, "not waited for")
class WaitsInForward(NoWait):
    def forward(self, *inputs, **kwargs):
        for work in self.works:
            work.wait()
        return self.module(*inputs, **kwargs)


@fault(SAME_START, "sent in a smaller dtype", "layers.1.weight")
class ThroughFloat32(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            numbers = tensor.float()
            dist.broadcast(numbers, 0)
            tensor.copy_(numbers)


@fault(SAME_START, "Rank 0 waits for", "which rank 1 never starts")
class OnlyRank0Sends(Wrapper):
    def start(self):
        if dist.get_rank() == 0:
            for tensor in all_tensors(self.module):
                dist.broadcast(tensor, 0)


@fault(SAME_START, "only a forward pass makes them equal")
class AtTheFirstForward(ForwardOnly):
    def forward(self, *inputs, **kwargs):
        with torch.no_grad():
            for tensor in all_tensors(self.module):
                dist.broadcast(tensor, 0)
        return super().forward(*inputs, **kwargs)


@fault(SAME_START, "another parameter in place of", rare=True)
class UntiesWeights(Broadcasts):
    def start(self):
        super().start()
        for name, layer in self.module.named_modules():
            if name == "tied.last":
                layer.weight = nn.Parameter(layer.weight.clone())


@fault(SAME_START, "requires_grad", rare=True)
class Unfreezes(Broadcasts):
    def start(self):
        super().start()
        self.module.requires_grad_(True)


@fault(SAME_START, "not waited for", "by luck")
class WaitsForTheLastOnly(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            work = dist.broadcast(tensor, 0, async_op=True)
        work.wait()


@fault(SAME_START, "num_batches_tracked", "they were not sent")
class NoNumbersWithoutDimension(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            if tensor.dim():
                dist.broadcast(tensor, 0)


@fault(SAME_START, "rank 2 took no part", rare=True)
class OnlyTwoRanks(Wrapper):
    def start(self):
        group = dist.new_group([0, 1])
        for tensor in all_tensors(self.module):
            dist.broadcast(tensor, 0, group=group)


@fault(SAME_START, "those of other places", "in the order in which it was put together", rare=True)
class TakenApartBackwards(Wrapper):
    def start(self):
        tensors = all_tensors(self.module)
        for dtype in {tensor.dtype: None for tensor in tensors}:
            group = [tensor for tensor in tensors if tensor.dtype is dtype]
            flat = torch.cat([tensor.flatten() for tensor in group])
            dist.broadcast(flat, 0)
            pieces = flat.split([tensor.numel() for tensor in group[::-1]])
            for tensor, values in zip(group[::-1], pieces, strict=True):
                tensor.copy_(values.view_as(tensor))


@fault(SAME_START, "the same on all ranks, but not what rank 0 had", rare=True)
class Largest(Wrapper):
    def start(self):
        for param in self.module.parameters():
            dist.all_reduce(param, op=dist.ReduceOp.MAX)
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


@fault(SAME_START, "are all zero on rank 1", rare=True)
class ZerosOnly(Wrapper):
    def start(self):
        for tensor in all_tensors(self.module):
            if dist.get_rank() != 0:
                tensor.zero_()
