"""Wrappers for step overlap: see ``planted``."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from planted import Planted, fault, right
from torch import nn
from torch.autograd import Variable
from torch.distributed import _functional_collectives as functional

from ddp_teach import DistributedDataParallel
from ddp_teach.steps import AverageAfterBackward, Buckets, OverlappedHooks, SameStart

OVERLAP = Planted("overlap")
RIGHT_ELSEWHERE = [
    OverlappedHooks,
    Buckets,
    DistributedDataParallel,
    nn.parallel.DistributedDataParallel,
]


class Hooks(SameStart):
    """Calls ``ready(param)`` in a hook, and ``finish()`` at the end of every backward."""

    def __init__(self, module):
        super().__init__(module)
        self.in_flight = []
        for param in self.learning():
            self.hook(param)

    def learning(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def hook(self, param):
        param.register_post_accumulate_grad_hook(self.on_gradient)

    @torch.no_grad()
    def on_gradient(self, param):
        if not self.in_flight:
            Variable._execution_engine.queue_callback(self.at_the_end)
        self.ready(param)

    def ready(self, param):
        param.grad /= dist.get_world_size()
        self.in_flight.append(dist.all_reduce(param.grad, async_op=True))

    def at_the_end(self):
        self.finish()
        self.in_flight = []

    def finish(self):
        for work in self.in_flight:
            work.wait()


@right(OVERLAP)
class InPlace(Hooks):
    pass


@right(OVERLAP)
class Futures(Hooks):
    def ready(self, param):
        work = dist.all_reduce(param.grad, async_op=True)
        mean = work.get_future().then(lambda f, p=param: p.grad.div_(dist.get_world_size()))
        self.in_flight.append(mean)


@right(OVERLAP)
class Functional(Hooks):
    def ready(self, param):
        self.in_flight.append((param, functional.all_reduce(param.grad, "sum", dist.group.WORLD)))

    @torch.no_grad()
    def finish(self):
        for param, total in self.in_flight:
            param.grad = (total / dist.get_world_size()).clone()


@right(OVERLAP)
class AllGathered(Hooks):
    def ready(self, param):
        everyones = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        work = dist.all_gather(everyones, param.grad, async_op=True)
        self.in_flight.append((param, everyones, work))

    def finish(self):
        for param, everyones, work in self.in_flight:
            work.wait()
            param.grad = torch.stack(everyones).mean(0)


@right(OVERLAP)
class CountsHooks(SameStart):
    """Waits in the hook of the last gradient: no callback of the engine."""

    def __init__(self, module):
        super().__init__(module)
        self.works, self.params = [], [p for p in module.parameters() if p.requires_grad]
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.ready)

    @torch.no_grad()
    def ready(self, param):
        self.works.append(dist.all_reduce(param.grad, async_op=True))
        if len(self.works) == len(self.params):
            for work in self.works:
                work.wait()
            for param in self.params:
                param.grad /= dist.get_world_size()
            self.works = []


@fault(OVERLAP, "local ones on both ranks", "Nobody calls sync_gradients()")
class AfterBackward(AverageAfterBackward):
    pass


@fault(OVERLAP, "No all-reduce starts before backward ends", "all 8 start after")
class AllAtTheEnd(Hooks):
    def ready(self, param):
        self.in_flight.append(param)

    @torch.no_grad()
    def finish(self):
        for param in self.in_flight:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@fault(OVERLAP, "Backward stands still during every all-reduce", "async_op=True")
class OneByOne(Hooks):
    def ready(self, param):
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
        self.in_flight.append(None)

    def finish(self):
        pass


@fault(OVERLAP, "Backward stands still during every all-reduce", rare=True)
class WaitsAtOnce(Hooks):
    def ready(self, param):
        super().ready(param)
        self.in_flight[-1].wait()


@fault(OVERLAP, "read before they are there", "0 were waited for")
class NeverWaits(Hooks):
    def finish(self):
        pass


@fault(OVERLAP, "read before they are there", rare=True)
class WaitsInTheNextForward(Hooks):
    def finish(self):
        pass

    def at_the_end(self):
        pass

    def forward(self, *inputs, **kwargs):
        for work in self.in_flight:
            work.wait()
        self.in_flight = []
        return super().forward(*inputs, **kwargs)


@fault(OVERLAP, "read before they are there", "Of 2 collectives on rank 0, 1 was waited for")
class WaitsForTheLastOnly(Hooks):
    def ready(self, param):
        super().ready(param)
        self.in_flight = self.in_flight[-1:]


@fault(OVERLAP, "2.0 times too large on both ranks: summed, not averaged", rare=True)
class Summed(Hooks):
    def ready(self, param):
        self.in_flight.append(dist.all_reduce(param.grad, async_op=True))


@fault(OVERLAP, "2.0 times too small on both ranks", "divided by the world size twice", rare=True)
class DividedTwice(Hooks):
    def finish(self):
        super().finish()
        for param in self.learning():
            param.grad /= dist.get_world_size()


@fault(OVERLAP, "local ones on both ranks", "did not get into .grad", rare=True)
class CopyNotWrittenBack(Hooks):
    def ready(self, param):
        copy = param.grad / dist.get_world_size()
        self.in_flight.append(dist.all_reduce(copy, async_op=True))


@fault(OVERLAP, "local ones", "did not get into .grad")
class BeforeAccumulation(Hooks):
    """A hook that sees the gradient on its way to ``.grad``: what it reduces arrives too late."""

    def hook(self, param):
        param.register_hook(lambda grad: self.on_the_way(grad))

    def on_the_way(self, grad):
        if not self.in_flight:
            Variable._execution_engine.queue_callback(self.at_the_end)
        mean = grad / dist.get_world_size()
        self.in_flight.append(dist.all_reduce(mean, async_op=True))


@fault(OVERLAP, "changed the parameters themselves", rare=True)
class ReducesParameters(Hooks):
    def ready(self, param):
        param.data /= dist.get_world_size()
        self.in_flight.append(dist.all_reduce(param.data, async_op=True))


@fault(OVERLAP, "in iteration 2; before it they were right", "local ones")
class OnlyTheFirstBackward(Hooks):
    """Removes its hooks after the first backward."""

    def hook(self, param):
        self.handles = getattr(self, "handles", [])
        self.handles.append(param.register_post_accumulate_grad_hook(self.on_gradient))

    def finish(self):
        super().finish()
        for handle in self.handles:
            handle.remove()


@fault(OVERLAP, "gradients of first.weight", "2 names, first.weight and last.weight: treat it once")
class TiedTwice(Hooks):
    def learning(self):
        named = self.module.named_parameters(remove_duplicate=False)
        return [p for _, p in named if p.requires_grad]


@fault(OVERLAP, "raised RuntimeError", "require gradient", "frozen", rare=True)
class FrozenToo(Hooks):
    def learning(self):
        return list(self.module.parameters())


@fault(OVERLAP, "backward raised ZeroDivisionError", rare=True)
class Raises(Hooks):
    def ready(self, param):
        param.grad /= 1 // (dist.get_world_size() - 2)


@fault(OVERLAP, "does not come to an end on rank 0", "never leaves a loop")
class WaitsForEver(Hooks):
    def finish(self):
        while self.in_flight:
            pass


@fault(OVERLAP, "Rank 1 waits for rank 0", "which rank 0 never starts")
class OneTooMany(Hooks):
    def finish(self):
        super().finish()
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))


@right(OVERLAP)
class HooksOfAccumulation(Hooks):
    """As torch's own class did in its first years, in Python."""

    def hook(self, param):
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: self.on_gradient(param))
        self.nodes = [*self.__dict__.get("nodes", []), node]


