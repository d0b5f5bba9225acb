"""Wrappers for step no_sync: see ``planted``. Each is a whole wrapper with one method replaced."""

from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from complete_wrappers import GraphWalk, MultiGradHooks, OnTheLadder
from planted import Planted, fault, right
from torch import nn

from ddp_teach.steps import Buckets, OverlappedHooks

NO_SYNC = Planted("no_sync")
STOPPED = Planted("no_sync")  # those that hang


class Switch:
    """A context manager of the old kind."""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def __enter__(self):
        self.before, self.wrapper.require_sync = self.wrapper.require_sync, False

    def __exit__(self, *error):
        self.wrapper.require_sync = self.before


@right(NO_SYNC)
class OldKindOfContext(OnTheLadder):
    def no_sync(self):
        return Switch(self)


@right(NO_SYNC)
class DecidesByHookOnTheOutput(Buckets):
    """Goes by the forward pass whose output backward comes through."""

    def __init__(self, module, bucket_cap_mb=None):
        super().__init__(module, bucket_cap_mb=bucket_cap_mb)
        self.depth, self.synchronise = 0, True

    def forward(self, *inputs, **kwargs):
        output, synchronise = super().forward(*inputs, **kwargs), self.depth == 0
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _grad: setattr(self, "synchronise", synchronise))
        return output

    def _on_gradient(self, param):
        if self.synchronise:
            super()._on_gradient(param)

    @contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@right(NO_SYNC)
class BroadcastsBuffersInsideToo(OnTheLadder):
    def forward(self, *inputs, **kwargs):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        return super().forward(*inputs, **kwargs)


# What no_sync() returns.


@fault(NO_SYNC, "has no method no_sync")
class NoMethod(Buckets):
    pass


@fault(NO_SYNC, "no_sync() returns None")
class OnlySetsTheSwitch(GraphWalk):
    def no_sync(self):
        self.sync = False


@fault(NO_SYNC, "bare generator", "@contextlib.contextmanager")
class NoDecorator(GraphWalk):
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


@fault(NO_SYNC, "something of type bool")
class ReturnsTheSwitch(GraphWalk):
    def no_sync(self):
        return self.sync


# When the switch works, and how long.


@fault(NO_SYNC, "no_sync has no effect")
class DoesNothing(Buckets):
    def no_sync(self):
        return nullcontext()


@fault(NO_SYNC, "no_sync has no effect")
class WrongSwitch(GraphWalk):
    @contextmanager
    def no_sync(self):
        self.synchronise = False
        yield
        self.synchronise = True


@fault(NO_SYNC, "The forward pass decides")
class DecidesInBackward(OnTheLadder):
    def _on_gradient(self, param):
        self.will_sync = self.require_sync
        super()._on_gradient(param)


@fault(NO_SYNC, "begins one forward pass too late", "off by one")
class SeesTheSwitchOfTheLastForward(GraphWalk):
    last = True

    def forward(self, *inputs, **kwargs):
        now, self.sync = self.sync, self.last
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            self.sync = self.last = now


@fault(NO_SYNC, "begins one forward pass too late")
class SetsTheFlagAfterTheForwardPass(OnTheLadder):
    def forward(self, *inputs, **kwargs):
        before = self.will_sync
        output = super().forward(*inputs, **kwargs)
        self.will_sync, self.next = before, self.will_sync
        return output

    def _on_gradient(self, param):
        super()._on_gradient(param)
        if not self.will_sync and param is next(iter(self.names)):  # the last gradient
            self.will_sync = self.next

    def _end_of_backward(self):
        super()._end_of_backward()
        self.will_sync = self.next


@fault(NO_SYNC, "ends one forward pass too late", "off by one")
class PutsTheSwitchBackInTheNextForward(GraphWalk):
    ended = False

    def forward(self, *inputs, **kwargs):
        output = super().forward(*inputs, **kwargs)
        if self.ended:
            self.sync, self.ended = True, False
        return output

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.ended = True


@fault(NO_SYNC, "never averaged again")
class NeverPutsTheSwitchBack(GraphWalk):
    @contextmanager
    def no_sync(self):
        self.sync = False
        yield


@fault(NO_SYNC, "never averaged again")
class RemembersTooLate(OnTheLadder):
    @contextmanager
    def no_sync(self):
        self.require_sync = False
        before = self.require_sync
        try:
            yield
        finally:
            self.require_sync = before


@fault(NO_SYNC, "wrong way round")
class Inverted(GraphWalk):
    def forward(self, *inputs, **kwargs):
        self.sync = not self.sync
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            self.sync = not self.sync


