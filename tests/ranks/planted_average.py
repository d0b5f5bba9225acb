"""Wrappers for step average: see ``planted``."""

import torch
import torch.distributed as dist
from planted import Planted, fault, right
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import _functional_collectives as functional

from ddp_teach import DistributedDataParallel
from ddp_teach.steps import AverageAfterBackward, OverlappedHooks, SameStart

AVERAGE = Planted("average")
RIGHT_ELSEWHERE = [
    AverageAfterBackward,
    OverlappedHooks,
    DistributedDataParallel,
    nn.parallel.DistributedDataParallel,
]


class Wrapper(SameStart):
    """``sync_gradients()`` calls ``sync(params)`` with those that have a gradient."""

    @torch.no_grad()
    def sync_gradients(self):
        self.sync([p for p in self.module.parameters() if p.grad is not None])


@right(AVERAGE)
class SumThenDivide(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@right(AVERAGE)
class ReduceAndBroadcast(Wrapper):
    def sync(self, params):
        for p in params:
            dist.reduce(p.grad, dst=0)
            p.grad /= dist.get_world_size()
            dist.broadcast(p.grad, src=0)


@right(AVERAGE)
class MeanOfAllGathered(Wrapper):
    def sync(self, params):
        for p in params:
            everyones = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, p.grad)
            p.grad = torch.stack(everyones).mean(dim=0)


@right(AVERAGE)
class FlatPerDtype(Wrapper):
    def sync(self, params):
        for dtype in {p.dtype: None for p in params}:
            grads = [p.grad for p in params if p.dtype is dtype]
            flat = _flatten_dense_tensors(grads) / dist.get_world_size()
            work = dist.all_reduce(flat, async_op=True)
            work.wait()
            for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(mean)


@right(AVERAGE)
class Functional(Wrapper):
    def sync(self, params):
        means = [functional.all_reduce(p.grad, "sum", dist.group.WORLD) for p in params]
        for p, mean in zip(params, means, strict=True):
            p.grad.copy_(mean / dist.get_world_size())


@right(AVERAGE)
class Coalesced(Wrapper):
    def sync(self, params):
        for dtype in {p.dtype: None for p in params}:
            with dist._coalescing_manager(async_ops=True) as works:
                for p in params:
                    if p.dtype is dtype:
                        p.grad /= dist.get_world_size()
                        dist.all_reduce(p.grad)
            works.wait()


@right(AVERAGE)
class Futures(Wrapper):
    def sync(self, params):
        works = [dist.all_reduce(p.grad, async_op=True) for p in params]
        torch.futures.wait_all([work.get_future() for work in works])
        for p in params:
            p.grad /= dist.get_world_size()


@right(AVERAGE)
class AsksUntilItIsDone(Wrapper):
    def sync(self, params):
        for p in params:
            work = dist.all_reduce(p.grad, async_op=True)
            while not work.is_completed():
                pass
            p.grad /= dist.get_world_size()


@right(AVERAGE)
class Ring(Wrapper):
    def sync(self, params):
        rank, size = dist.get_rank(), dist.get_world_size()
        for p in params:
            passing = p.grad.clone()
            for _ in range(size - 1):
                coming = torch.empty_like(passing)
                to_next = dist.P2POp(dist.isend, passing, (rank + 1) % size)
                from_last = dist.P2POp(dist.irecv, coming, (rank - 1) % size)
                for work in dist.batch_isend_irecv([to_next, from_last]):
                    work.wait()
                passing = coming
                p.grad += passing
            p.grad /= size


@fault(AVERAGE, "gradients are 2.0 times too large on both ranks: summed, not averaged")
class Summed(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)