@right(OVERLAP)
class AThreadSends(Hooks):
    def ready(self, param):
        pool = self.__dict__.setdefault("pool", ThreadPoolExecutor(1))
        self.in_flight.append(pool.submit(self.average, param.grad))

    def average(self, grad):
        grad /= dist.get_world_size()
        dist.all_reduce(grad)

    def finish(self):
        for future in self.in_flight:
            future.result()


@fault(OVERLAP, "A lambda made in a loop sees the loop's last value")
class LambdaInALoop(Hooks):
    def __init__(self, module):
        SameStart.__init__(self, module)
        self.in_flight = []
        for param in self.learning():
            param.register_post_accumulate_grad_hook(lambda _: self.on_gradient(param))  # noqa: B023


@fault(OVERLAP, "All 8 collectives start when the last gradient is there")
class TheLastHookSendsAll(Hooks):
    def ready(self, param):
        self.in_flight.append(param)
        if len(self.in_flight) == len(self.learning()):
            self.in_flight, params = [], self.in_flight
            for p in params:
                super().ready(p)


@fault(OVERLAP, "were started, 2 in iteration 1. Register hooks once", rare=True)
class HooksInForward(Hooks):
    def hook(self, param):
        pass

    def forward(self, *inputs, **kwargs):
        for param in self.learning():
            super().hook(param)
        return super().forward(*inputs, **kwargs)


@fault(OVERLAP, "divided by the world size twice", rare=True)
class DividesInEveryCallback(Hooks):
    @torch.no_grad()
    def on_gradient(self, param):
        Variable._execution_engine.queue_callback(self.at_the_end)
        self.in_flight.append(dist.all_reduce(param.grad, async_op=True))

    @torch.no_grad()
    def finish(self):
        super().finish()
        for param in self.learning():
            param.grad /= dist.get_world_size()