@fault(NO_SYNC, "After an exception", "finally block")
class NoFinally(GraphWalk):
    @contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        yield
        self.sync = before


@fault(NO_SYNC, "After an exception", "finally block")
class PutsBackOnlyWithoutError(OnTheLadder):
    def no_sync(self):
        class OnlyWithoutError(Switch):
            def __exit__(self, kind, *rest):
                if kind is None:
                    super().__exit__(kind, *rest)

        return OnlyWithoutError(self)


@fault(NO_SYNC, "swallows an exception")
class CatchesEverything(OnTheLadder):
    @contextmanager
    def no_sync(self):
        before, self.require_sync = self.require_sync, False
        try:
            yield
        except Exception:
            pass
        finally:
            self.require_sync = before


@fault(NO_SYNC, "swallows an exception")
class ExitReturnsTrue(OnTheLadder):
    def no_sync(self):
        class ReturnsTrue(Switch):
            def __exit__(self, *error):
                super().__exit__(*error)
                return True

        return ReturnsTrue(self)


@fault(NO_SYNC, "Leaving an inner no_sync", "what the switch was before")
class AlwaysSetsTrue(OnTheLadder):
    @contextmanager
    def no_sync(self):
        self.require_sync = False
        try:
            yield
        finally:
            self.require_sync = True


@fault(NO_SYNC, "Keep the switch in self")
class SwitchInTheClass(GraphWalk):
    on = True

    def forward(self, *inputs, **kwargs):
        self.sync = SwitchInTheClass.on
        return super().forward(*inputs, **kwargs)

    @contextmanager
    def no_sync(self):
        before, SwitchInTheClass.on = SwitchInTheClass.on, False
        try:
            yield
        finally:
            SwitchInTheClass.on = before