@fault(AVERAGE, "2.0 times too small on both ranks", "divided by the world size twice")
class DividedTwice(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@fault(AVERAGE, "1.5 times too large on all 3 ranks", "divided by 2, but there are 3 ranks")
class DividedByTwo(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= 2


@fault(AVERAGE, "4.0 times too large on both ranks", "summed twice", rare=True)
class SummedTwice(Wrapper):
    def sync(self, params):
        for _ in range(2):
            for p in params:
                dist.all_reduce(p.grad)


@fault(AVERAGE, "still the local ones on both ranks", "No collective was started")
class Nothing(Wrapper):
    def sync(self, params):
        pass


@fault(AVERAGE, "still the local ones on both ranks", "no method sync_gradients()", rare=True)
class NoMethod(SameStart):
    pass


@fault(AVERAGE, "still the local ones on both ranks", "did not get into .grad")
class CopyNotWrittenBack(Wrapper):
    def sync(self, params):
        for p in params:
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)


@fault(AVERAGE, "0.5 times the local ones on both ranks", "divided, but not added up", rare=True)
class OnlyDivided(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()


@fault(AVERAGE, "are those of rank 0 on both ranks", "copied from one rank, not averaged")
class Broadcasts(Wrapper):
    def sync(self, params):
        for p in params:
            dist.broadcast(p.grad, src=0)


@fault(AVERAGE, "wrong on rank 1", "dist.reduce gives the result to one rank")
class OnlyReduces(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()
            dist.reduce(p.grad, dst=0)


@fault(AVERAGE, "are the mean on rank 0 only", "rank 1 still holds its own", rare=True)
class OnlyRank0WritesBack(Wrapper):
    def sync(self, params):
        for p in params:
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                p.grad.copy_(mean)


@fault(AVERAGE, "2.0 times too large on rank 1", "summed, not averaged", rare=True)
class OnlyRank0Divides(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            if dist.get_rank() == 0:
                p.grad /= dist.get_world_size()


@fault(AVERAGE, "0.667 of rank 0's + 0.333 of rank 1's")
class Weighted(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad *= (2 if dist.get_rank() == 0 else 1) / (dist.get_world_size() + 1)
            dist.all_reduce(p.grad)


@fault(AVERAGE, "wrong sign", rare=True)
class Subtracted(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= -dist.get_world_size()
            dist.all_reduce(p.grad)


@fault(AVERAGE, "no sum of the ranks' gradients", rare=True)
class Clipped(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            p.grad.clamp_(-0.01, 0.01)


@fault(AVERAGE, "are the local ones plus the mean on both ranks")
class MeanIsAdded(Wrapper):
    def sync(self, params):
        for p in params:
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)
            p.grad += mean


@fault(AVERAGE, "0.5 of rank 1's on both ranks", rare=True)
class WithoutRank0(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad *= min(dist.get_rank(), 1) / dist.get_world_size()
            dist.all_reduce(p.grad)


@fault(AVERAGE, "those of other places", "in the order in which it was put together", rare=True)
class TakenApartBackwards(Wrapper):
    def sync(self, params):
        for dtype in {p.dtype: None for p in params}:
            grads = [p.grad for p in params if p.dtype is dtype]
            flat = _flatten_dense_tensors(grads) / dist.get_world_size()
            dist.all_reduce(flat)
            means = _unflatten_dense_tensors(flat, grads[::-1])
            for grad, mean in zip(grads[::-1], means, strict=True):
                grad.copy_(mean)


@fault(AVERAGE, "combined by MAX on both ranks", rare=True)
class Largest(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)


@fault(AVERAGE, "changed the parameters themselves", "their .grad")
class AveragesParameters(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()


@fault(AVERAGE, "read before they are there", "0 were waited for", "wait()")
class NoWait(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)


@fault(AVERAGE, "read before they are there", "wait()", rare=True)
class DividesBeforeItIsThere(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad, async_op=True)
            p.grad /= dist.get_world_size()


@fault(AVERAGE, "0.bias, 2.bias, 4.bias", "still the local ones", "768 of 864 bytes")
class BiasesLeftOut(Wrapper):
    def sync(self, params):
        for p in params:
            if p.dim() > 1 or p.dtype is not torch.float32:
                p.grad /= dist.get_world_size()
                dist.all_reduce(p.grad)


@fault(AVERAGE, "sync_gradients() raised", "A frozen parameter never gets a gradient")
class FrozenToo(SameStart):
    @torch.no_grad()
    def sync_gradients(self):
        for p in self.module.parameters():
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


@fault(AVERAGE, "should be None", "frozen", rare=True)
class FrozenGetZeros(SameStart):
    @torch.no_grad()
    def sync_gradients(self):
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@fault(AVERAGE, "gradients of first.weight are 2.0 times too small")
class TiedDividedTwice(SameStart):
    @torch.no_grad()
    def sync_gradients(self):
        for layer in self.module.modules():
            for p in layer.parameters(recurse=False):
                if p.grad is not None:
                    p.grad /= dist.get_world_size()
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)


@fault(AVERAGE, "Rank 0 waits for rank 1", "which rank 1 never starts")
class OnlyRank0(Wrapper):
    def sync(self, params):
        if dist.get_rank() == 0:
            for p in params:
                dist.all_reduce(p.grad)


@fault(AVERAGE, "Collective number", "64 x float32", "the same order", rare=True)
class AnotherOrderOnRank1(Wrapper):
    def sync(self, params):
        for p in params if dist.get_rank() == 0 else params[::-1]:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


@fault(AVERAGE, "sync_gradients() raised", "several dtypes", rare=True)
class OneFlatTensor(Wrapper):
    def sync(self, params):
        flat = torch.cat([p.grad.flatten() for p in params]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = mean.view_as(p)


@fault(AVERAGE, "smaller dtype", "right to a few digits")
class Compressed(Wrapper):
    def sync(self, params):
        for p in params:
            grad = (p.grad / dist.get_world_size()).bfloat16()
            dist.all_reduce(grad)
            p.grad.copy_(grad)


@fault(AVERAGE, "mixed with those of the iteration before", "kept")
class KeepsTheSum(Wrapper):
    def sync(self, params):
        self.sums = getattr(self, "sums", {})
        for p in params:
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)
            self.sums[p] = self.sums.get(p, 0) + mean
            p.grad.copy_(self.sums[p])


@fault(AVERAGE, "still those of the iteration before", rare=True)
class KeepsTheFirst(Wrapper):
    def sync(self, params):
        self.means = getattr(self, "means", {})
        for p in params:
            if p not in self.means:
                self.means[p] = p.grad / dist.get_world_size()
                dist.all_reduce(self.means[p])
            p.grad.copy_(self.means[p])


@fault(AVERAGE, "mixed up with those of")
class Swapped(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
        same_shape = [p for p in params if p.shape == params[0].shape]
        if len(same_shape) > 1:
            a, b = same_shape[:2]
            a.grad, b.grad = b.grad, a.grad


@fault(AVERAGE, "are all zero", rare=True)
class ZeroesThem(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad.zero_()


@fault(AVERAGE, "are None", rare=True)
class DropsThem(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad = None


@fault(
    AVERAGE, "sync_gradients() raised AttributeError: module 'torch.distributed' has no", rare=True
)
class Typo(Wrapper):
    def sync(self, params):
        for p in params:
            dist.allreduce(p.grad)


@right(AVERAGE)
class ReduceScatterThenGather(Wrapper):
    def sync(self, params):
        size = dist.get_world_size()
        for p in params:
            flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % size)) / size
            part = torch.empty(len(flat) // size, dtype=flat.dtype)
            dist.reduce_scatter_tensor(part, flat)
            dist.all_gather_into_tensor(flat, part)
            p.grad = flat[: p.numel()].view_as(p)


@fault(AVERAGE, "of the last micro-batch only", "is lost")
class ZeroesInForward(SumThenDivide):
    def forward(self, *inputs, **kwargs):
        self.module.zero_grad()
        return super().forward(*inputs, **kwargs)


@fault(AVERAGE, "gradients of second are still the local ones", "32 of 96 bytes")
class OnlyTheFirst(Wrapper):
    def sync(self, params):
        dist.all_reduce(params[0].grad)
        params[0].grad /= dist.get_world_size()


@fault(AVERAGE, "was a gradient changed while its all-reduce was under way?", rare=True)
class DividesWhileUnderWay(Wrapper):
    def sync(self, params):
        works = []
        for p in params:
            works.append(dist.all_reduce(p.grad, async_op=True))
            p.grad /= dist.get_world_size()
        for work in works:
            work.wait()


@fault(AVERAGE, "rank 2 takes no part", rare=True)
class OnlyTwoRanks(Wrapper):
    def sync(self, params):
        group = dist.new_group([0, 1])
        for p in params:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad, group=group)


@fault(AVERAGE, "rounded down", rare=True)
class WholeNumberDivision(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            p.grad //= dist.get_world_size()


@fault(AVERAGE, "dist.reduce gives the result to one rank, rank 1 here", rare=True)
class BroadcastFromAnotherRoot(Wrapper):
    def sync(self, params):
        for p in params:
            p.grad /= dist.get_world_size()
            dist.reduce(p.grad, dst=1)
            dist.broadcast(p.grad, src=0)


@fault(AVERAGE, "layers.1.weight", "sent in a smaller dtype", rare=True)
class ThroughFloat32(Wrapper):
    def sync(self, params):
        for p in params:
            mean = p.grad.float() / dist.get_world_size()
            dist.all_reduce(mean)
            p.grad.copy_(mean)


@fault(AVERAGE, "the sum was divided by 4", "twice, or by a fixed number", rare=True)
class DividedByFour(Wrapper):
    def sync(self, params):
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= 4