@fault(NO_SYNC, "turn 2 of 3", "a new context manager")
class OneContextForAll(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.context = super().no_sync()

    def no_sync(self):
        return self.context


# What happens to the gradients.


@fault(NO_SYNC, "Leaving no_sync has changed the gradients")
class AveragesWhenLeaving(GraphWalk):
    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for param in self.params:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()


@fault(NO_SYNC, "Only the micro-batch after no_sync was averaged", "stayed local")
class HooksBeforeAccumulation(nn.Module):
    """16 and 17 where 16.5 is right."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__()
        self.module, self.on, self.synchronise = module, True, True
        for param in module.parameters():
            param.register_hook(self.averaged)

    def averaged(self, grad):
        if not self.synchronise:
            return grad
        mean = grad / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def forward(self, *inputs, **kwargs):
        self.synchronise = self.on
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self):
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


@fault(NO_SYNC, "is lost", "Average the whole of param.grad")
class SendsOnlyTheNewGradient(MultiGradHooks):
    def begin(self, grad):
        super().begin(grad)
        self.before = {}


@fault(NO_SYNC, "Gradients are lost inside no_sync")
class DropsThemInside(GraphWalk):
    def gradient_ready(self, param):
        super().gradient_ready(param)
        if not self.sync_backward:
            param.grad = None


@fault(NO_SYNC, "takes the place of the one before")
class KeepsOnlyTheLastInside(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = {}

    def gradient_ready(self, param):
        if self.sync_backward:
            self.sums = {}
        else:
            param.grad -= self.sums.get(param, 0)
            self.sums[param] = param.grad.clone()
        super().gradient_ready(param)


@fault(NO_SYNC, "undivided")
class DividesInside(GraphWalk):
    def gradient_ready(self, param):
        if not self.sync_backward:
            param.grad /= dist.get_world_size()
        super().gradient_ready(param)


class KnowsThatNoSyncWasUsed(GraphWalk):
    fresh = False  # no_sync was used since the last average

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            self.fresh = True
            yield

    def finish(self):
        super().finish()
        self.fresh = False


@fault(NO_SYNC, "came in twice")
class AddsTheMean(KnowsThatNoSyncWasUsed):
    def write_back(self, param, mean):
        super().write_back(param, mean + param.grad if self.fresh else mean)


@fault(NO_SYNC, "came in twice")
class SendsASumOfItsOwnAsWell(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = {}

    def gradient_ready(self, param):
        if not self.sync_backward:
            self.sums[param] = param.grad.clone()
        super().gradient_ready(param)

    def part(self, param, zeros):
        return super().part(param, zeros) + self.sums.pop(param, torch.zeros(())).flatten()


@fault(NO_SYNC, "divided by the world size twice")
class DividesTwice(KnowsThatNoSyncWasUsed):
    def write_back(self, param, mean):
        super().write_back(param, mean / dist.get_world_size() if self.fresh else mean)


@fault(NO_SYNC, "4.0 times too small", "divided by 12")
class DividesByMicroBatches(KnowsThatNoSyncWasUsed):
    def write_back(self, param, mean):
        super().write_back(param, mean / 4 if self.fresh else mean)


@fault(NO_SYNC, "3.0 times too large", "summed, not averaged")
class SumsAll(KnowsThatNoSyncWasUsed):
    def write_back(self, param, mean):
        super().write_back(param, mean * dist.get_world_size() if self.fresh else mean)


@fault(NO_SYNC, "was summed over the ranks, not averaged")
class SumsWhatAccumulated(MultiGradHooks):
    def begin(self, grad):
        first = not self.running
        super().begin(grad)
        if first and self.averages_missing:
            self.before = {p: g * dist.get_world_size() for p, g in self.before.items()}
            self.averages_missing = False

    averages_missing = False

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            self.averages_missing = True
            yield


@fault(NO_SYNC, "micro-batch after no_sync is missing", "post_accumulate_grad_hook")
class SendsBeforeTheLastIsAdded(MultiGradHooks):
    def group_ready(self, k, grads):
        accumulated = self.running and self.before
        super().group_ready(k, [None] * len(grads) if accumulated else grads)


@fault(NO_SYNC, "came in once more in the next backward")
class KeepsTheAverage(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = {}

    def finish(self):
        super().finish()
        for param in self.params:
            param.grad += self.kept.get(param, 0)
            self.kept[param] = param.grad.clone()


@fault(NO_SYNC, "from before zero_grad() came in again")
class AddsTheBlockBefore(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums, self.old = {}, {}

    def gradient_ready(self, param):
        if not self.sync_backward:
            self.sums[param] = param.grad.clone()
        super().gradient_ready(param)

    @contextmanager
    def no_sync(self):
        self.old, self.sums = self.sums, {}
        with super().no_sync():
            yield

    def write_back(self, param, mean):
        super().write_back(param, mean + self.old.pop(param, 0))


# What is sent.


@fault(NO_SYNC, "inside no_sync sends gradients")
class SendsACopyInside(GraphWalk):
    def gradient_ready(self, param):
        if not self.sync_backward:
            dist.all_reduce(param.grad.clone())
        super().gradient_ready(param)


@fault(NO_SYNC, "Register hooks once")
class RegistersHooksAgain(OverlappedHooks):
    def __init__(self, module, bucket_cap_mb=None):
        super().__init__(module)
        self.on = self.synchronise = True

    def forward(self, *inputs, **kwargs):
        self.synchronise = self.on
        return super().forward(*inputs, **kwargs)

    def _on_gradient(self, param):
        if self.synchronise:
            super()._on_gradient(param)

    @contextmanager
    def no_sync(self):
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before
            for param in self.names:
                param.register_post_accumulate_grad_hook(self._on_gradient)


@fault(STOPPED, "in no_sync, turn 1 of 3 does not come to an end on rank 0", "waits for rank 1")
class OneRankSendsInside(GraphWalk):
    def gradient_ready(self, param):
        if not self.sync_backward and dist.get_rank() == 0:
            dist.all_reduce(param.grad.clone())
        super().gradient_ready(param)


# More ways of getting it wrong.


@right(NO_SYNC)
class AStackOfCallbacks(OnTheLadder):
    def no_sync(self):
        stack = ExitStack()
        stack.callback(setattr, self, "require_sync", self.require_sync)
        self.require_sync = False
        return stack


@fault(NO_SYNC, "it is not torch.no_grad()")
class WithoutGradients(GraphWalk):
    def no_sync(self):
        return torch.no_grad()


@fault(NO_SYNC, "turned the switch over")
class TurnsTheSwitchOver(GraphWalk):
    @contextmanager
    def no_sync(self):
        self.sync = not self.sync
        try:
            yield
        finally:
            self.sync = not self.sync


@fault(NO_SYNC, "Entering or leaving no_sync has thrown gradients away")
class ZeroesWhenEntering(GraphWalk):
    @contextmanager
    def no_sync(self):
        self.zero_grad()
        with super().no_sync():
            yield


@fault(NO_SYNC, "no_sync ends too early", "off by one")
class TheThirdOneSends(GraphWalk):
    count = 0

    def forward(self, *inputs, **kwargs):
        before = self.sync
        self.count = 0 if before else self.count + 1
        self.sync = before or self.count == 3
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            self.sync = before
